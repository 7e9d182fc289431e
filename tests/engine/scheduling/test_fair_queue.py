"""Clients get fair shares of the engine, and short prompts get in beside long ones; judged in steps."""

from __future__ import annotations

import math
import random
from collections import Counter
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_simulation import add, make_request, make_scheduler

from engine.request import Request
from engine.scheduling.candidates import Candidates, Outcome
from engine.scheduling.fair_queue import OUTPUT_WEIGHT, FairQueue, Ticket
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceState

BUDGET = 256


def large_scheduler(**options: int) -> Scheduler:
    """Sixteen prompts of 2,000 tokens fit; the pool of a small GPU, or of a CPU."""
    sizes = {"num_blocks": 2048, "block_size": 16, "max_num_seqs": 64, "token_budget": BUDGET, **options}
    return make_scheduler(**sizes, max_model_len=16_384, check_invariants=False)


def prompt(length: int, seed: int | str) -> list[int]:
    return random.Random(seed).choices(range(40), k=length)


def _outcome(sequence: Sequence) -> Outcome:
    """Always the token 7, whatever a request needs of a step."""
    group = sequence.group
    if group is None:
        return 7
    if group.search is not None:
        return Candidates(tuple(range(group.search.num_candidates)), (-1.0,) * group.search.num_candidates)
    return Candidates((7,) * (1 if group.forked else group.params.width), (-1.0,) * group.params.width)


