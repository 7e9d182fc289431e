"""The loop and its thread: ends, aborts in every state, faults that stay with the request that causes them."""

from __future__ import annotations

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_requests import BAD, GOOD
from delayed_steps import delayed_steps
from tiny_engines import add, made, make_request, run_to_end, tiny_engine_config

from engine import engine_thread
from engine.config import EngineConfig
from engine.engine import Engine
from engine.engine_thread import EngineThread, StepOutputs
from engine.errors import ConfigError, EngineDeadError, InvalidRequestError
from engine.kv.kv_cache import KVCache
from engine.request import FinishReason, Request, TokenDelta
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import SequenceState
from engine.structured.compiler import GrammarCompiler

MakeEngine = Callable[..., Engine]
POISON = 96
PROMPT = [5, 9, 60, 33, 7, 7, 41, 12, 80, 3, 22]


@contextmanager
def poisoned(engine: Engine, token: int = POISON) -> Iterator[None]:
    """Make every computation over ``token`` raise, after it has written its keys and values."""
    forward = engine.runner.decoder.forward

    def fail(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = forward(token_ids, *rest)
        if bool((token_ids == token).any()):
            raise ValueError("poisoned")
        return logits

    engine.runner.decoder.forward = fail  # type: ignore[method-assign]
    yield
    engine.runner.decoder.forward = forward  # type: ignore[method-assign]


def assert_idle(engine: Engine) -> None:
    stats = engine.stats().scheduler
    assert (stats.referenced_blocks, stats.running, stats.waiting, stats.preempted) == (0, 0, 0, 0)
    assert not engine.has_work()
    engine.scheduler.check()


def test_max_tokens_ends_with_length(make_engine: MakeEngine) -> None:
    engine = make_engine()
    deltas = run_to_end(engine, make_request("a", PROMPT, max_tokens=5))["a"]
    assert len(made(deltas)) == 5
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + [FinishReason.LENGTH]
    assert_idle(engine)


def test_one_token_is_made_in_the_prefill_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=1))
    (delta,) = engine.step()
    assert (len(delta.token_ids), delta.finish_reason) == (1, FinishReason.LENGTH)
    assert engine.step() == []


def test_without_max_tokens_the_context_is_filled(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=20)
    assert len(made(run_to_end(engine, make_request("a", PROMPT, max_tokens=None))["a"])) == 20 - len(PROMPT)


