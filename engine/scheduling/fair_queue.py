"""Fair queueing: a request's place in the order depends on the work that its client has requested before.

This is start-time fair queueing (Goyal et al., SIGCOMM 1996), with work defined as for virtual token counters
(Sheng et al., OSDI 2024). Each client has an account in virtual time, which advances by one unit for each
prompt token that every client with work gets. A request's *start* is the *finish* of its client's previous
request, but never earlier than the current virtual time. Its finish is its start plus its work. Requests run in
the order of their starts. So a client that requests a lot queues only behind itself, and an idle client saves
up no credit.

A start is fixed once the request runs, so the order of requests that have run is total and permanent. Before
that, a start changes only if an earlier request of the same client is added later, because it has moved here
from another replica.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

OUTPUT_WEIGHT = 2.0
"""The work of one generated token, in prompt tokens."""

_SWEEP = 64  # accounts of one level before the first search for those that say nothing any more

_MAX_MOVED = 32  # requests that start later because one that arrived before them has come


@dataclass(slots=True, eq=False)
class Ticket:
    """One live request's place: all its sequences share it."""

    account: Account
    request_id: str
    numbers: tuple[int, ...]  # of the sequences that it begins with
    arrival: float  # seconds: the order within a client
    start: float  # virtual time
    work: float  # estimated, in prompt tokens
    done: float = 0.0  # what it has come to, as far as known
    sequences: int = 0  # that live
    begun: bool = False  # has run


@dataclass(slots=True, eq=False)
class Account:
    """What one client has asked for on one level."""

    level: Level
    finish: float = 0.0  # virtual time at which all of it would be done
    in_service: float = 0.0  # work of its requests that run
    tickets: list[Ticket] = field(default_factory=list)  # of its live requests, by arrival


@dataclass(slots=True, eq=False)
class Level:
    """Requests of one priority: clients share what better levels leave."""

    priority: float
    accounts: dict[str, Account] = field(default_factory=dict)
    active: int = 0  # accounts with live requests
    reached: float = 0.0  # virtual time by what has begun to run
    in_service: float = 0.0  # work of the requests that run
    sweep_at: int = _SWEEP


class FairQueue:
    """Accounts of all clients with live requests, or with work that others have yet to catch up with."""

    def __init__(self) -> None:
        self._levels: dict[float, Level] = {}

    @property
    def shared(self) -> bool:
        """Whether two clients have live requests on one level."""
        return any(level.active > 1 for level in self._levels.values())

    def enter(
        self,
        request_id: str,
        numbers: tuple[int, ...],
        *,
        client: str,
        priority: float,
        arrival: float,
        work: float,
        oldest: float,
    ) -> tuple[Ticket, list[Ticket]]:
        """Give a request its place.

        Args:
            oldest: the first start of all live requests of its priority.

        Returns:
            Its ticket, and those of requests of its client that arrived later and now start later.
        """
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority)
        # Running work is not done yet, so a client that arrives now starts where that work began. No request
        # starts before the oldest one: that one ends, and then the next.
        now = max(oldest, level.reached - level.in_service)
        account = level.accounts.get(client)
        if account is None:
            if len(level.accounts) >= level.sweep_at:
                _sweep(level, now)
            account = level.accounts[client] = Account(level)
        tickets = account.tickets
        level.active += not tickets
        account.finish = max(account.finish, now)
        ticket = Ticket(account, request_id, numbers, arrival, account.finish, work)
        account.finish += work
        if not tickets or tickets[-1].arrival <= arrival:
            tickets.append(ticket)
            return ticket, []
        place = bisect_right(tickets, arrival, key=_arrival)
        later = tickets[place:]
        tickets.insert(place, ticket)
        if len(later) > _MAX_MOVED or any(other.begun for other in later):
            ticket.start = min(other.start for other in later)
            return ticket, []
        starts = [other.start for other in later]
        for other, start in zip(later, [*starts[1:], ticket.start], strict=True):
            other.start = start
        ticket.start = starts[0]
        return ticket, later

    def begin(self, ticket: Ticket, prompt_tokens: int) -> None:
        """A request runs for the first time, and computes ``prompt_tokens`` tokens of its prompt."""
        if ticket.begun:
            return
        ticket.begun = True
        ticket.done += prompt_tokens
        level = ticket.account.level
        # Divided by the number of clients: however many new ones come, every waiting one is reached eventually.
        level.reached = max(level.reached, ticket.start) + ticket.work / level.active

    def leave(self, ticket: Ticket) -> None:
        """A request has ended: its client's next one starts by what it has come to."""
        account, level = ticket.account, ticket.account.level
        account.finish += ticket.done - ticket.work
        account.tickets.remove(ticket)  # mostly one of the first
        if account.tickets:
            return
        level.active -= 1
        if not level.active:
            del self._levels[level.priority]


def _sweep(level: Level, now: float) -> None:
    """Forget the clients whose next request would start now, as if they were new."""
    accounts = level.accounts.items()
    level.accounts = {name: each for name, each in accounts if each.tickets or each.finish > now}
    level.sweep_at = max(_SWEEP, 2 * len(level.accounts))


def _arrival(ticket: Ticket) -> float:
    return ticket.arrival