class Steps:
    """Runs a scheduler and notes the step of each first token and each end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.number = 0
        self.added: dict[str, int] = {}
        self.first_token: dict[str, int] = {}
        self.over: dict[str, int] = {}
        self.work: Counter[str] = (
            Counter()
        )  # by client; what is computed again after a preemption does not count
        self._computed: Counter[str] = Counter()  # prompt tokens, by request

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.added[request.request_id] = self.number

    def step(self) -> dict[str, int]:
        """Returns the tokens of each request in this step."""
        plan = self.scheduler.schedule()
        assert plan.chunks
        assert plan.num_tokens <= self.scheduler.state.token_budget
        for chunk in plan.chunks:
            sequence = chunk.sequence
            name = sequence.request_id
            computed = min(chunk.start + chunk.length, sequence.num_prompt_tokens)
            prefill = max(0, computed - max(chunk.start, self._computed[name]))
            self._computed[name] = max(computed, self._computed[name])
            group = sequence.group
            first_tokens = 1 if group is None or group.forked else group.params.width
            self.work[name.split("-")[0]] += prefill + int(OUTPUT_WEIGHT) * chunk.samples * first_tokens
        self.number += 1
        outcomes = [_outcome(chunk.sequence) for chunk in plan.chunks if chunk.samples]
        for delta in self.scheduler.commit(plan, outcomes):
            self.first_token.setdefault(delta.request_id, self.number)
            if delta.final:
                self.over[delta.request_id] = self.number
        return {chunk.sequence.request_id: chunk.length for chunk in plan.chunks}

    def until_first_token(self, name: str, most: int = 10_000) -> int:
        """Steps from the arrival of a request to its first token."""
        for _ in range(most):
            if name in self.first_token:
                return self.first_token[name] - self.added[name]
            self.step()
        raise AssertionError(f"{name} has no token after {most} steps")


def test_a_short_prompt_gets_in_beside_a_long_one_which_is_hardly_later() -> None:
    def long_one(shorts: int) -> tuple[int, list[int]]:
        steps = Steps(large_scheduler())
        steps.add(make_request("long", prompt(6_000, 0), arrival=1.0))
        steps.step()
        waits = []
        for number in range(shorts):
            steps.add(make_request(f"s{number}", prompt(16, number + 1), arrival=2.0 + number))
            waits.append(steps.until_first_token(f"s{number}"))
        return steps.until_first_token("long"), waits

    alone, _ = long_one(0)
    assert alone == -(-6_000 // BUDGET)
    beside, waits = long_one(1)
    assert waits == [1]
    assert beside <= 1.15 * alone
    beside, waits = long_one(100)  # one in each step
    assert max(waits) <= 3
    assert beside <= 1.15 * alone + 1


@pytest.mark.parametrize("budget", [32, 64, 512, 2048])
def test_any_token_budget_has_room_for_a_short_prompt(budget: int) -> None:
    steps = Steps(large_scheduler(token_budget=budget))
    steps.add(make_request("long", prompt(6_000, 0), arrival=1.0))
    steps.step()
    steps.add(make_request("short", prompt(16, 1), arrival=2.0))
    assert steps.until_first_token("short") <= 3


def test_short_prompts_take_no_more_than_their_share_from_a_long_one() -> None:
    steps = Steps(large_scheduler(max_num_seqs=4096, num_blocks=65_536))
    steps.add(make_request("long", prompt(16_000, 0), 1, arrival=1.0))
    for number in range(3000):
        steps.add(make_request(f"s{number}", prompt(16, number + 1), 1, arrival=2.0 + number))
    assert steps.until_first_token("long") <= 1.13 * 16_000 / BUDGET + 2


def test_a_clients_flood_does_not_delay_another() -> None:
    """Two requests of 64 prompts of 2,000 tokens each, and beside them requests of another client."""
    for length, output in [(4, 16), (16, 16), (500, 16), (2_000, 64)]:
        alone = Steps(large_scheduler())
        alone.add(make_request("other-0", prompt(length, 999), output))
        expected = alone.until_first_token("other-0")
        steps = Steps(large_scheduler())
        for number in range(128):
            steps.add(make_request(f"flood-{number}", prompt(2_000, number), 64, arrival=1.0, client="flood"))
        for _ in range(40):
            steps.step()
        assert steps.scheduler.stats().waiting > 100
        waits = []
        for number in range(9):
            request = make_request(
                f"other-{number}", prompt(length, 1000 + number), output, arrival=2.0 + number, client="other"
            )
            steps.add(request)
            waits.append(steps.until_first_token(request.request_id))
            for _ in range(5):
                steps.step()
        assert median(waits) <= 2 * expected, (length, waits)
        assert max(waits) <= 2 * expected + 4, (length, waits)


def test_a_flood_that_holds_every_slot_or_block_gives_some_back() -> None:
    for options in ({"max_num_seqs": 8}, {"num_blocks": 1_100}):
        steps = Steps(large_scheduler(**options))
        for number in range(40):
            steps.add(make_request(f"flood-{number}", prompt(2_000, number), 500, client="flood"))
        for _ in range(80):
            steps.step()
        scheduler = steps.scheduler
        running = scheduler.stats().running
        assert running in (7, 8)
        steps.add(make_request("other", prompt(16, 99), 16, arrival=2.0, client="other"))
        assert steps.until_first_token("other") <= 2
        flood = [each for each in scheduler.state.sequences.values() if each.num_preemptions]
        assert {each.request_id.split("-")[0] for each in flood} <= {"flood"}
        assert len(flood) <= 1


def test_a_group_takes_as_many_slots_of_a_flood_at_once_as_its_client_is_due() -> None:
    steps = Steps(large_scheduler(max_num_seqs=8))
    for number in range(20):
        steps.add(make_request(f"flood-{number}", prompt(40, number), 200, client="flood", ignore_eos=True))
    for _ in range(20):
        steps.step()
    steps.add(make_request("group", prompt(40, 99), 200, arrival=2.0, client="other", ignore_eos=True, n=8))
    assert steps.until_first_token("group") == 1
    steps.step()
    running = Counter(each.request_id.split("-")[0] for each in steps.scheduler.state.running)
    assert running == {"group": 4, "flood": 4}
    assert steps.scheduler.stats().preemptions == 4


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("missing", [0, 1, -5])  # slots that the request leaves, or that it lacks
@pytest.mark.parametrize("kind", ["n", "best_of", "beam_width"])
@pytest.mark.parametrize("output", [8, 64])  # of each of its sequences
def test_a_group_as_wide_as_all_slots_starts_beside_a_flood(
    slots: int, missing: int, kind: str, output: int
) -> None:
    """As soon as the first slot is free, however long small requests that would fit keep coming."""
    steps, draw, longest = Steps(large_scheduler(max_num_seqs=slots)), random.Random(slots), 60
    waiting = steps.scheduler.state.waiting

    def step() -> None:
        while len(waiting) < 2 * slots + 1:
            name = f"flood-{draw.random()}"
            steps.add(
                make_request(name, prompt(8, name), draw.randint(1, longest), client="flood", ignore_eos=True)
            )
        steps.step()

    for _ in range(50):
        step()
    width = max(slots - missing, 1)
    group = {"use_beam_search": kind == "beam_width", kind: width}
    steps.add(
        make_request("group", prompt(40, 0), output, arrival=2.0, client="other", ignore_eos=True, **group)
    )
    sequence = steps.scheduler.state.sequences["group", 0]
    for _ in range(longest + 1):
        step()
        if sequence.state is SequenceState.RUNNING:
            break
    assert sequence.state is SequenceState.RUNNING
    # Then each slot that becomes free is for its sequences, until all have run: in rounds, if there are more.
    for _ in range((longest + output) * -(-width // slots) + 10):
        step()
    assert "group" in steps.over


@pytest.mark.parametrize("length", [372, 172])  # it would have more, or as much
def test_a_client_takes_no_place_from_one_that_has_no_more_in_service(length: int) -> None:
    """Otherwise two of them would take the same slot from each other in turn."""
    steps = Steps(large_scheduler(max_num_seqs=3, token_budget=2_048))
    for number in range(6):
        steps.add(make_request(f"a-{number}", prompt(472, number), 64, client="a"))
    steps.step()
    for number in range(2):
        steps.add(make_request(f"b-{number}", prompt(length, 50 + number), 64, arrival=2.0, client="b"))
    steps.step()
    scheduler = steps.scheduler
    assert [each.request_id for each in scheduler.state.running] == ["a-0", "b-0", "a-1"]
    assert scheduler.state.waiting[0].request_id == "b-1"
    assert scheduler.state.waiting[0].order < scheduler.state.running[-1].order
    steps.step()
    assert scheduler.stats().preemptions == 1


def test_clients_share_the_tokens_of_a_step() -> None:
    for length, alone in [(500, 2), (2_000, 8)]:
        steps = Steps(large_scheduler())
        steps.add(make_request("long", prompt(6_000, 0), client="a"))
        steps.step()
        steps.add(make_request("other", prompt(length, 1), arrival=2.0, client="b"))
        assert steps.until_first_token("other") <= 2 * alone


def test_a_client_gets_one_part_of_a_step_however_many_of_its_prompts_run() -> None:
    steps = Steps(large_scheduler())
    for number in (3, 2, 1):  # each moved here after the one behind it had begun
        steps.add(make_request(f"a-{number}", prompt(2_000, number), arrival=float(number), client="a"))
        steps.step()
    steps.add(make_request("c", prompt(2_000, 4), arrival=4.0, client="c"))
    steps.step()
    assert [each.request_id for each in steps.scheduler.state.running] == ["a-1", "a-2", "a-3", "c"]
    steps.add(make_request("first", prompt(10, 5), arrival=0.5, client="b"))
    assert steps.step() == {"first": 10, "a-1": BUDGET - 10 - BUDGET // 3, "c": BUDGET // 3}


def test_a_client_of_worse_priority_takes_no_part_of_a_step_from_those_of_the_best() -> None:
    steps = Steps(large_scheduler())
    for client, priority in [("a", 0), ("b", 0), ("worse", 1)]:
        steps.add(make_request(client, prompt(2_000, client), client=client, priority=priority))
    assert steps.step() == {"a": BUDGET // 2, "b": BUDGET // 2}


def test_a_short_prompt_of_worse_priority_takes_no_tokens_that_a_long_one_lacks() -> None:
    steps = Steps(large_scheduler())
    steps.add(make_request("long", prompt(1_000, 0)))
    steps.step()
    steps.add(make_request("short", prompt(16, 1), priority=1))
    for _ in range(2):
        assert steps.step() == {"long": BUDGET}
    assert steps.step() == {"long": 1_000 - 3 * BUDGET, "short": 16}


def test_a_prompt_that_moved_here_gets_tokens_in_its_place() -> None:
    """Of one client: before those that run and come later, and after those that come first."""
    steps = Steps(large_scheduler())
    steps.add(make_request("third", prompt(2_000, 3), arrival=3.0))
    assert steps.step() == {"third": BUDGET}
    steps.add(make_request("first", prompt(2_000, 1), arrival=1.0))
    assert steps.step() == {"first": BUDGET}
    steps.add(make_request("second", prompt(2_000, 2), arrival=2.0))
    assert steps.step() == {"first": BUDGET}


def test_what_a_prompt_that_gave_way_leaves_goes_to_its_clients_next() -> None:
    steps = Steps(large_scheduler())
    steps.add(make_request("second", prompt(BUDGET + 100, 2), arrival=2.0))
    steps.step()
    for arrival, name in ((1.0, "first"), (3.0, "third")):
        steps.add(make_request(name, prompt(100, name), arrival=arrival))
    assert steps.step() == {"first": 100, "second": 100, "third": BUDGET - 200}


def test_what_is_left_goes_to_a_waiting_prompt_before_a_running_one_that_comes_later() -> None:
    steps = Steps(large_scheduler())
    steps.add(make_request("third", prompt(2_000, 3), arrival=3.0))
    steps.step()
    steps.add(make_request("first", prompt(BUDGET * 3 // 4, 1), arrival=1.0))  # a quarter is for short ones
    steps.add(make_request("second", prompt(2_000, 2), arrival=2.0))
    assert steps.step() == {"first": BUDGET * 3 // 4, "second": BUDGET // 4}


def test_what_one_that_does_not_fit_leaves_goes_to_a_running_prompt_before_later_ones() -> None:
    steps = Steps(large_scheduler(num_blocks=200))
    steps.add(make_request("runs", prompt(2_000, 3), arrival=3.0))
    steps.step()
    steps.add(make_request("large", prompt(3_000, 2), arrival=2.0))
    steps.add(make_request("later", prompt(300, 4), arrival=4.0))
    assert steps.step() == {"runs": BUDGET}


Size = tuple[int, int]
"""Tokens of a prompt and of an output."""


def check_shares(
    slots: int,
    sizes: dict[str, Size],
    queued: int,
    *,
    widths: dict[str, int] | None = None,
    guest: Size = (60, 1),
    at_once: int = 0,
    pause: int = 0,
    num_steps: int = 200,
) -> None:
    """Clients that always wait get equal work, a guest no more.

    That is within two of the largest requests, a step, and the outputs of what runs: their lengths are
    estimates. Each request is for ``widths`` sequences, by client.

    The guest sends ``at_once`` requests when it has none that waits, ``pause`` steps after the last time. Its
    outputs end after one token, so it may be charged too much at first.
    """
    # Blocks run out. Without look-ahead, no small request passes a large one that lacks them.
    steps = Steps(large_scheduler(num_blocks=512, max_num_seqs=slots, look_ahead=0))
    made: Counter[str] = Counter()
    width = widths or {}

    def add_one(client: str, length: int, output: int) -> None:
        made[client] += 1
        name, stop = f"{client}-{made[client]}", (7,) if client == "guest" else ()
        steps.add(
            make_request(
                name,
                prompt(length, name),
                output,
                arrival=1.0 + steps.number,
                client=client,
                stop=stop,
                ignore_eos=True,
                n=width.get(client, 1),
            )
        )

    back = 0
    for _ in range(num_steps):
        state = steps.scheduler.state
        waiting = Counter(each.request_id.split("-")[0] for each in state.waiting)
        for client, size in sizes.items():
            for _ in range(slots + queued - waiting[client]):
                add_one(client, *size)
        if steps.number >= back and not waiting["guest"]:
            for _ in range(at_once):
                add_one("guest", *guest)
            back = steps.number + pause
        steps.step()
    work = [steps.work[each] for each in sizes]
    largest = max(
        length + OUTPUT_WEIGHT * output * width.get(client, 1)
        for client, (length, output) in [*sizes.items(), ("guest", guest)]
    )
    longest = max(output for _, output in [*sizes.values(), guest])
    bound = 2 * largest + BUDGET + slots * OUTPUT_WEIGHT * longest
    assert max(work) - min(work) <= bound, steps.work
    assert steps.work["guest"] - min(work) <= bound, steps.work


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_clients_that_always_wait_get_equal_work_and_one_that_comes_and_goes_no_more(
    data: st.DataObject,
) -> None:
    """Whatever the number of slots and clients and the sizes of requests."""
    sizes = {
        client: (data.draw(st.sampled_from([16, 60, 400, 1500])), data.draw(st.sampled_from([1, 8, 60])))
        for client in ["a", "b", "c", "d", "e"][: data.draw(st.integers(2, 5))]
    }
    check_shares(
        data.draw(st.integers(1, 16)),
        sizes,
        data.draw(st.integers(1, 40)),
        guest=(data.draw(st.sampled_from([60, 400, 1500])), data.draw(st.sampled_from([1, 60]))),
        at_once=data.draw(st.integers(0, 3)),
        pause=data.draw(st.integers(0, 10)),
    )


def test_with_fewer_slots_than_clients_none_falls_behind() -> None:
    check_shares(1, {"a": (1500, 60), "b": (60, 1), "c": (1500, 8), "d": (400, 8)}, 1, num_steps=600)
    check_shares(2, {"a": (60, 1), "b": (400, 1)}, 0, num_steps=400)  # one's queue is empty in some steps


@pytest.mark.parametrize("width", [2, 7, 8, 12])
def test_requests_for_several_sequences_get_equal_work_too(width: int) -> None:
    check_shares(8, {"a": (60, 8), "b": (60, 8), "c": (400, 8)}, 5, widths={"a": width}, num_steps=400)


def test_with_more_slots_than_blocks_for_large_requests_none_falls_behind() -> None:
    check_shares(12, {"a": (1500, 60), "b": (400, 8)}, 39)
    check_shares(8, {"a": (1500, 60), "b": (400, 8)}, 5, num_steps=400)


def test_a_client_that_lacks_tokens_in_a_step_loses_no_slot_to_those_behind_it() -> None:
    check_shares(10, {"a": (60, 8), "b": (1500, 1)}, 2, guest=(16, 1), at_once=1, pause=2)


def test_a_client_of_short_prompts_gets_its_part_of_the_tokens_that_another_leaves() -> None:
    check_shares(12, {"a": (400, 1), "b": (60, 1)}, 5, at_once=2, pause=3, num_steps=400)


@pytest.mark.parametrize(
    ("sizes", "widths"),
    [
        ({"a": (16, 1), "b": (400, 1)}, {}),
        ({"a": (60, 60), "b": (400, 1)}, {}),
        ({"a": (16, 1), "b": (400, 1), "c": (60, 1)}, {}),
        ({"a": (60, 1), "b": (400, 1)}, {"a": 8}),
        ({"a": (130, 1), "b": (1500, 8)}, {"a": 16}),
    ],
)
def test_generated_tokens_count_in_a_steps_shares_as_in_the_fair_queue(
    sizes: dict[str, Size], widths: dict[str, int]
) -> None:
    """Short prompts, outputs and groups get as much work out of each step's prefills as long prompts."""
    check_shares(64, sizes, 5, widths=widths, num_steps=800)


