"""What is learned of the fleet: step times, outputs, reuse, shares of prefixes; and of one replica."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from routing_support import BLOCK, IDLE

from app.routing.fleet_estimates import (
    REMEMBERED,
    FleetEstimates,
    OutputLength,
    PrefixShare,
    ReuseShare,
    StepModel,
)
from app.routing.replica_state import ReplicaHistory


def test_step_model_finds_the_coefficients() -> None:
    model, draw = StepModel(), random.Random(1)
    for _ in range(2000):
        rows = draw.randint(1, 100)
        kv = sum(draw.randint(100, 8000) for _ in range(rows))
        model.learn(rows, kv, (0.008 + 3e-5 * rows + 5e-8 * kv) * draw.uniform(0.97, 1.03))
    for rows, kv in ((1, 500), (30, 60_000), (100, 400_000)):
        assert math.isclose(model.seconds(rows, kv), 0.008 + 3e-5 * rows + 5e-8 * kv, rel_tol=0.06)


def test_step_model_stays_sensible_where_reports_say_little() -> None:
    one = StepModel()
    one.learn(1, 100, 0.005)
    assert math.isclose(one.seconds(1, 100), 0.005, rel_tol=0.05)
    shrinking = StepModel()
    for rows in range(1, 300):  # faster with more rows: no coefficient may go below zero
        shrinking.learn(rows, 100 * rows, 0.02 / rows)
    assert min(shrinking.base, shrinking.per_row, shrinking.per_kv_token) >= 0.0
    assert not shrinking.learn(0, 0, 0.01)
    assert not shrinking.learn(5, 10, 0.0)


def test_step_model_follows_a_change() -> None:
    model = StepModel()
    for seconds_each in (0.01, 0.03):
        for index in range(4000):
            model.learn(1 + index % 50, 1000 * (1 + index % 7), seconds_each)
    assert math.isclose(model.seconds(10, 3000), 0.03, rel_tol=0.05)


def test_expected_output_follows_what_ends() -> None:
    outputs = OutputLength()
    for _ in range(400):
        outputs.learn(40)
    assert math.isclose(outputs.tokens, 40, rel_tol=0.02)


def test_a_few_short_answers_correct_what_is_expected_before_any() -> None:
    outputs = OutputLength()
    for _ in range(8):
        outputs.learn(16)
    assert outputs.tokens == pytest.approx((256 + 8 * 16) / 9)
    for _ in range(1000):
        outputs.learn(16)
    # One of many weighs 1/64. What it says of the longer ranges counts beside the first assumption: of two that
    # got to 64 tokens, one ended 16 later.
    outputs.learn(80)
    assert outputs.tokens == pytest.approx(16 + (16 + 32 + 40 + 0.5 * 128) / 64)


def test_without_running_sequences_it_is_the_mean_of_all() -> None:
    outputs, lengths = OutputLength(), [0, 1, 7, 8, 255, 300, 5_000, 40.5]
    for length in lengths:
        outputs.learn(length)
    assert outputs.tokens == pytest.approx((256 + sum(lengths)) / (len(lengths) + 1))


def lengths_over_time(*lengths: int, rate: float, most: int, seconds: int) -> list[float]:
    """What is expected at each second; at ``most`` so many sequences come in turn and make 20 tokens/s each."""
    outputs, running, came, expected = OutputLength(), list[list[int]](), 0, []
    for tick in range(20 * seconds):
        while came < most and 20 * came <= rate * tick:
            running.append([0, lengths[came % len(lengths)]])
            came += 1
        for one in running:
            one[0] += 1
            if one[0] == one[1]:
                outputs.learn(one[1], known=one[0] - 1)
            elif one[0].bit_length() != (one[0] - 1).bit_length():
                outputs.grow(one[0] - 1, one[0])
        running = [one for one in running if one[0] < one[1]]
        if tick % 20 == 19:
            expected.append(outputs.tokens)
    return expected


def test_short_answers_that_end_first_do_not_stand_for_all() -> None:
    # On average 504 tokens; those that have ended before 50 s have 8.
    expected = lengths_over_time(8, 1000, rate=1, most=120, seconds=120)
    assert min(expected) > 120, "half of what is assumed before any of them has ended"
    assert min(expected[30:]) > 0.4 * 504
    assert all(one == pytest.approx(504, rel=0.05) for one in expected[60:])


def test_sequences_that_run_side_by_side_are_no_longer_than_they_are() -> None:
    expected = lengths_over_time(1000, rate=100, most=40, seconds=60)
    assert max(expected) < 1001
    assert expected[-1] == pytest.approx(1000, rel=0.02)


def test_reuse_is_the_share_of_what_is_made_again() -> None:
    reuse = ReuseShare()
    assert reuse.share == 0.0
    fresh = itertools.count()
    for _ in range(500):  # one prefix for all stays cached; the rest and the outputs are new each time
        reuse.learn([*range(-400, 0), *(next(fresh) for _ in range(64))], 400, 16)
    assert reuse.share == 0.0
    for _ in range(100):  # twenty prefixes are pushed out and computed again
        for prefix in range(20):
            reuse.learn(range(10_000 * (prefix + 100), 10_000 * (prefix + 100) + 320), 0, 80)
    assert math.isclose(reuse.share, 320 / 400, rel_tol=0.05)
    for _ in range(5000):
        reuse.learn([next(fresh) for _ in range(64)], 0, 16)
    assert 0.0 <= reuse.share < 0.01


def test_reuse_of_short_prompts_and_short_rests() -> None:
    for held in (0, 4, 9, 17, 40):  # a system prompt that stays cached, and a few blocks of one's own
        reuse = ReuseShare()
        for _ in range(200):
            for name in range(20):
                reuse.learn([*range(-held, 0), *range(100 * name, 100 * name + 3)], held, 9)
        assert math.isclose(reuse.share, 3 / 12, rel_tol=0.05), held
    for name in range(2000):  # siblings do not pass for each other
        reuse.learn([*range(-held, 0), *range(10_000 + 100 * name, 10_003 + 100 * name)], held, 9)
    assert reuse.share < 0.01


def test_what_reuse_remembers_is_bounded() -> None:
    reuse = ReuseShare()
    for start in range(0, 40_000_000, 16_000):
        reuse.learn(range(start, start + 16_000), 0, 0)
    assert len(reuse._known) == REMEMBERED
    assert reuse.share == 0.0


def test_share_of_a_prefix_is_of_the_last_requests_only() -> None:
    hot = PrefixShare()
    for index in range(1000):
        hot.learn(1 if index % 2 else index + 10)
    assert math.isclose(hot.share(1), 0.5, abs_tol=0.01)
    for index in range(200):
        hot.learn(-index - 1)
    assert hot.share(1) == 0.0


def test_slowness_is_a_replicas_step_time_over_the_fleets() -> None:
    fleet, quick, slow = FleetEstimates(BLOCK), ReplicaHistory(), ReplicaHistory()
    for _ in range(400):
        for history, seconds in ((quick, 0.02), (slow, 0.06)):
            fleet.learn_report(replace(IDLE, running=4, kv_tokens=4000, step_seconds=seconds), history)
    assert slow.slowness / quick.slowness == pytest.approx(3.0, rel=0.05)
    before = slow.slowness
    fleet.learn_report(replace(IDLE, running=4, step_seconds=0.0), slow)
    assert slow.slowness == before, "nobody knows how long it took"
    fleet.learn_report(replace(IDLE, running=0, step_seconds=9.0), slow)
    assert slow.slowness == pytest.approx(before - (before - 1) / 128)
    for _ in range(1000):
        fleet.learn_report(replace(IDLE, running=0, step_seconds=9.0), slow)
    assert slow.slowness == pytest.approx(1.0, abs=0.01), "else an idle engine that was slow once stays idle"


def test_one_absurd_step_changes_little() -> None:
    history = ReplicaHistory()
    history.learn_step(1e4, 0.02)
    assert 1.0 < history.slowness < 1.3
    history.learn_step(1e-9, 0.0)
    assert 0.9 < history.slowness < 1.3


def test_a_report_says_whether_all_views_are_out_of_date() -> None:
    fleet, history = FleetEstimates(BLOCK), ReplicaHistory()
    assert fleet.learn_report(replace(IDLE, running=4, kv_tokens=4000, step_seconds=0.5), history)
    assert not fleet.learn_report(replace(IDLE, running=4, kv_tokens=4000, step_seconds=0.5), history)
    assert not fleet.learn_report(replace(IDLE, block_size=0), history)
    assert fleet.learn_report(replace(IDLE, block_size=32), history)
    assert fleet.block_size == 32


def test_expected_output_is_the_learned_one_up_to_a_sequences_share_of_the_limit() -> None:
    fleet = FleetEstimates(BLOCK)
    assert [fleet.expected_output(limit, 1) for limit in (100, 256, 10_000)] == [100, 256, 256]
    assert fleet.expected_output(300, 3) == 100


def test_the_block_of_the_last_token_is_computed() -> None:
    fleet = FleetEstimates(16)
    assert [fleet.usable_blocks(tokens, 2) for tokens in (1, 16, 17, 32, 33, 100)] == [0, 0, 1, 1, 2, 2]
    assert fleet.usable_blocks(0, 0) == 0


def test_a_retry_teaches_nothing_of_reuse() -> None:
    fleet = FleetEstimates(BLOCK)
    for retry in (False, True, True):
        fleet.learn_prompt(range(40), 0, 100.0, retry)
    assert fleet.reuse.share == 0.0
    fleet.learn_prompt(range(40), 0, 100.0, retry=False)
    assert fleet.reuse.share == pytest.approx(40 / (1 + 2 * (40 + 100 // BLOCK)), rel=0.01)


def test_prompts_teach_which_prefixes_are_shared() -> None:
    fleet = FleetEstimates(BLOCK)
    for _ in range(64):
        fleet.learn_prompt(range(40), 30, 0.0, retry=False)
        fleet.learn_prompt(range(40), 0, 0.0, retry=False)
    assert (fleet.prefixes.share(29), fleet.prefixes.share(39)) == (0.5, 0.0)
