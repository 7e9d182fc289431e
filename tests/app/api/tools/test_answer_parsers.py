"""Calls and reasoning in a model's text: what each family's parser finds, however the text is split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.tools.answer_text import AnswerGrammar, AnswerParser
from app.api.tools.families import TOOL_PARSERS
from app.api.tools.forced import named, required
from app.api.tools.parts import Part
from app.api.tools.reasoning import reasoning

NAMES = frozenset({"get_weather", "add", "a-b"})
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2.5e3, null]}}'
WEATHER = ("get_weather", {"city": "Zürich", "days": [1, 2500.0, None]})
ADD = ("add", {"x": 1})
Joined = tuple[str, str, list[tuple[str, Any]]]


def joined(parts: Sequence[Part]) -> Joined:
    """Content, reasoning and calls; checks that each call begins with its ID and name, one after the other."""
    calls: list[list[str]] = []
    for part in parts:
        assert sum(map(bool, (part.content, part.reasoning, part.call))) == 1
        if part.call is None:
            continue
        if part.call.index == len(calls):
            assert part.call.id.startswith("call_")
            assert not part.call.arguments
            calls.append([part.call.name, ""])
        else:
            assert part.call.index == len(calls) - 1
            assert not part.call.id
            assert not part.call.name
            calls[-1][1] += part.call.arguments
    content = "".join(part.content for part in parts)
    return content, "".join(part.reasoning for part in parts), [(name, text) for name, text in calls]


def parsed(grammars: Sequence[AnswerGrammar], pieces: Sequence[str]) -> Joined:
    parser = AnswerParser(grammars)
    parts = [part for piece in pieces for part in parser.push(piece, ended=False)]
    return joined(parts + parser.push("", ended=True))


def found(grammar: AnswerGrammar, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, with the arguments as values."""
    content, _, calls = parsed([grammar], list(text))
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", "no call <tool> here ", "no call <tool> here ", []),
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
        ("hermes", f"I look.\n<tool_call>{CALL}</tool_call>\n", "I look.", [WEATHER]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [WEATHER, WEATHER]),
        ("hermes", f"<tool_call>{CALL}", "", [WEATHER]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
        ("hermes", '<tool_call>{"arguments": "{\\"x\\": 1}", "name": "add"}</tool_call>', "", [ADD]),
        ("llama3_json", '{"name": "add", "parameters": {"x": 1}}', "", [ADD]),
        ("llama3_json", '\n{"type": "function", "name": "add", "parameters": {"x": 1}}', "", [ADD]),
        ("llama3_json", '{"name": "add", "parameters": {"x": 1}}; {"name": "add"}', "", [ADD, ("add", {})]),
        ("llama3_json", f"<|python_tag|>{CALL}", "", [WEATHER]),
        ("llama3_json", f"The call {CALL}", f"The call {CALL}", []),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
        ("mistral", 'Yes.[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]a-b{}', "Yes.", [ADD, ("a-b", {})]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"x": 1}', "", [ADD]),
        ("pythonic", "[add(x=1)]", "", [ADD]),
        ("pythonic", "<|python_start|>[add(x=1), a-b()]<|python_end|>", "", [ADD, ("a-b", {})]),
        (
            "pythonic",
            "[add(a='it\\'s', b=[True, None, -1.5], c={'k': (1, \"\\u00e9\"),},)]",
            "",
            [("add", {"a": "it's", "b": [True, None, -1.5], "c": {"k": [1, "é"]}})],
        ),
        ("pythonic", "[1, 2]", "[1, 2]", []),
    ],
)
def test_calls_are_found(parser: str, text: str, content: str, calls: list[Any]) -> None:
    assert found(TOOL_PARSERS[parser](NAMES), text) == (content, calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["add"]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": 1'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": "\\uD80'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "no object"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "null"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"x\\": 01}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{} {}"}</tool_call>'),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 100 + "1" + "}" * 101 + "</tool_call>",
        ),
        ("llama3_json", '{"name": "add", "parameters": {"x": 1}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", '[TOOL_CALLS][{"name": "add"}, 3]'),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[add(x=y)]"),
        ("pythonic", "[add(x='\\ud800')]"),
        ("pythonic", "[add(x=" + "[" * 100 + "]" * 100 + ")]"),
        ("pythonic", "[add(x=1)"),
    ],
)
def test_malformed_calls_come_back_as_text(parser: str, text: str) -> None:
    assert found(TOOL_PARSERS[parser](NAMES), text) == (text, [])


