"""Who sends a request: the tenant, whose requests share cached prefixes, and the client, who gets a fair share.

The tenant comes from the API key and a header that a gateway sets, never from the body. A client that shares
cached blocks can learn by timing which prompts others have sent; tenants must not. The client is the tenant. If
nothing names tenants, it is what the request says of itself: the headers that bear a key, and ``user``. Where
such a name must not be made up, the sender counts: the tenant, else the address.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache

from starlette.datastructures import Headers
from starlette.requests import Request

from app.config import CACHE_SECRET, haproxy_enabled

CLIENT_ADDRESS = "x-quire-client"
"""Request header that ``app/launch/haproxy.py`` sets: without it an ingress sees the proxy's own address."""

DIGEST_BYTES = 16


@cache
def secret() -> bytes:
    """The secret of this process; ``make serve`` draws one."""
    return os.environ.get(CACHE_SECRET, "").encode()[: hashlib.blake2b.MAX_KEY_SIZE]


def tenant_of(headers: Headers, name: str | None, key: str = "") -> str:
    """The tenant: a MAC (BLAKE2b-128, in hex) of the API key's id and the header's value; empty without both.

    Only the digest is used from here on, because the value may be a credential. If the header occurs several
    times, all values count, so that adding one cannot reach another tenant's blocks.
    """
    values = headers.getlist(name) if name else []
    if not values and not key:
        return ""
    # No header value and no id of a key contains a NUL.
    text = "\0".join([key, *values] if key else values)
    person = b"key" if key else b""
    mac = hashlib.blake2b(text.encode("latin-1"), digest_size=DIGEST_BYTES, person=person, key=secret())
    return mac.hexdigest()


def client_of(headers: Headers, user: str) -> str:
    """The client where nothing names tenants, by what the request says of itself; empty if it says nothing."""
    values = [*headers.getlist("authorization"), *headers.getlist("x-api-key")]
    if not values and not user:
        return ""
    # ``user`` is the last one, and the others contain no NUL.
    said = [*(value.encode("latin-1") for value in values), user.encode()]
    return hashlib.blake2b(b"\0".join(said), digest_size=DIGEST_BYTES, person=b"client").hexdigest()


def sender_of(request: Request, header: str | None) -> str:
    """Who may hold or use only so much: the tenant, else the address. No body and no made-up key changes it."""
    limits = getattr(request.state, "key_limits", None)
    tenant = tenant_of(request.headers, header, "" if limits is None else limits.key.id)
    return tenant or address_of(request)


def address_of(request: Request) -> str:
    """The address that connects: a gateway in front of this server, or the client.

    Only HAProxy sets :data:`CLIENT_ADDRESS`; through Serve's own proxy it comes from the client.
    """
    peer = request.client.host if request.client is not None else ""
    return request.headers.get(CLIENT_ADDRESS, peer) if haproxy_enabled() else peer
