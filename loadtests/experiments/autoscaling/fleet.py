"""A fleet in simulated time: each replica a rate of prefill, a step time and a pool, all replicas at once."""

from __future__ import annotations

import heapq
import math
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from app.autoscaling.snapshot import ReplicaStats
from loadtests.experiments.autoscaling.constants import BLOCK_SIZE, SERVICE, TICK_S, Service
from loadtests.experiments.autoscaling.workloads import Workload

Floats = npt.NDArray[np.float64]
Amounts = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

_EMPTY: Ints = np.empty(0, np.int64)
_NOWHERE = -1


class Fleet:
    """Requests and replicas as arrays; a tick moves all of them.

    Requests wait first come, first served, for rows and blocks; their prompts are then computed in that order,
    beside the decodes. Where decodes outgrow the pool, those that came last wait again and compute all anew.
    A replica that is told to stop gives up what waits there and goes when the rest has ended.
    """

    def __init__(
        self, workload: Workload, most: int, first: int, startup_s: float, service: Service = SERVICE
    ) -> None:
        self.workload = workload
        self.service = service
        self.startup_s = startup_s
        self.now = 0.0
        count, slots = len(workload.arrival), 3 * most + 8  # stopping replicas hold slots, too
        self.uncached = np.maximum(workload.prompt * (1.0 - workload.hit_share), 1.0)
        self.place: Ints = np.full(count, _NOWHERE)
        self.left: Floats = self.uncached.copy()  # prompt tokens to be computed
        self.made: Floats = np.zeros(count)
        self.first: Floats = np.full(count, math.inf)
        self.done: Floats = np.full(count, math.inf)
        self.preemptions = 0
        self.replica_seconds = 0.0
        self._next = 0
        self._unplaced: list[int] = []
        self._waiting = _EMPTY  # requests, each replica's in their order
        self._prefilling = _EMPTY
        self._decoding = _EMPTY
        # Columns of those that decode, in their order: what every tick reads and a gather would cost more.
        self._decode_slot = _EMPTY
        self._decode: Floats = np.zeros((3, 0))  # prompt, made, output

        self.exists = np.zeros(slots, bool)
        self.serving = np.zeros(slots, bool)
        self.stopping = np.zeros(slots, bool)
        self.ready_at = np.full(slots, math.inf)
        self.born: Ints = np.zeros(slots, np.int64)
        self.held: Amounts = np.zeros(slots)  # tokens whose blocks are referenced
        self.lacking: Amounts = np.zeros(slots)  # tokens that waiting ones need
        self.backlog: Amounts = np.zeros(slots)  # uncached prompt tokens
        self.rows: Ints = np.zeros(slots, np.int64)
        self.decode_rows: Ints = np.zeros(slots, np.int64)
        self.queue: Ints = np.zeros(slots, np.int64)
        self.step = np.zeros(slots)
        self.arrived = np.zeros(slots)
        self.growth: Amounts = np.zeros(slots)
        self.preempted = np.zeros(slots)
        self.names: Ints = np.zeros(slots, np.int64)
        self._made_so_far = 0
        self.target = 0
        self.mean_output = float(workload.output[:1].mean()) if count else 1.0
        self.set_target(first)
        self.serving |= self.exists
        self.ready_at[self.exists] = 0.0

    @property
    def running(self) -> int:
        """Replicas that serve and may get requests."""
        return int(np.count_nonzero(self.serving & ~self.stopping))

    @property
    def queued(self) -> int:
        """Requests that wait for any replica."""
        return len(self._unplaced)

    @property
    def ongoing(self) -> int:
        """Requests that have come and not ended."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding) + len(self._unplaced)

    @property
    def idle(self) -> bool:
        """Whether all requests of the workload have come and ended."""
        return self._next == len(self.workload.arrival) and not self.ongoing

    def set_target(self, target: int) -> None:
        """Start replicas, or stop some: those that start first, then the newest."""
        mine = np.flatnonzero(self.exists & ~self.stopping)
        for _ in range(target - len(mine)):
            free = np.flatnonzero(~self.exists)
            if not len(free):
                break
            self._start(int(free[0]))
        if target < len(mine):
            order = sorted(mine, key=lambda slot: (not self.serving[slot], self.born[slot]))
            for slot in order[target:]:
                self._stop(int(slot))
        self.target = target

    def tick(self, seconds: float = TICK_S) -> None:
        self.replica_seconds += seconds * np.count_nonzero(self.exists)
        self.serving |= self.exists & (self.ready_at <= self.now)
        self._route(self.now + seconds)
        self._admit()
        used = self._prefill(seconds)
        self._step(seconds, used)
        self._relieve()
        self._count()
        empty = self.stopping & (self.rows == 0) & (self.queue == 0)
        if empty.any():
            self.exists &= ~empty
            self.serving &= ~empty
            self.stopping &= ~empty
        self.now += seconds

    def reports(self) -> dict[int, ReplicaStats]:
        """What each serving replica says now."""
        slots = np.flatnonzero(self.serving & ~self.stopping)
        blocks = self.service.pool_tokens // BLOCK_SIZE
        columns = zip(
            repeat(blocks),
            (self.held[slots] / BLOCK_SIZE).tolist(),
            (self.lacking[slots] / BLOCK_SIZE).tolist(),
            (self.growth[slots] / BLOCK_SIZE).tolist(),
            (self.rows[slots] + self.queue[slots]).tolist(),
            self.backlog[slots].tolist(),
            self.arrived[slots].tolist(),
            repeat(self.service.prefill_rate),
            self.step[slots].tolist(),
            self.preempted[slots].tolist(),
            *map(repeat, {**ReplicaStats._field_defaults, "max_running": self.service.max_rows}.values()),
        )
        # A thousand a second are made; the class itself would take three times as long.
        made = map(tuple.__new__, repeat(ReplicaStats), columns)
        return dict(zip(self.names[slots].tolist(), made, strict=True))

    def _start(self, slot: int) -> None:
        self._made_so_far += 1
        self.names[slot] = self.born[slot] = self._made_so_far
        self.exists[slot] = True
        self.serving[slot] = self.stopping[slot] = False
        self.ready_at[slot] = self.now + self.startup_s
        for column in (self.held, self.lacking, self.backlog, self.step, self.arrived, self.growth):
            column[slot] = 0.0
        self.preempted[slot] = 0.0
        self.rows[slot] = self.queue[slot] = 0

    def _stop(self, slot: int) -> None:
        if not self.serving[slot]:
            self.exists[slot] = False
            return
        self.stopping[slot] = True
        mine = self.place[self._waiting] == slot
        self._unplaced.extend(self._waiting[mine].tolist())
        self._waiting = self._waiting[~mine]
        self.queue[slot] = 0

    def _route(self, until: float) -> None:
        """Send what has come to the replica with the least demand."""
        arrival = self.workload.arrival
        end = int(np.searchsorted(arrival, until))
        new = self._unplaced + list(range(self._next, end))
        self._next = end
        self._unplaced = []
        if not new:
            return
        slots = np.flatnonzero(self.serving & ~self.stopping)
        if not len(slots):
            self._unplaced = new
            return
        rate, pool = self.service.prefill_rate, self.service.pool_tokens
        demand = (self.held[slots] + self.lacking[slots]) / pool + self.backlog[slots] / rate
        if len(new) < len(slots):  # at most so many get one: those with the least
            low = demand <= np.partition(demand, len(new) - 1)[len(new) - 1]
            demand, slots = demand[low], slots[low]
        heap = list(zip(demand.tolist(), slots.tolist(), strict=True))
        heapq.heapify(heap)
        requests = np.array(new, np.int64)
        more = (self.workload.prompt[requests] + self.made[requests]) / pool + self.uncached[requests] / rate
        chosen = []
        for one in more.tolist():
            load, slot = heap[0]
            heapq.heapreplace(heap, (load + one, slot))
            chosen.append(slot)
        self.place[requests] = chosen
        self._waiting = np.concatenate([self._waiting, requests])
        np.add.at(self.arrived, chosen, self.left[requests])

    def _admit(self) -> None:
        if not len(self._waiting):
            return
        order = np.argsort(self.place[self._waiting], kind="stable")
        waiting = self._waiting[order]
        slot = self.place[waiting]
        need = self.workload.prompt[waiting] + self.made[waiting] + 1
        position, before = _within(slot, need)
        free = self.service.pool_tokens - self.held[slot]
        fits = (before + need <= free) & (position + self.rows[slot] < self.service.max_rows)
        # Nobody overtakes: who comes after one that does not fit has a larger sum and place.
        self._waiting = waiting[~fits]
        started = waiting[fits]
        self._prefilling = np.concatenate([self._prefilling, started])
        np.add.at(self.held, slot[fits], need[fits])
        np.add.at(self.rows, slot[fits], 1)

    def _prefill(self, seconds: float) -> Floats:
        """Compute prompts; returns the seconds that each replica took for them."""
        used = np.zeros(len(self.exists))
        if not len(self._prefilling):
            return used
        order = np.argsort(self.place[self._prefilling], kind="stable")
        requests = self._prefilling[order]
        slot = self.place[requests]
        share = np.where(self.decode_rows > 0, self.service.shared_prefill, 1.0)
        budget = self.service.prefill_rate * seconds * share
        left = self.left[requests]
        _, before = _within(slot, left)
        take = np.clip(budget[slot] - before, 0.0, left)
        ends = take >= left
        self.left[requests] = left - take
        np.add.at(used, slot, take / self.service.prefill_rate)
        over = requests[ends]
        when = self.now + seconds * (before[ends] + left[ends]) / budget[slot[ends]]
        # All of a tick's arrivals are there at its start, but nobody is served before he comes.
        alone = left[ends] / (self.service.prefill_rate * share[slot[ends]])
        when = np.maximum(when, self.workload.arrival[over] + alone)
        # The first token of one that computes its prompt anew was long before.
        self.first[over] = np.minimum(self.first[over], when)
        self.made[over] += 1
        ended = self.made[over] >= self.workload.output[over]
        self.done[over[ended]] = when[ended]
        self._prefilling = requests[~ends]
        self._start_decoding(over[~ended])
        return used

    def _start_decoding(self, requests: Ints) -> None:
        slot = self.place[requests]
        self.decode_rows = self.decode_rows + np.bincount(slot, minlength=len(self.exists))
        self._decoding = np.concatenate([self._decoding, requests])
        self._decode_slot = np.concatenate([self._decode_slot, slot])
        load = self.workload
        columns = np.stack([load.prompt[requests], self.made[requests], load.output[requests]])
        self._decode = np.concatenate([self._decode, columns], axis=1)

    def _keep_decoding(self, keep: Ints) -> None:
        """Drop all others."""
        self._decoding = self._decoding[keep]
        self._decode_slot = self._decode_slot[keep]
        self._decode = self._decode[:, keep]

    def _step(self, seconds: float, used: Floats) -> None:
        if not len(self._decoding):
            self.step[:] = 0.0
            return
        slot, rows = self._decode_slot, self.decode_rows
        service = self.service
        prompt, made, output = self._decode
        read = np.bincount(slot, prompt + made, minlength=len(rows))
        step = service.step_base + service.step_row * rows + service.step_token * read
        self.step = np.where(rows > 0, step, 0.0)
        grown = (seconds - used) / step
        made += grown[slot]
        ends = made >= output
        ended = np.flatnonzero(ends)
        if not len(ended):
            return
        over, output = self._decoding[ended], output[ended]
        late = (made[ended] - output) / grown[slot[ended]]
        self.done[over] = self.now + seconds * (1.0 - late)
        self.made[over] = output
        self.mean_output += (float(output.mean()) - self.mean_output) * min(1.0, len(over) / 200)
        self._keep_decoding(np.flatnonzero(~ends))

    def _relieve(self) -> None:
        """Preempt the latest where decodes have outgrown the pool."""
        self._hold()
        for slot in np.flatnonzero(self.held > self.service.pool_tokens):
            places = np.flatnonzero(self._decode_slot == slot)
            mine = self._decoding[places]
            self.made[mine] = self._decode[1][places]
            held = self.held[slot]
            back = []
            for request in mine[np.argsort(self.workload.arrival[mine])][::-1][:-1]:
                if held <= self.service.pool_tokens:
                    break
                held -= self.workload.prompt[request] + self.made[request]
                self.left[request] = self.uncached[request] + self.made[request]
                back.append(request)
            lost = np.array(back, np.int64)
            self.preemptions += len(back)
            self.preempted[slot] += len(back)
            self._keep_decoding(np.flatnonzero(~np.isin(self._decoding, lost)))
            self._waiting = np.concatenate([lost[::-1], self._waiting])
            self._hold()

    def _hold(self) -> None:
        size, prefilling = len(self.exists), self._prefilling
        place = self.place[prefilling]
        made = np.concatenate([self.made[prefilling], self._decode[1]])
        slot = np.concatenate([place, self._decode_slot])
        prompt = np.concatenate([self.workload.prompt[prefilling], self._decode[0]])
        self.held = np.bincount(slot, prompt + made, minlength=size)
        self.decode_rows = np.bincount(self._decode_slot, minlength=size)
        self.rows = np.bincount(place, minlength=size) + self.decode_rows
        self.growth = np.bincount(slot, np.maximum(self.mean_output - made, 0.0), minlength=size)

    def _count(self) -> None:
        size = len(self.exists)
        waiting, slot = self._waiting, self.place[self._waiting]
        self.lacking = np.bincount(slot, self.workload.prompt[waiting] + self.made[waiting], minlength=size)
        self.queue = np.bincount(slot, minlength=size)
        prompts = np.concatenate([waiting, self._prefilling])
        self.backlog = np.bincount(self.place[prompts], self.left[prompts], minlength=size)


def _within(group: Ints, amount: Floats) -> tuple[Ints, Floats]:
    """Of sorted groups: each one's place in its group, and the sum of the amounts before it there."""
    count = len(group)
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    sizes = np.diff(np.append(starts, count))
    first = np.repeat(starts, sizes)
    total = np.cumsum(amount)
    before = total - amount
    return np.arange(count) - first, before - before[first]
