"""Grammars compiled for real vocabularies, and what hostile ones cost."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models

from engine.errors import ClientLimitError, EngineDeadError, GrammarFault, InvalidRequestError
from engine.structured.budget import BURST_S, SHARE, TOKEN_S, FollowBudget, FollowBudgets
from engine.structured.budget import KEPT as BUDGETS
from engine.structured.checker import NICENESS, GrammarChecker
from engine.structured.compiler import KEPT, WORKERS, GrammarCompiler
from engine.structured.grammar import build_grammar, load_llg_tokenizer, lowered
from engine.structured.lexers import LEAST, LIMIT, MAX_STATE_BYTES, RESTART_S, LexerMemory, lexer_memory
from engine.structured.matcher import NO_TOKEN, Matcher
from engine.structured.round_robin_queue import RoundRobinQueue
from engine.structured_output import MAX_CHOICES, StructuredOutput

VOCABULARY = 49152
END = 2


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path) -> LLTokenizer:
    return load_llg_tokenizer(bundled_model, VOCABULARY, [END])


def matches(tokenizer: LLTokenizer, form: StructuredOutput, text: str) -> bool:
    """Whether ``text`` can be written token by token, and may end there."""
    matcher = build_grammar(tokenizer, form, lowered(form)).form.lexer.matcher()
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text))) and matcher.is_accepting()


def schema(**keywords: Any) -> StructuredOutput:
    return StructuredOutput.of_schema(keywords)


CHOICES = ["yes", 'nó "q"\n', "a\\b", "😀 x", "/x/ | y", "tab\t\x00"]
MANY = [f"choice {i} " + "x" * 15 for i in range(10_000, 10_000 + MAX_CHOICES)]
PERSON = schema(type="object", properties={"name": {"type": "string"}}, required=["name"])


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        *((StructuredOutput.of_choices(CHOICES), choice, choice[:-1]) for choice in CHOICES),
        *((StructuredOutput.of_choices(MANY), choice, choice[:-1]) for choice in (MANY[0], MANY[-1])),
        (StructuredOutput.of_choices(["a.", "a.b*"]), "a.b*", "a.bb"),
        (StructuredOutput("json_object"), '{"a": [1, "é"]}', "[1]"),
        (StructuredOutput("json_object"), "{" + " " * 40 + "}", "{" + " " * 41 + "}"),
        (PERSON, '{"name": "Zoë", "age": 3}', '{"age": 3}'),
        (schema(oneOf=[{"const": "a"}, {"type": "integer"}]), "12", '"b"'),
        (schema(type="string", pattern="^[a-z]+$", minLength=3), '"abc"', '"ab"'),
        (StructuredOutput("json_schema", "true"), "[null]", "nul"),
        (StructuredOutput("regex", "^ab*$"), "abb", "ba"),
        (StructuredOutput("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]+/'), "a12", "a"),
        (StructuredOutput("grammar", 'root ::= "a" digits\ndigits ::= [0-9]+'), "a12", "a"),
    ],
)
def test_what_matches(tokenizer: LLTokenizer, form: StructuredOutput, good: str, bad: str) -> None:
    assert matches(tokenizer, form, good)
    assert not matches(tokenizer, form, bad)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        (schema(oneOf=[{"type": "string", "pattern": "^.*a.*$"}, {"type": "string", "pattern": "b"}]), "oneOf"),
        (schema(type="string", format="shoe-size"), "Unknown format: shoe-size"),
        (schema(type="shoe"), "Invalid type: shoe"),
        ({"$ref": "https://example.com/schema.json"}, "does not fetch"),
        ({"$ref": "#"}, "no output can match it"),
        (StructuredOutput("json_schema", "false"), "no output can match it"),
        (StructuredOutput("regex", "(?=a)b"), "look-around"),
        (StructuredOutput("regex", "(" * 8000 + "a" + ")" * 8000), "regex"),
        (StructuredOutput("regex", "a)"), "invalid regex"),
        (StructuredOutput("grammar", "start: missing"), "unknown name"),
        (StructuredOutput("grammar", "what is this"), "GBNF"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(tokenizer: LLTokenizer, form: Any, words: str) -> None:
    form = StructuredOutput.of_schema(form) if isinstance(form, dict) else form
    with pytest.raises(InvalidRequestError, match=words) as caught:
        build_grammar(tokenizer, form, lowered(form))
    assert (caught.value.param, caught.value.code) == ("structured_output", "invalid_grammar")
    assert len(caught.value.message) < 400


def test_byte_fallback_vocabularies(tmp_path: Path) -> None:
    """Text that has no token of its own is written byte by byte, and spaces as ▁."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_llg_tokenizer(tmp_path, 300, [2])  # the model has more rows than the tokenizer has pieces
    form = StructuredOutput.of_choices(["b ab", "é"])
    matcher = Matcher(build_grammar(vocabulary, form, lowered(form)))

    def allowed() -> set[int]:
        return {t for t in range(32 * len(matcher.mask)) if matcher.mask[t >> 5] >> (t & 31) & 1}

    b, first, second = pieces.index("b"), pieces.index("<0xC3>"), pieces.index("<0xA9>")
    assert matcher.advance([], ()) is None
    assert allowed() == {b, pieces.index("<0x62>"), first}
    assert matcher.advance([first], ()) is None
    assert allowed() == {second}
    assert matcher.advance([second], ()) is None
    assert allowed() == {2}


