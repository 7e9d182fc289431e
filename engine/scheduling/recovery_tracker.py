"""Follows each recovery from the preemption until the KV is back, and tells the policy its cost."""

from __future__ import annotations

from collections import deque

from engine.kv.block_pool import NO_BLOCK, BlockPool
from engine.kv.host_pool import HostPool
from engine.kv.prefix_node import PrefixNode
from engine.scheduling.block_tables import ComputedBlocks
from engine.scheduling.recovery import Recovery, RecoveryDecision, RecoveryPolicy, RecoveryStats, Victim
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import StepPlan, StepTiming

_CHECKED = 4  # watched decisions that are checked at each preemption


class RecoveryTracker:
    """Asks the policy for a recovery at each preemption and reports what that recovery took."""

    def __init__(self, pool: BlockPool, host: HostPool, policy: RecoveryPolicy) -> None:
        self._pool = pool
        self._host = host
        self._policy = policy
        self._num_open = 0  # recoveries that are not complete
        self._watched: deque[tuple[RecoveryDecision, PrefixNode]] = (
            deque()
        )  # with the first block that may be lost
        self._stats: RecoveryStats | None = None  # until the next decision begins or ends

    def stats(self) -> RecoveryStats:
        """Figures of the policy, recomputed only after a decision began or ended."""
        if self._stats is None:
            self._stats = self._policy.stats()
        return self._stats

    def preempted(self, sequence: Sequence, computed: ComputedBlocks) -> RecoveryDecision | None:
        """Decide how a sequence that loses its blocks will recover; ``None`` if they hold nothing."""
        self.abandon(sequence)
        self._stats = None
        self._check_watched()
        if not computed.contents:
            return None
        decision = self._policy.choose(self._victim(sequence, computed))
        sequence.decision = decision
        self._num_open += 1
        first = self._first_unshared(sequence, computed.table, decision)
        if first is not None:
            self._watched.append((decision, first))
        return decision

    def resumed(self, sequence: Sequence, found: int) -> None:
        """A preempted sequence runs again and found ``found`` of its blocks in the prefix index."""
        decision = sequence.decision
        if decision is None:
            return
        self._policy.resumed(decision, found)
        if sequence.computed >= decision.tokens and decision.recovery is Recovery.RECOMPUTE:
            self._complete(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """A sequence ended, or lost its blocks again, before its recovery was complete."""
        if sequence.decision is not None:
            self._policy.abandon(sequence.decision)
            sequence.decision = self._stats = None
            self._num_open -= 1

    def account(self, plan: StepPlan, timing: StepTiming) -> None:
        """Charge the recoveries in ``plan`` with their shares of its time, before ``computed`` moves on."""
        tokens = plan.num_tokens
        if tokens and plan.prefill_tokens:
            each = timing.compute / tokens
            for chunk in plan.chunks:
                if chunk.length > 1:
                    self._policy.saw_prefill(chunk.length, each * chunk.length)
        if plan.swaps:
            self._account_swaps(plan, timing)
        if not self._num_open or not tokens:
            return
        for chunk in plan.chunks:
            decision = chunk.sequence.decision
            if decision is None:
                continue
            if decision.recovery is Recovery.SWAP:
                self._complete(chunk.sequence)  # its copy was part of this step, and charged above
                continue
            end = chunk.start + chunk.length
            recomputed = min(end, decision.tokens) - chunk.start
            if recomputed > 0:
                self._policy.spent(decision, timing.compute * recomputed / tokens)
            if end >= decision.tokens:
                self._complete(chunk.sequence)

    def _account_swaps(self, plan: StepPlan, timing: StepTiming) -> None:
        """Charge each sequence with its share of the step's copies, by blocks, and learn from that share.

        Sequences that are copied in the same step share its fixed part, as others will in steps to come.
        """
        blocks_out, blocks_in = len(plan.transfers.swap_out), len(plan.transfers.swap_in)
        for swap in plan.swaps:
            seconds_out = timing.swap_out * swap.blocks_out / max(blocks_out, 1)
            seconds_in = timing.swap_in * swap.blocks_in / max(blocks_in, 1)
            self._policy.saw_swap_out(swap.blocks_out, seconds_out)
            self._policy.saw_swap_in(swap.blocks_in, seconds_in)
            self._policy.spent(swap.decision, seconds_out + seconds_in)

    def _complete(self, sequence: Sequence) -> None:
        assert sequence.decision is not None
        self._policy.done(sequence.decision)
        sequence.decision = self._stats = None
        self._num_open -= 1

    def _first_unshared(
        self, sequence: Sequence, table: list[int], decision: RecoveryDecision
    ) -> PrefixNode | None:
        """The node of a table's first findable block that no other sequence holds."""
        node, first = sequence.node, None
        if decision.findable <= decision.shared:
            return None
        while node is not None and node.depth and node.alive:
            block = table[node.depth - 1]
            if block != NO_BLOCK and self._pool.references(block) == 1:
                first = node
            node = node.parent
        return first

    def _check_watched(self) -> None:
        """Let the preempted sequences that were checked least recently teach the policy what they have lost."""
        for _ in range(min(_CHECKED, len(self._watched))):
            decision, first = self._watched.popleft()
            if decision.survival_known or decision.ended:
                continue
            if first.block < 0:  # forgotten, or hollow
                self._policy.resumed(decision, decision.shared)
            else:
                self._watched.append((decision, first))

    def _victim(self, sequence: Sequence, computed: ComputedBlocks) -> Victim:
        table, contents = computed
        to_copy = self._host.num_to_copy(contents)
        findable = sequence.indexed if sequence.node is not None and sequence.node.alive else 0
        shared = sum(block != NO_BLOCK and self._pool.references(block) > 1 for block in table[:findable])
        return Victim(
            tokens=sequence.computed,
            blocks=len(contents),
            to_copy=to_copy,
            findable=findable,
            shared=shared,
            swappable=bool(self._host.num_blocks) and to_copy <= self._host.num_free,
        )
