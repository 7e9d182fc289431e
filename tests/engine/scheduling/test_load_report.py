"""What an engine says of its load is what it has still to do."""

from __future__ import annotations

import pytest
from kv_simulation import KVSimulation, make_request, make_scheduler

from engine.request import Request
from engine.scheduling.load_report import ENDS_EVERY_S, LoadReporter
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SequenceState
from engine.scheduling.slot_ends import ENOUGH, FEWEST, WINDOW
from engine.scheduling.step import StepTiming


class Setting:
    """A scheduler of small steps, its model, and a reporter."""

    def __init__(self, **options: int | str) -> None:
        self.scheduler: Scheduler = make_scheduler(**{"num_blocks": 64, "max_num_seqs": 4, **options})  # type: ignore[arg-type]
        self.model = KVSimulation(4)
        self.reporter = LoadReporter(self.scheduler.state, prefill_rate=123.0)

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        return request

    def step(self, seconds: float = 0.5) -> None:
        plan = self.scheduler.schedule()
        outcomes = self.model.run(plan)
        self.scheduler.commit(plan, outcomes, StepTiming(seconds))
        self.reporter.stepped(plan, seconds)


def test_an_idle_engine() -> None:
    idle = Setting().reporter.read()
    assert (idle.waiting_tokens, idle.running, idle.kv_tokens) == (0, 0, 0)
    assert (idle.referenced, idle.free, idle.evictable) == (0, 64, 0)
    assert (idle.prefill_rate, idle.step_seconds) == (123.0, 0.0)


def test_a_request_waits_then_runs_then_ends() -> None:
    setting = Setting(token_budget=8)
    setting.add(make_request("a", list(range(20)), max_tokens=3, ignore_eos=True))
    assert setting.reporter.read().waiting_tokens == 20
    setting.step()
    read = setting.reporter.read()
    assert (read.waiting_tokens, read.running, read.kv_tokens, read.referenced) == (12, 1, 8, 2)
    setting.step()
    setting.step()
    assert setting.reporter.read().step_seconds == 0.0  # none that only decoded
    read = setting.reporter.read()
    assert (read.waiting_tokens, read.running, read.kv_tokens) == (0, 1, 20)
    setting.step(0.25)
    assert setting.reporter.read().step_seconds == 0.25
    setting.step(0.75)
    read = setting.reporter.read()
    assert (read.waiting_tokens, read.running, read.kv_tokens, read.referenced) == (0, 0, 0, 0)
    assert read.evictable == 5
    assert read.free + read.evictable == 64


def test_a_step_of_long_ago_says_nothing() -> None:
    """The time of a decode step counts for a minute of steps that do more."""
    setting = Setting()
    setting.add(make_request("a", list(range(20)), max_tokens=2, ignore_eos=True))
    setting.step()
    setting.step(0.25)
    seen = []
    for number in range(3):
        setting.add(make_request(f"b{number}", [40 + number, 3, 4], max_tokens=1))
        setting.step(30.0)
        seen.append(setting.reporter.read().step_seconds)
    assert seen == [0.25, 0.25, 0.0]


def test_what_waits_counts_beyond_its_hit() -> None:
    setting = Setting()
    setting.add(make_request("a", list(range(20)), max_tokens=1))
    setting.step()
    setting.add(make_request("b", [*range(16), 40, 41, 42]))
    assert setting.reporter.read().waiting_tokens == 3


def test_prefix_that_several_wait_for_counts_once() -> None:
    setting = Setting(max_num_seqs=1)
    for name in "abc":
        setting.add(make_request(name, [*range(16), ord(name) % 40], max_tokens=2, ignore_eos=True))
    read = setting.reporter.read()
    assert (read.waiting_tokens, read.waiting, read.max_running) == (16 + 3, 3, 1)
    setting.step()
    assert setting.reporter.read().waiting_tokens == 2


def test_sequences_without_a_slot_are_blocked() -> None:
    setting = Setting(max_num_seqs=2)
    for number in range(5):
        setting.add(make_request(f"r{number}", [number] * 6, max_tokens=3, ignore_eos=True))
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_blocked) == (0, 5, 0)  # no step has tried to start them
    setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_blocked) == (2, 3, 3)
    setting.scheduler.abort("r4")
    assert setting.reporter.read().num_blocked == 2


def test_who_waits_for_what_another_computes_is_not_blocked() -> None:
    setting = Setting(max_num_seqs=2, token_budget=128)
    for number, (text, length) in enumerate([(1, 60), (1, 60), (2, 3), (3, 3)]):
        setting.add(make_request(f"r{number}", [text] * length, max_tokens=3, arrival=1.0 + number))
    setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_blocked, read.num_lacking) == (2, 2, 1, 1)


