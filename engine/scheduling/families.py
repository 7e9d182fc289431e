"""Requests for several sequences: spreads them after the prompt, searches with beams, ranks the results."""

from __future__ import annotations

from collections.abc import Callable

from engine.execution.random import sequence_seed
from engine.kv.block_pool import InvariantError
from engine.request import FinishReason, Request, TokenDelta
from engine.scheduling.beam import BeamSearch
from engine.scheduling.family import Family, Hypothesis
from engine.scheduling.preemption import Preemption
from engine.scheduling.request_table import Entry, RequestTable
from engine.scheduling.step_plan import Candidates

Append = Callable[[Entry, int, float], list[TokenDelta]]


class Families:
    """All families that have live sequences.

    Args:
        append: gives a sequence its next token, with its log probability.
        max_num_seqs: most running sequences; a fork beyond it waits, and computes its KV again.
    """

    def __init__(self, table: RequestTable, preemption: Preemption, append: Append, max_num_seqs: int) -> None:
        self._table = table
        self._preemption = preemption
        self._append = append
        self._max_num_seqs = max_num_seqs
        self._families: dict[str, Family] = {}
        self.beam_tokens = 0  # made by beam search, in beams that were given up, too

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._families

    def open(self, request: Request, ending: frozenset[int]) -> Family:
        """Make the family of a request that is about to be queued, all its limits set."""
        params = request.params
        search = None
        if params.use_beam_search:
            search = BeamSearch(
                params.width,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                ending=ending,
                max_new_tokens=request.max_total_tokens - request.num_prompt_tokens,
                min_new_tokens=params.min_tokens,
            )
        family = Family(request.request_id, params, search, request.seed)
        request.family = self._families[request.request_id] = family
        return family

    def members(self, request_id: str) -> list[Entry]:
        """Live sequences of a family."""
        return list(self._families[request_id].members.values())

    def advance(self, entry: Entry, outcome: Candidates) -> list[TokenDelta]:
        """What a step made for a member."""
        family = _family(entry)
        if family.search is not None:
            return self._search(family, entry, outcome)
        if family.spread:
            return self._append(entry, outcome.tokens[0], outcome.logprobs[0])
        return self._spread(family, entry, outcome)

    def finished(self, entry: Entry, delta: TokenDelta) -> list[TokenDelta]:
        """A member has ended: what its client gets to see of that now."""
        family = _family(entry)
        del family.members[entry.request.sequence]
        last = not family.members
        if last:
            del self._families[family.request_id]
        if family.params.ranked and delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            output = tuple(entry.request.token_ids[entry.base :])
            assert delta.finish_reason is not None
            family.finished.append(Hypothesis(output, entry.request.logprob / len(output), delta.finish_reason))
            return self._results(family, delta.cached_tokens) if last else []
        delta.final = last
        return [delta]

    def _spread(self, family: Family, entry: Entry, draws: Candidates) -> list[TokenDelta]:
        """The prompt is computed: fork the other sequences, then give each its own first token."""
        family.spread = True
        self._table.give_up_seats(entry)
        sequences = [entry]
        for _ in draws.tokens[1:]:
            sequences.append(self._fork(family, entry))
        deltas = []
        for sequence, token, logprob in zip(sequences, draws.tokens, draws.logprobs, strict=True):
            deltas += self._append(sequence, token, logprob)
        return deltas

    def _search(self, family: Family, entry: Entry, offers: Candidates) -> list[TokenDelta]:
        """One beam has its offers; when all have, choose those that go on."""
        assert family.search is not None
        if not family.spread:
            family.spread = True
            self._table.give_up_seats(entry)
        entry.candidates = offers
        beams = list(family.members.values())
        if any(beam.candidates is None for beam in beams):
            return []
        generated = beams[0].request.num_generated
        selection = family.search.select(
            [(beam.request.logprob, beam.candidates) for beam in beams if beam.candidates], generated
        )
        for parent, token, score, reason in selection.finished:
            output = (*beams[parent].request.token_ids[entry.base :], token)
            family.finished.append(Hypothesis(output, score, reason))
        going_on: list[list[tuple[int, int, float]]] = [[] for _ in beams]
        for rank, (parent, token, total) in enumerate(selection.next):
            going_on[parent].append((rank, token, total))
        for beam, continuations in zip(beams, going_on, strict=True):
            if not continuations:  # first of all, since that makes seats free for the forks
                self._drop(beam)
        following: dict[int, Entry] = {}
        for beam, continuations in zip(beams, going_on, strict=True):
            if not continuations:
                continue
            forks = [self._fork(family, beam) for _ in continuations[1:]]
            for (rank, token, total), sequence in zip(continuations, [beam, *forks], strict=True):
                sequence.candidates = None
                sequence.request.token_ids.append(token)
                sequence.request.logprob = total
                self.beam_tokens += 1
                following[rank] = sequence
        family.members = {
            following[rank].request.sequence: following[rank] for rank in range(len(selection.next))
        }
        if not selection.done:
            return []
        del self._families[family.request_id]
        return self._results(family, entry.request.cached_tokens or 0)

    def _drop(self, entry: Entry) -> None:
        self._preemption.abandon(entry)
        self._table.finish(entry, FinishReason.STOP)

    def _fork(self, family: Family, parent: Entry) -> Entry:
        source = parent.request
        child = Request(
            source.request_id,
            list(source.token_ids),
            source.params,
            source.namespace,
            source.priority,
            generated_before=source.generated_before,
            seed=sequence_seed(family.seed, family.next_sequence),
            sequence=family.next_sequence,
            family=family,
            logprob=source.logprob,
        )
        family.next_sequence += 1
        entry = self._table.fork(parent, child, run=self._table.seats < self._max_num_seqs)
        family.members[child.sequence] = entry
        return entry

    def _results(self, family: Family, cached_tokens: int) -> list[TokenDelta]:
        best = family.best()
        if not best:  # every token that was allowed ends a sequence too early, or none was allowed
            message = "no sequence could be completed under these limits; lower min_tokens or raise max_tokens"
            return [
                TokenDelta(
                    family.request_id, 0, (), FinishReason.ERROR, cached_tokens, error=message, final=True
                )
            ]
        return [
            TokenDelta(
                family.request_id,
                0,
                hypothesis.token_ids,
                hypothesis.reason,
                cached_tokens,
                sequence=rank,
                final=rank == len(best) - 1,
                score=hypothesis.score,
            )
            for rank, hypothesis in enumerate(best)
        ]

    def check(self) -> None:
        """Verify that families and live sequences know each other.

        Raises:
            InvariantError: says what is wrong.
        """
        members = {entry.request.key for family in self._families.values() for entry in family.members.values()}
        related = {key for key, entry in self._table.entries.items() if entry.request.family is not None}
        if members != related:
            raise InvariantError(f"families have the sequences {sorted(members)}, {sorted(related)} are live")
        for family in self._families.values():
            beams = family.members.values()
            if not beams:
                raise InvariantError(f"the family of request {family.request_id!r} is empty")
            if family.search is not None and all(beam.candidates is not None for beam in beams):
                raise InvariantError(f"all beams of request {family.request_id!r} wait for each other")


def _family(entry: Entry) -> Family:
    family = entry.request.family
    if family is None:
        raise InvariantError(f"request {entry.request.request_id!r} has candidates, but no use for them")
    return family
