"""A model of KV memory that knows what every slot holds, and a driver that runs a scheduler over it."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool
from engine.kv.prefix_index import PrefixIndex
from engine.kv.transfers import Transfers
from engine.request import CacheNamespace, ModelLimits, Request, TokenDelta
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates, Outcome
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_config import ModelTraits, SchedulerConfig
from engine.scheduling.sequence import ScheduledChunk, Sequence
from engine.scheduling.speculation import Speculation
from engine.scheduling.step import StepPlan, StepTiming

VOCAB = 50
EOS = 49


def constant_hash(tokens: tuple[int, ...]) -> int:
    return 7


def make_scheduler(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    token_budget: int = 32,
    lone_budget: int | None = None,
    max_model_len: int = 4096,
    prefix_caching: bool = True,
    look_ahead: int = 8,
    max_overtakes: int = 32,
    hash_tokens: Callable[[tuple[int, ...]], int] = hash,
    check_invariants: bool = True,
    host_blocks: int = 0,
    recovery: str = "recompute",
    window: int | None = None,
    priority_aging: float | None = None,
    speculation: Speculation | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(
        pool,
        PrefixIndex(pool, hash_tokens, window),
        RecoveryPolicy(RecoveryMode(recovery), block_size, Rates(1000.0, 250.0, 250.0)),
        ModelTraits(ModelLimits(VOCAB, max_model_len, num_blocks, block_size), ("model", "float32"), (EOS,)),
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            lone_budget=lone_budget,
            prefix_caching=prefix_caching,
            priority_aging=priority_aging,
            look_ahead=look_ahead,
            max_overtakes=max_overtakes,
            check_invariants=check_invariants,
        ),
        host=HostPool(host_blocks),
        speculation=speculation,
        clock=clock,
    )


def make_request(
    name: str,
    tokens: list[int],
    max_tokens: int | None = 4,
    *,
    arrival: float | None = None,
    priority: int = 0,
    salt: str = "",
    generated_before: int = 0,
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    ignore_eos: bool = False,
    outputs: tuple[tuple[int, ...] | None, ...] = (),
    client: str = "",
    **sequences: Any,
) -> Request:
    return Request(
        name,
        list(tokens),
        SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            **sequences,
        ),
        namespace=CacheNamespace(salt=salt),
        priority=priority,
        arrival=1.0 if arrival is None else arrival,
        generated_before=generated_before,
        outputs=outputs,
        client=client,
    )


def add(scheduler: Scheduler, request: Request) -> Sequence:
    """Queue a request; return its first sequence."""
    scheduler.add(request)
    keys = [key for key in scheduler.state.sequences if key[0] == request.request_id]
    return scheduler.state.sequences[min(keys)]


class KVSimulation:
    """Stands in for the model: writes and reads KV slots, checks each read, makes tokens.

    The KV of a token is the whole text up to it, named by an exact number: a dictionary gives each pair (number
    of the text before, token) its own. A slot that holds anything else than its reader's own text is a fault.
    """

    def __init__(
        self,
        block_size: int,
        sample: Callable[[Sequence], int] | None = None,
        window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.sample = sample or (lambda sequence: self.text(sequence) % (VOCAB - 1))
        self.window = window
        self.slots: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.output: dict[str, list[int]] = {}  # by request id; "id#1" is its second sequence
        self.ended: dict[str, TokenDelta] = {}
        self.over: set[str] = set()
        self.computed_tokens = 0
        self._names: dict[tuple[object, int], int] = {}

    def extend(self, before: object, token: int) -> int:
        return self._names.setdefault((before, token), len(self._names))

    def text(self, sequence: Sequence) -> int:
        return self.texts(sequence)[-1]

    def texts(self, sequence: Sequence, drafts: Iterable[int] = ()) -> list[int]:
        texts: list[int] = []
        for token in chain(sequence.token_ids, drafts):
            texts.append(self.extend(texts[-1] if texts else sequence.root, token))
        return texts

    def transfer(self, transfers: Transfers) -> None:
        """Copy blocks; all sources of a kind are read before any destination is written."""
        for pairs, source, destination in (
            (transfers.swap_out, self.slots, self.host),
            (transfers.copies, self.slots, self.slots),
            (transfers.swap_in, self.host, self.slots),
        ):
            targets = [to for _, to in pairs]
            assert len(set(targets)) == len(targets), "two copies into one block"
            read = [
                {at: source[block, at] for at in range(self.block_size) if (block, at) in source}
                for block, _ in pairs
            ]
            for (_, to), contents in zip(pairs, read, strict=True):
                for offset in range(self.block_size):
                    destination.pop((to, offset), None)
                destination.update({(to, offset): text for offset, text in contents.items()})

    def run(self, plan: StepPlan) -> list[Outcome]:
        """Make the transfers, write all slots of the step, then let each chunk read what it sees."""
        self.transfer(plan.transfers)
        writers: set[tuple[int, int]] = set()
        texts_of = [self.texts(chunk.sequence, chunk.drafts) for chunk in plan.chunks]
        for chunk, texts in zip(plan.chunks, texts_of, strict=True):
            self.computed_tokens += chunk.length
            for position in range(chunk.start, chunk.start + chunk.num_rows):
                slot = self._slot(chunk.sequence, position)
                assert slot not in writers, "two rows of one step write one slot"
                assert slot[0] >= 0, "a write to a block that is gone"
                writers.add(slot)
                self.slots[slot] = texts[position]
        outcomes: list[Outcome] = []
        for chunk, texts in zip(plan.chunks, texts_of, strict=True):
            first = 0 if self.window is None else max(0, chunk.start - self.window + 1)
            for position in range(first, chunk.start + chunk.num_rows):
                assert self.slots[self._slot(chunk.sequence, position)] == texts[position], "another text's KV"
            if chunk.samples:
                outcomes.append(self.outcomes(chunk) if chunk.drafts else self.outcome(chunk.sequence))
        return outcomes

    def outcomes(self, chunk: ScheduledChunk) -> tuple[int | Candidates, ...]:
        """Of a chunk's rows up to the first whose token is not the next draft."""
        tokens = chunk.sequence.token_ids
        length, choices = len(tokens), [self.outcome(chunk.sequence)]
        for draft in chunk.drafts:
            last = choices[-1]
            if draft != (last.tokens[0] if isinstance(last, Candidates) else last):
                break
            tokens.append(draft)
            choices.append(self.outcome(chunk.sequence))
        del tokens[length:]
        return tuple(choices)

    def outcome(self, sequence: Sequence) -> int | Candidates:
        """A token; for groups some tokens with log probabilities that only the text decides."""
        group = sequence.group
        if group is None:
            return self.sample(sequence)
        text = zlib.crc32(bytes(sequence.token_ids))  # the same in every run
        if group.search is not None:
            ranks = range(min(group.search.num_candidates, VOCAB))
            tokens = tuple((text * 7 + rank * 11) % VOCAB for rank in ranks)
            return Candidates(tokens, tuple(-0.1 * (text % 5) - 0.3 * rank for rank in ranks))
        if not group.forked:
            width = group.params.width
            return Candidates(tuple((text + 3 * draw) % (VOCAB - 1) for draw in range(width)), (-1.0,) * width)
        token = self.sample(sequence)
        return Candidates((token,), (-(text % 7) / 3,)) if group.params.ranked else token

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self.block_size], position % self.block_size

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Note what came out; each token must follow the one before it, and nothing may follow the end."""
        for delta in deltas:
            key = f"{delta.request_id}#{delta.sequence}" if delta.sequence else delta.request_id
            assert key not in self.ended, "a delta after the last"
            assert delta.request_id not in self.over, "a delta after the request's end"
            output = self.output.setdefault(key, [])
            assert delta.index == len(output), "a token is lost or doubled"
            output.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ended[key] = delta
            if delta.final:
                assert delta.finish_reason is not None
                self.over.add(delta.request_id)

    def step(self, scheduler: Scheduler) -> StepPlan:
        plan = scheduler.schedule()
        timing = StepTiming(
            0.001 * plan.num_tokens, 0.004 * len(plan.transfers.swap_out), 0.004 * len(plan.transfers.swap_in)
        )
        self.deliver(scheduler.commit(plan, self.run(plan), timing))
        return plan

    def drain(self, scheduler: Scheduler, most_steps: int = 10_000) -> int:
        """Run until nothing is left; return the number of steps."""
        for steps in range(most_steps):
            if not scheduler.has_work():
                return steps
            assert self.step(scheduler).chunks, "work is left but nothing runs"
        raise AssertionError(f"{scheduler.stats()} after {most_steps} steps")


def random_prompt(rng: random.Random, most: int) -> list[int]:
    """A prompt of two letters, so that beginnings are often shared."""
    return [rng.randrange(2) for _ in range(rng.randint(1, most))]