def test_who_waits_for_tokens_of_the_budget_is_not_blocked() -> None:
    setting = Setting(token_budget=8)
    for number in range(4):
        setting.add(make_request(f"r{number}", [number] * 20, max_tokens=1))
    setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_blocked, read.num_lacking) == (1, 3, 0, 0)


def test_who_waits_for_blocks_is_blocked() -> None:
    setting = Setting(num_blocks=8, look_ahead=0)
    for number in range(4):
        setting.add(make_request(f"r{number}", [number] * 14, max_tokens=8, ignore_eos=True))
    setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_blocked) == (1, 3, 3)
    num_blocked = set()
    while setting.scheduler.has_work():
        setting.step()
        read = setting.reporter.read()
        num_blocked.add(read.num_blocked)
        assert read.num_blocked <= read.waiting
    assert (read.waiting, read.num_blocked) == (0, 0)
    assert num_blocked >= {0, 1, 2}


def test_who_gave_up_waiting_says_nothing_of_those_that_come_later() -> None:
    setting = Setting(num_blocks=8, look_ahead=0)
    for number in range(2):
        setting.add(make_request(f"r{number}", [number] * 14, max_tokens=8, ignore_eos=True))
    setting.step()
    read = setting.reporter.read()
    assert (read.waiting, read.num_blocked, read.num_lacking) == (1, 1, 1)
    setting.scheduler.abort("r1")
    setting.step()
    setting.add(make_request("later", [2]))
    read = setting.reporter.read()
    assert (read.waiting, read.num_blocked, read.num_lacking) == (1, 0, 0)


@pytest.mark.parametrize(("look_ahead", "num_blocked"), [(0, 4), (1, 3), (3, 1), (4, 0), (8, 0)])
def test_those_that_a_newcomer_passes_lack_blocks_but_block_nobody(look_ahead: int, num_blocked: int) -> None:
    setting = Setting(num_blocks=8, look_ahead=look_ahead)
    for number in range(5):
        setting.add(make_request(f"r{number}", [number] * 14, max_tokens=8, ignore_eos=True))
    setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_blocked, read.num_lacking) == (1, 4, num_blocked, 4)


def test_who_is_passed_holds_nobody_up() -> None:
    setting = Setting(num_blocks=8)
    setting.add(make_request("runs", [1] * 10, max_tokens=8, ignore_eos=True, arrival=1.0))
    setting.step()
    setting.add(make_request("large", [2] * 26, max_tokens=1, arrival=2.0))
    setting.add(make_request("small", [3] * 3, max_tokens=5, ignore_eos=True, arrival=3.0))
    setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_blocked, read.num_lacking) == (2, 1, 0, 1)


def test_who_lacks_blocks_counts_in_steps_without_tokens_for_it_too() -> None:
    setting = Setting(num_blocks=9, token_budget=8)
    for number in range(4):
        setting.add(make_request(f"r{number}", [number] * 20, max_tokens=8, ignore_eos=True))
    seen = set()
    for _ in range(4):
        setting.step()
        read = setting.reporter.read()
        seen.add((read.running, read.waiting, read.num_lacking))
    assert seen == {(1, 3, 3)}


def test_all_that_wait_lack_blocks_while_those_that_run_cannot_grow() -> None:
    setting = Setting(num_blocks=8)
    for number in range(3):
        setting.add(make_request(f"r{number}", [number] * 3, max_tokens=12, ignore_eos=True))
    out_of_blocks = False
    while setting.scheduler.has_work():
        preempted = setting.scheduler.stats().preemptions
        setting.step()
        read = setting.reporter.read()
        if setting.scheduler.stats().preemptions > preempted:
            out_of_blocks = True
            assert read.num_lacking == read.waiting > 0
    assert out_of_blocks


def test_each_sequence_that_a_request_wants_waits() -> None:
    setting = Setting(num_blocks=8)
    setting.add(make_request("one", [1] * 14, max_tokens=8, ignore_eos=True))
    setting.add(make_request("three", [2] * 14, max_tokens=8, ignore_eos=True, n=3))
    setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting, read.num_lacking) == (1, 3, 3)
    while setting.scheduler.has_work():
        setting.step()
    assert setting.reporter.read().waiting == 0


