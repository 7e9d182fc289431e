"""Turns logits into tokens.

Order per row: allowed tokens -> forbidden tokens -> bias -> penalties -> temperature -> min-p -> top-k -> top-p
-> draw. The three filters keep tokens by a threshold, so tokens that tie with the last one kept are kept too.

The draw takes two exact steps (the group's probability times the token's within the group): the vocabulary
is cut into ``GROUPS_OF`` interleaved groups, a race of exponentials (the Gumbel-max trick) chooses a group by
its summed weight, then a token within it. So a row costs some hundred random numbers instead of one per
token of the vocabulary. The sums of the draw are explicit trees, so its bits do not depend on the other rows.
Kernels that draw follow the same steps; a weight of theirs may differ in its last bit. On a GPU top-p goes by
torch's running sums, whose order of additions may depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.logprobs import likeliest, log_normalizers, logprobs_of, no_finite_maximum
from engine.execution.random import draw_key, exponential, seed_bits
from engine.logit_edits import LogitEdits
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.token_logprobs import TokenLogprobs
from kernels.interface import (
    Choices,
    DrawOptions,
    Kernels,
    LogitEdit,
    LogprobOptions,
    RowEdit,
    edit_logits,
    row_logprobs,
)

GROUPS_OF = 64
"""Tokens of one group; a power of two."""

_FIRST_CUT, _LAST_CUT = 2.0**-6, 2.0**-30  # weights; the most likely token has 1

_SMALL_K = 256  # from a larger one on, top-k sorts a whole row

_MOST = 2**31 - 1  # a larger top-k means the same

_SORTED_AT_ONCE = 1 << 22  # weights: what sorting them takes stays near 100 MB

_GROUP_CANDIDATES = 1 << 32  # candidates of the group draws start above every token id


NONE_ALLOWED = Candidates((), ())
"""The outcome of a row whose tokens are all forbidden."""


@dataclass(slots=True)  # not frozen: one is made for each token
class SampleRow:
    """What to choose from one row of logits. Treat as frozen.

    Attributes:
        position: absolute position of the token to make in its sequence (the number of tokens before it).
        forbidden: ids that must not be chosen.
        extra_seeds: further draws, one for each, as rows with these seeds would draw.
        best: instead of drawing, take this many of the likeliest tokens, best first, ties by lower id; fewer
            where fewer are allowed.
        logprobs: also return the log probability of a single draw.
        edit: how to change the logits first.
        top: also return details of each chosen token, and this many of the most likely tokens.
        allowed: the only tokens that may be chosen, as :class:`kernels.interface.RowEdit` has them.
    """

    params: SamplingParams
    seed: int
    position: int
    forbidden: tuple[int, ...] = ()
    extra_seeds: tuple[int, ...] = ()
    best: int = 0
    logprobs: bool = False
    edit: LogitEdit | None = None
    top: int | None = None
    allowed: Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are not those of the model when a token is chosen."""
        return bool(self.forbidden) or self.edit is not None or self.allowed is not None

    @property
    def random(self) -> bool:
        """Whether its tokens are drawn."""
        return not (self.params.greedy or self.best)

    @property
    def plain(self) -> bool:
        """Whether a single token is all that is asked for."""
        return not (self.extra_seeds or self.best or self.logprobs or self.top is not None)

    @property
    def unedited(self) -> bool:
        """Whether it takes the model's logits as they are, with no filter, for a single token."""
        params = self.params
        filtered = params.top_k or params.top_p < 1.0 or params.min_p
        return self.plain and not self.changes_logits and (params.greedy or not filtered)


