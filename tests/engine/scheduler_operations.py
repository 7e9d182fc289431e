"""Random operations on a scheduler without a model, with all invariants checked."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kv_simulation import EOS, KVSimulation, add, constant_hash, make_request, make_scheduler, random_prompt
from scheduler_steps import assert_no_idle_budget

from engine.errors import InvalidRequestError
from engine.request import Request
from engine.scheduling.sequence import Sequence
from engine.scheduling.speculation import Speculation


@dataclass(frozen=True)
class Case:
    """One pool and what uses it."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    host_blocks: int = 0
    recovery: str = "auto"
    window: int | None = None
    aging: float | None = None
    caching: bool = True
    constant: bool = False


CASES = [
    Case(3, 1, 2, 3),
    Case(3, 1, 3, 4, host_blocks=3, recovery="swap", constant=True),
    Case(3, 4, 3, 8, host_blocks=2),
    Case(5, 2, 4, 4, host_blocks=64, recovery="swap"),
    Case(6, 1, 6, 16, host_blocks=7, recovery="swap", aging=0.5),
    Case(8, 4, 8, 16, host_blocks=8, aging=1.0),
    Case(8, 4, 8, 16, caching=False, host_blocks=12, recovery="swap"),
    Case(12, 3, 6, 64, recovery="recompute", constant=True),
    Case(12, 2, 5, 7, host_blocks=24, window=5),
    Case(20, 2, 8, 24, window=3, constant=True, host_blocks=4, recovery="swap"),
    Case(40, 2, 2, 8, host_blocks=16),  # more beams than sequence slots
]


class Driver:
    """Does random things to one scheduler and keeps account of them."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.rng = random.Random(f"{seed}/{case}")
        self.scheduler = make_scheduler(
            case.num_blocks,
            case.block_size,
            max_num_seqs=case.max_num_seqs,
            token_budget=case.token_budget,
            prefix_caching=case.caching,
            hash_tokens=constant_hash if case.constant else hash,
            look_ahead=self.rng.choice([0, 2, 8]),
            max_overtakes=self.rng.choice([1, 32]),
            host_blocks=case.host_blocks,
            recovery=case.recovery,
            window=case.window,
            priority_aging=case.aging,
            speculation=Speculation(self.rng.choice([1, 4, 15])) if seed % 2 else None,
        )
        self.simulation = KVSimulation(case.block_size, self._sample, window=case.window)
        self.requests: dict[str, Request] = {}
        self.first: dict[str, Sequence] = {}  # of each request's sequences
        self.aborted: set[str] = set()
        self.time = 0.0
        self.idle = False  # nothing has happened since a step that found no work
        self.clients = self.rng.choice([[""], ["a", "b"], ["a", "a", "a", "b", "c"]])

    def _sample(self, sequence: Sequence) -> int:
        return self.rng.choice([0, 0, 1, 1, EOS])

    def arrive(self) -> None:
        rng, capacity = self.rng, self.case.num_blocks * self.case.block_size
        sequences: dict[str, object] = {}
        kind = rng.choice(["one", "one", "n", "best", "beam"])
        if kind == "n":
            sequences = {"n": rng.randint(2, 4)}
        elif kind == "best":
            sequences = {"n": rng.randint(1, 2), "best_of": rng.randint(2, 4)}
        elif kind == "beam":
            early = rng.choice([True, False, "never"])
            sequences = {"use_beam_search": True, "beam_width": rng.randint(1, 4), "early_stopping": early}
        outputs: tuple[tuple[int, ...] | None, ...] = ()
        if kind == "n" and rng.random() < 0.3:
            count = int(str(sequences["n"]))
            outputs = tuple(None if rng.random() < 0.3 else (0,) * rng.randint(0, 2) for _ in range(count))
        self.time += rng.choice([0.0, 0.1, 1.0])
        request = make_request(
            f"r{len(self.requests)}",
            random_prompt(rng, max(1, capacity * 2 // 3)),
            rng.choice([None, *[rng.randint(1, max(1, capacity // 2)) for _ in range(3)]]),
            arrival=1.0 + self.time,
            priority=rng.choice([0, 0, 0, 1]),
            salt=rng.choice(["", "", "salt"]),
            client=rng.choice(self.clients),
            outputs=outputs if any(output is not None for output in outputs) else (),
            **sequences,
        )
        try:
            first = add(self.scheduler, request)
        except InvalidRequestError:
            return
        self.requests[request.request_id] = request
        self.first[request.request_id] = first
        for sequence, output in enumerate(request.outputs):
            name = f"{request.request_id}#{sequence}" if sequence else request.request_id
            self.simulation.output[name] = list(output or ())

    def live(self) -> list[str]:
        return [name for name in self.requests if name not in self.simulation.over]

    def abort(self) -> None:
        names = self.live()
        if names:
            name = self.rng.choice(names)
            self.simulation.deliver(self.scheduler.abort(name))
            assert name in self.simulation.over
            assert self.scheduler.abort(name) == []
            self.aborted.add(name)

    def step(self) -> None:
        case, rng = self.case, self.rng
        if not self.scheduler.has_work():
            assert self.idle or not self.scheduler.schedule().chunks
            self.idle = True
            return
        plan = self.scheduler.schedule()
        assert plan.chunks, f"work is left but nothing runs: {self.scheduler.stats()}"
        assert plan.num_tokens <= case.token_budget
        assert_no_idle_budget(self.scheduler, plan)
        assert len({chunk.sequence.key for chunk in plan.chunks}) == len(plan.chunks) <= case.max_num_seqs
        outcomes = self.simulation.run(plan)
        if rng.random() < 0.05:
            self.abort()
        if rng.random() < 0.03:
            victim = rng.choice(plan.chunks).sequence.request_id
            if victim not in self.simulation.over:
                self.simulation.deliver(self.scheduler.fail([victim], "planted"))
            if rng.random() < 0.5:
                return  # the step is lost: what it wrote must not be found, and it is planned again
        self.simulation.deliver(self.scheduler.commit(plan, outcomes))

    def run(self, operations: int) -> None:
        for _ in range(operations):
            roll = self.rng.random()
            if roll >= 0.23:
                self.step()
                continue
            self.idle = False
            if roll < 0.2 and len(self.live()) < 40:
                self.arrive()
            elif roll < 0.22:
                self.abort()
            else:
                self.scheduler.reset_prefix_cache()
