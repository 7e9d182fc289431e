"""One attempt at a request: a call of an engine replica, open until the request ends or moves on."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from app.channel import wire
from app.fleet.live_request import LiveRequest
from app.routing.fleet import NotAcceptedError
from app.routing.ledger import NoRouteError
from engine.errors import InvalidRequestError

END_RECORD_S = 5.0
"""The end record follows the engine's answer on the channel within this, else the request moves on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setback:
    """Why an attempt came to nothing; ``fault`` if a replica failed under it, not if it never began."""

    reason: str
    fault: bool


class Attempts:
    """Makes the calls of one ingress process; ``generate`` is the engine deployment's method of that name."""

    def __init__(self, generate: Any, cid: str) -> None:
        self._generate = generate
        self._cid = cid
        self._lingering: set[asyncio.Future[Any]] = set()

    async def run(self, live: LiveRequest, attempt: int) -> Setback | None:
        """Run one attempt; ``None`` when the request has ended or was asked to move."""
        payload = wire.pack_submission(live.submission(attempt))
        try:
            response = self._generate.remote(self._cid, payload, meta=live.routing_meta(attempt))
        except Exception as error:  # noqa: BLE001  (as any failure of a call below)
            return Setback(_said(error), fault=True)
        answer = asyncio.ensure_future(_await(response))
        interrupted = asyncio.ensure_future(live.interrupt.wait())
        try:
            await asyncio.wait((answer, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return None
            try:
                outcome = answer.result()
            except (NoRouteError, NotAcceptedError) as error:
                return Setback(str(error), fault=False)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                # Any failure of a call moves the request on; Serve also raises CancelledError for calls that
                # nobody here has cancelled. A lost replica shows on its channel, too: its end counts the fault.
                return None if live.interrupt.is_set() else Setback(_said(error), fault=True)
            return await self._conclude(live, outcome, interrupted)
        finally:
            interrupted.cancel()
            if live.complete:
                self._linger(answer, response)
            elif not answer.done():
                _cancel(answer, response)

    def _linger(self, answer: asyncio.Future[Any], response: Any) -> None:
        """The end record overtook the engine's answer, due any moment: to cancel that would cost more."""
        limit = asyncio.get_running_loop().call_later(END_RECORD_S, _cancel, answer, response)

        def done(answer: asyncio.Future[Any]) -> None:
            limit.cancel()
            self._lingering.discard(answer)
            if not answer.cancelled() and answer.exception() is not None:
                logger.info("after its last token a call ended with %s", answer.exception())

        self._lingering.add(answer)
        answer.add_done_callback(done)

    async def _conclude(
        self, live: LiveRequest, outcome: dict[str, Any], interrupted: asyncio.Future[Any]
    ) -> Setback | None:
        """The engine's answer; only the channel's end record, which may still be behind, ends the request."""
        if "invalid" in outcome:
            live.fail(InvalidRequestError(*outcome["invalid"]))
            return None
        if "refused" in outcome:
            return Setback(str(outcome["refused"]), fault=False)
        if not live.ended:
            await asyncio.wait((interrupted,), timeout=END_RECORD_S)
            if not live.ended and not live.interrupt.is_set():
                return Setback("the end record did not come", fault=True)
        return None


async def _await(response: Any) -> Any:
    return await response


def _cancel(answer: asyncio.Future[Any], response: Any) -> None:
    """The task first: awaiting a response that one has cancelled raises."""
    answer.cancel()
    response.cancel()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