class Sampler:
    """One for each model runner. ``kernels`` draw if they can; otherwise torch does, more slowly."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels if kernels is not None and kernels.draws else None
        self._options = _DrawOptions()
        self._edit_logits = edit_logits if kernels is None else kernels.edit_logits
        self._logprobs = row_logprobs if kernels is None else kernels.logprobs

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int | Candidates]:
        """Choose from each row of ``logits`` (float32 ``[S, vocab]``, overwritten).

        Returns a token for each row, or candidates where more was asked for, or none where every token is
        forbidden. Log probabilities are those of the raw logits, before anything is changed.

        Raises:
            QuireError: a row has no finite logit to choose from.
        """
        asking = [index for index, row in enumerate(rows) if not row.plain]
        if not asking:
            tokens, exhausted = self._choose(logits, rows)
            outcomes: list[int | Candidates] = [*tokens]
            for index in exhausted:
                outcomes[index] = NONE_ALLOWED
            return outcomes
        raw = _RawRows(logits, rows, asking)
        several = [
            index for index in asking if rows[index].top is None or rows[index].best or rows[index].logprobs
        ]
        several_logits = logits if len(several) == len(rows) else logits[several]
        normalizers = log_normalizers(several_logits) if several else []
        tokens, exhausted = self._choose(logits, rows)
        chosen = iter(tokens)
        draws = [[next(chosen) for _ in range(1 + len(row.extra_seeds))] for row in rows]
        searching = [index for index in several if rows[index].best]
        if searching:
            found = likeliest(
                logits if len(searching) == len(rows) else logits[searching],
                [rows[index].best for index in searching],
            )
            for index, best in zip(searching, found, strict=True):
                draws[index] = best
        for index in exhausted:
            draws[index] = []
        details = self._details(raw, rows, draws)
        logprobs = _logprobs(raw, several, draws, normalizers)
        outcomes = [own[0] if own else -1 for own in draws]
        for index in asking:
            own = details.get(index, ())
            known = logprobs.get(index)
            outcomes[index] = Candidates(
                tuple(draws[index]), tuple(each.logprob for each in own) if known is None else known, own
            )
        for index in exhausted:
            outcomes[index] = NONE_ALLOWED
        return outcomes

    def score(self, logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Of ``tokens[i]`` in row ``i`` of ``logits`` (float32 ``[S, vocab]``), with the ``top`` likeliest.

        Raises:
            QuireError: a row has a logit that is NaN or infinite.
        """
        rows = list(range(len(tokens)))
        return [one for (one,) in self._score(logits, rows, [[token] for token in tokens], [top] * len(rows))]

    def _details(
        self, raw: _RawRows, rows: Sequence[SampleRow], draws: Sequence[Sequence[int]]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Of the tokens ``draws[i]`` of each row ``i`` that asks for it."""
        asking = [index for index, row in enumerate(rows) if row.top is not None]
        made: dict[int, tuple[TokenLogprobs, ...]] = {}
        for logits, places, indices in raw.groups(asking):
            tops = [rows[index].top or 0 for index in indices]
            scores = self._score(logits, places, [draws[index] for index in indices], tops)
            made.update(zip(indices, scores, strict=True))
        return made

    def _score(
        self, logits: Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]], tops: Sequence[int]
    ) -> list[tuple[TokenLogprobs, ...]]:
        vocab = logits.shape[1]
        counts = [min(top, vocab) for top in tops]
        made = self._logprobs(
            logits,
            LogprobOptions(
                rows=torch.tensor(rows, dtype=torch.int64),
                num_top=torch.tensor(counts, dtype=torch.int64),
                num_tokens=torch.tensor([len(own) for own in tokens], dtype=torch.int64),
                tokens=torch.tensor([token for own in tokens for token in own], dtype=torch.int64),
            ),
        )
        normalizers = made.normalizers.tolist()
        if not all(map(math.isfinite, normalizers)):
            raise no_finite_maximum()
        pairs = iter(zip(made.logits.tolist(), made.ranks.tolist(), strict=True))
        results = []
        for own, count, normalizer, ids, values in zip(
            tokens, counts, normalizers, made.top_ids.tolist(), made.top_logits.tolist(), strict=True
        ):
            top_ids, top = tuple(ids[:count]), tuple(value - normalizer for value in values[:count])
            scores = []
            for _ in own:
                value, rank = next(pairs)
                scores.append(TokenLogprobs(value - normalizer, rank, top_ids, top))
            results.append(tuple(scores))
        return results

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[int]]:
        """``1 + len(extra_seeds)`` tokens for each row of ``logits`` ``[S, vocab]``, which are edited.

        A row that asks for its ``best`` gets the likeliest one. Also returns the rows whose tokens are all
        forbidden; theirs mean nothing.
        """
        edits = [
            RowEdit(index, row.edit, row.forbidden, row.allowed)
            for index, row in enumerate(rows)
            if row.changes_logits
        ]
        if edits:
            self._edit_logits(logits, edits)
        if self._kernels is not None:
            tokens, largest = self._kernels.draw(logits, [row.position for row in rows], self._options.of(rows))
            return tokens, _exhausted(largest, rows)
        best = _argmax(logits)
        best_logits = logits.gather(1, best[:, None])
        exhausted = _exhausted(best_logits[:, 0].tolist(), rows)
        if exhausted:
            logits[exhausted] = best_logits[exhausted] = 0.0  # drawing from them is harmless then
        draws = _draws_of(rows)
        if draws is not None:
            best = best[torch.tensor(draws, device=best.device)]
        random = [index for index, row in enumerate(rows) if row.random]
        if not random:
            return _ints(best), exhausted
        some = slice(None) if len(random) == len(rows) else random
        drawn = _draw(logits[some], best_logits[some], [rows[index] for index in random])
        if len(random) == len(rows):
            return _ints(drawn), exhausted
        owners = range(len(rows)) if draws is None else draws
        places = [place for place, row in enumerate(owners) if rows[row].random]
        best[torch.tensor(places, device=best.device)] = drawn
        return _ints(best), exhausted


def choices_of(rows: Sequence[SampleRow]) -> Choices | None:
    """How ``rows`` choose, if no row needs more than that says."""
    if not all(row.unedited for row in rows):
        return None
    return Choices(
        torch.tensor([row.params.temperature if row.random else 0.0 for row in rows]),
        torch.tensor([draw_key(row.seed, row.position) for row in rows]),
    )


def both_allowed(mask: Tensor | None, other: NDArray[np.int32] | None) -> Tensor | None:
    """The tokens that both allow; ``None`` allows all."""
    if other is None:
        return mask
    return torch.from_numpy(other) if mask is None else mask & torch.from_numpy(other)


def edit_after(edits: LogitEdits, token_ids: list[int]) -> LogitEdit:
    """What ``edits`` do to the logits after ``token_ids``, the whole sequence; it holds until the next call."""
    params = edits.params
    seen, counts = edits.counts(token_ids)
    return LogitEdit(
        torch.from_numpy(edits.bias_ids) if len(edits.bias_ids) else None,
        torch.from_numpy(edits.bias) if len(edits.bias_ids) else None,
        torch.from_numpy(seen) if len(seen) else None,
        torch.from_numpy(counts) if len(seen) else None,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


class _RawRows:
    """The logits as the model gave them, of rows that are asked about: copies of those that will be edited."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow], asking: Sequence[int]) -> None:
        self._logits = logits
        edited = [index for index in asking if rows[index].changes_logits]
        self._places = {index: place for place, index in enumerate(edited)}
        self._copies = logits[edited] if edited else None

    def groups(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, list[int], list[int]]]:
        """``indices`` in up to two parts: a tensor, their rows in it, and they themselves."""
        edited = [index for index in indices if index in self._places]
        if edited and self._copies is not None:
            yield self._copies, [self._places[index] for index in edited], edited
        others = [index for index in indices if index not in self._places]
        if others:
            yield self._logits, others, others


