"""Who sends a request."""

from __future__ import annotations

from dataclasses import dataclass

from app.api.key_limits import KeyLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """``tenant`` partitions the prefix cache, ``client`` gets a fair share, and ``sender`` has a budget.

    See ``app/api/tenant.py``. ``request_id`` need not be unique. Without keys there are no ``limits``.
    """

    tenant: str
    request_id: str
    limits: KeyLimits | None = None
    client: str = ""
    sender: str = ""
    address: str = ""  # of the connection
    trace: tuple[str, str] = ("", "")  # the headers traceparent and tracestate
