"""The selection step of beam search: which beams continue and which are finished."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from engine.request import FinishReason
from engine.scheduling.candidates import Candidates


@dataclass(frozen=True, slots=True)
class Selection:
    """The beams after one step; parents are indices into the step's beams."""

    next: list[tuple[int, int, float]]  # (parent, token, summed log probability), best first, at most ``width``
    finished: list[tuple[int, int, float, FinishReason]]  # (parent, last token, score, why), best first
    done: bool  # the results are final; ``next`` is empty then


class BeamSearch:
    """Beam search over one request, with the selection rules of Hugging Face transformers 5.

    Each step sorts the continuations of all beams by their summed log probability. Of the best ``width``, those
    that end are finished, with the score ``sum / length ** length_penalty``, where the length counts generated
    tokens, the end token too. The best ``width`` that do not end continue. After ``max_new_tokens`` the best
    ``width`` are finished whatever their last token.

    The results are the finished sequences with the highest scores of all that :meth:`select` returned; equal
    scores keep the order in which they were returned. Equal sums keep the order of the beams and of each beam's
    candidates. Sums are float64, so that rounding makes no two of them equal. A single beam is greedy: it ends
    with its first end token, whatever ``early_stopping`` says.

    Args:
        width: beams to keep, at least 1.
        length_penalty: above 0 favors long sequences, below 0 short ones.
        early_stopping: ``True`` ends as soon as ``width`` sequences are finished. ``False`` continues while the
            best beam, scored at its present length, beats the worst of the best ``width`` finished ones.
            ``"never"`` does the same with the length that would score the beam highest.
        end_token_ids: tokens that end a sequence.
        max_new_tokens: most tokens to generate.
        min_new_tokens: no end token is taken before this many; the others keep their log probabilities.
    """

    def __init__(
        self,
        width: int,
        *,
        length_penalty: float,
        early_stopping: bool | str,
        end_token_ids: frozenset[int],
        max_new_tokens: int,
        min_new_tokens: int = 0,
    ) -> None:
        self.width = width
        self._length_penalty = length_penalty
        self._early_stopping = True if width == 1 else early_stopping
        self._end_token_ids = end_token_ids
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = min_new_tokens
        self._scores: list[float] = []  # of the best ``width`` finished sequences, ascending

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that each beam must bring, or all if the vocabulary has fewer.

        Up to ``width`` continuations of one beam may continue, and every end token may be likelier than they.
        """
        return self.width + len(self._end_token_ids)

    def select(self, beams: Sequence[tuple[float, Candidates]], generated: int) -> Selection:
        """Choose among the continuations of all beams.

        Args:
            beams: summed log probability and candidates of each, in the order of the last selection's ``next``;
                one beam with sum 0 in the first step.
            generated: tokens in each beam so far.
        """
        length = generated + 1
        may_end = length > self._min_new_tokens
        continuations = [
            (total + logprob, parent, token)
            for parent, (total, candidates) in enumerate(beams)
            for token, logprob in zip(candidates.tokens, candidates.logprobs, strict=True)
            if logprob > -math.inf and (may_end or token not in self._end_token_ids)
        ]
        continuations.sort(key=lambda continuation: -continuation[0])
        last = length >= self._max_new_tokens
        finished = self._finish(continuations[: self.width], length, last)
        following: list[tuple[int, int, float]] = []
        if not last:
            endless = (
                (parent, token, total)
                for total, parent, token in continuations
                if token not in self._end_token_ids
            )
            following = list(islice(endless, self.width))
        if not following or not self._may_improve(following[0][2], length):
            return Selection([], finished, True)
        return Selection(following, finished, False)

    def _finish(
        self, best: list[tuple[float, int, int]], length: int, last: bool
    ) -> list[tuple[int, int, float, FinishReason]]:
        """Finish those of the ``best`` continuations that end, unless ``width`` finished ones score as high."""
        finished = []
        for total, parent, token in best:
            if token not in self._end_token_ids and not last:
                continue
            score = self._score(total, length)
            if len(self._scores) == self.width:
                if score <= self._scores[0]:
                    continue
                del self._scores[0]
            bisect.insort(self._scores, score)
            reason = FinishReason.STOP if token in self._end_token_ids else FinishReason.LENGTH
            finished.append((parent, token, score, reason))
        return finished

    def _may_improve(self, best: float, length: int) -> bool:
        """Whether beams of ``length`` tokens, the best with the sum ``best``, can still change the results."""
        if len(self._scores) < self.width:
            return True
        if self._early_stopping is True:
            return False
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_new_tokens
        return self._score(best, length) > self._scores[0]

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._length_penalty)
