"""A server-sent event with a name."""

from __future__ import annotations

import json
from typing import Any


def named_event(event: dict[str, Any]) -> bytes:
    """``event`` as bytes; its name is its ``type``."""
    data = json.dumps(event, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
