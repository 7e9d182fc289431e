"""What an engine says of its load is what it has still to do."""

from __future__ import annotations

import random

import pytest
from kv_simulation import KVSimulation, make_request, make_scheduler

from engine import load
from engine.load import LoadMeter
from engine.request import Request, RequestState
from engine.scheduler import Scheduler
from engine.step_plan import StepTiming


class Setting:
    """A scheduler of small steps, its model, and a meter."""

    def __init__(self, **options: int | str) -> None:
        self.scheduler: Scheduler = make_scheduler(**{"num_blocks": 64, "max_num_seqs": 4, **options})  # type: ignore[arg-type]
        self.model = KVSimulation(4)
        self.meter = LoadMeter(
            self.scheduler._pool,
            self.scheduler._index,
            self.scheduler.table,
            prefix_caching=True,
            prefill_rate=123.0,
            max_running=4,
        )

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.meter.added(request)
        return request

    def step(self, seconds: float = 0.5) -> None:
        plan = self.scheduler.schedule()
        outcomes = self.model.run(plan)
        self.scheduler.commit(plan, outcomes, StepTiming(seconds))
        self.meter.stepped(plan, seconds)

    def owed(self) -> int:
        """Tokens to compute before all that is there decodes, nothing found any more than was."""
        tokens = 0
        for entry in self.scheduler.table.waiting:
            request = entry.request
            if request.state is RequestState.SWAPPED:
                tokens += len(request.token_ids) - request.computed
            else:
                most = len(request.token_ids) - 1
                node = self.scheduler._index.match(entry.root, request.token_ids, most)
                tokens += len(request.token_ids) - (0 if node is None else node.depth * 4)
        return tokens + sum(e.remaining for e in self.scheduler.table.running if e.remaining > 1)


def test_an_idle_engine() -> None:
    idle = Setting().meter.read()
    assert (idle.waiting_tokens, idle.running, idle.kv_tokens) == (0, 0, 0)
    assert (idle.referenced, idle.free, idle.evictable) == (0, 64, 0)
    assert (idle.prefill_rate, idle.step_seconds) == (123.0, 0.0)


def test_a_request_waits_then_runs_then_ends() -> None:
    setting = Setting(token_budget=8)
    setting.add(make_request("a", list(range(20)), max_tokens=3, ignore_eos=True))
    assert setting.meter.read().waiting_tokens == 20
    setting.step()
    read = setting.meter.read()
    assert (read.waiting_tokens, read.running, read.kv_tokens, read.referenced) == (12, 1, 8, 2)
    setting.step()
    setting.step()
    assert setting.meter.read().step_seconds == 0.0  # none that only decoded
    read = setting.meter.read()
    assert (read.waiting_tokens, read.running, read.kv_tokens) == (0, 1, 20)
    setting.step(0.25)
    assert setting.meter.read().step_seconds == 0.25
    setting.step(0.75)
    read = setting.meter.read()
    assert (read.waiting_tokens, read.running, read.kv_tokens, read.referenced) == (0, 0, 0, 0)
    assert read.evictable == 5
    assert read.free + read.evictable == 64


def test_what_waits_counts_beyond_its_hit() -> None:
    setting = Setting()
    setting.add(make_request("a", list(range(20)), max_tokens=1))
    setting.step()
    setting.add(make_request("b", [*range(16), 40, 41, 42]))
    assert setting.meter.read().waiting_tokens == 3


def test_what_waits_for_a_prefix_that_others_compute_is_seen_to_become_less() -> None:
    setting = Setting(max_num_seqs=1)
    for name in "abc":
        setting.add(make_request(name, [*range(16), ord(name) % 40], max_tokens=2, ignore_eos=True))
    assert setting.meter.read().waiting_tokens == 3 * 17
    setting.step()
    assert setting.meter.read().waiting_tokens == 2


@pytest.mark.parametrize("recovery", ["swap", "recompute"])
def test_random_load_is_counted_rightly(recovery: str) -> None:
    draw = random.Random(5)
    setting = Setting(num_blocks=20, host_blocks=40, recovery=recovery)
    for number in range(200):
        if draw.random() < 0.15:
            prompt = [draw.choice([0, 7])] * 8 + [draw.randrange(40) for _ in range(draw.randrange(1, 12))]
            setting.add(
                make_request(
                    f"r{number}",
                    prompt,
                    max_tokens=draw.randrange(1, 40),
                    arrival=1.0 + number,
                    ignore_eos=True,
                )
            )
        if draw.random() < 0.05:
            setting.scheduler.abort(f"r{draw.randrange(number + 1)}")
        if setting.scheduler.has_work():
            setting.step()
        assert len(setting.scheduler.table.waiting) <= load.LOOKED_UP
        assert setting.meter.read().waiting_tokens == setting.owed()
    assert setting.scheduler.stats().preemptions > 0


def test_a_long_queue_is_counted_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("engine.load.time.monotonic", lambda: now)
    setting = Setting(max_num_seqs=2, num_blocks=1000)
    count = 3 * load.COUNTED_EACH_TIME
    for number in range(count):
        setting.add(
            make_request(f"r{number}", [number % 49, number // 49] * 5, max_tokens=1, arrival=1.0 + number)
        )
    assert setting.meter.read().waiting_tokens == setting.owed() == 10 * count
    for _ in range(5):
        setting.step()
    setting.add(make_request("last", [41] * 9, max_tokens=1, arrival=1e6))
    assert setting.meter.read().waiting_tokens == setting.owed() == 10 * (count - 10) + 9
    # An abort is seen with the next count.
    setting.scheduler.abort(f"r{count - 1}")
    assert setting.meter.read().waiting_tokens == setting.owed() + 10
    now = load.COUNT_EVERY_S
    assert setting.meter.read().waiting_tokens == setting.owed()
