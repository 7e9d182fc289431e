"""Prompts and outputs that came and went: their totals, and what they let expect of the next ones."""

from __future__ import annotations

from engine.request import FinishReason, Request

KEPT = 64
"""About so many of the last ones count in what is learned."""

FIRST_OUTPUT = 256.0
"""Tokens that an output is taken to have before any has ended."""


class Traffic:
    """Belongs to one scheduler; every call is O(1).

    ``arrived_tokens`` estimates, as a request comes, the prompt tokens that it has to compute: those that its
    prefix spares it are known only once it runs, but then an engine that is behind would report its own pace
    for that of its clients.
    """

    def __init__(self) -> None:
        self.arrived_tokens = 0.0  # expected to be computed, of all requests that ever came
        self.prompt_tokens = 0  # of admitted requests
        self.query_tokens = 0  # of those, looked up
        self.hit_tokens = 0  # of those, found
        self._looked_up = self._found = 0.0  # lately
        self._length, self._square = FIRST_OUTPUT, 2.0 * FIRST_OUTPUT**2
        self._outputs = 1

    @property
    def remaining_output(self) -> float:
        """Tokens that a sequence which runs at some moment still gets, on average.

        Half of them if all outputs are equally long; more the more they differ, since at any moment long ones
        are over-represented.
        """
        return self._square / (2.0 * self._length)

    def came(self, request: Request) -> None:
        """A request has been queued."""
        share = 1.0 - self._found / self._looked_up if self._looked_up else 1.0
        outputs = sum(len(output) for output in request.outputs or () if output is not None)
        self.arrived_tokens += share * (len(request.token_ids) + outputs)

    def admitted(self, request: Request, prefix_caching: bool) -> None:
        """A request runs for the first time."""
        tokens, found = request.num_prompt_tokens, request.cached_tokens or 0
        self.prompt_tokens += tokens
        if not prefix_caching:
            return
        self.query_tokens += tokens
        self.hit_tokens += found
        kept = 1.0 - 1.0 / KEPT
        self._looked_up = kept * self._looked_up + tokens
        self._found = kept * self._found + found

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A sequence has ended; what clients or errors cut short says nothing of lengths."""
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        length = float(max(request.num_generated, 1))
        self._outputs = min(self._outputs + 1, KEPT)
        self._length += (length - self._length) / self._outputs
        self._square += (length**2 - self._square) / self._outputs
