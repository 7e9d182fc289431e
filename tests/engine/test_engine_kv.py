"""KV events and load of a running engine: in order with its tokens, whoever asks when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from kv_follower import Follower
from tiny_engines import make_request, tiny_engine_config

from engine.engine import Engine
from engine.engine_thread import EngineThread, StepOutputs
from engine.errors import EngineDeadError
from engine.kv.kv_events import KvBatch, KvSnapshot
from engine.request import CacheNamespace, TokenDelta

PROMPT = [place % 90 for place in range(40)]


class Observed:
    """An engine thread whose outputs are kept."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.outputs: list[StepOutputs] = []
        self._changed = threading.Condition()
        self.thread = EngineThread(tiny_engine_config(folder, **options), self._keep, lambda error: None)
        self.thread.start()

    def _keep(self, outputs: StepOutputs) -> None:
        with self._changed:
            self.outputs.append(outputs)
            self._changed.notify_all()

    def until_ended(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended(name), 30)

    def until_outputs(self, more_than: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outputs) > more_than, 30)

    def _ended(self, name: str) -> bool:
        return any(delta.final and delta.request_id == name for out in self.outputs for delta in out.deltas)

    @property
    def batches(self) -> list[KvBatch]:
        return [out.kv for out in self.outputs if out.kv is not None]

    def snapshot(self) -> KvSnapshot:
        made = self.thread.kv_snapshot().result(30)
        assert made is not None
        return made


@pytest.fixture
def observed(tiny_models: dict[str, Path]) -> Iterator[Observed]:
    one = Observed(tiny_models["Llama"])
    yield one
    one.thread.stop()


def test_batches_and_keys_of_a_request(observed: Observed) -> None:
    space = CacheNamespace(tenant="t")
    follower = Follower(observed.snapshot())
    assert (follower.sequence, follower.keys) == (0, set())
    request = replace(make_request("a", PROMPT, max_tokens=4), namespace=space)
    observed.thread.submit(request)
    observed.until_ended("a")
    assert [name for out in observed.outputs for name in out.added] == ["a"]
    for batch in observed.batches:
        follower.follow(batch)
    scheme = observed.thread.key_scheme
    assert scheme is not None
    assert follower.keys >= set(scheme.keys(PROMPT, space))
    assert Follower(observed.snapshot()).keys == follower.keys
    load = observed.outputs[-1].load
    assert (load.running, load.waiting_tokens, load.evictable) == (0, 0, len(follower.keys))


def test_an_engine_that_has_not_run_yet_has_a_load(observed: Observed) -> None:
    load, limits = observed.thread.load(), observed.thread.limits
    assert not observed.outputs
    assert (load.running, load.waiting, load.num_blocked, load.waiting_tokens) == (0, 0, 0, 0)
    assert load.free == limits.num_blocks
    assert load.prefill_rate > 0.0
    assert load.max_running > 0


def test_a_reset_of_an_idle_engine_is_told(observed: Observed) -> None:
    observed.thread.submit(make_request("a", PROMPT, max_tokens=2))
    observed.until_ended("a")
    before = len(observed.outputs)
    assert observed.thread.reset_prefix_cache().result(30) > 0
    observed.until_outputs(before)
    batch = observed.outputs[-1].kv
    assert batch is not None
    assert (batch.cleared, batch.stored, batch.count, batch.xor) == (True, [], 0, 0)
    assert observed.snapshot().keys == []


