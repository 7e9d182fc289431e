"""An engine in simulated time: the real scheduler, block pool and prefix index; only the model is replaced."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from app.routing.load import LoadReport
from engine.kv.block_keys import KeyScheme
from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool
from engine.kv.kv_events import KvEvents, root_key_of
from engine.kv.prefix_index import PrefixIndex
from engine.request import ModelLimits, Request, TokenDelta
from engine.scheduling.candidates import Candidates
from engine.scheduling.load_report import EngineLoad, LoadReporter
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_config import ModelTraits, SchedulerConfig
from engine.scheduling.step import StepPlan, StepTiming

VOCABULARY = 2**62
"""Token ids only have to differ. Those of a replica with KV events must fit 32 bits, to be hashed."""

_REVISION, _DTYPE = "simulated", "bfloat16"
_COST_BLOCK = 16  # tokens of the block whose copy ``StepCost.swapped_block`` is about


@dataclass(frozen=True, slots=True)
class StepCost:
    """Step-time model: seconds of a step are a constant and so much for each unit of work."""

    base: float
    prefill_token: float
    decode_row: float
    context_token: float  # K and V of one token read by a decode
    swapped_block: float = 0.0  # one block of 16 tokens copied to the host or back
    swap_call: float = 0.0  # a step that copies anything at all

    def step(self, prefill: int, rows: int, context: int) -> float:
        """Seconds for ``prefill`` prompt tokens and ``rows`` decodes that read ``context`` tokens of KV."""
        return self.base + self.prefill_token * prefill + self.decode_row * rows + self.context_token * context

    def scaled(self, prefill: float, copy: float) -> StepCost:
        """The same machine with prompts and copies that take so many times as long."""
        return replace(
            self,
            prefill_token=self.prefill_token * prefill,
            swapped_block=self.swapped_block * copy,
            swap_call=self.swap_call * copy,
        )


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What one replica is made of.

    ``rates`` are what the recovery policy believes at first. With ``noise``, each part of a step takes a
    log-normal factor of that sigma and mean 1.
    """

    cost: StepCost
    num_blocks: int
    block_size: int
    token_budget: int
    max_num_seqs: int = 256
    max_length: int = 2**30  # tokens
    host_blocks: int = 0
    recovery: RecoveryMode = RecoveryMode.RECOMPUTE
    rates: Rates = field(default_factory=Rates)
    kv_events: bool = False
    noise: float = 0.0
    seed: int = 0


class SimulatedReplica:
    """Runs requests step by step as the engine does; the caller keeps the time.

    A step is :meth:`begin_step`, which says how long it takes, and :meth:`end_step`. Requests may be added at
    any time; those that come during a step are in the next one.
    """

    def __init__(self, config: ReplicaConfig, name: str = "replica") -> None:
        self.config, self.name = config, name
        size, cost = config.block_size, config.cost
        self.pool = BlockPool(config.num_blocks, size)
        self.kv_events = KvEvents(size, root_key_of) if config.kv_events else None
        self.index = PrefixIndex(self.pool, observer=self.kv_events)
        self.policy = RecoveryPolicy(config.recovery, size, config.rates)
        self.scheduler = Scheduler(
            self.pool,
            self.index,
            self.policy,
            ModelTraits(
                ModelLimits(VOCABULARY, config.max_length, config.num_blocks, size), (_REVISION, _DTYPE, size)
            ),
            SchedulerConfig(max_num_seqs=config.max_num_seqs, token_budget=config.token_budget),
            host=HostPool(config.host_blocks),
        )
        prefill_rate = 1 / cost.prefill_token if cost.prefill_token else 0.0
        self._load = LoadReporter(self.scheduler.state, prefill_rate=prefill_rate)
        self.plan: StepPlan | None = None
        """The step that runs now."""
        self.acknowledged: dict[int, int] = {}
        """The highest attempt that has arrived on each channel."""
        self._timing = StepTiming(0.0)
        self._random = random.Random(config.seed)

    def add(self, request: Request, channel: int = 0, attempt: int = 0) -> None:
        """Queue a request, which arrived as the last ``attempt`` so far of a channel."""
        self.scheduler.add(request)
        self.acknowledged[channel] = attempt

    def begin_step(self) -> float | None:
        """Plan the next step and return the seconds that it takes; ``None`` if there is nothing to do."""
        if not self.scheduler.has_work():
            return None
        plan = self.plan = self.scheduler.schedule()
        prefill = rows = context = 0
        for chunk in plan.chunks:
            if chunk.length == 1:
                rows += 1
                context += chunk.start
            else:
                prefill += chunk.length
        seconds = self.config.cost.step(prefill, rows, context) * self._factor()
        swaps = plan.transfers
        self._timing = StepTiming(seconds, self._copy(len(swaps.swap_out)), self._copy(len(swaps.swap_in)))
        return self._timing.compute + self._timing.swap_out + self._timing.swap_in

    def end_step(self, outcomes: Sequence[int | Candidates]) -> list[TokenDelta]:
        """Account for the step with what was sampled, in the order of the chunks that sample."""
        plan, self.plan = self.plan, None
        assert plan is not None
        deltas = self.scheduler.commit(plan, outcomes, self._timing)
        self._load.stepped(plan, self._timing.compute)
        return deltas

    def load(self, channel: int = 0) -> LoadReport:
        """What the engine reports now on one of its channels."""
        load = self._load.read()
        known = {name: getattr(load, name) for name in _LOAD}
        blocks, size = self.config.num_blocks, self.config.block_size
        seen = self.acknowledged.get(channel, 0)
        return LoadReport(**known, num_blocks=blocks, block_size=size, acknowledged=seen)

    def _copy(self, blocks: int) -> float:
        if not blocks:
            return 0.0
        cost = self.config.cost
        block = cost.swapped_block * self.config.block_size / _COST_BLOCK
        return (cost.swap_call + blocks * block) * self._factor()

    def _factor(self) -> float:
        noise = self.config.noise
        return self._random.lognormvariate(-(noise**2) / 2, noise) if noise else 1.0


_LOAD = tuple(one.name for one in fields(EngineLoad))


def key_scheme(block_size: int) -> KeyScheme:
    """How the blocks of simulated replicas are named."""
    return KeyScheme(_REVISION, _DTYPE, block_size)