def test_a_quota_is_work_as_in_the_fair_queue() -> None:
    """A part of a step's: prompt tokens, and twice the generated ones."""
    steps = Steps(large_scheduler())
    for number in range(4):
        steps.add(make_request(f"a-{number}", prompt(64, number), client="a", n=4))
    steps.add(make_request("b", prompt(6_000, "b"), client="b"))
    assert steps.step() == {"a-0": 64, "a-1": 64, "b": 128}  # a-1 is short enough for the reserved tokens
    # Eight sequences decode, which leaves 248 tokens: half of the work is 132. Those are 16 of client a's work,
    # and a-2 with its first four tokens 72. Client b gets 132, and what nobody has a quota for.
    assert steps.step() == {"a-0": 1, "a-1": 1, "a-2": 64, "a-3": 44, "b": 132 + 8}


def test_no_more_prompts_of_a_client_begin_while_one_that_has_begun_is_held_back() -> None:
    """Each would hold blocks, and none of them end."""
    steps = Steps(large_scheduler())
    made = 0
    for _ in range(100):
        for _ in range(20 - sum(each.request_id[0] == "a" for each in steps.scheduler.state.waiting)):
            steps.add(make_request(f"a-{made}", prompt(16, made), 1, client="a", ignore_eos=True))
            made += 1
        for _ in range(5 - sum(each.request_id[0] == "b" for each in steps.scheduler.state.waiting)):
            steps.add(make_request(f"b-{made}", prompt(400, made), 1, client="b", ignore_eos=True))
            made += 1
        steps.step()
        assert sum(each.request_id[0] == "b" for each in steps.scheduler.state.running) <= 2


