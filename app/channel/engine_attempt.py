"""One attempt at a request on an engine replica: the body of the ``generate`` call."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Any, Protocol

from app.channel import wire
from app.channel.channel_hub import ChannelHub
from app.channel.engine_channel import UnknownEpochError
from app.channel.suspects import NEWS_S, OccupiedError
from engine.errors import ClientLimitError, EngineDeadError, GrammarFault, InvalidRequestError
from engine.request import Request
from engine.structured.grammar import Grammar
from engine.structured_output import StructuredOutput


class AttemptEngine(Protocol):
    """The part of ``EngineThread`` that an attempt uses."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def compile(self, form: StructuredOutput, sender: str) -> Future[Grammar]:
        """Compile what the output of a request of ``sender`` must match."""

    def abort(self, request_id: str) -> None:
        """End a request and all its sequences, whatever its state."""


def request_of(engine_id: str) -> str:
    """The ID of an attempt's request, from the ID by which the engine knows the attempt."""
    return engine_id.rpartition("@")[0] or engine_id


async def run_attempt(
    hub: ChannelHub, engine: AttemptEngine, cid: str, epoch: int, payload: bytes
) -> dict[str, Any]:
    """Run one attempt until it ends; its tokens leave on the channel. Canceling the call aborts the attempt.

    Returns one of ``{"generated": tokens}``, ``{"invalid": (message, param, code)}``, ``{"failed": message}``,
    ``{"limited": (message, seconds)}``, and ``{"refused": reason}``: plain values, because unpickling an
    exception would require the same code on the other side.
    """
    try:
        submission = wire.unpack_submission(payload)
        engine_id = f"{submission.request_id}@{cid}:{submission.attempt}"
        form = submission.params.structured_output
        grammar: Grammar | None = None
        if form is not None:
            grammar = await asyncio.wrap_future(engine.compile(form, submission.sender))
        attempt = hub.attach(cid, epoch, submission.attempt, engine_id)
        try:
            if submission.proof_tokens:
                others = hub.suspect(attempt, submission.proof_tokens)
                await asyncio.sleep(NEWS_S if others else 0)
                if attempt.done.done():  # it was given up meanwhile, when there was nothing to abort yet
                    await attempt.done
            engine.submit(
                Request(
                    request_id=engine_id,
                    token_ids=submission.token_ids,
                    params=submission.params,
                    namespace=submission.namespace,
                    priority=submission.priority,
                    arrival=time.monotonic() - submission.age_s,
                    generated_before=submission.generated_before,
                    outputs=submission.outputs,
                    client=submission.client,
                    grammar=grammar,
                )
            )
        except BaseException:
            hub.detach(attempt)
            raise
        try:
            return {"generated": await attempt.done}
        finally:
            # Also runs when Serve cancels this call because the client has left, or the connection is lost.
            hub.leave(attempt)
    except InvalidRequestError as error:
        return {"invalid": (error.message, error.param, error.code)}
    except ClientLimitError as error:
        return {"limited": (error.message, error.retry_after_s)}
    except GrammarFault as error:
        return {"failed": str(error)}
    except (UnknownEpochError, OccupiedError, EngineDeadError, wire.WireError) as error:
        return {"refused": str(error)}