def _logprobs(
    raw: _RawRows, indices: Sequence[int], tokens: Sequence[Sequence[int]], normalizers: Sequence[float]
) -> dict[int, tuple[float, ...]]:
    """Log probabilities of ``tokens[i]`` for each row ``i`` of ``indices``, which have the ``normalizers``."""
    of_row = dict(zip(indices, normalizers, strict=True))
    made: dict[int, tuple[float, ...]] = {}
    for logits, places, some in raw.groups(indices):
        asked, own = [tokens[index] for index in some], [of_row[index] for index in some]
        made.update(zip(some, logprobs_of(logits, places, asked, own), strict=True))
    return made


def _exhausted(best: Sequence[float], rows: Sequence[SampleRow]) -> list[int]:
    """The rows with changed logits and without an allowed token.

    Raises:
        QuireError: another row has no finite maximum.
    """
    found = [index for index, value in enumerate(best) if not math.isfinite(value)]
    if any(not rows[index].changes_logits or best[index] != -math.inf for index in found):
        raise no_finite_maximum()
    return found


def _draws_of(rows: Sequence[SampleRow]) -> list[int] | None:
    """The row of each draw; ``None`` where each row has one."""
    if not any(row.extra_seeds for row in rows):
        return None
    return [index for index, row in enumerate(rows) for _ in range(1 + len(row.extra_seeds))]