def enter(queue: FairQueue, client: str, work: float, next_start: float) -> Ticket:
    return queue.enter(
        client, (0,), client=client, priority=0.0, arrival=1.0, work=work, oldest=0.0, next_start=next_start
    )


def queue_request(queue: FairQueue, arrival: float) -> Ticket:
    """Of the only client."""
    return queue.enter(
        f"{arrival}", (0,), client="a", priority=0.0, arrival=arrival, work=10.0, oldest=0.0, next_start=0.0
    )


def test_a_client_is_brought_up_to_others_unless_it_waits() -> None:
    queue = FairQueue()
    first, second = enter(queue, "a", 10.0, math.inf), enter(queue, "a", 10.0, 0.0)
    others = [enter(queue, "b", 100.0, 0.0) for _ in range(2)]
    for ticket in (first, *others):
        queue.begin(ticket, 1)
    third = enter(queue, "a", 10.0, 10.0)
    assert [each.start for each in (first, second, third)] == [0.0, 10.0, 20.0]
    queue.begin(second, 1)
    queue.begin(third, 1)
    fourth = enter(queue, "a", 10.0, 40.0)
    assert fourth.start == 40.0, "as the first that waits"
    queue.begin(fourth, 1)
    fifth = enter(queue, "a", 10.0, math.inf)
    assert fifth.start == 100.0, "as the last that began"
    for ticket in (first, second, third, fourth):
        queue.leave(ticket)
    assert enter(queue, "a", 10.0, 100.0).start == 110.0, "what was charged too much before is no credit"


