"""Checks new requests, and queues the sequences that they start with."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import InvalidRequestError
from engine.logit_edits import LogitEdits
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request, check
from engine.scheduling.fair_queue import Ticket
from engine.scheduling.scheduler_config import ModelTraits
from engine.scheduling.sequence import Sequence, order_of
from engine.scheduling.sequence_groups import SequenceGroups
from engine.scheduling.state import SchedulerState
from engine.scheduling.workload_stats import WorkloadStats
from engine.seeds import sequence_seed


class Intake:
    """Makes sequences of requests; :class:`engine.scheduling.scheduler.Scheduler` describes the arguments."""

    def __init__(
        self,
        state: SchedulerState,
        groups: SequenceGroups,
        workload: WorkloadStats,
        model: ModelTraits,
        *,
        priority_aging: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._groups = groups
        self._workload = workload
        self._eos = frozenset(model.eos_token_ids)
        self._model_key = model.key
        self._limits = model.limits
        self._priority_aging = priority_aging
        self._clock = clock

    def add(self, request: Request, seed: int) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
        """
        max_total_tokens = self._max_total_tokens(request)  # checks all of the request
        if (request.request_id, 0) in self._state.sequences or request.request_id in self._groups:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use by a request that has not ended",
                "request_id",
                "duplicate_id",
            )
        if request.outputs:  # it began on another replica
            _check_outputs(request)
            outputs = {number: output for number, output in enumerate(request.outputs) if output is not None}
        else:
            outputs = {0: ()}
        ticket = self._ticket(request, tuple(outputs), max_total_tokens)
        sequences = [
            self._sequence(request, number, output, ticket, seed, max_total_tokens)
            for number, output in outputs.items()
        ]
        sequences[0].work = ticket.work
        params = request.params
        if params.width > 1 or params.use_beam_search:
            group = self._groups.open(sequences, seed)
            if request.outputs:
                group.forked = True
                group.next_number = len(request.outputs)
            sequences[0].num_seqs = self._state.slots_wanted(sequences[0])
        for sequence in sequences:
            self._state.queue(sequence)

    def _ticket(self, request: Request, numbers: tuple[int, ...], max_total_tokens: int) -> Ticket:
        """The place of a request among those of its client and of others."""
        priority, arrival = float(request.priority), request.arrival or self._clock()
        if self._priority_aging is not None:
            priority, arrival = 0.0, arrival + self._priority_aging * request.priority
        running, waiting = self._state.first_starts(priority)
        return self._state.fair.enter(
            request.request_id,
            numbers,
            client=request.client,
            priority=priority,
            arrival=arrival,
            work=self._workload.expected_work(request, max_total_tokens),
            oldest=min(running, waiting),
            next_start=waiting,
        )

    def _sequence(
        self,
        request: Request,
        number: int,
        output: tuple[int, ...],
        ticket: Ticket,
        seed: int,
        max_total_tokens: int,
    ) -> Sequence:
        """Sequence ``number`` of a request, which has generated ``output`` on another replica."""
        params, namespace = request.params, request.namespace
        token_ids = [*request.token_ids, *output]
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or request.grammar is not None:  # nothing fits after a grammar's end
            end_token_ids |= self._eos
        # Parts at fixed places: an adapter's name can never pass for a tenant or a salt.
        parts = (namespace.adapter, namespace.tenant, namespace.salt)
        root = (self._model_key, self._limits.block_size, *parts)
        output_start = len(request.token_ids) - request.generated_before
        edits = LogitEdits(params, output_start, self._limits.vocab_size) if params.edits_logits else None
        # One that began elsewhere has returned them.
        begun = request.generated_before or request.outputs
        asked = None if begun or params.prompt_logprobs is None else params.prompt_logprobs
        return Sequence(
            request.request_id,
            token_ids,
            params,
            request.priority,
            ticket,
            root=root,
            order=order_of(ticket, number),
            end_token_ids=end_token_ids,
            output_start=output_start,
            num_prompt_tokens=len(token_ids),
            max_total_tokens=max_total_tokens,
            number=number,
            seed=sequence_seed(seed, number),
            charged_from=len(token_ids),
            edits=edits,
            grammar=request.grammar,
            prompt_logprobs=None if asked is None else PromptLogprobs(len(token_ids), asked),
            # One that moved here has waited elsewhere before.
            queued_at=(0.0 if request.generated_before or request.outputs else request.arrival)
            or self._clock(),
        )

    def _max_total_tokens(self, request: Request) -> int:
        total = check(request, self._limits)
        longest = len(request.token_ids) + max(map(len, filter(None, request.outputs)), default=0)
        if longest >= total and request.params.max_tokens != 0:
            before = request.generated_before or longest - len(request.token_ids)
            raise InvalidRequestError(
                f"the request has {longest} tokens, {before} of them generated before, and may have at most "
                f"{total}, so none is left to generate",
                "max_tokens",
            )
        return total


def _check_outputs(request: Request) -> None:
    params = request.params
    if params.ranked or len(request.outputs) != params.n or not any(o is not None for o in request.outputs):
        raise InvalidRequestError(
            f"outputs has {len(request.outputs)} entries but must have one for each of {params.n} sequences, "
            "at least one of them not ended, and none if sequences are ranked, because those start over",
            "outputs",
        )
