"""Whose prefix cache a request may share: told by a header that a gateway sets, never by the request's body.

Who shares cached blocks can find out by timing which prompts others have sent; tenants must not.
"""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers

DIGEST_BYTES = 16


def tenant_of(headers: Headers, name: str | None) -> str:
    """The tenant's key: BLAKE2b-128, in hex, of the header's value; empty without the header or without a name.

    Only the digest goes on from here: the value may be a credential. Should the header come several times, all
    values count, so that adding one leads away from everyone else's blocks.
    """
    values = headers.getlist(name) if name else []
    if not values:
        return ""
    # No header value holds a NUL.
    return hashlib.blake2b("\0".join(values).encode("latin-1"), digest_size=DIGEST_BYTES).hexdigest()
