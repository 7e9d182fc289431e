"""A model of KV memory that knows what every slot holds, and a driver that runs a scheduler over it."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.block_pool import BlockPool
from engine.prefix_index import PrefixIndex
from engine.recovery import RecomputeRecovery
from engine.request import CacheNamespace, ModelLimits, Request, TokenDelta
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.step_plan import StepPlan

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
    max_model_len: int = 4096,
    prefix_caching: bool = True,
    look_ahead: int = 8,
    max_overtakes: int = 32,
    hash_tokens: Callable[[tuple[int, ...]], int] = hash,
    check_invariants: bool = True,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(
        pool,
        PrefixIndex(pool, hash_tokens),
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        prefix_caching=prefix_caching,
        eos_token_ids=(EOS,),
        model_key=("model", "float32"),
        limits=ModelLimits(VOCAB, max_model_len, num_blocks, block_size),
        recovery=RecomputeRecovery(),
        look_ahead=look_ahead,
        max_overtakes=max_overtakes,
        check_invariants=check_invariants,
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
) -> Request:
    return Request(
        name,
        list(tokens),
        SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop, ignore_eos=ignore_eos
        ),
        namespace=CacheNamespace(salt=salt),
        priority=priority,
        arrival=1.0 if arrival is None else arrival,
        generated_before=generated_before,
    )


class KVSimulation:
    """Stands in for the model: writes and reads KV slots, checks each read, makes tokens.

    The KV of a token is the whole text up to it, named by an exact number: a dictionary gives each pair (number
    of the text before, token) its own. A slot that holds anything else than its reader's own text is a fault.
    """

    def __init__(self, block_size: int, sample: Callable[[Request], int] | None = None) -> None:
        self.block_size = block_size
        self.sample = sample or (lambda request: self.text(request) % (VOCAB - 1))
        self.slots: dict[tuple[int, int], int] = {}
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, TokenDelta] = {}
        self._names: dict[tuple[object, int], int] = {}

    def extend(self, before: object, token: int) -> int:
        return self._names.setdefault((before, token), len(self._names))

    def text(self, request: Request) -> int:
        return self.texts(request)[-1]

    def texts(self, request: Request) -> list[int]:
        texts: list[int] = []
        for token in request.token_ids:
            texts.append(self.extend(texts[-1] if texts else request.namespace, token))
        return texts

    def run(self, plan: StepPlan) -> list[int]:
        """Write all slots of the step, then let each chunk read everything before its end."""
        writers: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            texts = self.texts(chunk.request)
            for position in range(chunk.start, chunk.start + chunk.length):
                slot = self._slot(chunk.request, position)
                assert slot not in writers, "two rows of one step write one slot"
                writers.add(slot)
                self.slots[slot] = texts[position]
        tokens = []
        for chunk in plan.chunks:
            texts = self.texts(chunk.request)
            for position in range(chunk.start + chunk.length):
                assert self.slots[self._slot(chunk.request, position)] == texts[position], "another text's KV"
            if chunk.samples:
                tokens.append(self.sample(chunk.request))
        return tokens

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_table[position // self.block_size], position % self.block_size

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Note what came out; each token must follow the one before it, and nothing may follow the end."""
        for delta in deltas:
            assert delta.request_id not in self.ended, "a delta after the last"
            output = self.output.setdefault(delta.request_id, [])
            assert delta.index == len(output), "a token is lost or doubled"
            output.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta

    def step(self, scheduler: Scheduler) -> StepPlan:
        plan = scheduler.schedule()
        self.deliver(scheduler.commit(plan, self.run(plan)))
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
