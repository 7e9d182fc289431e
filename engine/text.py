"""Token ids to text, one token at a time: never part of a character, never text past a stop string.

Each token is decoded once, to its bytes; joining bytes is exact. Decoding a sliding window of tokens is not: a
character may span any number of tokens, and a token may have parts of two characters.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer

from engine.errors import ConfigError

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""What the tokenizers' step ByteFallback takes for a byte, a sign included."""


class Detokenizer(Protocol):
    """Turns the tokens of one output into text as they arrive."""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """The end of the output: an incomplete character becomes U+FFFD."""


class TextDecoder:
    """The bytes or text of one model's tokens, shared by all outputs; used on the event loop's thread.

    Two kinds of tokenizer are supported: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), whose tokens are bytes,
    and SentencePiece-like (Llama 2, Mistral), whose tokens are text or single bytes.

    Raises:
        ConfigError: the tokenizer is of another kind.
    """

    def __init__(self, backend: Tokenizer) -> None:
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        self._backend = backend
        added = backend.get_added_tokens_decoder().items()
        self._special = {i: token.content for i, token in added if token.special}
        self._pieces: dict[int, bytes] = {}
        self._byte_level = kinds == ["ByteLevel"]
        self._has_bytes = "ByteFallback" in kinds
        self._space = ""
        self._strips_first_space = False
        if not self._byte_level:
            for step in steps:
                self._read_step(step)

    def _read_step(self, step: dict[str, object]) -> None:
        pattern = step.get("pattern")
        if step["type"] == "Replace" and isinstance(pattern, dict) and step.get("content") == " ":
            self._space = str(pattern.get("String", ""))
        elif step["type"] == "Metaspace":
            self._space = str(step["replacement"])
            self._strips_first_space = step.get("prepend_scheme") != "never"
        elif step["type"] == "Strip" and step.get("content") == " " and not step.get("stop"):
            self._strips_first_space = bool(step.get("start"))
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise ConfigError(
                f"the tokenizer's decoder {step['type']!r} is not supported; byte-level BPE and "
                "SentencePiece-like tokenizers are"
            )

    def detokenizer(self, *, continues_text: bool, shown: Collection[str] = ()) -> Detokenizer:
        """A detokenizer for one output; ``continues_text`` keeps the first token's space.

        Special tokens have no text, apart from those named in ``shown``.
        """
        names = {self._backend.token_to_id(name): name for name in shown}

        def byte_level_piece(token_id: int) -> bytes:
            return names[token_id].encode() if token_id in names else self._byte_level_piece(token_id)

        def text_piece(token_id: int) -> str | int:
            return names[token_id] if token_id in names else self._text_piece(token_id)

        if self._byte_level:
            return _ByteLevelDetokenizer(byte_level_piece if names else self._byte_level_piece)
        return _SentencePieceDetokenizer(
            text_piece if names else self._text_piece,
            strip_space=self._strips_first_space and not continues_text,
        )

    @property
    def special_names(self) -> Collection[str]:
        """The special tokens, which have no text unless they are ``shown``."""
        return self._special.values()

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes, with the space at its beginning; of a special token its name."""
        name = self._special.get(token_id)
        if name is not None:
            return name.encode()
        if self._byte_level:
            return self._byte_level_piece(token_id)
        piece = self._text_piece(token_id)
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def _byte_level_piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = "" if token_id in self._special else self._backend.id_to_token(token_id) or ""
            try:
                piece = bytes([_BYTE_OF[char] for char in token])
            except KeyError:  # an added token: plain text
                piece = token.encode("utf-8")
            self._pieces[token_id] = piece
        return piece

    def _text_piece(self, token_id: int) -> str | int:
        """A token's text, or its value if it stands for one byte."""
        token = "" if token_id in self._special else self._backend.id_to_token(token_id) or ""
        if self._has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return int(byte[1], 16)
        return token.replace(self._space, " ") if self._space else token