class _DrawOptions:
    """How to choose from a batch, for the kernels; kept for the next batch, which mostly is like it."""

    def __init__(self) -> None:
        self._rows: list[tuple[SamplingParams, int, tuple[int, ...], bool]] = []
        self._options = self._made()

    def of(self, rows: Sequence[SampleRow]) -> DrawOptions:
        wanted = [(row.params, row.seed, row.extra_seeds, row.random) for row in rows]
        if wanted != self._rows:
            self._rows = wanted
            self._options = self._made()
        return self._options

    def _made(self) -> DrawOptions:
        params = [params for params, *_ in self._rows]
        temperatures = [p.temperature if random else 0.0 for p, _, _, random in self._rows]
        seeds = [(seed, *extra) for _, seed, extra, _ in self._rows]
        bits = np.array([seed_bits(seed) for own in seeds for seed in own], dtype=np.uint64)
        return DrawOptions(
            temperature=torch.tensor(temperatures, dtype=torch.float32),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
            top_k=torch.tensor([min(p.top_k, _MOST) for p in params], dtype=torch.int64),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
            num_draws=torch.tensor([len(own) for own in seeds], dtype=torch.int64),
            seeds=torch.from_numpy(bits.view(np.int64)),
        )


def _draw(logits: Tensor, best: Tensor, rows: list[SampleRow]) -> Tensor:
    """Tokens ``[D]`` for ``logits`` ``[S, vocab]`` with maxima ``best`` ``[S, 1]``; every row is random.

    ``D`` counts all draws; the draws of a row follow each other.
    """
    count, vocab = logits.shape
    device = logits.device
    groups = -(-vocab // GROUPS_OF)
    temperature = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float32, device=device)
    weights = torch.empty(count, groups * GROUPS_OF, dtype=torch.float32, device=device)
    weights[:, vocab:] = 0.0
    scaled = torch.sub(logits, best, out=weights[:, :vocab])  # at most 0, so no overflow at any temperature
    scaled.div_(temperature).exp_()
    _filter(weights, rows)

    sums = _group_sums(weights, groups)
    keys = torch.tensor(
        [[draw_key(seed, row.position)] for row in rows for seed in (row.seed, *row.extra_seeds)], device=device
    )
    draws = _draws_of(rows)
    owners = None if draws is None else torch.tensor(draws, device=device)
    group_ids = torch.arange(groups, device=device)
    race = exponential(keys, group_ids + _GROUP_CANDIDATES)
    race = race / (sums if owners is None else sums[owners]).to(torch.float64)
    group = race.argmin(dim=1, keepdim=True)
    tokens = group + torch.arange(0, groups * GROUPS_OF, groups, device=device)
    within = weights.gather(1, tokens) if owners is None else weights[owners[:, None], tokens]
    race = exponential(keys, tokens) / within.to(torch.float64)
    return tokens.gather(1, race.argmin(dim=1, keepdim=True))[:, 0]


def _group_sums(weights: Tensor, groups: int) -> Tensor:
    """Sums over the interleaved groups, ``[S, groups * GROUPS_OF] -> [S, groups]``; group = id % groups."""
    sums = weights.view(weights.shape[0], GROUPS_OF, groups)
    half = GROUPS_OF
    while half > 1:
        half //= 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _filter(weights: Tensor, rows: list[SampleRow]) -> None:
    """Zero the weights that min-p, top-k and top-p drop; each row of ``weights`` ``[S, P]`` has maximum 1."""
    filtered = [
        i for i, row in enumerate(rows) if row.params.min_p or row.params.top_k or row.params.top_p < 1.0
    ]
    if not filtered:
        return
    thresholds = [row.params.min_p for row in rows]
    limited = [i for i in filtered if 0 < rows[i].params.top_k < weights.shape[1]]
    for i, value in zip(
        limited, _largest(weights, limited, [rows[i].params.top_k for i in limited]), strict=True
    ):
        thresholds[i] = max(thresholds[i], value)
    nucleus = [i for i in filtered if rows[i].params.top_p < 1.0]
    if weights.device.type == "cpu":
        found = [_nucleus_threshold(weights[i].numpy(), thresholds[i], rows[i].params.top_p) for i in nucleus]
    else:
        found = _nucleus_thresholds(weights, nucleus, thresholds, [rows[i].params.top_p for i in nucleus])
    for i, value in zip(nucleus, found, strict=True):
        thresholds[i] = max(thresholds[i], value)
    least = torch.tensor(thresholds, dtype=torch.float32, device=weights.device)
    weights.masked_fill_(weights < least[:, None], 0.0)