def test_a_client_that_takes_back_what_waits_is_brought_up_to_others() -> None:
    queue = FairQueue()
    first, waits = enter(queue, "a", 10.0, math.inf), enter(queue, "a", 10.0, 0.0)
    others = [enter(queue, "b", 100.0, 0.0) for _ in range(2)]
    for ticket in (first, *others):
        queue.begin(ticket, 1)
    queue.leave(waits)
    assert enter(queue, "a", 10.0, math.inf).start == 100.0


def test_a_request_that_moved_keeps_its_start_when_others_change() -> None:
    queue = FairQueue()
    first, second = (queue_request(queue, arrival) for arrival in (5.0, 6.0))
    queue.begin(first, 10)
    moved, third = (queue_request(queue, arrival) for arrival in (1.0, 7.0))
    assert queue.settle() == [second]
    assert [each.start for each in (moved, first, second, third)] == [0.0, 0.0, 20.0, 30.0]


def test_a_client_that_waits_is_not_brought_up_to_the_start_that_its_own_request_is_about_to_leave() -> None:
    queue = FairQueue()
    first, second = enter(queue, "a", 10.0, math.inf), enter(queue, "a", 1.0, 0.0)
    for ticket in (first, enter(queue, "b", 100.0, 10.0), enter(queue, "b", 100.0, 10.0)):
        queue.begin(ticket, 2)
    queue.leave(first)
    third = enter(queue, "a", 1.0, second.start)
    queue.settle()
    assert (second.start, third.start) == (2.0, 3.0)


