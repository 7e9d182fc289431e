"""Read and check the JSON body of a request."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from app.api.errors import ApiError

MAX_BODY_BYTES = 8 * 1024 * 1024


async def read_json_object(request: Request) -> dict[str, Any]:
    """The body of ``request`` as a JSON object.

    Raises:
        ApiError: 413 above ``MAX_BODY_BYTES``, before all of it is read; 400 if it is not a JSON object.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect as error:
        raise ApiError(400, "the client disconnected before the body was complete") from error
    return parse_json_object(bytes(body))


def parse_json_object(body: bytes) -> dict[str, Any]:
    """``body`` as strict JSON: UTF-8, no NaN or Infinity, an object at the top.

    Raises:
        ApiError: 400; says what is wrong and where.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise ApiError(400, "the body nests too deeply", code="invalid_json") from error
    except ValueError as error:  # also a number with thousands of digits
        reason = str(error).split(";")[0]
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _too_large() -> ApiError:
    return ApiError(413, f"the body exceeds {MAX_BODY_BYTES} bytes", code="request_too_large")
