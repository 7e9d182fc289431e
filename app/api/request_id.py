"""The ID of a request: one for its client, the logs of every process, and the engine."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers

HEADER = "x-request-id"
"""HAProxy sets it where the client did not; Serve returns it with every response."""

_WELL_FORMED = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:+/=@-]{1,128}")  # "." and ".." are steps of a path


def request_id_of(headers: Headers) -> str:
    """The client's ID if it is well-formed, at most 128 plain characters; otherwise a new one."""
    given = headers.get(HEADER, "")
    return given if _WELL_FORMED.fullmatch(given) else uuid.uuid4().hex
