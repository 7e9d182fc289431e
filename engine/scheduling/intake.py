"""Takes new requests in: checks them, and queues the sequences that they begin with."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.errors import InvalidRequestError
from engine.execution.random import sequence_seed
from engine.request import ModelLimits, Request, validate
from engine.scheduling.sequence import Sequence, SequenceGroup
from engine.scheduling.sequence_groups import SequenceGroups
from engine.scheduling.state import SchedulerState


class Intake:
    """Makes sequences of requests; :class:`engine.scheduling.scheduler.Scheduler` describes the arguments."""

    def __init__(
        self,
        state: SchedulerState,
        groups: SequenceGroups,
        *,
        eos_token_ids: Collection[int],
        model_key: tuple[object, ...],
        limits: ModelLimits,
        priority_ageing: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._groups = groups
        self._eos = frozenset(eos_token_ids)
        self._model_key = model_key
        self._limits = limits
        self._priority_ageing = priority_ageing
        self._clock = clock

    def add(self, request: Request, seed: int) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
        """
        if (request.request_id, 0) in self._state.sequences or request.request_id in self._groups:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use by a request that has not ended",
                "request_id",
                "duplicate_id",
            )
        max_total_tokens = self._max_total_tokens(request)
        if request.outputs:
            _check_outputs(request)
        arrival = request.arrival or self._clock()
        params = request.params
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= self._eos
        prompt = len(request.token_ids)

        def queue(
            token_ids: list[int],
            output_start: int,
            *,
            number: int = 0,
            seed: int = seed,
            num_seqs: int = 1,
            group: SequenceGroup | None = None,
        ) -> None:
            sequence = Sequence(
                request,
                token_ids,
                root=self._root(request),
                order=self._order(request, arrival, number),
                end_token_ids=end_token_ids,
                output_start=output_start,
                num_prompt_tokens=len(token_ids),
                max_total_tokens=max_total_tokens,
                number=number,
                group=group,
                seed=seed,
                num_seqs=num_seqs,
            )
            if group is not None:
                group.sequences[number] = sequence
            self._state.queue(sequence)

        output_start = prompt - request.generated_before
        if params.width == 1 and not params.use_beam_search:
            queue(list(request.token_ids), output_start)
            return
        group = self._groups.open(request, seed, end_token_ids, max_total_tokens)
        if not request.outputs:
            width = min(params.width, self._state.max_num_seqs)
            queue(list(request.token_ids), output_start, num_seqs=width, group=group)
            return
        # Continue the sequences of a request that began on another replica.
        group.forked = True
        group.next_number = len(request.outputs)
        for number, output in enumerate(request.outputs):
            if output is not None:
                own_seed = sequence_seed(seed, number)
                queue([*request.token_ids, *output], prompt, number=number, seed=own_seed, group=group)

    def _max_total_tokens(self, request: Request) -> int:
        total = validate(request.token_ids, request.params, self._limits, request.generated_before)
        longest = len(request.token_ids) + max(map(len, filter(None, request.outputs)), default=0)
        if longest >= total:
            before = request.generated_before or longest - len(request.token_ids)
            raise InvalidRequestError(
                f"the request has {longest} tokens, {before} of them generated before, and may reach {total}: "
                "none is left to generate",
                "max_tokens",
            )
        return total

    def _root(self, request: Request) -> tuple[object, ...]:
        """The root of the prefix tree. Parts at fixed places: an adapter's name can never pass for a tenant."""
        namespace = request.namespace
        return (self._model_key, self._limits.block_size, namespace.adapter, namespace.tenant, namespace.salt)

    def _order(self, request: Request, arrival: float, number: int) -> tuple[float, float, str, int]:
        ageing = self._priority_ageing
        if ageing is None:
            return (float(request.priority), arrival, request.request_id, number)
        return (0.0, arrival + ageing * request.priority, request.request_id, number)


def _check_outputs(request: Request) -> None:
    params = request.params
    if params.ranked or len(request.outputs) != params.n or not any(o is not None for o in request.outputs):
        raise InvalidRequestError(
            f"outputs has {len(request.outputs)} entries but must have one for each of {params.n} sequences, "
            "not all of them ended, and none where sequences are ranked: those begin again",
            "outputs",
        )
