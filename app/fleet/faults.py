"""What a replica's failure says about the requests that ran there: the one place where faults are counted."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from app.fleet.generation import EngineDeathsError, GenerationError
from app.fleet.in_flight import InFlightRequest
from app.routing.fleet import Fleet

MAX_DEATHS = 2
"""A request ends once this many engines have died while running it."""

MAX_FAILURES = 4
"""Attempts at one request that may fail although their replica lives on."""

PROOF_TOKENS = 4
"""A suspect is cleared once it has this many tokens beyond the point at which its engine died."""

YOUNG_TOKENS = 32
"""A request that got fewer tokens from the engine that died must first get as many again: what kills an engine
after a while does so at another token each time."""

logger = logging.getLogger(__name__)


class Faults:
    """Runs on the ingress's event loop. ``notify`` is called when a suspect that waits may have its turn.

    When an engine dies, any request that ran on it may be the cause. These become *suspects*: each runs again,
    but on a replica without another suspect, the youngest first, until it has passed the point at which the
    engine died. If an engine dies while running a suspect, the suspect is to blame and ends. The other requests
    there are not to blame, and move. So a request kills two engines at most, and ends no other request.

    Ingresses share an engine's suspects: it runs one at a time, refuses others, and reports that one runs.
    """

    def __init__(self, fleet: Fleet, notify: Callable[[], None]) -> None:
        self._fleet = fleet
        self._notify = notify
        # Suspects, the next one first, and those that no replica could run as of ``_seen``. After each
        # ``notify``, each of perhaps thousands asks for its turn, so none may look at all others.
        self._waiting: list[InFlightRequest] = []
        self._unable: set[InFlightRequest] = set()
        self._entered: set[InFlightRequest] = set()  # all of these
        self._able: InFlightRequest | None = None  # the last first one that a replica could run
        self._seen: tuple[int, frozenset[str]] = -1, frozenset()
        self._placing: dict[int, InFlightRequest] = {}  # suspects on their way to a replica, by attempt

    def replica_died(
        self, requests: Collection[InFlightRequest], reason: str, foreign_suspect: bool = False
    ) -> None:
        """A replica was lost while these requests ran there, and perhaps a suspect of another ingress."""
        suspects = [request for request in requests if request.suspect]
        if foreign_suspect and not suspects:
            return  # its own ingress blames it
        for request in suspects or requests:
            request.deaths += 1
            if request.deaths >= MAX_DEATHS:
                _fail(
                    request,
                    EngineDeathsError(
                        f"{request.deaths} engines died while they ran this request, so it is presumed to be "
                        "the cause and not tried again"
                    ),
                    reason,
                )
                continue
            request.suspect = True
            request.death_age = age = request.attempt_tokens
            request.proof_tokens = PROOF_TOKENS + (age if age < YOUNG_TOKENS else 0)
            self._enter(request)

    def attempt_failed(self, request: InFlightRequest, reason: str) -> None:
        """An attempt failed although its replica lives on."""
        request.failures += 1
        if request.failures > MAX_FAILURES:
            error = GenerationError(
                f"{request.failures} attempts at this request failed; the server's log says why"
            )
            _fail(request, error, reason)

    def received(self, attempt: int, request: InFlightRequest) -> None:
        """A request has got tokens; a suspect may be cleared by them."""
        if request.suspect and request.attempt_tokens >= request.proof_tokens:
            self._fleet.ledger.clear_suspect(attempt)
            self.clear(request)

    def clear(self, request: InFlightRequest) -> None:
        """Suspect a request no longer; an engine that has died under it still counts."""
        request.suspect = False
        self._leave(request)
        self._notify()

    def may_run(self, request: InFlightRequest) -> bool:
        """Whether a replica can take a request now; a suspect also waits for its turn."""
        ledger = self._fleet.ledger
        if not request.suspect:
            return bool(ledger.routable(self._fleet.members, request.requirement()))
        self._enter(request)
        if self._first() is not request:
            return False
        for attempt in [attempt for attempt in self._placing if ledger.booking(attempt) is not None]:
            del self._placing[attempt]
        return len(ledger.routable(self._fleet.members, request.requirement())) > len(self._placing)

    def begin(self, attempt: int, request: InFlightRequest) -> None:
        """An attempt begins."""
        if request.suspect:
            self._leave(request)
            self._placing[attempt] = request
            self._notify()

    def end(self, attempt: int, request: InFlightRequest) -> None:
        """An attempt has ended."""
        self._placing.pop(attempt, None)
        if request.suspect:
            self._notify()

    def forget(self, request: InFlightRequest) -> None:
        """The request has ended."""
        if request.suspect:
            self._leave(request)
            self._notify()

    def _enter(self, request: InFlightRequest) -> None:
        if request not in self._entered:
            self._entered.add(request)
            bisect.insort(self._waiting, request, key=_order)

    def _leave(self, request: InFlightRequest) -> None:
        if request not in self._entered:
            return
        self._entered.discard(request)
        if self._able is request:
            self._able = None
        if request in self._unable:
            self._unable.discard(request)
            return
        place = bisect.bisect_left(self._waiting, _order(request), key=_order)
        while self._waiting[place] is not request:  # others may have died as young and arrived at the same time
            place += 1
        del self._waiting[place]

    def _first(self) -> InFlightRequest | None:
        """Whose turn it is. A suspect whose model has no replica at present does not hold up others.

        Each is looked at once until other replicas are routable.
        """
        ledger, members, waiting = self._fleet.ledger, self._fleet.members, self._waiting
        seen = ledger.changes, members
        if seen != self._seen:
            self._seen, self._able = seen, None
            if self._unable:
                waiting += self._unable
                waiting.sort(key=_order)
                self._unable.clear()
        while waiting and waiting[0] is not self._able:
            if ledger.routable(members, replace(waiting[0].requirement(), alone=False)):
                self._able = waiting[0]
            else:
                self._unable.add(waiting.pop(0))
        return self._able if waiting else None


def _fail(request: InFlightRequest, error: GenerationError, reason: str) -> None:
    """End a request; the ``reason`` may name paths and addresses of the server, so only the log has it."""
    logger.error("request %s has failed: %s; the last: %s", request.request.request_id, error, reason)
    request.fail(error)


def _order(request: InFlightRequest) -> tuple[int, float]:
    """The likeliest cause is a request that got few tokens before its engine died; of several, the newest."""
    return request.death_age, -request.arrived
