"""The state of one request in the ingress, across all attempts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.channel import wire
from app.channel.wire_resume import AttemptClaim
from app.fleet.delta_queue import DeltaQueue
from app.fleet.generation import Delta, GenerateRequest, GenerationError
from app.fleet.journal import AttemptNotes
from app.routing.requirement import Requirement
from app.routing.routing_meta import RoutingMeta
from engine.errors import InvalidRequestError, QuireError
from engine.models.identity import ModelIdentity
from engine.request import COMPUTATION, FinishReason
from engine.structured_output import FORM_FAILED

EXPECTED_TOKENS = 256
"""Output that is booked for a request that may make more, unless outputs here are longer on average."""

_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR  # found once: Python 3.11 finds a member by a call
_ENDS_ATTEMPT = (_ABORT, _ERROR)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """``outputs`` has the tokens that have arrived, for each sequence; ``deltas`` go to the client's generator.

    ``interrupt`` ends the current attempt: the request has ended, the attempt's channel is gone, or its replica
    is being stopped. ``deaths`` counts engines that died while running the request. ``failures`` counts
    attempts that failed although their replica stayed alive. A ``suspect`` may have killed an engine: see
    ``app.fleet.faults``.
    """

    request: GenerateRequest
    block_keys: Sequence[int] = ()  # of the prompt's full blocks, if known
    typical_output: float = EXPECTED_TOKENS  # average tokens of a sequence here
    arrived: float = field(default_factory=time.monotonic)  # monotonic seconds
    outputs: list[list[int]] = field(init=False)
    finished: list[bool] = field(init=False)  # of each sequence: its end record has arrived, or need not
    unwanted: set[int] = field(default_factory=set)  # sequences that the client's text has ended
    attempt: int = 0  # the current one, or the last
    cached_tokens: int | None = None
    ended: bool = False
    complete: bool = False  # the final record has arrived
    deltas: DeltaQueue = field(default_factory=DeltaQueue)
    interrupt: asyncio.Event = field(default_factory=asyncio.Event)
    deaths: int = 0
    failures: int = 0
    suspect: bool = False
    death_age: int = 0  # tokens that had arrived of the attempt under which the engine died
    proof_tokens: int = 0  # of an attempt, which clear a suspect
    tokens_before: int = 0  # that had arrived when the current attempt began
    avoid: str = ""  # the replica of the previous attempt
    model: ModelIdentity | None = None  # which generates the output, once some has arrived
    fingerprint: str = ""  # its
    moving: bool = False  # it was moved and has not got a token since
    held: bool = False  # the channel of the current attempt broke, and the next one may resume the attempt
    resumed_at: float = -math.inf  # when one last did, on the loop's clock
    runner: asyncio.Task[None] | None = None
    notes: AttemptNotes = field(default_factory=AttemptNotes)  # of the current one

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.request.params.n)]
        self.finished = [False] * self.request.params.n
        self.request.journal.arrived = self.arrived

    @property
    def num_tokens(self) -> int:
        """Tokens that have arrived, in all sequences."""
        return sum(map(len, self.outputs))

    @property
    def satisfied(self) -> bool:
        """Whether it needs no more attempts: it has ended, or all sequences have, and its reader ends it."""
        return self.ended or all(self.finished)

    @property
    def unfinished(self) -> list[list[int]]:
        """The outputs so far of the sequences that have not ended."""
        return [output for output, finished in zip(self.outputs, self.finished, strict=True) if not finished]

    @property
    def context_tokens(self) -> int:
        """What its next replica computes, unless it has cached some."""
        return len(self.request.token_ids) + sum(map(len, self.unfinished))

    @property
    def attempt_tokens(self) -> int:
        """Tokens that have arrived from the current attempt."""
        return self.num_tokens - self.tokens_before

    @property
    def mean_output(self) -> float | None:
        """Tokens of each sequence, on average; ``None`` until the request, or its text, is complete."""
        tokens = self.num_tokens if self.complete else self.request.text_end.tokens
        return None if tokens is None else tokens / self.request.params.n

    def end_sequence(self, sequence: int) -> None:
        """The client needs no more of a sequence: drop whatever arrives of it from now on."""
        self.unwanted.add(sequence)
        self.finished[sequence] = True

    def begin_attempt(self, number: int, typical_output: float) -> None:
        """Attempt ``number`` begins; sequences here come to ``typical_output`` tokens on average."""
        self.notes = AttemptNotes(tokens_before=self.num_tokens)
        self.request.journal.attempts.append(self.notes)
        self.interrupt.clear()
        self.attempt = number
        self.held, self.resumed_at = False, -math.inf
        self.tokens_before = self.num_tokens
        self.typical_output = typical_output

    def end_attempt(self, replica: str | None) -> None:
        """The attempt on ``replica`` has ended; the next one avoids it. ``None`` if none was booked."""
        if replica is not None:
            self.avoid = replica

    def move(self) -> None:
        """End the current attempt, so that the request moves to another replica."""
        self.moving = self.notes.planned = True
        self.interrupt.set()

    def lose_replica(self, replica: str, reason: str) -> None:
        """The channel of the current attempt's replica has ended: the request moves to another."""
        self.avoid = self.notes.replica = replica
        self.notes.failure = reason
        self.held = False
        self.interrupt.set()

    def hold(self) -> None:
        """The channel of the current attempt broke; ``resumed`` or ``lose_replica`` follows."""
        self.held = True

    def resumed(self, now: float) -> None:
        """The current attempt continues on another channel."""
        self.held, self.resumed_at = False, now

    def claim(self, attempt: int) -> AttemptClaim:
        """The place from which the current attempt is to continue."""
        return AttemptClaim(
            attempt,
            tuple(
                None if finished else len(output)
                for output, finished in zip(self.outputs, self.finished, strict=True)
            ),
        )

    def submission(self, attempt: int) -> wire.Submission:
        """What the next replica needs to continue.

        A single sequence continues as a longer prompt; several sequences continue one by one. Ranked sequences
        start over: all their tokens come in the last frame, so none have arrived.
        """
        request = self.request
        single = len(self.outputs) == 1
        begun = not single and any(self.outputs)
        return wire.Submission(
            request_id=request.request_id,
            attempt=attempt,
            token_ids=request.token_ids + self.outputs[0] if single else request.token_ids,
            params=request.params,
            namespace=request.namespace,
            priority=request.priority,
            client=request.client,
            sender=request.sender,
            generated_before=len(self.outputs[0]) if single else 0,
            outputs=tuple(
                None if finished else tuple(output)
                for output, finished in zip(self.outputs, self.finished, strict=True)
            )
            if begun
            else (),
            age_s=time.monotonic() - self.arrived,
            proof_tokens=self.proof_tokens if self.suspect else 0,
        )

    def requirement(self) -> Requirement:
        """What its next replica must offer."""
        return Requirement(len(self.request.token_ids), self.request.params, self.model, alone=self.suspect)

    def routing_meta(self, attempt: int) -> RoutingMeta:
        """What the router needs to choose and book a replica.

        The prompt counts once, whatever the number of sequences.
        """
        params = self.request.params
        running = [[]] * params.width if params.ranked else self.unfinished
        wanted, expected = params.max_tokens, max(EXPECTED_TOKENS, math.ceil(self.typical_output))
        left = [expected if wanted is None else min(wanted - len(output), expected) for output in running]
        return RoutingMeta(
            request_id=self.request.request_id,
            attempt=attempt,
            prefill=self.context_tokens,
            decode=sum(max(tokens, 1) for tokens in left),
            avoid=self.avoid,
            keys=self.block_keys,
            sequences=len(running),
            requirement=self.requirement(),
        )

    def continues(self, record: wire.Record) -> bool:
        """Whether a record begins where its sequence ends here; one that only ends the attempt always does."""
        if record.end in _ENDS_ATTEMPT:
            return True
        sequence = record.sequence
        return sequence in self.unwanted or (
            sequence < len(self.outputs)
            and not self.finished[sequence]
            and record.index == len(self.outputs[sequence])
        )

    def accept(self, record: wire.Record, model: ModelIdentity | None = None) -> None:
        """Apply a record that :meth:`continues` the request; ``model`` has made it."""
        if record.end is _ERROR:
            self.fail(_error_of(record.message, self.request.request_id))
            return
        if record.end is _ABORT:
            # Nobody here asked for it.
            self.notes.failure = record.message or "the engine closed the channel"
            self.interrupt.set()
            return
        if record.stats is not None:
            self.notes.engine_stats(record.stats, ended=record.end is not None)
            if self.request.params.ranked and record.end is None:
                return  # it says how much is generated, and nothing else
        tokens = tuple(record.token_ids)
        if record.sequence in self.unwanted:
            if not record.final:
                return
            tokens = ()
        self.moving = False
        if self.model is None and model is not None:
            self.model, self.fingerprint = model, model.fingerprint
        if self.cached_tokens is None:
            self.cached_tokens = record.cached_tokens
        output = self.outputs[record.sequence]
        index = len(output)
        output.extend(tokens)
        self.finished[record.sequence] = record.end is not None
        if record.final and not all(self.finished):
            self.fail(GenerationError("the engine ended the request before all of its sequences"))
            return
        self.deltas.put(
            Delta(
                tokens,
                record.end.value if record.end is not None else None,
                self.cached_tokens,
                index,
                record.sequence,
                record.final,
                self.fingerprint,
                None if record.logprobs is None else tuple(record.logprobs),
                record.prompt_logprobs,
            )
        )
        if record.final:
            self.ended = self.complete = True
            self.interrupt.set()

    def fail(self, error: QuireError) -> None:
        """End the request with an error, unless it has ended."""
        if not self.ended:
            self.ended = True
            self.deltas.fail(error)
            self.interrupt.set()

    def on_runner_done(self, runner: asyncio.Task[None]) -> None:
        """End the request if it has not ended: nothing else would."""
        self.runner = None  # its error refers to this request, which would refer to itself
        error = None if runner.cancelled() else runner.exception()
        if error is not None:
            logger.error("request %s failed in the ingress", self.request.request_id, exc_info=error)
        self.fail(GenerationError("an internal error ended this request; the server's log has details"))


def _error_of(message: str, request_id: str) -> QuireError:
    """The client's error for an engine's ``message`` about a failed request."""
    if message.startswith(COMPUTATION):  # the text of any error: it may name paths of the server
        logger.error("request %s has failed: %s", request_id, message)
        return GenerationError(f"{message.partition(':')[0]}; the server's log says why")
    if message.startswith(FORM_FAILED):  # sent again, it would fail again
        return InvalidRequestError(message, "structured_output", "invalid_grammar")
    return GenerationError(message or "the engine failed to compute the request")