def _largest(weights: Tensor, rows: Sequence[int], ks: Sequence[int]) -> list[float]:
    """The ``ks[j]``-th largest weight of row ``rows[j]``.

    Rows with a small ``k`` are worked out together, the others one by one: theirs would cost all rows as much.
    """
    found: dict[int, float] = {}
    small = [(row, k) for row, k in zip(rows, ks, strict=True) if k <= _SMALL_K]
    if small:
        some = [row for row, _ in small]
        top = (weights if len(some) == len(weights) else weights[some]).topk(max(k for _, k in small)).values
        places = torch.tensor([[k - 1] for _, k in small], device=weights.device)
        found.update(zip(some, top.gather(1, places)[:, 0].tolist(), strict=True))
    for row, k in zip(rows, ks, strict=True):
        if k <= _SMALL_K:
            continue
        place = weights.shape[1] - k
        if weights.device.type == "cpu":
            found[row] = float(np.partition(weights[row].numpy(), place)[place])
        else:
            found[row] = float(weights[row].sort().values[place])
    return [found[row] for row in rows]


def _nucleus_threshold(weights: NDArray[np.float32], threshold: float, top_p: float) -> float:
    """Weight of the last token that top-p keeps among those of at least ``threshold``."""
    if threshold > 0.0:
        likely = weights[weights >= np.float32(threshold)]
        total = float(likely.sum(dtype=np.float64))
    else:
        total = float(weights.sum(dtype=np.float64))
        # Sort no more than needed: lower the cut until what lies above it holds the nucleus.
        cut = np.float32(_FIRST_CUT)
        likely = weights[weights >= cut]
        while likely.sum(dtype=np.float64) < top_p * total and cut > 0:
            cut = cut / np.float32(16) if cut > _LAST_CUT else np.float32(0)
            likely = weights[weights >= cut]
    likely = np.sort(likely)[::-1]
    place = int(np.searchsorted(np.cumsum(likely, dtype=np.float64), top_p * total))
    return float(likely[min(place, len(likely) - 1)])


def _nucleus_thresholds(
    weights: Tensor, rows: Sequence[int], thresholds: Sequence[float], top_p: Sequence[float]
) -> list[float]:
    """What :func:`_nucleus_threshold` gives for ``rows`` of ``weights``, worked out where these are."""
    found: list[float] = []
    at_once = max(1, _SORTED_AT_ONCE // weights.shape[1])
    for begin in range(0, len(rows), at_once):
        some = rows[begin : begin + at_once]
        ordered = weights[some].sort(dim=1, descending=True).values
        least = torch.tensor([thresholds[i] for i in some], dtype=torch.float32, device=weights.device)
        kept = ordered >= least[:, None]
        sums = torch.where(kept, ordered, 0.0).cumsum(dim=1, dtype=torch.float64)
        shares = torch.tensor(top_p[begin : begin + at_once], dtype=torch.float64, device=weights.device)
        place = (sums < shares[:, None] * sums[:, -1:]).sum(dim=1)
        place = torch.minimum(place, kept.sum(dim=1) - 1)
        found += ordered.gather(1, place[:, None])[:, 0].tolist()
    return found


def _argmax(logits: Tensor) -> Tensor:
    """Lowest id of each row's maximum, int64 ``[S]``; a NaN counts as the maximum."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # ten times as fast as torch's here
    return logits.argmax(dim=1)


def _ints(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens.tolist()]
