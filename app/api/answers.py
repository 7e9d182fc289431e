"""Answers, put together from their deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from app.api.choices import TextDelta, TokenDetails

Kind: TypeAlias = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer: content, reasoning, or a call, whose text is its arguments.

    Arguments are JSON text, which may be cut short by ``max_tokens``.
    """

    kind: Kind
    id: str = ""  # of a call
    name: str = ""
    details: list[TokenDetails] = field(default_factory=list)  # of the tokens of a text, if known
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        """The text goes on."""
        self._pieces.append(piece)


class Answer:
    """One choice of a response: its blocks in the order of the model's text."""

    __slots__ = ("_details", "_without_text", "blocks", "fingerprint", "finish_reason", "stop")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._details: list[TokenDetails] = []
        self._without_text: list[TokenDetails] = []  # of tokens whose text is still to come
        self.finish_reason = ""
        self.fingerprint = ""
        self.stop: str | None = None  # the stop string that ended it

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """What the model wrote before."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def details(self) -> TokenDetails:
        """What is known of its tokens."""
        return TokenDetails(
            tuple(token for part in self._details for token in part.token_ids),
            tuple(score for part in self._details for score in part.logprobs),
            self._details[0].prompt_logprobs if self._details else None,
            True,
        )

    @property
    def calls(self) -> list[Block]:
        """Its calls of tools."""
        return [block for block in self.blocks if block.kind == "call"]

    def add(self, delta: TextDelta) -> str:
        """The next delta of the choice; returns what it adds to the last block."""
        self.fingerprint = delta.fingerprint
        self.finish_reason = delta.finish_reason or ""
        self.stop = delta.stop
        if delta.call is not None:
            if delta.call.name:
                self.blocks.append(Block("call", delta.call.id, delta.call.name))
            piece = self._add("call", delta.call.arguments)
        else:
            piece = self._add("reasoning", delta.reasoning) or self._add("text", delta.text)
        if delta.details is not None:
            self._details.append(delta.details)
            self._place(delta.details, piece)
        return piece

    def _place(self, details: TokenDetails, piece: str) -> None:
        """Give ``details`` to the text that ``piece``, or the next one, belongs to."""
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.kind != "text":
            self._without_text.clear()
            return
        self._without_text.append(details)
        if block is not None and piece:
            block.details += self._without_text
            self._without_text.clear()

    def _add(self, kind: Kind, piece: str) -> str:
        if piece:
            if not self.blocks or self.blocks[-1].kind != kind:
                self.blocks.append(Block(kind))
            self.blocks[-1].add(piece)
        return piece
