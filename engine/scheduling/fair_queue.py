"""Fair queueing: a request's place in the order depends on the work that its client has requested before.

This is start-time fair queueing (Goyal et al., SIGCOMM 1996), with work defined as for virtual token counters
(Sheng et al., OSDI 2024). Each client has an account in virtual time: the work of its requests, estimated until
they end. A request's *start* is the *finish* of its client's previous request, and its own finish is its start
plus its work. Requests run in the order of their starts. So a client that requests a lot queues only behind
itself.

A client whose requests have all begun to run saves up nothing: its next one starts no earlier than the last
that began, or than the first that waits. A client with a waiting request keeps its place, however far behind it
is: that is what others owe it. So clients that always have requests waiting get equal work, whatever the number
of sequence slots, and coming and going gains nothing.

A new client starts at a virtual time that advances by one unit for each prompt token that every client with
work gets. Otherwise new ones could come forever and all start before one that waits. It follows what requests
come to, as starts do: if it kept the estimates, a new client would wait for all that they were too high by.

A start is fixed once the request runs, so the order of requests that have run is permanent. Before that, it
changes if the estimate of an earlier request of its client was wrong, or if one that arrived earlier is added
later, because it has moved here from another replica.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

OUTPUT_WEIGHT = 2.0
"""The work of one generated token, in prompt tokens."""

_SWEEP = 64  # accounts of one level before the first search for those that say nothing any more


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
    advance: float = 0.0  # of virtual time, for each unit of its work
    lifts: int = 0  # of its account, when it came
    sequences: int = 0  # that live
    begun: bool = False  # has run
    fixed: bool = False  # its start stays: it has run, or arrived before one that has


@dataclass(slots=True, eq=False)
class Account:
    """What one client has asked for on one level."""

    level: Level
    finish: float = 0.0  # virtual time at which all of it would be done
    in_service: float = 0.0  # work of its requests that run
    waiting: int = 0  # live requests that have not run
    lifts: int = 0  # times that it was brought up to others
    tickets: list[Ticket] = field(default_factory=list)  # of its live requests, by arrival


@dataclass(slots=True, eq=False)
class Level:
    """Requests of one priority: clients share what better levels leave."""

    priority: float
    accounts: dict[str, Account] = field(default_factory=dict)
    active: int = 0  # accounts with live requests
    reached: float = 0.0  # virtual time by what has begun to run
    latest: float = 0.0  # the last start of a request that has begun to run
    in_service: float = 0.0  # work of the requests that run
    sweep_at: int = _SWEEP


class FairQueue:
    """Accounts of all clients with live requests, or with work that others have yet to catch up with."""

    def __init__(self) -> None:
        self._levels: dict[float, Level] = {}
        self._stale: dict[Account, None] = {}  # the starts of their waiting requests are to be computed anew

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
        next_start: float,
    ) -> Ticket:
        """Give a request its place, which :meth:`settle` may correct until it runs.

        Args:
            oldest: the first start of all live requests of its priority.
            next_start: the same of those that wait; infinite if there are none.
        """
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority)
        # Running work is not done yet, so a new client starts where that work began. It does not start before
        # the oldest request: that one ends, and then the next.
        now = max(oldest, level.reached - level.in_service) if level.active else 0.0
        account = level.accounts.get(client)
        if account is None:
            if len(level.accounts) >= level.sweep_at:
                _sweep(level, now)
            account = level.accounts[client] = Account(level)
        else:
            now = min(level.latest, next_start)
        tickets = account.tickets
        level.active += not tickets
        if not account.waiting and account.finish < now:
            account.finish = now
            account.lifts += 1
        account.waiting += 1
        ticket = Ticket(account, request_id, numbers, arrival, account.finish, work, lifts=account.lifts)
        account.finish += work
        if not tickets or tickets[-1].arrival <= arrival:
            tickets.append(ticket)
            return ticket
        place = bisect_right(tickets, arrival, key=_arrival)
        later = tickets[place:]
        tickets.insert(place, ticket)
        ticket.fixed = any(other.begun for other in later)
        ticket.start = min(other.start for other in later)
        self._stale[account] = None
        return ticket

    def begin(self, ticket: Ticket, prompt_tokens: int) -> None:
        """A request runs for the first time, and computes ``prompt_tokens`` tokens of its prompt."""
        if ticket.begun:
            return
        ticket.begun = ticket.fixed = True
        ticket.account.waiting -= 1
        ticket.done += prompt_tokens
        level = ticket.account.level
        level.latest = max(level.latest, ticket.start)
        # Divided by the number of clients: however many new ones come, every waiting one is reached eventually.
        ticket.advance = 1.0 / level.active
        level.reached = max(level.reached, ticket.start) + ticket.work * ticket.advance

    def leave(self, ticket: Ticket) -> None:
        """A request has ended: its client's next ones start by what it has come to."""
        account, level = ticket.account, ticket.account.level
        account.tickets.remove(ticket)  # mostly one of the first
        account.waiting -= not ticket.begun
        error = ticket.done - ticket.work
        shared = level.active > 1
        if shared:
            level.reached += error * ticket.advance
        # What a lone client runs is at nobody's expense, so its queue keeps its starts, without a pass over it.
        # What a client was charged too much is no credit if it has been brought up to others since.
        if (shared or not ticket.begun) and (error > 0 or ticket.lifts == account.lifts):
            account.finish += error
            if account.waiting:
                self._stale[account] = None
        if not account.tickets:
            level.active -= 1
            if not level.active:
                del self._levels[level.priority]

    def settle(self) -> list[Ticket]:
        """Compute starts anew where that is due; returns the tickets that have other ones now."""
        moved: list[Ticket] = []
        for account in self._stale:
            waiting = [ticket for ticket in account.tickets if not ticket.fixed]
            start = account.finish - sum(ticket.work for ticket in waiting)
            for ticket in waiting:
                if ticket.start != start:
                    ticket.start = start
                    moved.append(ticket)
                start += ticket.work
        self._stale.clear()
        return moved


def _sweep(level: Level, now: float) -> None:
    """Forget the clients whose next request would start now, as if they were new."""
    accounts = level.accounts.items()
    level.accounts = {name: each for name, each in accounts if each.tickets or each.finish > now}
    level.sweep_at = max(_SWEEP, 2 * len(level.accounts))


def _arrival(ticket: Ticket) -> float:
    return ticket.arrival
