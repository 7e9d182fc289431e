"""The ingress's engine client: one request in, its tokens out, whatever happens to replicas meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from engine.errors import QuireError
from engine.request import CacheNamespace, ModelLimits
from engine.sampling_params import SamplingParams


class UnavailableError(QuireError):
    """No engine replica could take the request within the bounded time; becomes a 503 with Retry-After."""


class GenerationError(QuireError):
    """The engine gave the request up because of a fault in its computation; becomes a 500."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate.

    ``request_id`` must be unique among the live requests of this client.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    namespace: CacheNamespace = field(default_factory=CacheNamespace)
    priority: int = 0  # lower runs first


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that arrived for one request.

    ``index`` is the offset of the first token in the whole output. Only the last delta has a
    ``finish_reason`` (``"stop"``, ``"length"`` or ``"abort"``); it may carry no token, and with ``"stop"``
    its last token may be the end-of-sequence or stop token. ``cached_tokens`` is the exact number of prompt
    tokens that the prefix cache supplied at the first admission.
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None
    cached_tokens: int
    index: int


class EngineClient:
    """Owned by one ingress replica; every method runs on that replica's event loop.

    ``handle`` is the Serve handle of the engine deployment.
    """

    def __init__(self, handle: Any) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Open channels to the replicas; called once, awaits no replica."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Close every channel."""
        raise NotImplementedError

    def limits(self) -> ModelLimits | None:
        """Of the model, from the replicas' first frames; ``None`` until one has answered."""
        raise NotImplementedError

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the request's tokens in order, none lost or doubled; the last delta has a finish reason.

        Closing or cancelling the generator aborts the request on the engine.

        Raises:
            InvalidRequestError: before the first delta; the request can never run.
            UnavailableError: no replica could take it (or go on with it) within the bounded time.
            GenerationError: the engine gave it up.
        """
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """For /health: ``replicas`` (known), ``routable`` (open channel), ``live_requests``."""
        raise NotImplementedError
