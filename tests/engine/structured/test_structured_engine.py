"""Sequences that are held to a form, through all that may happen to a sequence."""

from __future__ import annotations

import itertools
import json
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from structured_engines import text_of, tokens_of, with_characters
from tiny_engines import EOS, made, run_to_end, tiny_engine_config

from engine.engine import Engine
from engine.engine_thread import EngineThread
from engine.errors import InvalidRequestError
from engine.llm import LLM
from engine.request import FinishReason, Request, TokenDelta
from engine.sampling_params import SamplingParams
from engine.structured.checker import GrammarChecker
from engine.structured.matcher import Matcher
from engine.structured_output import StructuredOutput

PROMPT = tokens_of("Once upon a time")
LETTERS = StructuredOutput("regex", "([ab]{3}-){4}[cd]{2}")
TWO_INTEGERS = StructuredOutput.of_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def folder(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_characters(tiny_models["Llama"], tmp_path_factory.mktemp("characters"))


@pytest.fixture
def make(folder: Path) -> Callable[..., Engine]:
    def engine(**options: Any) -> Engine:
        return Engine(tiny_engine_config(folder, **options), offline=True)

    return engine


def ask(name: str, form: StructuredOutput | None, *, prompt: list[int] = PROMPT, **params: Any) -> Request:
    wanted = {"max_tokens": 60, "temperature": 1.5, "seed": 7, "structured_output": form, **params}
    return Request(name, prompt, SamplingParams(**wanted), arrival=1.0)


def outputs(deltas: list[TokenDelta]) -> dict[int, tuple[str, FinishReason | None]]:
    """Text and finish reason of each sequence."""
    texts: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason | None] = {}
    for delta in deltas:
        texts.setdefault(delta.sequence, []).extend(delta.token_ids)
        reasons[delta.sequence] = delta.finish_reason
    return {number: (text_of(tokens), reasons[number]) for number, tokens in texts.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_kind_is_kept_to(make: Callable[..., Engine], temperature: float) -> None:
    engine = make()
    forms = {
        "regex": LETTERS,
        "json_schema": TWO_INTEGERS,
        "choice": StructuredOutput.of_choices(["yes", "no", 'may"be']),
        "grammar": StructuredOutput("grammar", 'start: pair pair\npair: "(" /[xy]/ ")"'),
    }
    made_by = run_to_end(engine, *(ask(kind, form, temperature=temperature) for kind, form in forms.items()))
    texts = {}
    for kind, deltas in made_by.items():
        ((text, reason),) = outputs(deltas).values()
        assert reason is FinishReason.STOP
        assert made(deltas)[-1] == EOS
        texts[kind] = text
    assert re.fullmatch(LETTERS.text, texts["regex"])
    value = json.loads(texts["json_schema"])
    assert value.keys() == {"a", "b"}
    assert 0 <= value["a"] <= 999
    assert value["b"] in ("x", "y")
    assert texts["choice"] in ("yes", "no", 'may"be')
    assert re.fullmatch(r"\([xy]\)\([xy]\)", texts["grammar"])


def test_any_json_object(make: Callable[..., Engine]) -> None:
    forms = [ask(f"{seed}", StructuredOutput("json_object"), seed=seed, max_tokens=80) for seed in range(8)]
    ended = 0
    for deltas in run_to_end(make(), *forms).values():
        ((text, reason),) = outputs(deltas).values()
        assert text.startswith("{")
        if reason is FinishReason.STOP:
            ended += 1
            assert isinstance(json.loads(text), dict)
    assert ended


def test_others_beside_it_are_free(make: Callable[..., Engine]) -> None:
    """Rows without a form draw what they draw alone."""
    alone = made(run_to_end(make(), ask("a", None))["a"])
    beside = run_to_end(make(), ask("b", LETTERS, seed=3), ask("a", None), ask("c", TWO_INTEGERS))
    assert made(beside["a"]) == alone


def test_what_is_cut_short_says_so(make: Callable[..., Engine]) -> None:
    ((text, reason),) = outputs(run_to_end(make(), ask("a", LETTERS, max_tokens=5))["a"]).values()
    assert reason is FinishReason.LENGTH
    assert re.fullmatch("[ab]{3}-[ab]", text)


def test_the_end_comes_when_the_form_may_end(make: Callable[..., Engine]) -> None:
    """Not before, and not after; ``min_tokens`` and ``ignore_eos`` keep it off while anything else fits."""
    short = StructuredOutput("regex", "a{2,6}")
    engine = make()
    cases: dict[str, dict[str, Any]] = {f"plain{seed}": {"seed": seed} for seed in range(12)}
    cases["long"] = {"min_tokens": 5, "seed": 1}
    cases["longest"] = {"min_tokens": 50}  # more than the form has room for
    cases["endless"] = {"ignore_eos": True}
    cases["stopped"] = {"stop_token_ids": tuple(tokens_of("a")), "min_tokens": 3}
    results = run_to_end(engine, *(ask(name, short, **params) for name, params in cases.items()))
    texts = {name: outputs(deltas)[0][0] for name, deltas in results.items()}
    reasons = {outputs(deltas)[0][1] for deltas in results.values()}
    assert reasons == {FinishReason.STOP}
    assert all(re.fullmatch("a{2,6}", texts[name]) for name in cases if name != "stopped")
    assert len({texts[name] for name in cases if name.startswith("plain")}) > 1
    assert len(texts["long"]) >= 5
    assert texts["longest"] == texts["endless"] == "aaaaaa"
    # A stop token is kept off like an end, but not where the form has nothing else.
    assert re.fullmatch("a{2,4}", texts["stopped"])


@pytest.mark.parametrize("options", [{"n": 4}, {"n": 2, "best_of": 5}])
def test_every_sequence_follows_its_own_way(make: Callable[..., Engine], options: dict[str, int]) -> None:
    found = outputs(run_to_end(make(), ask("a", LETTERS, **options))["a"])
    assert len(found) == options["n"]
    assert len({text for text, _ in found.values()}) == options["n"]
    for text, reason in found.values():
        assert reason is FinishReason.STOP
        assert re.fullmatch(LETTERS.text, text)


@pytest.mark.parametrize("options", [{"swap_space": 0}, {"swap_space": "8MiB", "recovery": "swap"}])
def test_memory_pressure_changes_nothing(make: Callable[..., Engine], options: dict[str, Any]) -> None:
    requests = [
        ask(f"r{i}", form, prompt=[*PROMPT, 50 + i], seed=i, n=2)
        for i, form in enumerate((LETTERS, TWO_INTEGERS, LETTERS, None, LETTERS))
    ]
    roomy = {
        name: outputs(run_to_end(make(), request)[name])
        for name, request in ((request.request_id, request) for request in requests)
    }
    engine = make(num_blocks=40, token_budget=12, **options)
    results = run_to_end(engine, *requests)
    assert engine.stats().scheduler.preemptions
    assert {name: outputs(deltas) for name, deltas in results.items()} == roomy


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_moved_goes_on_where_it_was(make: Callable[..., Engine], n: int) -> None:
    whole: dict[int, list[int]] = {}
    for delta in run_to_end(make(), ask("a", LETTERS, n=n))["a"]:
        whole.setdefault(delta.sequence, []).extend(delta.token_ids)
    for cut in (1, 7):
        request = ask("a", LETTERS, n=n)
        if n == 1:
            request = replace(request, token_ids=[*PROMPT, *whole[0][:cut]], generated_before=cut)
        else:
            request = replace(request, outputs=tuple(tuple(whole[i][:cut]) for i in range(n)))
        rest: dict[int, list[int]] = {}
        for delta in run_to_end(make(), request)["a"]:
            rest.setdefault(delta.sequence, []).extend(delta.token_ids)
        assert {i: whole[i][:cut] + rest[i] for i in whole} == whole


def test_logprobs_are_those_of_the_model(make: Callable[..., Engine]) -> None:
    """A form leaves tokens out; it does not change what the model thinks of the others."""
    engine = make()
    (ranked,) = run_to_end(engine, ask("a", StructuredOutput("regex", "a"), n=1, best_of=2))["a"]
    assert ranked.score is not None
    assert ranked.score < -1  # a random model would rather have written something else
    deltas = run_to_end(engine, ask("b", StructuredOutput("regex", "a"), logprobs=0))["b"]
    assert deltas[0].logprobs is not None
    assert deltas[0].logprobs[0].logprob < -1


def test_a_form_that_becomes_too_complex_fails_its_request_alone(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    bad = StructuredOutput("regex", "a{20}")
    advance = Matcher.advance

    def fail(self: Matcher, tokens: list[int], unwanted: tuple[int, ...]) -> str | None:
        error = advance(self, tokens, unwanted)
        if self is doomed.matcher and self.advanced == 4:
            self.mask.fill(-1)
            return "too many states"
        return error

    monkeypatch.setattr(Matcher, "advance", fail)
    engine.add(ask("bad", bad))
    doomed = engine.scheduler.state.sequences["bad", 0]
    compiled = doomed.grammar
    engine.add(ask("good", LETTERS))
    deltas: dict[str, list[TokenDelta]] = {"bad": [], "good": []}
    while engine.has_work():
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    assert re.fullmatch(LETTERS.text, outputs(deltas["good"])[0][0])
    assert outputs(deltas["bad"])[0] == ("aaaa", FinishReason.ERROR)
    assert deltas["bad"][-1].error == "the structured output cannot be continued: too many states"
    assert compiled is not None
    assert engine.grammars.compile(bad).form is not compiled.form


def test_a_form_that_takes_long_to_follow_fails_its_request_alone(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("engine.structured.matcher.thread_time", lambda: next(clock) * 0.004)
    monkeypatch.setattr("engine.structured.budget.SHARE", 0.0)
    slow = ask("slow", StructuredOutput("regex", "a{500}"), n=4, max_tokens=100)
    deltas = run_to_end(make(), slow, ask("free", None))
    assert outputs(deltas["free"])[0][1] is not FinishReason.ERROR
    assert deltas["slow"][-1].error == (
        "the structured output cannot be continued: following it takes more than 2 ms per token; simplify it"
    )
    assert 10 < sum(len(delta.token_ids) for delta in deltas["slow"]) < 100


def test_the_memory_of_forms_is_looked_at_in_each_step(make: Callable[..., Engine]) -> None:
    """A lexer that is dropped amid an output changes nothing."""
    engine = make()
    engine.add(ask("a", LETTERS))
    lexers = [(grammar := engine.scheduler.state.sequences["a", 0].grammar) and grammar.form.lexer]
    deltas = engine.step()
    engine.grammars.memory.limit = 0
    while engine.has_work():
        engine.grammars.memory.worked_s += 1
        deltas += engine.step()
        assert grammar is not None
        if grammar.form.lexer is not lexers[-1]:
            lexers.append(grammar.form.lexer)
    assert len(lexers) > 2
    assert re.fullmatch(LETTERS.text, outputs(deltas)[0][0])


def test_offline_a_form_that_cannot_be_used_is_named_and_nothing_runs(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", num_blocks=64, block_size=4, num_threads=1)
    bad = StructuredOutput("regex", "(?=a)b")
    params = [SamplingParams(max_tokens=40, structured_output=form) for form in (LETTERS, bad)]
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: the regex .* look-around"):
        llm.generate([PROMPT, PROMPT], params)
    assert llm.engine.stats().steps == 0
    (result,) = llm.generate([PROMPT], params[0])
    assert result.text is not None
    assert re.fullmatch(LETTERS.text, result.text)


def checkers() -> set[psutil.Process]:
    """This process's children that compile grammars."""
    children = psutil.Process().children()
    return {child for child in children if "engine.structured.checker" in child.cmdline()}


def test_steps_go_on_while_a_grammar_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is stuck here until others have been answered; with its thread the process ends, too."""
    others = checkers()  # of engines that other tests share
    outputs: queue.Queue[TokenDelta] = queue.Queue()
    thread = EngineThread(
        tiny_engine_config(folder), lambda made: [outputs.put(delta) for delta in made.deltas], print
    )
    thread.start()
    answered = threading.Event()
    check = GrammarChecker.check

    def wait(checker: GrammarChecker, form: StructuredOutput) -> str:
        assert answered.wait(60)
        return check(checker, form)

    monkeypatch.setattr(GrammarChecker, "check", wait)
    compiling = thread.compile(LETTERS)
    thread.submit(ask("free", None, max_tokens=5))
    assert len([outputs.get(timeout=60) for _ in range(5)]) == 5
    assert not compiling.done()
    answered.set()
    thread.submit(replace(ask("held", LETTERS), grammar=compiling.result(60)))
    thread.submit(ask("unprepared", LETTERS, seed=2))
    texts = {"held": "", "unprepared": ""}
    ended = 0
    while ended < 2:
        delta = outputs.get(timeout=60)
        texts[delta.request_id] += text_of(list(delta.token_ids))
        ended += delta.final
    assert all(re.fullmatch(LETTERS.text, text) for text in texts.values())
    mine = checkers() - others
    assert mine
    thread.stop()
    assert not any(child.is_running() for child in mine)


def test_without_a_tokenizer_the_request_is_refused(tiny_models: dict[str, Path]) -> None:
    engine = Engine(tiny_engine_config(tiny_models["Llama"]), offline=True)
    with pytest.raises(InvalidRequestError, match=r"cannot be constrained to a form: .*tokenizer") as caught:
        engine.add(ask("a", LETTERS))
    assert caught.value.code == "unsupported_parameter"
    assert len(made(run_to_end(engine, ask("b", None, max_tokens=3))["b"])) == 3
