"""Totals of the prompts and outputs so far, and what they predict for the next ones."""

from __future__ import annotations

from engine.request import FinishReason, Request
from engine.scheduling.fair_queue import OUTPUT_WEIGHT
from engine.scheduling.sequence import Sequence
from engine.scheduling.slot_ends import OutputLengths

WINDOW = 64
"""Roughly how many of the latest requests the averages remember."""

FIRST_OUTPUT = 256.0
"""Tokens of an output, as long as none has ended."""


class WorkloadStats:
    """Belongs to one scheduler; every call is O(1). Each length also goes to ``lengths``.

    ``arrived_tokens`` estimates, when a request arrives, the prompt tokens that it has to compute. The hit is
    known only once the request runs, but then an engine that lags behind would report its own pace as that of
    its clients.
    """

    def __init__(self, lengths: OutputLengths | None = None) -> None:
        self._lengths = OutputLengths() if lengths is None else lengths
        self.arrived_tokens = 0.0  # prompt tokens to compute, estimated, of all requests so far
        self.prompt_tokens = 0  # of admitted requests
        self.query_tokens = 0  # of these, looked up in the prefix index
        self.hit_tokens = 0  # of these, found there
        self._recent_queries = self._recent_hits = 0.0  # tokens, fading
        self._mean_output, self._mean_square = FIRST_OUTPUT, 2.0 * FIRST_OUTPUT**2
        self._outputs = 1

    @property
    def remaining_output(self) -> float:
        """Tokens that a running sequence will still generate, on average.

        Half of an output if all are equally long; more the more they differ, since long ones are
        over-represented among the running at any moment.
        """
        return self._mean_square / (2.0 * self._mean_output)

    def expected_work(self, request: Request, max_total_tokens: int) -> float:
        """What a request will come to, in prompt tokens; generated ones weigh ``OUTPUT_WEIGHT``."""
        live = [len(output) for output in request.outputs if output is not None] or [0] * request.params.width
        room = max_total_tokens - len(request.token_ids)
        output = sum(min(room - made, self._mean_output) for made in live)
        return self._expected_prefill(request) + OUTPUT_WEIGHT * output

    def arrived(self, request: Request) -> None:
        """A request has been queued."""
        self.arrived_tokens += self._expected_prefill(request)

    def _expected_prefill(self, request: Request) -> float:
        miss_rate = 1.0 - self._recent_hits / self._recent_queries if self._recent_queries else 1.0
        outputs = sum(len(output) for output in request.outputs if output is not None)
        return miss_rate * (len(request.token_ids) + outputs)

    def admitted(self, sequence: Sequence, prefix_caching: bool) -> None:
        """A sequence runs for the first time."""
        tokens, hit = sequence.num_prompt_tokens, sequence.cached_tokens or 0
        self.prompt_tokens += tokens
        if not prefix_caching:
            return
        self.query_tokens += tokens
        self.hit_tokens += hit
        decay = 1.0 - 1.0 / WINDOW
        self._recent_queries = decay * self._recent_queries + tokens
        self._recent_hits = decay * self._recent_hits + hit

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended; outputs that clients or errors cut short say nothing of lengths."""
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        length = float(max(sequence.num_generated, 1))
        self._lengths.add(int(length), reason is FinishReason.LENGTH)
        self._outputs = min(self._outputs + 1, WINDOW)
        self._mean_output += (length - self._mean_output) / self._outputs
        self._mean_square += (length**2 - self._mean_square) / self._outputs
