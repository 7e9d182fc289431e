"""What one ingress process learns of its fleet: step time, outputs, reuse of evicted blocks, hot prefixes.

Each is a running average that starts from a plain prior and forgets, so that none needs an option.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import combinations

from app.routing.load import LoadReport
from app.routing.replica_state import ReplicaHistory

WINDOW = 128
SAMPLED, REMEMBERED = 16, 16_384
_REFIT_EVERY = 32
_PRIOR_TOKENS, _MAX_TOKENS = 256, 10_000_000
_SCALE = (1.0, 64.0, 100_000.0)  # of (1, rows, KV tokens), so that the three weigh alike


class StepModel:
    """Seconds of a decode step: ``base + per_row * rows + per_kv_token * KV tokens``, none below zero.

    Least squares over reports that count less by 1/512 with each later one, refitted every 32; a weak pull
    toward zero decides what the reports leave open (rows and KV tokens often grow together).
    """

    def __init__(self) -> None:
        self.base, self.per_row, self.per_kv_token = 0.02, 2e-4, 2e-8
        self._gram = [[0.0] * 3 for _ in range(3)]
        self._target = [0.0] * 3
        self._seen = 0

    def seconds(self, rows: float, kv_tokens: float) -> float:
        """The duration of a step with ``rows`` rows that read ``kv_tokens`` tokens of KV."""
        return self.base + self.per_row * rows + self.per_kv_token * kv_tokens

    def learn(self, rows: int, kv_tokens: int, seconds: float) -> bool:
        """Take in one report of running rows; true if the coefficients have changed."""
        if rows <= 0 or seconds <= 0.0:
            return False
        sample = (1.0, rows / _SCALE[1], kv_tokens / _SCALE[2])
        for i, left in enumerate(sample):
            line = self._gram[i]
            for j, right in enumerate(sample):
                line[j] += left * right - line[j] / 512
            self._target[i] += left * seconds - self._target[i] / 512
        self._seen += 1
        if self._seen % _REFIT_EVERY and self._seen != 1:
            return False
        return self._refit()

    def _refit(self) -> bool:
        pull = 1e-4 * self._gram[0][0]
        gram = [[self._gram[i][j] + (pull if i == j else 0.0) for j in range(3)] for i in range(3)]
        target = self._target
        best: tuple[float, list[float]] | None = None
        for size in (3, 2, 1):
            for chosen in combinations(range(3), size):
                found = _solve([[gram[i][j] for j in chosen] for i in chosen], [target[i] for i in chosen])
                if found is None or min(found) < 0.0:
                    continue
                # The sum of squares less a constant, at the least squares of these terms.
                fit = -sum(target[i] * value for i, value in zip(chosen, found, strict=True))
                if best is None or fit < best[0]:
                    best = fit, [dict(zip(chosen, found, strict=True)).get(i, 0.0) for i in range(3)]
        if best is None:
            return False
        before = self.base, self.base + self.per_row * _SCALE[1], self.base + self.per_kv_token * _SCALE[2]
        base, rows, kv = best[1]
        if all(
            abs(new - old) <= 0.02 * old
            for new, old in zip((base, base + rows, base + kv), before, strict=True)
        ):
            return False  # a change requires new terms for all replicas
        self.base, self.per_row, self.per_kv_token = base, rows / _SCALE[1], kv / _SCALE[2]
        return True


class OutputLength:
    """Tokens that a sequence makes here, on average; 256 before any has ended, which counts as one sequence.

    Short answers end first, so a mean of only the ended ones would be too low. For each range of lengths from
    one power of two to the next, this class learns how many of the sequences that reach it outgrow it, and how
    many tokens they make in it. Running sequences count in all ranges except the one that they are in.
    From 64 sequences in a range on, each new one weighs 1/64.
    """

    def __init__(self) -> None:
        known, longer = _PRIOR_TOKENS.bit_length(), _MAX_TOKENS.bit_length() - _PRIOR_TOKENS.bit_length()
        self._counts = [1] * (known + 1) + [0] * longer
        self._outgrown = [1.0] * known + [0.0] * (longer + 1)
        self._made = [float(_shortest(place + 1) - _shortest(place)) for place in range(known)]
        self._made += [0.0] * (longer + 1)
        self.tokens = float(_PRIOR_TOKENS)

    def grow(self, before: int, after: int) -> None:
        """A sequence that had ``before`` tokens has ``after``, and may go on."""
        self._outgrow(before, after)
        self._average()

    def learn(self, tokens: float, known: int = 0) -> None:
        """A sequence has ended by itself or at its limit with so many tokens; ``grow`` told of ``known``."""
        tokens = max(min(max(tokens, 0.0), float(_MAX_TOKENS)), known)
        self._outgrow(known, int(tokens))
        place = min(int(tokens).bit_length(), len(self._counts) - 1)
        self._add(place, 0.0, tokens - _shortest(place))
        self._average()

    def _outgrow(self, before: int, after: int) -> None:
        for place in range(before.bit_length(), min(after.bit_length(), len(self._counts) - 1)):
            self._add(place, 1.0, _shortest(place + 1) - _shortest(place))

    def _add(self, place: int, outgrown: float, made: float) -> None:
        count = self._counts[place] = min(self._counts[place] + 1, 64)
        self._outgrown[place] += (outgrown - self._outgrown[place]) / count
        self._made[place] += (made - self._made[place]) / count

    def _average(self) -> None:
        share, self.tokens = 1.0, 0.0
        for outgrown, made in zip(self._outgrown, self._made, strict=True):
            self.tokens += share * made
            share *= outgrown
            if not share:
                break


def _shortest(place: int) -> int:
    """The least length whose ``bit_length`` is ``place``."""
    return 1 << place >> 1


class ReuseShare:
    """The share of computed blocks that had been computed before and were lost: 0 to 1.

    In a full cache, each computed block evicts another, so this is the share of evicted blocks that are needed
    again. It weights the cost of an eviction. If only blocks that nobody needs again are evicted, it is 0.
    """

    def __init__(self) -> None:
        self._lost = 0.0
        self._made = 1.0
        self._known: OrderedDict[int, None] = OrderedDict()
        """Keys of prompts computed here, those that ``learn`` samples; the last ones asked for at the end."""

    @property
    def share(self) -> float:
        """The current share."""
        return self._lost / self._made

    def learn(self, keys: Sequence[int], held: int, output: int) -> None:
        """One request, once: its keys, of which the best replica holds so many; blocks that its output makes.

        The first key that is missing and each later one at a multiple of 16 are sampled: each stands for the
        blocks up to the next.
        """
        known, lost, place, end = self._known, 0, held, len(keys)
        while place < end:
            key, after = keys[place], min(place - place % SAMPLED + SAMPLED, end)
            if key in known:
                lost += after - place
                known.move_to_end(key)
            else:
                known[key] = None
                if len(known) > REMEMBERED:
                    known.popitem(last=False)
            place = after
        made = end - held + output
        self._lost += lost - self._lost / 512
        self._made += made - self._made / 512


class PrefixShare:
    """What share of the last 128 requests that found a prefix found this one.

    A prefix with a share of ``s`` is worth ``s * n`` copies on ``n`` replicas: computing these is no loss.
    """

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._counts: dict[int, int] = {}

    def share(self, key: int) -> float:
        """The share of the last requests that have this last shared block."""
        return self._counts.get(key, 0) / WINDOW

    def learn(self, key: int) -> None:
        """Take in the last shared block of a request."""
        self._last.append(key)
        self._counts[key] = self._counts.get(key, 0) + 1
        if len(self._last) > WINDOW:
            oldest = self._last.popleft()
            left = self._counts[oldest] - 1
            if left:
                self._counts[oldest] = left
            else:
                del self._counts[oldest]


class FleetEstimates:
    """All of these, for one fleet; its owner locks. Decisions read it, the ledger teaches it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        """Tokens; of the last report that says."""
        self.steps = StepModel()
        self.outputs = OutputLength()
        self.reuse = ReuseShare()
        self.prefixes = PrefixShare()

    def learn_report(self, load: LoadReport, history: ReplicaHistory) -> bool:
        """Take in a replica's report; true if anything changed that the views of all replicas depend on."""
        changed = self.steps.learn(load.running, load.kv_tokens, load.step_seconds)
        if load.running and load.step_seconds:
            history.learn_step(load.step_seconds, self.steps.seconds(load.running, load.kv_tokens))
        elif not load.running:
            history.forget()
        if load.block_size and load.block_size != self.block_size:
            self.block_size = load.block_size
            changed = True
        return changed

    def learn_prompt(self, keys: Sequence[int], shared_blocks: int, output: float, retry: bool) -> None:
        """Take in a prompt; the best replica held ``shared_blocks``, ``output`` tokens are expected in all.

        A ``retry`` would find its own blocks lost.
        """
        if shared_blocks:
            self.prefixes.learn(keys[shared_blocks - 1])
        if not retry:
            self.reuse.learn(keys, shared_blocks, int(output) // self.block_size)

    def expected_output(self, max_output: int, sequences: int) -> float:
        """Tokens of each of a request's ``sequences``, which together make ``max_output`` at most."""
        return min(max_output / sequences, self.outputs.tokens)

    def usable_blocks(self, tokens: int, blocks: int) -> int:
        """The number of ``blocks``, which hold the beginning of a prompt, that need no computing.

        An engine computes at least the last token, and with it its block.
        """
        most = (tokens - 1) // self.block_size if tokens else 0
        return blocks if blocks < most else most


def _solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float] | None:
    """Solve up to three equations by elimination; ``None`` if they have no single solution."""
    rows = [[*line, value] for line, value in zip(matrix, vector, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [left - factor * right for left, right in zip(rows[row], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