def test_snapshots_fit_between_the_batches_of_a_busy_engine(observed: Observed) -> None:
    made: list[Future[KvSnapshot | None]] = []
    for number in range(12):
        prompt = [(place * (number + 2)) % 90 for place in range(30)]
        observed.thread.submit(make_request(f"r{number}", prompt, max_tokens=20, ignore_eos=True))
        made.append(observed.thread.kv_snapshot())
        if number == 7:
            observed.thread.reset_prefix_cache()
    for number in range(12):
        observed.until_ended(f"r{number}")
    batches = observed.batches
    last = observed.snapshot()
    assert [batch.sequence for batch in batches] == list(range(1, last.sequence + 1))
    assert len(batches) > 12
    for future in made:
        snapshot = future.result(30)
        assert snapshot is not None
        follower = Follower(snapshot)
        for batch in batches:
            if batch.sequence > snapshot.sequence:
                follower.follow(batch)
        assert follower.keys == set(last.keys)


def test_without_prefix_caching_there_is_nothing_to_tell(tiny_models: dict[str, Path]) -> None:
    observed = Observed(tiny_models["Llama"], prefix_caching=False)
    try:
        assert observed.thread.key_scheme is None
        assert observed.thread.kv_snapshot().result(30) is None
        observed.thread.submit(make_request("a", PROMPT, max_tokens=4))
        observed.until_ended("a")
        assert observed.batches == []
    finally:
        observed.thread.stop()
    with pytest.raises(EngineDeadError):
        observed.thread.kv_snapshot()


def test_an_offline_engine_records_and_measures_nothing(tiny_models: dict[str, Path]) -> None:
    engine = Engine(tiny_engine_config(tiny_models["Llama"]), offline=True)
    assert engine.kv_events is None
    assert engine.load.read().prefill_rate == 0.0


def test_the_prefill_rate_is_known_whatever_the_budget(observed: Observed) -> None:
    observed.thread.abort("anything")
    observed.until_outputs(0)
    assert observed.outputs[0].load.prefill_rate > 0.0
    assert observed.outputs[0].deltas == []


def test_nobody_waits_for_an_engine_that_has_ended(observed: Observed) -> None:
    engine = observed.thread._engine
    assert engine is not None
    answers: list[Future[KvSnapshot | None] | Future[int]] = []

    def fail() -> None:
        # What is queued before the end is seen and after it, but not answered.
        answers.append(observed.thread.kv_snapshot())
        answers.append(observed.thread.reset_prefix_cache())
        raise MemoryError("no more")

    engine.step = fail  # type: ignore[assignment, method-assign]
    observed.thread.abort("anything")
    observed.thread._thread.join(30)
    assert len(answers) == 2
    for answer in answers:
        with pytest.raises(EngineDeadError, match="has stopped"):
            answer.result(0)


def test_whoever_gives_up_waiting_does_no_harm(observed: Observed) -> None:
    """A client that leaves cancels the future that was made for it."""
    for _ in range(20):
        observed.thread.reset_prefix_cache().cancel()
        observed.thread.kv_snapshot().cancel()
    assert observed.thread.reset_prefix_cache().result(30) == 0
    assert observed.snapshot().count == 0


def test_what_was_queued_behind_the_end_is_answered(observed: Observed) -> None:
    engine = observed.thread._engine
    assert engine is not None
    answers: list[Future[KvSnapshot | None] | Future[int]] = []

    def end(request_id: str) -> list[TokenDelta]:
        observed.thread._inbox.put(None)
        answers.append(observed.thread.reset_prefix_cache())
        answers.append(observed.thread.kv_snapshot())
        return []

    engine.abort = end  # type: ignore[method-assign]
    observed.thread.abort("anything")  # the next turn of the loop takes the three at once
    observed.thread._thread.join(30)
    assert len(answers) == 2
    for answer in answers:
        with pytest.raises(EngineDeadError, match="has stopped"):
            answer.result(0)


def test_what_is_queued_after_the_end_is_answered(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = observed.thread._engine
    assert engine is not None
    observed.thread.stop()
    monkeypatch.setattr(observed.thread, "_running", lambda: engine)  # it ended after the caller had looked
    for answer in (observed.thread.reset_prefix_cache(), observed.thread.kv_snapshot()):
        with pytest.raises(EngineDeadError, match="has stopped"):
            answer.result(0)
