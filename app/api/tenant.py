"""Who sends a request: the tenant, whose requests share cached prefixes, and the client, who gets a fair share.

The tenant comes from the API key and a header that a gateway sets, never from the body. Whoever shares cached
blocks can learn by timing which prompts others have sent; tenants must not. The client is the tenant. If
nothing names tenants, it is what the request says of itself: its ``Authorization`` header and ``user``.
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


def client_of(headers: Headers, user: str) -> str:
    """The client where nothing names tenants, by what the request says of itself; empty if it says nothing."""
    values = headers.getlist("authorization")
    if not values and not user:
        return ""
    # ``user`` is the last one, and the others contain no NUL.
    said = [*(value.encode("latin-1") for value in values), user.encode()]
    return hashlib.blake2b(b"\0".join(said), digest_size=DIGEST_BYTES, person=b"client").hexdigest()
