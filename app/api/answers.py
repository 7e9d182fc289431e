"""Whole answers, put together from their deltas."""

from __future__ import annotations

from dataclasses import dataclass

from app.api.choices import TextDelta


@dataclass(slots=True)
class CalledTool:
    """A call of a tool in an answer; ``arguments`` is JSON text, which may be cut short by ``max_tokens``."""

    id: str
    name: str
    arguments: str = ""


class Answer:
    """One choice of a response that is not streamed."""

    __slots__ = ("_reasoning", "_texts", "calls", "fingerprint", "finish_reason", "stop")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[CalledTool] = []
        self.finish_reason = ""
        self.fingerprint = ""
        self.stop: str | None = None  # the stop string that ended it

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """What the model wrote before."""
        return "".join(self._reasoning)

    def add(self, delta: TextDelta) -> None:
        """The next delta of the choice."""
        self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.call is not None:
            if delta.call.index == len(self.calls):
                self.calls.append(CalledTool(delta.call.id, delta.call.name))
            self.calls[delta.call.index].arguments += delta.call.arguments
        self.fingerprint = delta.fingerprint
        self.finish_reason = delta.finish_reason or ""
        self.stop = delta.stop
