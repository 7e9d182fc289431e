"""Who sends a request."""

from __future__ import annotations

from dataclasses import dataclass

from app.api.key_limits import KeyLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """``tenant`` partitions the prefix cache, and ``client`` gets a fair share; see ``app/api/tenant.py``.

    ``request_id`` need not be unique; without keys no ``limits``.
    """

    tenant: str
    request_id: str
    limits: KeyLimits | None = None
    client: str = ""
    address: str = ""  # of the connection
    trace: tuple[str, str] = ("", "")  # the headers traceparent and tracestate
