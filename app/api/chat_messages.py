"""The messages of a chat, as OpenAI's chat route has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.api.json_fields import check_names, name_hint, one_of, text, texts_in, with_texts, wrong
from engine.errors import InvalidRequestError

MAX_MESSAGES = 10_000
MAX_CALLS = 128
"""Calls of tools in one message."""

OUTPUT_ONLY = frozenset(
    {"refusal", "annotations", "audio", "reasoning", "reasoning_content", "provider_specific_fields"}
)
"""Fields of an assistant's message that servers send. Clients send them back as they came; all but
``reasoning_content`` are ignored."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_OF_ROLE = {"assistant": OUTPUT_ONLY | {"tool_calls"}, "tool": frozenset({"tool_call_id"})}
"""Fields besides those that every message may have."""

_MAY_BE_EMPTY = ("assistant", "tool")


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a message that is text: the field that has it, and those that have no effect."""

    field: str
    unused: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """All but ``type``."""
        return (self.field, *self.unused)


TEXT_PARTS = {"text": TextPart("text", ("cache_control", "citations", "prompt_cache_breakpoint"))}
"""The parts that the content of a message may have, by their types."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an assistant's message.

    ``arguments`` is JSON text, or what the model wrote instead; a template that knows tools gets the value.
    """

    id: str
    name: str
    arguments: str | dict[str, Any]

    @property
    def texts(self) -> list[str]:
        """All that the client wrote."""
        return [self.id, self.name, *texts_in(self.arguments)]

    def changed(self, change: Callable[[str], str]) -> ToolCall:
        """A copy with ``change`` applied to each of its texts."""
        return ToolCall(change(self.id), change(self.name), with_texts(self.arguments, change))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; a list of text parts has been joined by newlines."""

    role: str  # system, user, assistant or tool
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str = ""  # of a tool: the call that it answers
    name: str = ""  # of a tool
    reasoning: str = ""  # of the assistant

    @property
    def texts(self) -> list[str]:
        """All that the client wrote, and the template may write into the prompt."""
        calls = [text for call in self.tool_calls for text in call.texts]
        return [self.content, self.tool_call_id, self.name, self.reasoning, *calls]

    @property
    def chars(self) -> int:
        """The length of what the template certainly writes, more or less."""
        return len(self.content) + sum(len(call.arguments) for call in self.tool_calls)

    def changed(self, change: Callable[[str], str]) -> ChatMessage:
        """A copy with ``change`` applied to each of its texts."""
        return replace(
            self,
            content=change(self.content),
            tool_calls=tuple(call.changed(change) for call in self.tool_calls),
            tool_call_id=change(self.tool_call_id),
            name=change(self.name),
            reasoning=change(self.reasoning),
        )


def parse_messages(messages: object) -> list[ChatMessage]:
    """Check the field ``messages``; raises ``InvalidRequestError`` that names the part that is wrong."""
    return [_message(message, i) for i, message in enumerate(listed(messages, "messages"))]


def listed(given: object, name: str, must_be: str = "a list of at least 1") -> list[Any]:
    """The field ``name``, which has the messages of a request, as a list of 1 to ``MAX_MESSAGES`` entries.

    Raises:
        InvalidRequestError: it is none.
    """
    if not isinstance(given, list) or not given:
        raise wrong(name, given, must_be)
    if len(given) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"{name} has {len(given)} entries but at most {MAX_MESSAGES} are allowed", name
        )
    return given


def joined_text(
    content: object, name: str, kinds: Mapping[str, TextPart] = TEXT_PARTS, *, param: str | None = None
) -> str:
    """Content as text: a string, or parts of ``kinds``, joined by newlines.

    Args:
        kinds: what a part may be, by its type.
        param: the field to blame, if it is not the part.

    Raises:
        InvalidRequestError: it is neither; names the part.
    """
    if isinstance(content, str):
        return text(content, name, param)
    if not isinstance(content, list):
        raise wrong(name, content, "a string or a list of text parts", param)
    texts: list[str] = []
    fields = {kind: part.fields for kind, part in kinds.items()}
    for i, part in enumerate(content):
        found = one_of(part, f"{name}[{i}]", fields)
        key = kinds[found["type"]].field
        texts.append(text(found.get(key), f"{name}[{i}].{key}", param))
    return "\n".join(texts)


def _message(message: object, index: int) -> ChatMessage:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise wrong(name, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    own = _OF_ROLE.get(role, frozenset())
    for key, value in message.items():
        if key in ("role", "content", "name") or key in own:
            continue
        if value not in (None, [], ""):
            hint = name_hint(key, ("role", "content", "name", *own))
            raise InvalidRequestError(
                f"{name}.{key[:64]} is not supported{hint}", f"{name}.{key[:64]}", "unsupported_parameter"
            )
    if message.get("name") is not None:
        text(message["name"], f"{name}.name")
    content = message.get("content")
    if role == "assistant" and content is None:  # of an answer that was all calls, refusal, or reasoning
        content = ""
    if content == [] and role not in _MAY_BE_EMPTY:
        raise wrong(f"{name}.content", content, "a string or a list of text parts")
    found = ChatMessage(ROLES[role], joined_text(content, f"{name}.content"))
    if role == "tool":
        call = text(message.get("tool_call_id"), f"{name}.tool_call_id")
        return replace(found, tool_call_id=call, name=message.get("name") or "")
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        return replace(
            found,
            tool_calls=_tool_calls(message.get("tool_calls"), f"{name}.tool_calls"),
            reasoning=text(reasoning, f"{name}.reasoning_content") if isinstance(reasoning, str) else "",
        )
    return found


def _tool_calls(calls: object, name: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise wrong(name, calls, "a list of calls")
    if len(calls) > MAX_CALLS:
        raise InvalidRequestError(f"{name} has {len(calls)} entries but at most {MAX_CALLS} are allowed", name)
    return tuple(_tool_call(call, f"{name}[{i}]") for i, call in enumerate(calls))


def _tool_call(call: object, name: str) -> ToolCall:
    if not isinstance(call, dict) or call.get("type") not in (None, "function"):
        raise wrong(name, call, "a call of type 'function'")
    check_names(call, name, ("id", "type", "function"))
    function: Any = call.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{name}.function", function, "an object with name and arguments")
    check_names(function, f"{name}.function", ("name", "arguments"))
    return ToolCall(
        text(call.get("id"), f"{name}.id"),
        text(function.get("name"), f"{name}.function.name"),
        text(function.get("arguments"), f"{name}.function.arguments"),
    )
