"""Prompts and messages to token ids: chat template and tokenizer, in a thread if the text is long."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer

from app.api.bounded_template import TemplateTimeoutError
from app.api.chat_messages import ChatMessage
from app.api.chat_template import OWN_VARIABLES, RENDER_CPU_S, ChatTemplate
from app.api.errors import show
from app.api.fair_threads import FairThreads
from app.api.output_options import DEFAULT_TEMPLATE, TemplateOptions
from app.api.prefix_token_cache import PrefixTokenCache
from app.api.tokenizer_parts import TokenizerParts
from app.api.tools.conversation import plain_turns, turns, with_values
from app.api.tools.families import ModelFamily
from app.api.tools.tool_use import NO_TOOLS, Tool, ToolUse
from engine.errors import ConfigError, InvalidRequestError, one_line
from engine.template_errors import TEMPLATE_ERRORS
from engine.text import TextDecoder
from engine.tokenizer import reading_text

INLINE_CHARS = 2000
"""Texts up to this length are tokenized on the event loop, in under a millisecond; longer ones in a thread."""

MAX_THREADS = 4
"""Texts tokenized at the same time; the tokenizer releases the interpreter lock, so each takes a core."""

MESSAGE_CHARS = 50
"""Rendering a message costs as much as tokenizing this many characters."""

_TRIAL = "A system message."

INLINE_CPU_S = 0.005
"""Processor time for a rendering on the event loop; one that takes longer begins again in a thread."""

THREAD_CPU_S = 0.1
"""The same in the threads that tokenize; one that takes longer begins again in a thread for such alone."""

CUT_TOKENS = 64
"""Tokens at the beginning of a text that was cut off, which may differ from those of the whole text."""

_PRIVATE_USE = [chr(code) for code in range(0xE000, 0xF900)]

T = TypeVar("T")


class RenderLimits(NamedTuple):
    """How long one rendering of the template may take; see :meth:`ChatTemplate.render`."""

    cpu_s: float
    gives_way: bool


class PromptTokenizer:
    """One model's tokenizer, for any number of concurrent requests.

    Methods that take text also take ``max_tokens``, the maximum length of a sequence: text that certainly
    exceeds it is refused before it is tokenized. Where only the last ``keep`` tokens count, and these are no
    more than that, text of any length is taken, and only its end is tokenized.

    Raises:
        ConfigError: tokenizers of this kind are not supported, or this one does not work.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._template: ChatTemplate | None = None
        if parts.chat_template is not None:
            self._template = ChatTemplate(parts.chat_template, parts.special_tokens)
        self._backend = _whole(parts.backend)
        self._plain = _whole(parts.backend)
        self._plain.encode_special_tokens = True  # it reads special tokens' names as ordinary text
        self._longest_token = max([1, *map(len, self._backend.get_vocab(with_added_tokens=True))])
        self._bos: tuple[str, int] | None = None
        bos = parts.special_tokens.get("bos_token")
        bos_id = None if bos is None else self._backend.token_to_id(bos)
        if bos is not None and bos_id is not None:
            self._bos = (bos, bos_id)
        added = self._backend.get_added_tokens_decoder().items()
        specials = [(i, token) for i, token in added if token.special and token.content]
        specials.sort(key=lambda entry: -len(entry[1].content))
        self._special_ids = {token.content.strip(): i for i, token in specials}
        self._special_name = _any_of([re.escape(token.content) for _, token in specials])
        self._special_token = _any_of(
            [r"\s*" * t.lstrip + re.escape(t.content) + r"\s*" * t.rstrip for _, t in specials]
        )
        self._not_for_requests = {*OWN_VARIABLES, *parts.special_tokens}
        self._first_chars = {token.content[0] for _, token in specials}
        self.template = parts.chat_template or ""
        self._family = ModelFamily.of(self.template)
        # Placeholders for those characters must not occur in a special token's name or in the template.
        self._reserved = set(self.template).union(*(token.content for _, token in specials))
        self.prefix_tokens = PrefixTokenCache(self._encode, self._special_token)
        self._threads = FairThreads(MAX_THREADS, "tokenizer")
        self._slow = FairThreads(1, "slow-template")
        self.decoder = TextDecoder(self._backend)

    def warm_up(self) -> None:
        """Do what the first request would wait for otherwise."""
        if self._template is not None:
            self._template.compile()
        self._encode(" ")
        _ = self._trial

    @property
    def takes_system_messages(self) -> bool:
        """Whether the model's template writes them; false until it has been tried."""
        return self._trial.done() and self._trial.result()

    @cached_property
    def _trial(self) -> Future[bool]:
        """In a thread, as the template comes with the model and may take its whole time."""
        return self._slow.submit("", self._writes_system_messages)

    def _writes_system_messages(self) -> bool:
        if self._template is None:
            return False
        turns = [{"role": "system", "content": _TRIAL}, {"role": "user", "content": "Hello"}]
        try:
            return _TRIAL in self._template.render(turns, cpu_s=RENDER_CPU_S, gives_way=True)
        except TEMPLATE_ERRORS:
            return False

    async def encode_texts(
        self,
        texts: Sequence[str],
        max_tokens: int,
        add_special_tokens: bool = True,
        keep: int | None = None,
        *,
        sender: str = "",
    ) -> list[list[int]]:
        """Raw prompts: special tokens written in the text are recognized; the tokenizer adds BOS once.

        ``sender`` is who the prompts are from, here and in what follows: each has its turn in the threads.
        """
        texts = [self._counting_end(text, max_tokens, keep, "prompt") for text in texts]
        encode = self._encode_raw if add_special_tokens else self._encode
        return await self._run(sum(map(len, texts)), lambda: [encode(text) for text in texts], sender)

    async def decode(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        name: str = "tokens",
        param: str = "tokens",
        first: int = 0,
        *,
        sender: str = "",
    ) -> str:
        """The text of at most ``max_tokens`` tokens, with the names of special tokens.

        Errors call them ``name``, of the field ``param``, and the first of them ``name[first]``.

        Raises:
            InvalidRequestError: they are more, or one is not in the vocabulary.
        """
        if len(tokens) > max_tokens:
            raise InvalidRequestError(
                f"{len(tokens)} tokens exceed the context length of {max_tokens} tokens",
                param,
                "context_length_exceeded",
            )
        return await self._run(len(tokens), lambda: self._decode(tokens, name, param, first), sender)

    async def names(self, tokens: Sequence[int], *, sender: str = "") -> list[str]:
        """The vocabulary's entry of each token."""
        name = self._backend.id_to_token
        return await self._run(len(tokens), lambda: [str(name(token)) for token in tokens], sender)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        max_tokens: int,
        owner: Hashable = None,
        use: ToolUse = NO_TOOLS,
        options: TemplateOptions = DEFAULT_TEMPLATE,
        keep: int | None = None,
        *,
        sender: str = "",
    ) -> list[int]:
        """Messages and tools through the chat template, up to the beginning of the assistant's turn.

        ``options`` may have the last message continued instead, and set variables of the template.

        Only requests of the same ``owner`` share cached tokens. Names of special tokens inside messages and
        tools are ordinary text, so no message can end its turn or begin another.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the messages or takes
                more than ``RENDER_CPU_S``, or they name special tokens and use up the private-use characters.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", "messages")
        cut = keep is not None and keep <= max_tokens
        if len(messages) > max_tokens and not cut:  # a template writes at least one token for each
            raise InvalidRequestError(
                f"{len(messages)} messages exceed the context length of {max_tokens} tokens",
                "messages",
                "context_length_exceeded",
            )
        length = sum(message.chars for message in messages)
        if not cut:
            self._check_length(length, max_tokens, "messages")
        work = length + use.chars + MESSAGE_CHARS * len(messages)
        if work <= INLINE_CHARS:  # so the messages are few; a template may write more than it must
            texts = [text for message in messages for text in message.texts]
            texts += [value for _, value in options.variables if isinstance(value, str)]
            work += sum(map(len, texts)) - length
        self._check_variables(options)
        encode = partial(self._encode_messages, messages, use.tools, owner, options, max_tokens, keep)
        cpu_s = INLINE_CPU_S if work <= INLINE_CHARS else THREAD_CPU_S
        try:
            limits = RenderLimits(cpu_s, gives_way=work > INLINE_CHARS)
            return await self._run(work, partial(encode, limits), sender)
        except TemplateTimeoutError:
            pass
        try:
            begin_again = partial(encode, RenderLimits(RENDER_CPU_S, gives_way=True))
            return await self._slow.run(sender, begin_again)
        except TemplateTimeoutError as error:
            raise _refused(error) from error

    async def encode_words(self, words: Sequence[str], *, sender: str = "") -> tuple[tuple[int, ...], ...]:
        """The tokens of each of ``words``, and of each after a space, where they differ."""
        spellings = [spelling for word in words for spelling in (word, f" {word}")]
        encoded = await self._run(
            sum(map(len, spellings)), lambda: [tuple(self._encode(spelling)) for spelling in spellings], sender
        )
        return tuple(dict.fromkeys(filter(None, encoded)))

    def _check_variables(self, options: TemplateOptions) -> None:
        name = "chat_template_kwargs"
        for key, value in options.variables:
            if key in self._not_for_requests:
                raise InvalidRequestError(f"{name} has {show(key)}, which requests may not set", name)
            if isinstance(value, str) and self._special_name is not None and self._special_name.search(value):
                raise InvalidRequestError(f"{name}.{key[:64]} names a special token", name)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens of the vocabulary, special tokens included."""
        with reading_text("tokens"):
            return str(self._backend.decode(tokens, skip_special_tokens=False))

    def words_of(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens of the vocabulary, without special tokens."""
        with reading_text("tokens"):
            return str(self._backend.decode(tokens))

    def _counting_end(self, text: str, max_tokens: int, keep: int | None, param: str) -> str:
        """``text``, or, where only its last ``keep`` tokens count, an end that certainly has more."""
        if keep is not None and keep <= max_tokens:
            return text[-(keep + CUT_TOKENS) * self._longest_token :]
        self._check_length(len(text), max_tokens, param)
        return text

    def _check_length(self, chars: int, max_tokens: int, param: str) -> None:
        least = -(-chars // self._longest_token)
        if least > max_tokens:
            raise InvalidRequestError(
                f"{param} of {chars} characters, at least {least} tokens, exceeds the context length of "
                f"{max_tokens} tokens",
                param,
                "context_length_exceeded",
            )

    def _decode(self, tokens: Sequence[int], name: str, param: str, first: int) -> str:
        for i, token in enumerate(tokens, first):
            if not 0 <= token < 2**32 or self._backend.id_to_token(token) is None:
                raise InvalidRequestError(f"{name}[{i}] is {show(token)} but is not in the vocabulary", param)
        return self.text_of(tokens)

    async def _run(self, chars: int, encode: Callable[[], T], sender: str) -> T:
        return encode() if chars <= INLINE_CHARS else await self._threads.run(sender, encode)

    def _encode_raw(self, text: str) -> list[int]:
        ids = _ids(self._backend, text, add_special_tokens=True)
        if self._bos is not None and text.startswith(self._bos[0]) and ids[:2] == [self._bos[1]] * 2:
            return ids[1:]
        return ids

    def _encode_messages(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        owner: Hashable,
        options: TemplateOptions,
        max_tokens: int,
        keep: int | None,
        limits: RenderLimits,
    ) -> list[int]:
        if self._family.template_knows_tools:
            messages = with_values(messages)
        texts = [text for message in messages for text in message.texts]
        texts += [text for tool in tools for text in tool.texts]
        named = self._special_name
        if named is None or not any(map(named.search, texts)):
            text, first = self._render(messages, tools, options, limits)
            end = self._counting_end(text, max_tokens, keep, "messages")
            whole = len(end) == len(text)
            return self.prefix_tokens.encode(text, first, owner) if whole else self._encode(end)
        placeholders = self._placeholders(texts)

        def mask(text: str) -> str:
            return _masked(named, text, placeholders)

        masked = [message.changed(mask) for message in messages]
        text, _ = self._render(masked, [tool.changed(mask) for tool in tools], options, limits)
        return self._encode_masked(self._counting_end(text, max_tokens, keep, "messages"), placeholders)

    def _encode(self, text: str) -> list[int]:
        return _ids(self._backend, text)

    def _placeholders(self, contents: Sequence[str]) -> dict[str, str]:
        """For each first character of a special token's name, a character that occurs nowhere else."""
        used = self._reserved.union(*contents)
        free = [char for char in _PRIVATE_USE if char not in used]
        if len(free) < len(self._first_chars):
            raise InvalidRequestError(
                f"messages that name special tokens must leave {len(self._first_chars)} of the "
                f"{len(_PRIVATE_USE)} private-use characters unused (U+E000 to U+F8FF)",
                "messages",
            )
        return dict(zip(sorted(self._first_chars), free, strict=False))

    def _encode_masked(self, text: str, placeholders: dict[str, str]) -> list[int]:
        """Tokenize a rendered template in which the special tokens' names from messages are masked."""
        assert self._special_token is not None
        restored = str.maketrans({placeholder: char for char, placeholder in placeholders.items()})
        ids: list[int] = []
        begin = 0
        for match in self._special_token.finditer(text):
            ids += self._encode_plain(text[begin : match.start()].translate(restored))
            ids.append(self._special_ids[match.group().strip()])
            begin = match.end()
        return ids + self._encode_plain(text[begin:].translate(restored))

    def _encode_plain(self, text: str) -> list[int]:
        return _ids(self._plain, text) if text else []

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        options: TemplateOptions,
        limits: RenderLimits,
    ) -> tuple[str, str]:
        """The prompt, and the content of its first turn."""
        if self._family.template_knows_tools:
            short_ids = self._family.tool_parser == "mistral"
            return self._applied(turns(messages, short_ids=short_ids), options, limits, tools)
        try:
            return self._applied(plain_turns(messages, tools, "system"), options, limits)
        except InvalidRequestError:  # some templates refuse system messages
            if not tools:
                raise
            return self._applied(plain_turns(messages, tools, "user"), options, limits)

    def _applied(
        self,
        turns: list[dict[str, Any]],
        options: TemplateOptions,
        limits: RenderLimits,
        tools: Sequence[Tool] = (),
    ) -> tuple[str, str]:
        described = [tool.to_dict() for tool in tools] or None
        assert self._template is not None
        try:
            text = self._template.render(
                turns,
                described,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                variables=dict(options.variables),
                cpu_s=limits.cpu_s,
                gives_way=limits.gives_way,
            )
        except TemplateTimeoutError:
            raise
        except TEMPLATE_ERRORS as error:
            raise _refused(error) from error
        return text, turns[0]["content"]


def _refused(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's chat template rejects these messages: {one_line(error)}",
        "messages",
        "chat_template_error",
    )


def _whole(backend: str) -> Tokenizer:
    """A tokenizer that cuts nothing off and adds nothing.

    Raises:
        ConfigError: it cannot be read, or it cannot encode a space, so hardly any text.
    """
    fault = "its file cannot be read"
    try:
        with reading_text("file"):
            tokenizer = Tokenizer.from_str(backend)
            tokenizer.no_truncation()
            tokenizer.no_padding()
        fault = "a space cannot be encoded"
        _ids(tokenizer, " ")
    except InvalidRequestError as error:
        raise ConfigError(f"{fault}: {error.message}") from error
    return tokenizer


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    with reading_text("text"):
        # encode_batch_fast releases the interpreter lock; encode does not.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


def _any_of(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(patterns)) if patterns else None


def _masked(named: re.Pattern[str], text: str, placeholders: dict[str, str]) -> str:
    """``text`` with the first character of each special token's name replaced, even where names overlap."""
    while named.search(text):
        text = named.sub(lambda match: placeholders[match.group()[0]] + match.group()[1:], text)
    return text
