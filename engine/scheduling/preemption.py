"""Takes the blocks of a running sequence, and sees to it that its KV comes back."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from engine.kv.block_pool import NO_BLOCK, BlockPool
from engine.kv.host_pool import HostPool
from engine.kv.prefix_index import PrefixIndex
from engine.kv.prefix_node import PrefixNode
from engine.scheduling.recovery import Decision, Recovery, RecoveryPolicy, RecoveryStats, Victim
from engine.scheduling.request_table import Entry, RequestTable
from engine.scheduling.step_plan import StepPlan, StepTiming, Swap

if TYPE_CHECKING:
    from engine.scheduling.step_planner import Step

_LOOKS = 4  # decisions that are looked at again at each preemption


class Preemption:
    """Preempts, lets the policy choose the recovery, and tells it what the recovery really took."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        host: HostPool,
        table: RequestTable,
        policy: RecoveryPolicy,
    ) -> None:
        self._pool = pool
        self._index = index
        self._host = host
        self._table = table
        self._policy = policy
        self._open = 0  # recoveries that are not complete
        self._watched: deque[tuple[Decision, PrefixNode]] = deque()  # with the first block that may be lost
        self.count = 0
        self._stats: RecoveryStats | None = None  # until the next decision begins or ends

    def stats(self) -> RecoveryStats:
        """Figures of the policy, made anew only after a decision began or ended."""
        if self._stats is None:
            self._stats = self._policy.stats()
        return self._stats

    def preempt(self, position: int, step: Step) -> None:
        """Preempt the running sequence at ``position``, which has no chunk in this step."""
        entry = self._table.running[position]
        request = entry.request
        # What no layer can see any more is neither worth saving nor part of what is lost.
        self._table.drop_before(request, self._index.visible_from(request.computed))
        blocks = request.block_table[: self._pool.blocks_for(request.computed)]
        contents = self._contents(entry, blocks)
        self.abandon(entry)
        self._stats = None
        self._look_again()
        host_table = None
        if contents:
            decision = self._policy.choose(self._victim(entry, blocks, contents))
            entry.decision = decision
            self._open += 1
            first = self._first_unheld(entry, blocks, decision)
            if first is not None:
                self._watched.append((decision, first))
            if decision.recovery is Recovery.SWAP:
                taken = self._host.swap_out(contents)
                assert taken is not None, "the policy was told that they fit"
                copied, pairs = taken
                host_blocks = iter(copied)
                host_table = [NO_BLOCK if block == NO_BLOCK else next(host_blocks) for block in blocks]
                step.transfers.swap_out.extend(pairs)
                step.swaps.append(Swap(decision, len(pairs), 0))
        self._table.preempt(position, host_table)
        self.count += 1
        step.preempted.append(request)

    def resumed(self, entry: Entry, kept: int) -> None:
        """A preempted sequence runs again and found ``kept`` of its blocks in the prefix index."""
        decision = entry.decision
        if decision is None:
            return
        self._policy.resumed(decision, kept)
        if entry.request.computed >= decision.tokens and decision.recovery is Recovery.RECOMPUTE:
            self._close(entry)

    def abandon(self, entry: Entry) -> None:
        """A sequence ended, or lost its blocks again, before its recovery was complete."""
        if entry.decision is not None:
            self._policy.abandon(entry.decision)
            entry.decision = self._stats = None
            self._open -= 1

    def account(self, plan: StepPlan, timing: StepTiming) -> None:
        """Charge the recoveries in ``plan`` with their shares of its time, before ``computed`` moves on."""
        tokens = plan.num_tokens
        if tokens and plan.prefill:
            each = timing.compute / tokens
            for chunk in plan.chunks:
                if chunk.length > 1:
                    self._policy.saw_prefill(chunk.length, each * chunk.length)
        if plan.swaps:
            self._account_swaps(plan, timing)
        if not self._open or not tokens:
            return
        for chunk in plan.chunks:
            entry = chunk.entry
            if entry is None or entry.decision is None:
                continue
            decision = entry.decision
            if decision.recovery is Recovery.SWAP:
                self._close(entry)  # its copy was part of this step, and charged above
                continue
            end = chunk.start + chunk.length
            again = min(end, decision.tokens) - chunk.start
            if again > 0:
                self._policy.spent(decision, timing.compute * again / tokens)
            if end >= decision.tokens:
                self._close(entry)

    def _account_swaps(self, plan: StepPlan, timing: StepTiming) -> None:
        """Charge each sequence with its share of the step's copies, by blocks, and learn from that share.

        Others that are copied in the same step share its fixed part, as others will in steps to come.
        """
        out, back = len(plan.transfers.swap_out), len(plan.transfers.swap_in)
        for swap in plan.swaps:
            seconds_out = timing.swap_out * swap.blocks_out / max(out, 1)
            seconds_in = timing.swap_in * swap.blocks_in / max(back, 1)
            self._policy.saw_swap_out(swap.blocks_out, seconds_out)
            self._policy.saw_swap_in(swap.blocks_in, seconds_in)
            self._policy.spent(swap.decision, seconds_out + seconds_in)

    def _close(self, entry: Entry) -> None:
        assert entry.decision is not None
        self._policy.done(entry.decision)
        entry.decision = self._stats = None
        self._open -= 1

    def _first_unheld(self, entry: Entry, blocks: list[int], decision: Decision) -> PrefixNode | None:
        """The node of the first block in a table that can be found and that nobody else holds."""
        node, first = entry.node, None
        if decision.findable <= decision.held:
            return None
        while node is not None and node.depth and node.alive:
            block = blocks[node.depth - 1]
            if block != NO_BLOCK and self._pool.references(block) == 1:
                first = node
            node = node.parent
        return first

    def _look_again(self) -> None:
        """Let the longest unseen of the waiting sequences teach what they have lost by now."""
        for _ in range(min(_LOOKS, len(self._watched))):
            decision, first = self._watched.popleft()
            if decision.taught or decision.ended:
                continue
            if first.block < 0:  # forgotten, or hollow
                self._policy.resumed(decision, decision.held)
            else:
                self._watched.append((decision, first))

    def _contents(self, entry: Entry, blocks: list[int]) -> list[tuple[int, int, int]]:
        """What names the contents of a sequence's blocks: block, generation, valid tokens."""
        size, computed = self._pool.block_size, entry.request.computed
        return [
            (block, self._pool.generation(block), min(size, computed - place * size))
            for place, block in enumerate(blocks)
            if block != NO_BLOCK
        ]

    def _victim(self, entry: Entry, blocks: list[int], contents: list[tuple[int, int, int]]) -> Victim:
        to_copy = self._host.plan(contents)
        findable = entry.findable if entry.node is not None and entry.node.alive else 0
        held = sum(block != NO_BLOCK and self._pool.references(block) > 1 for block in blocks[:findable])
        return Victim(
            tokens=entry.request.computed,
            blocks=len(contents),
            to_copy=to_copy,
            findable=findable,
            held=held,
            swappable=bool(self._host.num_blocks) and to_copy <= self._host.num_free,
        )