class _ByteLevelDetokenizer:
    """Tokens are bytes; invalid UTF-8 is decoded as the tokenizer itself does."""

    def __init__(self, piece_of: Callable[[int], bytes]) -> None:
        self._piece_of = piece_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._piece_of(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class _SentencePieceDetokenizer:
    """Tokens are text, or single bytes where the vocabulary has no text.

    Bytes that form no character come out as one U+FFFD each, as in the tokenizer's own decode. That one also
    replaces valid characters before them in an unbroken row of byte tokens; here these stay readable, since
    they have been sent already.
    """

    def __init__(self, piece_of: Callable[[int], str | int], strip_space: bool) -> None:
        self._piece_of = piece_of
        self._strip_space = strip_space
        self._bytes = bytearray()  # of one incomplete character

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece == "":  # a special token has no text
            return ""
        text = self._push_byte(piece) if isinstance(piece, int) else self.flush() + piece
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text

    def _push_byte(self, byte: int) -> str:
        self._bytes.append(byte)
        try:
            text = self._bytes.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            text = REPLACEMENT * len(self._bytes)
        self._bytes.clear()
        return text

    def flush(self) -> str:
        text = REPLACEMENT * len(self._bytes)
        self._bytes.clear()
        return text


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, however it is split.

    The match that completes first counts; of matches that end together, the longest. Text that may be the
    beginning of a stop string is held back. With ``include`` the match is shown, too. Knuth-Morris-Pratt per
    string: constant time per character.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._stops = [(stop, failure_table(stop)) for stop in stops]
        self._first = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)  # characters of each stop string at the end of the text
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def push(self, text: str) -> str:
        """The text that can be shown now; empty after a match."""
        if self.stopped:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            match_length = self._advance(text[end])
            if match_length:
                begin = end + 1 - match_length
                self.found = text[begin : end + 1]
                self._held = ""
                return text[: end + 1 if self._include else begin]
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep]

    def _advance(self, char: str) -> int:
        longest = 0
        for i, (stop, failure) in enumerate(self._stops):
            k = self._matched[i]
            while k and stop[k] != char:
                k = failure[k - 1]
            if stop[k] == char:
                k += 1
            if k == len(stop):
                longest = max(longest, k)
                k = 0
            self._matched[i] = k
        return longest

    def flush(self) -> str:
        """The end of the output: returns the text that was held back."""
        text, self._held = self._held, ""
        return text


class OutputText:
    """The text of one output: detokenizes, stops, and counts the generated tokens.

    A stop string counts only if a token after the first ``min_tokens`` completes it and it begins after them.
    With ``include_stop`` the stop string, or the text of the token that ends the output, is shown.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0  # generated, including tokens without text

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the rest of the output is discarded."""
        return self.stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return None if self._matcher is None else self._matcher.found

    def push(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """The text to show for ``token_ids``.

        With ``finish_reason`` "stop" the last token is the one that ended the output and is not shown, unless
        asked for; with any reason the output is complete.
        """
        if finish_reason is None and self._matcher is None and len(token_ids) == 1:  # nearly always
            self.num_tokens += 1
            return self._detokenizer.push(token_ids[0])
        hidden = 1 if finish_reason == "stop" and token_ids and not self._include_stop else 0
        shown = self._push(token_ids[: len(token_ids) - hidden])
        if self.stopped:
            return shown
        self.num_tokens += hidden
        return shown if finish_reason is None else shown + self._flush()

    def _push(self, token_ids: Iterable[int]) -> str:
        texts: list[str] = []
        for token_id in token_ids:
            self.num_tokens += 1
            text = self._detokenizer.push(token_id)
            if self._matcher is not None and self.num_tokens > self._min_tokens:
                text = self._matcher.push(text)
                texts.append(text)
                if self._matcher.stopped:
                    break
            else:
                texts.append(text)
        return "".join(texts)

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        return text if self._matcher is None else self._matcher.push(text) + self._matcher.flush()


@lru_cache(maxsize=128)
def failure_table(stop: str) -> Sequence[int]:
    """For each prefix of ``stop``, the length of its longest proper suffix that is also a prefix.

    Kept, because all choices of a request look for the same strings.
    """
    table = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = table[k - 1]
        if stop[i] == stop[k]:
            k += 1
        table[i] = k
    return table


def _decoder_steps(backend: Tokenizer) -> list[dict[str, object]]:
    if backend.decoder is None:
        raise ConfigError("the tokenizer has no decoder, so its tokens cannot be shown as text")
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return list(steps)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