def test_starts_follow_what_earlier_requests_come_to() -> None:
    queue = FairQueue()
    first, second, third, fourth, _ = (enter(queue, client, 10.0, 0.0) for client in "aaaab")
    queue.begin(first, 10)
    first.done += 40
    queue.leave(first)
    assert queue.settle() == [second, third, fourth]
    assert [each.start for each in (second, third, fourth)] == [50.0, 60.0, 70.0]
    queue.leave(second)
    assert queue.settle() == [third, fourth]
    assert [each.start for each in (third, fourth)] == [50.0, 60.0]
    assert queue.settle() == []


def test_nobody_starves_however_many_new_clients_come() -> None:
    steps = Steps(large_scheduler(max_num_seqs=4))
    for number in range(8):
        steps.add(make_request(f"old-{number}", prompt(300, number), 16, client="old"))
    for number in range(500):
        name, text = f"new{number}", prompt(100, 1_000 + number)
        steps.add(make_request(name, text, 16, arrival=2.0 + number, client=name))
        for _ in range(4):  # as fast as they can be served
            steps.step()
        if "old-7" in steps.first_token:
            return
    raise AssertionError("a client with a queue waits for ever behind new ones")


@pytest.mark.parametrize("clients", ["a", "ab", "abcde"])
def test_a_new_client_does_not_wait_for_what_others_were_charged_too_much(clients: str) -> None:
    """They cancel each request after its first token, from which estimates learn nothing."""
    steps = Steps(large_scheduler(max_num_seqs=4))
    scheduler, made = steps.scheduler, 0

    def step() -> None:
        nonlocal made
        state = scheduler.state
        waiting = Counter(each.request_id[0] for each in state.waiting)
        for client in clients:
            for _ in range(4 - waiting[client]):
                made += 1
                name, text = f"{client}-{made}", prompt(60, made)
                steps.add(make_request(name, text, 200, arrival=1.0 + steps.number, client=client))
        steps.step()
        for sequence in list(state.running):
            if sequence.request_id[0] in clients and sequence.request_id in steps.first_token:
                scheduler.abort(sequence.request_id)

    while made < 400:
        step()
    steps.add(make_request("new", prompt(60, 0), 200, arrival=1.0 + steps.number, client="new"))
    for _ in range(4):
        step()
    assert "new" in steps.first_token