def test_a_good_call_after_a_malformed_one_counts() -> None:
    text = f"<tool_call>oops <tool_call>{CALL}</tool_call>"
    assert found(TOOL_PARSERS["hermes"](NAMES), text) == ("<tool_call>oops", [WEATHER])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "a < b"),
        ("hermes", "<tool_call>x"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {x'),
        ("hermes", '<tool_call>{"name": "unknown"'),
        ("llama3_json", "H"),
        ("llama3_json", '{"name": x'),
        ("mistral", "[TOOL_CALLS]x ("),
        ("pythonic", "[1"),
    ],
)
def test_text_that_cannot_be_a_call_goes_out_at_once(parser: str, text: str) -> None:
    out = AnswerParser([TOOL_PARSERS[parser](NAMES)])
    assert joined([part for char in text for part in out.push(char, ended=False)])[0] == text


@pytest.mark.parametrize(
    ("opened", "text", "content", "thought"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
        (False, "\n<think>Hm.</think>Yes. <think>no</think>", "Yes. <think>no</think>", "Hm."),
        (False, "Yes.", "Yes.", ""),
        (False, "<thin", "<thin", ""),
        (True, "Hm.</think>Yes.", "Yes.", "Hm."),
        (True, "<think>Hm.</think>Yes.", "Yes.", "Hm."),
        (True, "Hm. And ", "", "Hm. And"),
        (False, "<think>\n\n</think>\n\nYes.", "Yes.", ""),
    ],
)
def test_reasoning_is_told_from_content(opened: bool, text: str, content: str, thought: str) -> None:
    assert parsed([reasoning("think", opened=opened)], list(text)) == (content, thought, [])


def test_calls_may_follow_reasoning() -> None:
    grammars = [reasoning("think", opened=False), TOOL_PARSERS["hermes"](NAMES)]
    text = f"<think><tool_call>{CALL}</tool_call>?</think>\n<tool_call>{CALL}</tool_call>"
    content, thought, calls = parsed(grammars, [text])
    assert (content, thought) == ("", f"<tool_call>{CALL}</tool_call>?")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [WEATHER]


def test_a_named_calls_arguments_go_out_piece_by_piece() -> None:
    parser = AnswerParser([named("add")])
    assert joined(parser.push(' {"x"', ended=False))[2] == [("add", '{"x"')]
    assert parsed([named("add")], [' {"x": [1, "}"]} ']) == ("", "", [("add", '{"x": [1, "}"]}')])
    for cut in ('{"x": [1, "', '{"x": [tr', '{"x": 1e'):
        assert parsed([named("add")], [cut]) == ("", "", [("add", cut)])


def test_required_calls_go_out_piece_by_piece() -> None:
    text = '[{"name": "add", "arguments": {"x": 1}}, {"name": "a-b", "arguments": {}}]'
    calls = [("add", '{"x": 1}'), ("a-b", "{}")]
    assert parsed([required(NAMES)], [text]) == ("", "", calls)
    assert parsed([required(NAMES)], [text[:33]]) == ("", "", [("add", '{"x')])
    for end in range(39, text.index("{}}")):  # cut short between the arguments of both
        assert parsed([required(NAMES)], [text[:end]]) == ("", "", calls[:1])
    assert parsed([required(NAMES)], [text[:36] + "tr"]) == ("", "", [("add", '{"x": tr')])
    parser = AnswerParser([required(NAMES)])
    assert joined(parser.push(text[:33], ended=False))[2] == [("add", '{"x')]


MARKERS = (
    "<tool_call> </tool_call> [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> <|python_start|> <|python_end|> "
    "<think> </think>"
)
SCRAPS = """[ ] { } , ; ( ) : add x= 'a\\'b' " \\ 1 - true None é "name" "add" "arguments" text 😀"""
OBJECTS = (CALL, '{"name": "add", "arguments": {"x": "\\u00e9"}}')
PIECES = st.sampled_from([*MARKERS.split(), *SCRAPS.split(), *OBJECTS, " ", "\n"])
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=16).map("".join)
GRAMMARS: dict[str, list[AnswerGrammar]] = {
    **{name: [make(NAMES)] for name, make in TOOL_PARSERS.items()},
    "thinking": [reasoning("think", opened=False), TOOL_PARSERS["hermes"](NAMES)],
    "opened": [reasoning("think", opened=True), TOOL_PARSERS["llama3_json"](NAMES)],
    "named": [named("add")],
    "required": [required(NAMES)],
}


@pytest.mark.parametrize("kind", GRAMMARS)
@given(text=TEXTS, data=st.data())
def test_any_split_gives_what_the_whole_gives(kind: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(GRAMMARS[kind], [text])
    assert parsed(GRAMMARS[kind], pieces) == whole
    assert parsed(GRAMMARS[kind], list(text)) == whole
    if kind not in ("named", "required"):  # those may be cut short
        for _, arguments in whole[2]:
            assert isinstance(json.loads(arguments), dict)
    if not whole[1] and not whole[2] and "open" not in kind and "think" not in text:
        assert whole[0] == text
