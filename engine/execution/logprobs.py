"""Log probabilities that the model gives tokens, and the most likely tokens.

All are of the raw logits: neither the temperature nor the filters of a request change them. Nothing here
depends on the other rows of a batch: maxima are exact, sums are explicit trees, the rest is done one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import QuireError

GROUP = 64
"""Tokens of a group, of which only the likeliest counts when the least of the best is sought."""


def log_normalizers(logits: Tensor) -> list[float]:
    """Log of the summed exponentials of each row of ``logits`` (float32 ``[S, vocab]``).

    Raises:
        QuireError: a row has none, because a logit is NaN or infinite or all are minus infinity.
    """
    highest = logits.amax(dim=1, keepdim=True)
    sums = tree_sums(torch.sub(logits, highest).exp_())
    # The logarithms in Python: torch's differ in their last bit with the place in a vector.
    pairs = zip(highest[:, 0].tolist(), sums.tolist(), strict=True)
    results = [high + math.log(total) if total > 0.0 else math.nan for high, total in pairs]
    if not all(map(math.isfinite, results)):
        raise no_finite_maximum()
    return results


def tree_sums(weights: Tensor) -> Tensor:
    """Sum of each row of ``weights`` (``[S, N]``, overwritten): always the same additions, ``[S]``."""
    width = weights.shape[1]
    while width > 1:
        half = (width + 1) // 2
        weights[:, : width - half] += weights[:, half:width]
        width = half
    return weights[:, 0]


def likeliest(logits: Tensor, counts: Sequence[int]) -> list[list[int]]:
    """The ``counts[i]`` tokens with the highest logits of row ``i``, best first, ties by lower id.

    Fewer where fewer are allowed: a logit of minus infinity forbids its token.
    """
    rows, vocab = logits.shape
    largest = min(max(counts), vocab)
    # As many groups as tokens are wanted have a maximum of at least ``least``: no token below it is among the
    # best, and only those groups have to be searched.
    size = GROUP if vocab >= 4 * GROUP * largest else 1
    if vocab % size:
        logits = torch.nn.functional.pad(logits, (0, -vocab % size), value=-math.inf)
    grouped = logits.view(rows, size, -1)
    maxima = grouped.amax(dim=1)
    places = torch.tensor([[min(count, largest) - 1] for count in counts], device=logits.device)
    least = maxima.topk(largest, dim=1).values.gather(1, places)
    row, group = (maxima >= least).nonzero(as_tuple=True)
    values = grouped[row, :, group]
    pair, place = (values >= least[row]).nonzero(as_tuple=True)
    tokens = place * grouped.shape[2] + group[pair]
    found: list[list[tuple[float, int]]] = [[] for _ in counts]
    for index, token, value in zip(
        row[pair].tolist(), tokens.tolist(), values[pair, place].tolist(), strict=True
    ):
        if value > -math.inf:
            found[index].append((-value, token))
    return [[token for _, token in sorted(best)[:count]] for best, count in zip(found, counts, strict=True)]


def logprobs_of(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]], normalizers: Sequence[float]
) -> list[tuple[float, ...]]:
    """The log probability of ``tokens[i]`` in row ``rows[i]`` of ``logits`` with ``normalizers[i]``."""
    flat_rows = [row for row, several in zip(rows, tokens, strict=True) for _ in several]
    flat_tokens = [token for several in tokens for token in several]
    values = iter(logits[flat_rows, flat_tokens].tolist())
    return [
        tuple(next(values) - normalizer for _ in several)
        for several, normalizer in zip(tokens, normalizers, strict=True)
    ]


def no_finite_maximum() -> QuireError:
    """The error of logits that nothing can be chosen from."""
    return QuireError("the model's logits have no finite maximum; its weights or dtype may be broken")