def test_a_lone_client_is_not_charged_for_what_it_aborts_before_it_runs() -> None:
    queue = FairQueue()
    first, second, third = (enter(queue, "a", 10.0, 0.0) for _ in range(3))
    queue.begin(first, 10)
    queue.leave(second)
    assert queue.settle() == [third]
    assert third.start == 10.0
    first.done += 40
    queue.leave(first)  # nobody else has had less
    assert queue.settle() == []
    assert third.start == 10.0


def test_virtual_time_takes_back_what_it_advanced_too_far() -> None:
    """By the number of clients when it advanced, whatever that is when the request ends."""
    queue = FairQueue()
    first, _ = enter(queue, "a", 100.0, math.inf), enter(queue, "a", 100.0, 0.0)
    queue.begin(first, 10)
    for client in "bcd":
        enter(queue, client, 10.0, 0.0)
    queue.leave(first)
    assert first.account.level.reached == 10.0


def test_work_is_charged_by_what_it_comes_to() -> None:
    """A client whose outputs are longer than average pays for them with its next requests."""
    queue = FairQueue()
    first, other = enter(queue, "a", 10.0, 0.0), enter(queue, "b", 10.0, 0.0)
    queue.begin(first, 4)
    first.done += 96
    queue.leave(first)
    assert (enter(queue, "a", 10.0, 0.0).start, other.start) == (100.0, 0.0)
    queue.leave(other)  # aborted before it ran: nothing is charged
    assert enter(queue, "b", 10.0, 0.0).start == 0.0
    assert enter(queue, "c", 10.0, 0.0).start == 50.0  # half of a1 is what all had their share of