def test_no_more_are_blocked_than_wait() -> None:
    setting = Setting(num_blocks=6, max_num_seqs=2)
    for number in range(2):
        setting.add(make_request(f"r{number}", [number] * 8, max_tokens=12, ignore_eos=True))
    preempted = False
    while setting.scheduler.has_work():
        setting.step()
        waiting = [sequence.state for sequence in setting.scheduler.state.waiting]
        preempted |= SequenceState.PREEMPTED in waiting
        read = setting.reporter.read()
        assert read.num_blocked <= read.num_lacking <= len(waiting)
    assert preempted


def expecting(setting: Setting, length: int) -> Setting:
    """It has seen enough outputs of one length."""
    for number in range(ENOUGH):
        setting.add(make_request(f"known{number}", [number, 1], max_tokens=length, ignore_eos=True))
    while setting.scheduler.has_work():
        setting.step()
    return setting


def test_ends_are_expected_where_all_slots_are_taken() -> None:
    setting = expecting(Setting(num_blocks=1000), 20)
    for number in range(3):
        setting.add(make_request(f"r{number}", [number % 50, 49], max_tokens=20, ignore_eos=True))
    for _ in range(5):
        setting.step()
    assert setting.reporter.read().first_end == 0.0, "a slot is free"
    setting.add(make_request("r3", [3, 49], max_tokens=20, ignore_eos=True))
    setting.step()
    read = setting.reporter.read()
    assert read.running == 4
    assert read.first_end == pytest.approx(14, abs=1)
    assert read.all_ended == pytest.approx(19, abs=2)


def test_ends_are_expected_where_blocks_are_scarce() -> None:
    setting = expecting(Setting(num_blocks=64), 20)
    setting.add(make_request("a", [place % 47 for place in range(230)], max_tokens=20, ignore_eos=True))
    while setting.reporter.read().waiting_tokens:
        setting.step()
    read = setting.reporter.read()
    assert (read.running, read.max_running) == (1, 4)
    assert read.free + read.evictable < 8
    assert read.first_end == pytest.approx(19, abs=1.5)


def test_ends_follow_from_the_limits_of_what_runs_and_waits() -> None:
    """All known outputs ended at a limit of 20 tokens."""
    setting = expecting(Setting(num_blocks=1000), 20)
    for number, limit in enumerate([50, 50, 26, 26]):
        setting.add(make_request(f"r{number}", [number, 49], max_tokens=limit, ignore_eos=True))
    for number in range(4):
        setting.add(make_request(f"w{number}", [number, 48], max_tokens=10, ignore_eos=True))
    for _ in range(21):
        setting.step()
    read = setting.reporter.read()
    assert (read.running, read.waiting) == (4, 4)
    assert read.first_end == pytest.approx(5, abs=0.5)
    assert read.all_ended == pytest.approx(15, abs=2), "two of those that wait end before two that run"


def test_ends_are_not_expected_anew_in_each_short_step() -> None:
    setting = expecting(Setting(num_blocks=1000), 20)
    for number in range(4):
        setting.add(make_request(f"r{number}", [number % 50, 49], max_tokens=20, ignore_eos=True))
    setting.step()
    setting.step()
    ends = []
    for _ in range(5):
        ends.append(setting.reporter.read().first_end)
        setting.step(0.4 * ENDS_EVERY_S)
    assert ends[0] == ends[1] == ends[2]
    assert ends[3] == ends[4] == pytest.approx(ends[0] - 3, abs=0.5)


def test_outputs_that_were_cut_short_say_nothing_of_ends() -> None:
    setting = expecting(Setting(num_blocks=1000), 20)
    for number in range(100):
        setting.add(make_request(f"cut{number}", [number % 50, 49], max_tokens=20, ignore_eos=True))
        setting.step()
        setting.scheduler.abort(f"cut{number}")
    known = [output[:2] for output in setting.scheduler.state.output_lengths.recent]
    assert known == [(20, True)] * ENOUGH


def test_where_few_run_their_lengths_follow_from_few_outputs() -> None:
    """With as many as where many run, a change of lengths would show after many turns."""
    setting = Setting(max_num_seqs=2, num_blocks=256)
    lengths = setting.scheduler.state.output_lengths
    for tokens in range(1, WINDOW + 1):
        lengths.passed(1.0)
        lengths.add(tokens)
    for name in "abc":
        setting.add(make_request(name, [ord(name) % 40] * 4, max_tokens=100, ignore_eos=True))
    setting.step()
    assert setting.reporter.read().first_end > 0.0
    assert [output.tokens for output in lengths.recent] == [*range(WINDOW + 1 - FEWEST, WINDOW + 1)]
    assert lengths.since == WINDOW - FEWEST