def test_stop_tokens_and_min_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = made(run_to_end(engine, make_request("a", PROMPT, max_tokens=8))["a"])
    stop = free[3]
    first = free.index(stop)
    deltas = run_to_end(engine, make_request("b", PROMPT, max_tokens=8, stop_token_ids=(stop,)))["b"]
    assert made(deltas) == free[: first + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP
    later = made(
        run_to_end(engine, make_request("c", PROMPT, max_tokens=8, min_tokens=6, stop_token_ids=(stop,)))["c"]
    )
    assert len(later) >= 6
    assert stop not in later[:6]


def test_end_of_sequence_and_ignore_eos(
    make_engine: MakeEngine, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    free = made(run_to_end(make_engine(), make_request("a", PROMPT, max_tokens=8))["a"])
    folder = tmp_path / "model"
    shutil.copytree(tiny_models["Llama"], folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, free[2]]}))
    engine = Engine(tiny_engine_config(folder))
    deltas = run_to_end(engine, make_request("b", PROMPT, max_tokens=8))["b"]
    assert made(deltas) == free[: free.index(free[2]) + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert made(run_to_end(engine, make_request("c", PROMPT, max_tokens=8, ignore_eos=True))["c"]) == free
    later = made(run_to_end(engine, make_request("d", PROMPT, max_tokens=8, min_tokens=8))["d"])
    assert len(later) == 8
    assert free[2] not in later


def test_seeds_come_from_the_engine_and_the_id(make_engine: MakeEngine) -> None:
    def tokens(engine: Engine, name: str, **params: Any) -> list[int]:
        request = make_request(name, PROMPT, temperature=2.0, max_tokens=12, **params)
        return made(run_to_end(engine, request)[name])

    engine = make_engine(seed=1)
    first = tokens(engine, "a")
    assert tokens(make_engine(seed=1), "a") == first
    assert tokens(engine, "b") != first != tokens(make_engine(seed=2), "a")
    assert tokens(engine, "c", seed=4) == tokens(engine, "d", seed=4)


def test_cached_tokens_are_exact(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(2, 14))
    cold = run_to_end(engine, make_request("a", prompt, max_tokens=3))["a"]
    warm = run_to_end(engine, make_request("b", prompt, max_tokens=3))["b"]
    assert {delta.cached_tokens for delta in cold} == {0}
    assert {delta.cached_tokens for delta in warm} == {8}  # 12 tokens are 3 blocks; the last one must be run
    off = make_engine(prefix_caching=False)
    run_to_end(off, make_request("a", prompt, max_tokens=3))
    assert run_to_end(off, make_request("b", prompt, max_tokens=3))["b"][-1].cached_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_abort_frees_a_request_in_any_state(make_engine: MakeEngine, steps: int) -> None:
    """Waiting, in the middle of its prompt (11 tokens by 4 a step), at its first token, decoding."""
    engine = make_engine(token_budget=4)
    engine.add(make_request("a", PROMPT, max_tokens=30))
    for _ in range(steps):
        engine.step()
    (delta,) = engine.abort("a")
    assert delta is not None
    assert delta.finish_reason is FinishReason.ABORT
    assert engine.abort("a") == []
    assert engine.step() == []
    assert_idle(engine)


def test_abort_of_a_preempted_request(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=10)
    sequences = [
        add(engine, make_request(name, PROMPT[index:], max_tokens=25)) for index, name in enumerate("abc")
    ]
    while not any(sequence.state is SequenceState.PREEMPTED for sequence in sequences):
        assert engine.has_work()
        engine.step()
    victim = next(sequence for sequence in sequences if sequence.state is SequenceState.PREEMPTED)
    assert engine.abort(victim.request_id)
    while engine.has_work():
        engine.step()
    others = [sequence.finish_reason for sequence in sequences if sequence is not victim]
    assert others == [FinishReason.LENGTH] * 2
    assert_idle(engine)


@pytest.mark.parametrize("budget", [5, 64])
def test_a_request_that_raises_ends_alone(make_engine: MakeEngine, budget: int) -> None:
    def requests() -> list[Request]:
        prompts = {name: [token + index for token in PROMPT] for index, name in enumerate("abcde")}
        return [make_request(name, prompt, max_tokens=6) for name, prompt in prompts.items()]

    expected = {name: made(deltas) for name, deltas in run_to_end(make_engine(), *requests()).items()}
    engine = make_engine(token_budget=budget)
    bad = make_request("bad", [4, 5, POISON, 6, 7], max_tokens=6)
    with poisoned(engine):
        deltas = run_to_end(engine, *requests()[:2], bad, *requests()[2:])
    (error,) = deltas.pop("bad")
    assert error.finish_reason is FinishReason.ERROR
    assert error.error is not None
    assert "poisoned" in error.error
    assert {name: made(each) for name, each in deltas.items()} == expected
    assert_idle(engine)
    # what the failed request wrote is not found by a later one
    again = run_to_end(engine, make_request("again", [4, 5, POISON, 6, 7], max_tokens=2))["again"]
    assert again[-1].cached_tokens == 0


def test_a_lone_request_that_raises_leaves_the_engine_alive(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with poisoned(engine):
        for name in ("a", "b"):
            (delta,) = run_to_end(engine, make_request(name, [4, POISON], max_tokens=6))[name]
            assert delta.finish_reason is FinishReason.ERROR
    assert len(made(run_to_end(engine, make_request("c", PROMPT, max_tokens=6))["c"])) == 6


def test_a_model_that_cannot_run_at_all_is_no_request_s_fault(make_engine: MakeEngine) -> None:
    """The requests all fail, and so does the probe that runs without any of them."""

    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("broken")

    engine = make_engine()
    engine.add(make_request("a", PROMPT))
    engine.add(make_request("b", PROMPT[1:]))
    engine.runner.decoder.forward = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broken"):
        engine.step()


NO_MEMORY = [
    MemoryError("no memory for the attention"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
]


@contextmanager
def little_memory(engine: Engine, most: int, error: Exception) -> Iterator[list[int]]:
    """Every computation over more than ``most`` tokens raises ``error``; yields the sizes that were tried."""
    forward, tried = engine.runner.decoder.forward, []

    def fail(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        tried.append(len(token_ids))
        if len(token_ids) > most:
            raise error
        return forward(token_ids, *rest)

    engine.runner.decoder.forward = fail  # type: ignore[method-assign]
    yield tried
    engine.runner.decoder.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("most", [1, 3, 11, 20])
def test_a_step_that_finds_too_little_memory_is_run_in_smaller_steps(
    make_engine: MakeEngine, error: Exception, most: int
) -> None:
    def requests() -> list[Request]:
        prompts = {name: [token + index for token in PROMPT] for index, name in enumerate("abc")}
        return [make_request(name, prompt, max_tokens=6) for name, prompt in prompts.items()]

    expected = {name: made(deltas) for name, deltas in run_to_end(make_engine(), *requests()).items()}
    engine = make_engine()
    with little_memory(engine, most, error) as tried:
        deltas = run_to_end(engine, *requests())
    assert {name: made(each) for name, each in deltas.items()} == expected
    assert max(tried) == 3 * len(PROMPT)
    assert_idle(engine)


def test_a_request_that_finds_too_little_memory_alone_fails_and_the_others_go_on(
    make_engine: MakeEngine,
) -> None:
    expected = made(run_to_end(make_engine(), make_request("a", PROMPT, max_tokens=6))["a"])
    engine = make_engine()
    forward = engine.runner.decoder.forward

    def fail(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if bool((token_ids == POISON).any()):
            raise MemoryError("no memory for the attention")
        return forward(token_ids, *rest)

    engine.runner.decoder.forward = fail  # type: ignore[method-assign]
    large = make_request("large", [4, 5, POISON, 6, 7], max_tokens=6)
    deltas = run_to_end(engine, large, make_request("a", PROMPT, max_tokens=6))
    assert made(deltas["a"]) == expected
    (error,) = deltas["large"]
    assert error.finish_reason is FinishReason.ERROR
    assert "ran out of memory: no memory for the attention" in str(error.error)
    assert_idle(engine)


def test_memory_that_does_not_suffice_for_one_token_is_no_request_s_fault(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT))
    with little_memory(engine, 0, MemoryError()), pytest.raises(MemoryError):
        engine.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 129}, "max_model_len is 129 but the model's context is 128"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"kernels": "fast"}, "kernels='fast' is unknown"),
        ({"kernels": "triton", "device": "cpu"}, "triton"),
        ({"num_blocks": None, "kv_memory": 1}, "raise kv_memory"),
    ],
)
def test_options_that_cannot_work_are_one_line(
    make_engine: MakeEngine, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_engine(**options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_model_is_one_line() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Engine(EngineConfig(model="/nowhere/at/all"))


class Outputs:
    """Collects what a thread delivers."""

    def __init__(self, config: EngineConfig) -> None:
        self.deltas: queue.Queue[TokenDelta] = queue.Queue()
        self.deaths: queue.Queue[BaseException] = queue.Queue()
        self.thread = EngineThread(config, self._deliver, self.deaths.put)

    def _deliver(self, outputs: StepOutputs) -> None:
        for delta in outputs.deltas:
            self.deltas.put(delta)

    def until_finished(self, *names: str) -> dict[str, list[TokenDelta]]:
        deltas: dict[str, list[TokenDelta]] = {name: [] for name in names}
        left = set(names)
        while left:
            delta = self.deltas.get(timeout=120)
            deltas[delta.request_id].append(delta)
            if delta.finish_reason is not None:
                left.remove(delta.request_id)
        return deltas


@contextmanager
def held(outputs: Outputs) -> Iterator[None]:
    """No step begins until the block ends, so that no request is over before the next one is submitted."""
    go_on = threading.Event()
    with delayed_steps(outputs.thread, go_on.wait):
        try:
            yield
        finally:
            go_on.set()


@pytest.fixture
def outputs(tiny_models: dict[str, Path]) -> Iterator[Outputs]:
    outputs = Outputs(tiny_engine_config(tiny_models["Llama"]))
    outputs.thread.start()
    yield outputs
    outputs.thread.stop()
    assert not outputs.thread.is_alive()


class TimedInbox(queue.SimpleQueue[Any]):
    """Notes how long its reader is ready to wait for each item."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        return super().get(block, timeout)


@pytest.mark.parametrize(("cores", "beside", "pauses"), [(1, False, 1), (1, True, 0), (2, False, 0)])
def test_the_next_step_leaves_the_cores_to_the_first_token_of_a_lone_request(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, cores: int, beside: bool, pauses: int
) -> None:
    """The engine has one thread."""
    monkeypatch.setattr("engine.engine.usable_cores", lambda: cores)
    outputs = Outputs(tiny_engine_config(tiny_models["Llama"]))
    inbox = outputs.thread._inbox = TimedInbox()
    deliver, thread = outputs._deliver, outputs.thread

    def on_outputs(made: StepOutputs) -> None:
        deliver(made)
        if beside and any(delta.request_id == "a" and delta.index == 0 for delta in made.deltas):
            thread.submit(make_request("b", [5, 6], max_tokens=3, ignore_eos=True))  # while "a" has more to do

    thread._on_outputs = on_outputs
    thread.start()
    thread.submit(make_request("a", [5, 6, 7], max_tokens=20, ignore_eos=True))
    outputs.until_finished("a", *(["b"] if beside else []))
    thread.stop()
    assert inbox.timeouts.count(engine_thread.FIRST_TOKEN_S) == pauses


def test_an_idle_engine_prefaults_its_pool_and_takes_requests_meanwhile(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(KVCache, "prefault", lambda self, mark: calls.put(mark) is None)  # never done
    outputs = Outputs(tiny_engine_config(tiny_models["Llama"]))
    outputs.thread.start()
    assert calls.get(timeout=120) == 0
    outputs.thread.submit(Request("a", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)))
    outputs.until_finished("a")
    while calls.get(timeout=120) == 0:
        pass
    outputs.thread.stop()
    assert not outputs.thread.is_alive()


def test_what_grammars_need_is_loaded_once_no_request_runs(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the interpreter does nothing else, and every stream would wait."""
    warm: queue.Queue[int] = queue.Queue()
    looks: queue.Queue[None] = queue.Queue()
    outputs = Outputs(tiny_engine_config(tiny_models["Llama"]))
    closed = outputs.thread._closed
    monkeypatch.setattr(engine_thread, "WARM_AFTER_S", 0.0)
    monkeypatch.setattr(GrammarCompiler, "warm_up", lambda _: warm.put(outputs.thread.num_live))

    def wait(seconds: float) -> bool:
        looks.put(None)
        return threading.Event.wait(closed, max(seconds, 0.001))

    monkeypatch.setattr(closed, "wait", wait)
    outputs.thread._live.add("running")
    outputs.thread.start()
    for _ in range(3):
        looks.get(timeout=120)
    assert warm.empty()
    outputs.thread._live.discard("running")
    assert warm.get(timeout=120) == 0
    outputs.thread.stop()


def test_nothing_that_is_submitted_or_aborted_kills_the_thread(outputs: Outputs) -> None:
    good = make_request("a", PROMPT, max_tokens=9)
    outputs.thread.submit(good)
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(InvalidRequestError):
                outputs.thread.submit(replace(GOOD, **{"request_id": "bad", name: value}))
    for value in (None, 5, [], {}, good, b"a", "unknown"):
        outputs.thread.abort(value)  # type: ignore[arg-type]
        if not isinstance(value, str):
            with pytest.raises(InvalidRequestError):
                outputs.thread.submit(value if value is not good else "a")  # type: ignore[arg-type]
    changed = make_request("changed", list(PROMPT), max_tokens=9)
    outputs.thread.submit(changed)
    changed.token_ids[0] = 2.5  # type: ignore[call-overload]  # before or after the thread takes it in
    outputs.thread.submit(make_request("b", PROMPT, max_tokens=9))
    assert len(made(outputs.until_finished("a", "b", "changed")["b"])) == 9
    assert outputs.thread.is_alive()


def test_the_thread_delivers_what_the_engine_makes(outputs: Outputs, make_engine: MakeEngine) -> None:
    expected = made(run_to_end(make_engine(), make_request("a", PROMPT, max_tokens=9))["a"])
    names = [f"r{index}" for index in range(5)]
    for name in names:
        outputs.thread.submit(make_request(name, PROMPT, max_tokens=9))
    for deltas in outputs.until_finished(*names).values():
        assert made(deltas) == expected
    stats = outputs.thread.stats()
    assert stats.scheduler.finished[FinishReason.LENGTH] == 5
    assert stats.scheduler.referenced_blocks == 0
    assert stats.steps >= 9
    assert outputs.thread.num_live == 0


def test_the_thread_aborts(outputs: Outputs) -> None:
    with held(outputs):
        outputs.thread.submit(make_request("a", PROMPT, max_tokens=100, ignore_eos=True))
        outputs.thread.submit(make_request("b", PROMPT, max_tokens=4))
        aborted_at = time.monotonic()
        outputs.thread.abort("a")
        outputs.thread.abort("unknown")
    deltas = outputs.until_finished("a", "b")
    assert deltas["a"][-1].finish_reason is FinishReason.ABORT
    assert len(made(deltas["b"])) == 4
    assert aborted_at < outputs.thread.turned_at < time.monotonic()


def test_wrong_requests_raise_in_the_caller(outputs: Outputs) -> None:
    with pytest.raises(InvalidRequestError, match="97"):
        outputs.thread.submit(make_request("a", [97]))
    with pytest.raises(InvalidRequestError, match="context length of 128"):
        outputs.thread.submit(make_request("a", PROMPT, max_tokens=118))
    with held(outputs):
        outputs.thread.submit(make_request("a", PROMPT, max_tokens=60))
        with pytest.raises(InvalidRequestError, match="already running"):
            outputs.thread.submit(make_request("a", PROMPT))
    assert len(made(outputs.until_finished("a")["a"])) == 60
    moved = Request("m", PROMPT, SamplingParams(max_tokens=3), generated_before=3)
    outputs.thread.submit(moved)
    (delta,) = outputs.until_finished("m")["m"]
    assert delta.finish_reason is FinishReason.ERROR


def test_progress_within_a_step_and_none_while_idle(outputs: Outputs) -> None:
    engine = outputs.thread._engine
    assert engine is not None
    seen: list[tuple[int, int] | None] = []
    attention = engine.runner.decoder.kernels.attention
    steps = engine.runner._steps
    steps._recordings = dict.fromkeys(steps._recordings)  # the decoder runs each step, layer by layer

    def look(*args: Any) -> torch.Tensor:
        seen.append(outputs.thread.progress())
        return attention(*args)

    engine.runner.decoder.kernels.attention = look  # type: ignore[method-assign]
    outputs.thread.submit(make_request("a", PROMPT, max_tokens=3))
    outputs.until_finished("a")
    assert None not in seen
    assert len(set(seen)) == len(seen) >= 2 * engine.runner.model.num_layers
    while outputs.thread.progress() is not None:
        time.sleep(0.001)  # until it waits for its inbox again


def test_a_dead_thread_says_so_once(outputs: Outputs) -> None:
    error = MemoryError("no more")

    def fail(*_: Any) -> torch.Tensor:
        raise error

    engine = outputs.thread._engine
    assert engine is not None
    engine.runner.decoder.forward = fail  # type: ignore[method-assign]
    outputs.thread.submit(make_request("a", PROMPT))
    assert outputs.deaths.get(timeout=120) is error
    outputs.thread._thread.join(30)
    assert not outputs.thread.is_alive()
    assert outputs.deaths.empty()
    assert outputs.deltas.empty()
    with pytest.raises(EngineDeadError, match="no more"):
        outputs.thread.submit(make_request("b", PROMPT))
    outputs.thread.abort("a")  # never raises


def test_a_failing_start_raises_in_the_caller(tmp_path: Path) -> None:
    outputs = Outputs(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"config\.json"):
        outputs.thread.start()
    assert outputs.deaths.empty()
    with pytest.raises(EngineDeadError):
        _ = outputs.thread.limits
