"""What translations of other APIs onto the chat route share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.openai_types import ChatRequest, parse_chat
from engine.errors import InvalidRequestError


def chat_request(body: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat request ``body``; its errors blame the fields that ``names`` gives for those of ``body``."""
    try:
        return parse_chat(body)
    except InvalidRequestError as error:
        if error.param is None or error.param not in names:
            raise
        ours = names[error.param]
        raise InvalidRequestError(error.message.replace(error.param, ours, 1), ours, error.code) from error
