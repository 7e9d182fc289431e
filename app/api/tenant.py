"""The tenant of a request: from a header that a gateway sets, never from the body.

Requests share cached prefixes only within a tenant. Whoever shares cached blocks can learn by timing which
prompts others have sent; tenants must not.
"""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers

DIGEST_BYTES = 16


def tenant_of(headers: Headers, name: str | None, key: str = "") -> str:
    """The tenant: BLAKE2b-128, in hex, of the API key's id and the header's value; empty if there are neither.

    Only the digest is used from here on, because the value may be a credential. If the header occurs several
    times, all values count, so that adding one cannot reach another tenant's blocks.
    """
    values = headers.getlist(name) if name else []
    if not values and not key:
        return ""
    # No header value and no id of a key contains a NUL.
    text = "\0".join([key, *values] if key else values)
    person = b"key" if key else b""
    return hashlib.blake2b(text.encode("latin-1"), digest_size=DIGEST_BYTES, person=person).hexdigest()