@pytest.mark.parametrize("size", [4, 5, 32, 64])
def test_a_form_that_the_tokens_cannot_spell_to_its_end_fails_with_the_cause(tmp_path: Path, size: int) -> None:
    """A vocabulary without all bytes, in a model with as many rows, with fewer, and with more."""
    tokenizer = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2, "ab": 3, "c": 4}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, size, (0,), checked=False)

    def after(expression: str, tokens: list[int]) -> str | None:
        matcher = Matcher(compiler.compile(StructuredOutput("regex", expression)))
        error = matcher.advance(tokens, ())
        assert matcher.mask[0] & ((1 << min(size, 31)) - 1)
        return error

    assert after("a(é|d)", [1]) == NO_TOKEN
    assert after("ab(é|b)", [3]) is None  # the other way is left
    assert after("aé?", [1]) is None  # and here the end
    assert after("ac", [1]) == (NO_TOKEN if size == 4 else None)
    with pytest.raises(InvalidRequestError, match="no output can match it"):
        compiler.compile(StructuredOutput("regex", "é"))


def test_a_tokenizer_may_have_more_tokens_than_the_model(bundled_model: Path, tmp_path: Path) -> None:
    """As where a padding token was added without a row for it; also within a word of the mask."""
    description = json.loads((bundled_model / "tokenizer.json").read_text())
    padding = {"id": VOCABULARY, "content": "<pad>", "special": True, "normalized": False}
    sides = {"single_word": False, "lstrip": False, "rstrip": False}
    description["added_tokens"].append({**padding, **sides})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    form = StructuredOutput("regex", r"(?s:.)*")
    for size in (VOCABULARY, VOCABULARY - 5):
        compiler = GrammarCompiler(tmp_path, size, (END,), checked=False)
        matcher, expected = Matcher(compiler.compile(form)), np.zeros(VOCABULARY, dtype=np.uint8)
        assert matcher.advance([], ()) is None
        allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
        plain = Matcher(GrammarCompiler(bundled_model, VOCABULARY, (END,), checked=False).compile(form))
        assert plain.advance([], ()) is None
        expected[:size] = np.unpackbits(plain.mask.view(np.uint8), bitorder="little")[:size]
        assert allowed.tolist() == expected.tolist()
        only_padding = StructuredOutput("grammar", "start: <pad>")
        with pytest.raises(InvalidRequestError, match="no output can match it"):
            compiler.compile(only_padding)