def test_an_idle_client_saves_nothing_up_and_loses_nothing() -> None:
    steps = Steps(large_scheduler(max_num_seqs=4))
    for number in range(50):
        steps.add(make_request(f"busy-{number}", prompt(500, number), 4, client="busy"))
    for _ in range(50):
        steps.step()
    state = steps.scheduler.state
    oldest = min(each.order[1] for each in state.sequences.values())
    late = add(steps.scheduler, make_request("late", prompt(500, 99), 4, arrival=9.0, client="late"))
    assert oldest <= late.order[1] <= max(each.order[1] for each in state.running)


def test_a_request_that_moved_keeps_its_place_within_its_client() -> None:
    scheduler = large_scheduler(max_num_seqs=1)
    steps = Steps(scheduler)
    steps.add(make_request("first", prompt(16, 0), 64, arrival=1.0))
    steps.step()
    for number in (5, 3, 4, 2):
        steps.add(make_request(f"r{number}", prompt(16, number), arrival=float(number)))
    state = scheduler.state
    assert [each.request_id for each in state.waiting] == ["r2", "r3", "r4", "r5"]
    other = add(scheduler, make_request("other", prompt(16, 8), arrival=9.0, client="other"))
    steps.step()
    starts = [each.order[1] for each in state.waiting if each.ticket.account is not other.ticket.account]
    assert len(set(starts)) == 4  # none shares a place: each is charged to the client
    scheduler.check()
    moved = add(scheduler, make_request("moved", prompt(16, 9), arrival=0.5))
    assert moved.order < min(each.order for each in scheduler.state.running)
    while scheduler.has_work():
        steps.step()


def test_aging_offsets_priority_within_a_client_and_leaves_shares_as_they_are() -> None:
    scheduler = make_scheduler(64, 4, max_num_seqs=1, priority_aging=10.0)
    names = [("worse", 1, 1.0, "a"), ("better", 0, 5.0, "a"), ("late", 0, 30.0, "a"), ("other", 3, 40.0, "b")]
    for name, priority, arrival, client in names:
        scheduler.add(make_request(name, [1, 2], priority=priority, arrival=arrival, client=client))
    assert [chunk.sequence.request_id for chunk in scheduler.schedule().chunks] == ["better"]
    assert [each.request_id for each in scheduler.state.waiting] == ["other", "worse", "late"]


def test_a_level_ends_with_its_last_request() -> None:
    scheduler = large_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name, prompt(16, 1), 1, client=name, n=2))
    scheduler.abort("b")
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan.chunks
        scheduler.fail([chunk.sequence.request_id for chunk in plan.chunks], "planted")
    fresh = add(scheduler, make_request("c", prompt(16, 1), 1, client="b"))
    assert fresh.state is SequenceState.WAITING
    assert (fresh.order[1], len(fresh.ticket.account.level.accounts)) == (0.0, 1)


def test_accounts_of_clients_that_are_gone_are_forgotten() -> None:
    queue = FairQueue()
    keep = queue.enter(
        "keep", (0,), client="keep", priority=0.0, arrival=0.0, work=1.0, oldest=0.0, next_start=0.0
    )
    for number in range(10_000):
        now = float(number)
        ticket = queue.enter(
            f"r{number}",
            (0,),
            client=f"t{number}",
            priority=0.0,
            arrival=now,
            work=1.0,
            oldest=now,
            next_start=now,
        )
        queue.begin(ticket, 1)
        queue.leave(ticket)
    assert len(keep.account.level.accounts) < 300


def test_what_a_client_has_had_is_not_forgotten_before_others_have_had_as_much() -> None:
    queue = FairQueue()
    enter(queue, "keep", 1.0, math.inf)
    heavy = enter(queue, "heavy", 1000.0, 0.0)
    queue.begin(heavy, 1000)
    queue.leave(heavy)
    for number in range(200):
        ticket = enter(queue, f"t{number}", 1.0, 0.0)
        queue.begin(ticket, 1)
        queue.leave(ticket)
    assert len(heavy.account.level.accounts) < 150
    assert enter(queue, "heavy", 1.0, 0.0).start == 1000.0
