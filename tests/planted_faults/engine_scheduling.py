"""Faults in the scheduler: admission, preemption, recovery, block tables."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_ADMISSION = (
    "engine/scheduling/test_admission.py",
    "engine/scheduling/test_schedule.py",
    "engine/scheduling/test_scheduler.py",
)
_SCHEDULE = ("engine/scheduling/test_schedule.py", "engine/scheduling/test_scheduler.py")
_RECOVERY = ("engine/scheduling/test_recovery.py", "engine/scheduling/test_recovery_cost.py")
_SURVIVAL = ("engine/scheduling/test_survival.py",)
_SHARES = ("engine/scheduling/test_swap_shares.py", *_SURVIVAL)
_RANDOM = ("engine/scheduling/test_scheduler_random.py",)
_OPERATIONS = ("engine/scheduling/test_scheduler_operations.py",)
_RESERVE = ("engine/scheduling/test_growth_reserve.py",)
_PENDING = ("engine/scheduling/test_pending_prefill.py",)
_GROUPS = ("engine/test_llm_sequences.py", *_RANDOM)

SCHEDULING: list[Fault] = [
    Fault(
        "engine/scheduling/recovery.py",
        "self._in.mean(victim.blocks - found)",
        "self._in.mean(victim.blocks)",
        _RECOVERY,
        "the cost of a swap-in ignores the blocks that survive",
    ),
    Fault(
        "engine/scheduling/recovery.py",
        "self._in.likely(victim.blocks - found)",
        "self._in.likely(victim.blocks)",
        _RECOVERY,
        "the likely cost of a swap-in ignores the blocks that survive",
    ),
    Fault(
        "engine/scheduling/recovery.py",
        "self._prefill.mean(victim.tokens - found * self._block_size)",
        "self._prefill.mean(victim.tokens)",
        _RECOVERY,
        "the cost of a recompute ignores the blocks that survive",
    ),
    Fault(
        "engine/scheduling/recovery.py",
        "        if unshared < 1 or decision.survival_known:",
        "        if unshared < 1:",
        (*_RECOVERY, *_SURVIVAL),
        "a decision teaches twice",
    ),
    Fault(
        "engine/scheduling/recovery.py",
        "        affordable = other not in self._tried or high - low <= self._allowance",
        "        affordable = True",
        _RECOVERY,
        "trials cost any amount",
    ),
    Fault(
        "engine/scheduling/recovery.py",
        "        fallback = wanted is Recovery.SWAP and not victim.swappable",
        "        fallback = False",
        _RECOVERY,
        "a swap is chosen although the host pool is full",
    ),
    Fault(
        "engine/scheduling/recovery_tracker.py",
        "            recomputed = min(end, decision.tokens) - chunk.start",
        "            recomputed = end - chunk.start",
        (*_SHARES, *_RECOVERY),
        "a recompute is charged with more than the tokens that were lost",
    ),
    Fault(
        "engine/scheduling/recovery_tracker.py",
        "                self._policy.resumed(decision, decision.shared)",
        "                pass",
        _SURVIVAL,
        "who waits longest never tells what it lost",
    ),
    Fault(
        "engine/scheduling/recovery_tracker.py",
        "shared = sum(block != NO_BLOCK and self._pool.references(block) > 1",
        "shared = sum(block != NO_BLOCK and self._pool.references(block) > 0",
        (*_SURVIVAL, *_RECOVERY),
        "a sequence's own blocks pass for shared ones",
    ),
    Fault(
        "engine/scheduling/recovery_tracker.py",
        "timing.swap_out * swap.blocks_out / max(blocks_out, 1)",
        "timing.swap_out",
        _SHARES,
        "each of several swaps is charged with all copies of a step",
    ),
    Fault(
        "engine/scheduling/growth_reserve.py",
        "            self._growth = max(1.0, 0.99 * self._growth)",
        "            pass",
        _RESERVE,
        "a growth reserve never decays",
    ),
    Fault(
        "engine/scheduling/growth_reserve.py",
        "            self._growth = min(_MAX_GROWTH, 2 * self._growth)",
        "            self._growth = 2 * self._growth",
        _RESERVE,
        "a growth reserve has no bound",
    ),
    Fault(
        "engine/scheduling/growth_reserve.py",
        "                blocks += (sequence.num_seqs - 1) * (max(own, 0) + 1)",
        "                pass",
        _RESERVE,
        "nothing is reserved for the forks of a running sequence",
    ),
    Fault(
        "engine/scheduling/admission.py",
        "                state.num_seqs + sequence.num_seqs <= state.max_num_seqs\n                and needed",
        "                needed",
        _ADMISSION,
        "the slots of a group's sequences are not counted in admission",
    ),
    Fault(
        "engine/scheduling/admission.py",
        "    return blocks + sequence.num_seqs - 1",
        "    return blocks",
        _ADMISSION,
        "the blocks of a group's forks are not counted in admission",
    ),
    Fault(
        "engine/scheduling/admission.py",
        " or sequence.overtakes >= state.max_overtakes:",
        ":",
        _ADMISSION,
        "a waiting sequence may be overtaken without end",
    ),
    Fault(
        "engine/scheduling/admission.py",
        "            withheld += _blocks_in_all(state, sequence)",
        "            pass",
        _ADMISSION,
        "blocks that a preempted sequence waits for go to those behind it",
    ),
    Fault(
        "engine/scheduling/admission.py",
        "if sequence.host_table else len(tokens) - 1",
        "if sequence.host_table else len(tokens)",
        _ADMISSION,
        "a hit covers the whole prompt, so that no token is left to run",
    ),
    Fault(
        "engine/scheduling/admission.py",
        "        if is_next_block_scheduled(state, sequence, plan):",
        "        if False:",
        _ADMISSION,
        "two sequences of one step compute the same block",
    ),
    Fault(
        "engine/scheduling/admission.py",
        "                for other in passed:\n                    other.overtakes += 1\n",
        "",
        _ADMISSION,
        "overtaking is not counted",
    ),
    Fault(
        "engine/scheduling/preemption.py",
        "    position = len(state.running) - 1\n",
        "    position = 0\n",
        _SCHEDULE,
        "the sequence that came first loses its blocks first",
    ),
    Fault(
        "engine/scheduling/preemption.py",
        "            self.count += held == pool.references(block)",
        "            self.count += pool.references(block) == 1",
        _SCHEDULE,
        "victims that share blocks count as freeing none of them",
    ),
    Fault(
        "engine/scheduling/preemption.py",
        "            self.count += held == pool.references(block)",
        "            self.count += held == 1",
        _SCHEDULE,
        "blocks that others hold, too, count as freed",
    ),
    Fault(
        "engine/scheduling/block_tables.py",
        "        copy = first < len(table) and pool.references(table[first]) > 1",
        "        copy = False",
        _OPERATIONS,
        "a shared block is written without a copy",
    ),
    Fault(
        "engine/scheduling/block_tables.py",
        "            table[place] = NO_BLOCK\n",
        "",
        _OPERATIONS,
        "a block outside the window stays in the table after its release",
    ),
    Fault(
        "engine/scheduling/swapping.py",
        "    sources = sequence.host_table[found : state.pool.blocks_for(sequence.computed)]",
        "    sources = sequence.host_table[: state.pool.blocks_for(sequence.computed)]",
        _OPERATIONS,
        "blocks that survived are copied back, too",
    ),
    Fault(
        "engine/scheduling/state.py",
        "            self.host.share(_present(child.host_table))\n",
        "",
        _SCHEDULE,
        "a fork of a swapped sequence does not hold its host blocks",
    ),
    Fault(
        "engine/scheduling/state.py",
        "        self.num_seqs -= sequence.num_seqs - 1\n",
        "",
        (*_RANDOM, *_SCHEDULE),
        "a group counts twice once it is forked",
    ),
    Fault(
        "engine/scheduling/scheduler.py",
        "        full = sequence.computed // state.pool.block_size",
        "        full = -(-sequence.computed // state.pool.block_size)",
        _SCHEDULE,
        "a block is found before its last token is computed",
    ),
    Fault(
        "engine/scheduling/beam_search.py",
        "math.pow(length, self._length_penalty)",
        "math.pow(length, 1.0)",
        ("engine/scheduling/test_beam_search.py",),
        "the length penalty is ignored",
    ),
    Fault(
        "engine/scheduling/sequence_groups.py",
        "            if not own:  # before any fork, which may take its sequence slot",
        "            if False:",
        _GROUPS,
        "a beam that is not continued keeps its blocks",
    ),
    Fault(
        "engine/scheduling/sequence_groups.py",
        "        if any(other.candidates is None for other in beams):\n            return []\n",
        "",
        _GROUPS,
        "a beam goes on before the others have their candidates",
    ),
    Fault(
        "engine/scheduling/pending_prefill.py",
        "(len(self._wanted) - self._both) * self._size",
        "len(self._wanted) * self._size",
        _PENDING,
        "a block counts where it is computed and where it is waited for",
    ),
    Fault(
        "engine/scheduling/pending_prefill.py",
        "            elif matched < first:\n                self._count(self._wanted, self._computed, share.keys[matched:first])\n",
        "",
        _PENDING,
        "blocks that were evicted since do not count",
    ),
]