TEXT = schema(type="object", properties={"text": {"type": "string", "maxLength": 4000}}, required=["text"])


def texts(bundled_model: Path, characters: int) -> Iterator[list[int]]:
    """Tokens of objects of that form with English text, different ones without end."""
    tokenizer = Tokenizer.from_file(str(bundled_model / "tokenizer.json"))
    words = sorted(
        {
            word
            for page in Path("docs").glob("*.md")
            for word in page.read_text().split()
            if word.isascii() and word.isalpha()
        }
    )
    rng = random.Random(1)
    while True:
        text = " ".join(rng.choices(words, k=characters // 4))[:characters]
        yield tokenizer.encode(json.dumps({"text": text}), add_special_tokens=False).ids


def followed(matcher: Matcher, tokens: list[int]) -> str | None:
    """What goes wrong while ``matcher`` follows ``tokens`` one by one."""
    errors = (matcher.advance([token], ()) for token in tokens)
    return next((error for error in errors if error is not None), None)


def test_outputs_that_fill_a_forms_lexer_end_as_they_would_alone(
    compiler: GrammarCompiler, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients share the form: outputs of one take up all states while the other's are under way."""
    monkeypatch.setattr("engine.structured.grammar.MAX_STATES", 10_000)
    some, others = compiler.compile(TEXT, "some"), compiler.compile(TEXT, "others")
    first = others.form.lexer
    outputs = texts(bundled_model, 3900)
    waiting = [(Matcher(others), next(outputs)) for _ in range(8)]
    for matcher, tokens in waiting:
        assert matcher.advance(tokens[:500], ()) is None
    for _ in range(20):
        assert followed(Matcher(some), next(outputs)) is None
        if some.form.lexer is not first:
            break
    else:
        pytest.fail("the outputs took up no more states than there are")
    for matcher, tokens in waiting:
        assert followed(matcher, tokens[500:]) is None
        assert matcher.mask[0] >> END & 1
    alone = Matcher(build_grammar(compiler._loaded(), TEXT, lowered(TEXT)))
    matcher, tokens = waiting[0][0], waiting[0][1]
    assert alone.advance(tokens, ()) is None
    assert np.array_equal(matcher.mask, alone.mask)
    assert followed(Matcher(compiler.compile(TEXT, "others")), next(outputs)) is None


def test_an_output_that_fills_a_lexer_alone_goes_on_while_its_own_states_have_room(
    tokenizer: LLTokenizer, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.structured.grammar.MAX_STATES", 4000)
    outputs = texts(bundled_model, 3000)
    grammar = build_grammar(tokenizer, TEXT, lowered(TEXT))
    assert [followed(Matcher(grammar), next(outputs)) for _ in range(3)] == [None] * 3
    monkeypatch.setattr("engine.structured.grammar.MAX_STATES", 2000)
    grammar = build_grammar(tokenizer, TEXT, lowered(TEXT))
    assert "too many states" in (followed(Matcher(grammar), next(outputs)) or "")


def test_what_takes_long_to_compile_is_not_compiled_between_steps(
    tokenizer: LLTokenizer, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.structured.grammar.MAX_STATES", 4000)
    grammar = build_grammar(tokenizer, TEXT, lowered(TEXT))
    grammar.form.compile_s = RESTART_S + 0.001
    grammar.form.compiled = lambda: pytest.fail("compiled")
    error = followed(Matcher(grammar), next(texts(bundled_model, 3000)))
    assert "too many states" in (error or "")


def test_following_an_output_again_ends_when_its_time_is_over(
    tokenizer: LLTokenizer, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.structured.grammar.MAX_STATES", 4000)
    matcher = Matcher(build_grammar(tokenizer, TEXT, lowered(TEXT)))
    monkeypatch.setattr("engine.structured.matcher.RESTART_S", 1.0)
    clock = itertools.count()
    monkeypatch.setattr("engine.structured.matcher.thread_time", lambda: next(clock) * 0.1)
    monkeypatch.setattr("engine.structured.budget.TOKEN_S", 100.0)
    assert "too many states" in (followed(matcher, next(texts(bundled_model, 3000))) or "")
    assert matcher.advanced > 16 * 11


def test_a_form_that_takes_long_to_compile_restarts_with_a_lexer_compiled_ahead(
    compiler: GrammarCompiler, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.structured.grammar.MAX_STATES", 4000)
    monkeypatch.setattr("engine.structured.lexers.MAX_STATE_BYTES", 1 << 20)
    monkeypatch.setattr("engine.structured.lexers.LOOK_EVERY_S", 0.0)
    form = StructuredOutput.of_schema(json.loads(TEXT.text) | {"title": "slow"})
    grammar = compiler.compile(form)
    grammar.form.compile_s = RESTART_S + 0.001
    threads: list[threading.Thread] = []
    compiled = grammar.form.compiled

    def compile_there() -> LLMatcher:
        threads.append(threading.current_thread())
        return compiled()

    grammar.form.compiled = compile_there
    first, outputs = grammar.form.lexer, texts(bundled_model, 3000)
    while len(threads) < 3 or grammar.form.lexer is first:
        matcher = Matcher(grammar)
        for token in next(outputs):
            assert matcher.advance([token], ()) is None
            compiler.bound_memory()
            if compiler._preparing is not None:
                compiler._preparing.join(60)
    assert threading.current_thread() not in threads


def test_all_lexers_together_keep_to_a_limit(bundled_model: Path) -> None:
    """What no sequence follows gives way first, the least recently used first."""
    compiler = GrammarCompiler(
        bundled_model, VOCABULARY, (END,), checked=False, memory=5 * MAX_STATE_BYTES // 2
    )
    forms = [StructuredOutput("regex", f"b{{{i}}}") for i in range(1, 5)]
    grammars = [compiler.compile(form) for form in forms]
    lexers = [grammar.form.lexer for grammar in grammars]
    followed = Matcher(grammars[0])
    assert followed.advance([], ()) is None
    assert lexers[0].state_bytes > 0
    for lexer in lexers:
        lexer.followed_s = 1e9
        assert lexer.state_bytes == MAX_STATE_BYTES
    compiler.memory.worked_s += 1
    compiler.bound_memory()
    assert [lexer.dropped for lexer in lexers] == [False, True, True, False]
    assert compiler.memory.most_bytes <= compiler.memory.limit
    kept = [compiler.compile(forms[i]).form is grammars[i].form for i in (0, 3, 2)]
    assert kept == [True, True, False]


def test_a_sequence_whose_lexer_is_dropped_goes_on_or_fails_alone(
    tokenizer: LLTokenizer, bundled_model: Path
) -> None:
    """Dropped first is what frees most for the tokens to follow again, and what cannot restart at last."""
    memory = LexerMemory(3 * MAX_STATE_BYTES)
    grammars = [build_grammar(tokenizer, TEXT, lowered(TEXT), None, memory) for _ in range(5)]
    slow = grammars[3].form
    slow.compile_s = RESTART_S + 0.001
    tokens = next(texts(bundled_model, 3000))
    counts = (100, 10, 50, 1, 1)
    matchers = [Matcher(grammar) for grammar in grammars]
    together = Matcher(grammars[4])
    assert together.advance(tokens[:500], ()) is None
    for matcher, count in zip(matchers, counts, strict=True):
        assert matcher.advance(tokens[:count], ()) is None
        matcher._lexer.followed_s = 1e9
    memory.worked_s += 1
    assert memory.bound() == [slow]  # it needs a spare lexer
    assert [matcher._lexer.dropped for matcher in matchers] == [True, True, True, False, False]
    alone = Matcher(build_grammar(tokenizer, TEXT, lowered(TEXT)))
    for matcher, count in zip(matchers, counts, strict=True):
        assert matcher.advance(tokens[count:600], ()) is None
    assert alone.advance(tokens[:600], ()) is None
    assert all(np.array_equal(matcher.mask, alone.mask) for matcher in matchers)
    memory.limit, memory.worked_s = 0, memory.worked_s + 1
    memory.bound()
    assert memory.most_bytes == 0
    error = matchers[3].advance(tokens[600:601], ()) or ""
    assert error.startswith("all structured outputs together need more than 0 B of memory, and this one")
    for matcher in (*matchers[:3], matchers[4]):
        assert matcher.advance(tokens[600:601], ()) is None


def test_a_spare_lexer_gives_way_first_and_is_compiled_again_only_if_it_has_room(
    tokenizer: LLTokenizer,
) -> None:
    memory = LexerMemory()
    slow, quick = (build_grammar(tokenizer, TEXT, lowered(TEXT), None, memory) for _ in range(2))
    slow.form.compile_s = RESTART_S + 0.001
    matchers = [Matcher(grammar) for grammar in (slow, quick)]
    for matcher in matchers:
        assert matcher.advance([], ()) is None
        matcher._lexer.followed_s = 1e9
    slow.form.prepare()
    memory.limit, memory.worked_s = memory.most_bytes - slow.form.compiled_bytes - 1, memory.worked_s + 1
    memory.bound()
    assert slow.form.spare is None
    assert [matcher._lexer.dropped for matcher in matchers] == [False, True]  # the slow one cannot restart
    memory.limit, memory.worked_s = memory.most_bytes + slow.form.compiled_bytes - 1, memory.worked_s + 1
    assert memory.bound() == []
    memory.limit, memory.worked_s = memory.limit + 1, memory.worked_s + 1
    assert memory.bound() == [slow.form]


def test_a_sequence_that_begins_once_its_form_is_dropped_restarts_or_is_told_why(
    tokenizer: LLTokenizer,
) -> None:
    """Its request has waited, and no other sequence followed the form."""
    memory = LexerMemory(0)
    grammars = [build_grammar(tokenizer, TEXT, lowered(TEXT), None, memory) for _ in range(2)]
    grammars[1].form.compile_s = RESTART_S + 0.001
    memory.worked_s += 1
    memory.bound()
    assert all(grammar.form.lexer.dropped for grammar in grammars)
    assert Matcher(grammars[0]).advance([], ()) is None
    error = Matcher(grammars[1]).advance([], ()) or ""
    assert error.startswith("all structured outputs together need more than 0 B of memory, and this one")


def test_what_matchers_hold_counts(tokenizer: LLTokenizer) -> None:
    memory = LexerMemory()
    grammar = build_grammar(tokenizer, TEXT, lowered(TEXT), None, memory)
    matchers = [Matcher(grammar) for _ in range(2)]
    before = memory.most_bytes
    for matcher in matchers:
        matcher.followed_s += 1.0
    assert memory.most_bytes == before + 64 * 2**20
    del matchers[1], matcher
    assert memory.most_bytes == before + 32 * 2**20


@pytest.mark.parametrize(("free", "limit"), [(2**40, LIMIT), (8 * 2**30, 2**30), (2**30, LEAST), (0, LEAST)])
def test_the_limit_depends_on_the_machine(free: int, limit: int) -> None:
    assert lexer_memory(free) == limit


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_sequences_keep_to_the_limit_together(bundled_model: Path) -> None:
    """32 different forms, each of which fills a lexer with 47 MiB of states, if it may."""
    program = f"""
import random
import numpy as np
from pathlib import Path
from engine.structured.compiler import GrammarCompiler
from engine.structured.matcher import NO_TOKEN, Matcher
from engine.structured_output import StructuredOutput

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

compiler = GrammarCompiler({str(bundled_model)!r}, {VOCABULARY}, ({END},), checked=False, memory=256 << 20)
grammars = [compiler.compile(StructuredOutput("regex", f"(?s:.*[a-m].{{{{{{300 + i}}}}}})")) for i in range(32)]
matchers = [Matcher(grammar) for grammar in grammars]
for grammar in grammars:
    grammar.budget.spend = lambda took_s, tokens: True  # others pay
rng, made, most, before = random.Random(0), [[] for _ in matchers], 0.0, resident()
for step in range(150):
    for matcher, tokens in zip(matchers, made):
        assert matcher.advance(tokens, ()) is None
        allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
        tokens[:] = [int(rng.choice(allowed[3:]))]
    compiler.bound_memory()
    most = max(most, resident() - before)
print(most)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 50 < float(done.stdout) < 256 + 64


LOWER = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS
REFERENCES = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(50)} | {"a50": {}}
HOSTILE: dict[str, StructuredOutput] = {
    "exponential": schema(
        allOf=[{"type": "string", "pattern": f".*[a-{c}].{{50}}"} for c in "bcdefghijklmnopqrst"]
    ),
    "long": schema(type="integer", multipleOf=999983),
    "large": schema(type="object", properties={f"p{i}": {"enum": [i]} for i in range(4000)}),
    "references": schema(**{"$defs": REFERENCES, "$ref": "#/$defs/a0"}),
    "recursive": schema(
        type="object", properties={"a": {"$ref": "#"}, "b": {"$ref": "#"}}, additionalProperties=False
    ),
    "repeated": StructuredOutput("regex", "((a{0,1000}){0,1000}){0,1000}"),
    "ambiguous": StructuredOutput("grammar", 'start: s\ns: s s s | "a" | ""'),
}


@pytest.fixture(scope="module")
def compiler(bundled_model: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(bundled_model, VOCABULARY, (END,), checked=True)
    yield compiler
    compiler.close()


def test_hostile_ones_are_refused_or_compiled_and_harm_nobody(compiler: GrammarCompiler) -> None:
    compiler.warm_up()
    process = compiler._checkers[-1]._process
    assert process is not None
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == LOWER
    waiting = {name: compiler.submit(form) for name, form in HOSTILE.items()}
    friendly = compiler.submit(PERSON)
    refusals = {name: str(error) for name, done in waiting.items() if (error := done.exception())}
    assert {"exponential", "long"} <= refusals.keys() <= {"exponential", "long", "large"}
    assert all("compiling it takes more than 0.4 s of CPU time" in reason for reason in refusals.values())
    assert friendly.exception() is None
    assert compiler._checkers[-1]._process is process  # the next one need not wait until another has loaded


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_compiling_yields_to_steps(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []

    def compile_here(compiler: GrammarCompiler, form: StructuredOutput, client: str) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr(GrammarCompiler, "compile", compile_here)
    compiler.submit(StructuredOutput("regex", "[xyz]{3}")).result(60)
    assert priorities == [LOWER]
    assert os.getpriority(os.PRIO_PROCESS, 0) < LOWER


def test_what_was_compiled_or_refused_is_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = schema(uniqueItems=True)
    first = compiler.compile(PERSON, "alice")
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        compiler.compile(bad)
    monkeypatch.setattr(GrammarChecker, "check", lambda self, form: pytest.fail("asked again"))
    for again in (compiler.compile(PERSON, "bob"), compiler.submit(PERSON).result()):
        assert again.form is first.form
        assert again.budget is not first.budget  # each client has its own
    assert compiler.compile(PERSON, "alice").budget is first.budget
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        compiler.submit(bad).result()


def test_no_more_are_kept_than_there_is_room_for(bundled_model: Path) -> None:
    compiler = GrammarCompiler(bundled_model, VOCABULARY, (END,), checked=False)
    forms = [StructuredOutput("regex", f"a{{{i}}}") for i in range(1, KEPT + 2)]
    grammars = [compiler.compile(form) for form in forms]
    kept = [compiler.compile(forms[i]).form is grammars[i].form for i in (-1, 1, 0, 2)]
    assert kept == [True, True, False, False]


@pytest.mark.parametrize(
    "form",
    [
        schema(type="object", properties={f"p{i}": {"type": "string"} for i in range(1000)}),
        StructuredOutput(
            "grammar",
            "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)) + '\nr30: "c"',
        ),
    ],
)
def test_what_would_fail_at_the_second_token_is_refused(tokenizer: LLTokenizer, form: StructuredOutput) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be used: .*items"):
        build_grammar(tokenizer, form, lowered(form))


def test_only_what_takes_long_pays_for_it() -> None:
    now = [0.0]
    grammar = FollowBudget(lambda: now[0])
    assert grammar.spend(BURST_S + TOKEN_S, 0)  # the whole burst
    assert grammar.spend(TOKEN_S * 5, 5)  # no more than is allowed
    assert not grammar.spend(TOKEN_S * 5 + 0.001, 5)
    assert grammar.spend(TOKEN_S, 1)  # its share, whatever others have taken
    assert grammar.spend(0, 1)
    assert grammar.spend(TOKEN_S + 0.0009, 1)  # saved before
    for _ in range(1000):
        assert grammar.spend(0, 1)
    assert grammar.owed_s() == 0
    assert not grammar.spend(BURST_S + TOKEN_S + 0.001, 1)  # no more than the burst is saved
    assert grammar.owed_s() == pytest.approx(0.001 / SHARE)
    now[0] += 0.001 / SHARE
    assert grammar.owed_s() == pytest.approx(0)
    now[0] += 1
    assert grammar.spend(SHARE, 0)  # what a second gives
    assert not grammar.spend(SHARE, 0)


def test_a_client_that_owes_time_gets_no_new_form(compiler: GrammarCompiler) -> None:
    compiler.compile(PERSON, "slow").budget.spend(2 * BURST_S, 1)
    for ask in (compiler.compile, lambda *of: compiler.submit(*of).result()):
        with pytest.raises(ClientLimitError, match=r"again in [12] s, with a simpler form") as caught:
            ask(PERSON, "slow")
        assert caught.value.retry_after_s in (1, 2)
        ask(PERSON, "quick")
    assert compiler.faults == 0


def test_many_new_clients_do_not_make_a_debt_forgotten() -> None:
    budgets = FollowBudgets(lambda: 0.0)
    slow, used = budgets.of("slow"), budgets.of("used")
    slow.spend(2 * BURST_S, 1)
    for number in range(BUDGETS):
        budgets.of(str(number))
    assert budgets.of("slow") is slow
    assert budgets.of("used") is not used
    assert len(budgets._of) == BUDGETS


def test_clients_take_turns() -> None:
    queue: RoundRobinQueue[str] = RoundRobinQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert queue.put(item[0], item)
    assert [queue.get() for _ in range(2)] == ["a1", "b1"]
    queue.put("d", "d1")
    queue.put("a", "a4")
    assert [queue.get() for _ in range(5)] == ["c1", "a2", "b2", "d1", "a3"]
    assert queue.close() == ["a4"]
    assert queue.get() is None
    assert not queue.put("a", "a5")


def test_processes_that_end_are_replaced(bundled_model: Path) -> None:
    checker = GrammarChecker(bundled_model, VOCABULARY, [END])
    assert checker.check(PERSON) == lowered(PERSON)
    process = checker._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as when its owner dies
    assert process.wait(60) == 0
    assert checker.check(PERSON) == lowered(PERSON)
    assert checker._process is not process
    checker.close()


def dying(code: int) -> Callable[[GrammarChecker], subprocess.Popen[bytes]]:
    """Starts a process that ends itself by signal ``code`` when it is asked, or with 1."""
    end = f"kill -{code} $$" if code else "exit 1"
    return lambda checker: subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=PIPE, stdout=PIPE)


@pytest.mark.parametrize(("code", "words"), [(27, "CPU time"), (6, "memory"), (11, "memory")])
def test_a_process_that_its_grammar_ends_is_a_refusal(
    code: int, words: str, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarChecker, "_started", dying(code))
    checker = GrammarChecker(bundled_model, VOCABULARY, [END])
    with pytest.raises(InvalidRequestError, match=words):
        checker.check(PERSON)
    checker.close()


def test_what_is_no_fault_of_the_grammar_is_counted_and_not_kept(
    bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed, ends, or cannot be started; the next one answers."""

    def refuse(checker: GrammarChecker) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    compiler = GrammarCompiler(bundled_model, VOCABULARY, (END,), checked=True)
    form = StructuredOutput("regex", "[ab]{7}")
    cases = {"ended by signal 9": dying(9), "ended with code 1": dying(0), "temporarily unavailable": refuse}
    for words, start in cases.items():
        with monkeypatch.context() as patch:
            patch.setattr(GrammarChecker, "_started", start)
            with pytest.raises(GrammarFault, match=f"no fault of its own: .*{words}.*; send the request again"):
                compiler.submit(form).result(60)
    assert compiler.faults == len(cases)
    assert compiler.submit(form).result(60).mask_words
    compiler.close()


def test_after_a_warm_up_the_first_grammars_find_all_loaded(
    bundled_model: Path, tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(*_: Any) -> LLTokenizer:
        loaded.append("tokenizer")
        return tokenizer

    def start(checker: GrammarChecker) -> Any:
        loaded.append("process")
        return SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda: 0)

    monkeypatch.setattr("engine.structured.compiler.load_llg_tokenizer", load)
    monkeypatch.setattr(GrammarChecker, "_started", start)
    monkeypatch.setattr(GrammarChecker, "_ask", lambda *_: {"grammar": lowered(PERSON)})
    compiler = GrammarCompiler(bundled_model, VOCABULARY, (END,), checked=True)
    compiler.warm_up()
    assert loaded == ["tokenizer", "process"]
    for _ in range(2):  # the second one, too, finds the process that runs
        compiler.compile(PERSON)
        compiler.forget(PERSON)
    assert loaded == ["tokenizer", "process"]
    compiler.close()
    compiler.warm_up()  # too late, which harms nobody


def test_a_tokenizer_that_the_library_fails_on_holds_no_form(tmp_path: Path) -> None:
    """It panics where the numbers of tokens have gaps."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 300}, []))
    tokenizer.add_tokens(["b"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, 3, (0,), checked=True)
    compiler.warm_up()
    with pytest.raises(InvalidRequestError, match="cannot be constrained to a form: index out of bounds"):
        compiler.submit(PERSON).result(60)
    compiler.close()


def test_a_model_that_no_form_can_hold_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarChecker, "_started", lambda _: pytest.fail("for nothing"))
    GrammarCompiler(tmp_path, VOCABULARY, (), checked=True).warm_up()


def test_closing_ends_what_is_being_compiled_and_what_waits(
    bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def start(checker: GrammarChecker) -> subprocess.Popen[bytes]:
        silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        started.put(process := subprocess.Popen(silent, stdin=PIPE, stdout=PIPE))
        return process

    monkeypatch.setattr(GrammarChecker, "_started", start)
    compiler = GrammarCompiler(bundled_model, VOCABULARY, (END,), checked=True)
    waiting = [compiler.submit(StructuredOutput("regex", f"a{{{i}}}")) for i in range(1, WORKERS + 2)]
    processes = [started.get(timeout=60) for _ in range(WORKERS)]
    compiler.close()
    assert all(process.poll() is not None for process in processes)
    assert all(isinstance(future.exception(60), EngineDeadError) for future in waiting)
    with pytest.raises(EngineDeadError):
        compiler.submit(PERSON)
    with pytest.raises(EngineDeadError):
        compiler.compile(PERSON)
    assert started.empty()


def test_schemas_may_not_set_options_of_the_library_wrongly(tokenizer: LLTokenizer) -> None:
    form = StructuredOutput("json_schema", json.dumps({"x-guidance": {"lenient": 5}}))
    with pytest.raises(InvalidRequestError, match="expected a boolean"):
        build_grammar(tokenizer, form, lowered(form))
