"""The way in: checks new requests and makes live sequences of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.errors import InvalidRequestError
from engine.execution.random import sequence_seed
from engine.request import ModelLimits, Request, validate
from engine.scheduling.families import Families
from engine.scheduling.family import needs_family
from engine.scheduling.request_table import Entry, RequestTable


class Arrivals:
    """Queues requests; :class:`engine.scheduling.scheduler.Scheduler` says what the arguments mean."""

    def __init__(
        self,
        table: RequestTable,
        families: Families,
        *,
        max_num_seqs: int,
        eos_token_ids: Collection[int],
        model_key: tuple[object, ...],
        limits: ModelLimits,
        priority_ageing: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._families = families
        self._max_num_seqs = max_num_seqs
        self._eos = frozenset(eos_token_ids)
        self._model_key = model_key
        self._limits = limits
        self._priority_ageing = priority_ageing
        self._clock = clock

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
        """
        if (request.request_id, 0) in self._table.entries or request.request_id in self._families:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use by a request that has not ended",
                "request_id",
                "duplicate_id",
            )
        total = validate(request.token_ids, request.params, self._limits, request.generated_before)
        longest = len(request.token_ids) + max(map(len, filter(None, request.outputs)), default=0)
        if longest >= total:
            before = request.generated_before or longest - len(request.token_ids)
            raise InvalidRequestError(
                f"the request has {longest} tokens, {before} of them generated before, and may reach {total}: "
                "none is left to generate",
                "max_tokens",
            )
        request.arrival = request.arrival or self._clock()
        request.max_total_tokens = total
        if request.outputs:
            _check_outputs(request)
        if not needs_family(request):
            self._queue(request)
        elif request.outputs:
            self._queue_sequences(request)
        else:
            self._families.open(request, self._ending(request))
            self._queue(request, min(request.params.width, self._max_num_seqs))

    def _queue(self, request: Request, seats: int = 1) -> None:
        namespace = request.namespace
        # Parts at fixed places: an adapter's name can never pass for a tenant or a salt.
        root = (self._model_key, self._limits.block_size, namespace.adapter, namespace.tenant, namespace.salt)
        ageing = self._priority_ageing
        first, second = (request.priority, request.arrival)
        if ageing is not None:
            first, second = 0, request.arrival + ageing * request.priority
        order = (float(first), second, request.request_id, request.sequence)
        base = request.num_prompt_tokens - request.generated_before
        entry = Entry(request, root, order, self._ending(request), base, seats)
        self._table.queue(entry)
        if request.family is not None:
            request.family.members[request.sequence] = entry

    def _queue_sequences(self, request: Request) -> None:
        """Go on with the sequences of a request that began on another replica."""
        family = self._families.open(request, self._ending(request))
        family.spread = True
        family.next_sequence = len(request.outputs)
        for sequence, output in enumerate(request.outputs):
            if output is None:
                continue
            one = Request(
                request.request_id,
                request.token_ids + list(output),
                request.params,
                request.namespace,
                request.priority,
                request.arrival,
                generated_before=len(output),
                seed=sequence_seed(request.seed, sequence),
                sequence=sequence,
                family=family,
            )
            one.max_total_tokens = request.max_total_tokens
            self._queue(one)

    def _ending(self, request: Request) -> frozenset[int]:
        params = request.params
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos


def _check_outputs(request: Request) -> None:
    params = request.params
    if params.ranked or len(request.outputs) != params.n or not any(o is not None for o in request.outputs):
        raise InvalidRequestError(
            f"outputs has {len(request.outputs)} entries but must have one for each of {params.n} sequences, "
            "not all of them ended, and none where sequences are ranked: those begin again",
            "outputs",
        )
