"""Replayed steps: the bits of the plain decoder, for every family, dtype and number of requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import TINY_MODELS, make_request, run_to_end, tiny_engine_config
from torch import Tensor

from engine.engine import Engine
from engine.execution.batch import Layout
from engine.execution.recorded_steps import _Kind, _Size, runs_whole
from kernels.cpu.build import BuildError, find_compilers
from kernels.cpu.calls import CallRecording
from kernels.cpu.linear import prefers_onednn
from kernels.interface import Choices

try:
    find_compilers()
except BuildError as error:
    pytest.skip(f"only the CPU kernels record: {error}", allow_module_level=True)


def check_every_step(engine: Engine) -> list[tuple[_Size, bool]]:
    """From now on compare each step with the plain decoder; returns sizes and whether all decode, by step."""
    runner = engine.runner
    forward, pool = runner._steps.forward, runner.kv_cache.pool
    steps: list[tuple[_Size, bool]] = []

    def both(layout: Layout, choices: Choices | None = None) -> Tensor:
        before, batch = pool.clone(), layout.batch(pool.device)
        recorded = forward(layout, choices).clone()
        written = pool.clone()
        pool.copy_(before)
        plain = runner.decoder.forward(batch.token_ids, pool, batch.metadata, batch.sample_rows, choices)
        assert not plain.numel() or plain.data_ptr() != recorded.data_ptr()
        assert torch.equal(recorded.view(torch.int32), plain.view(torch.int32))
        bits = torch.int16 if pool.element_size() == 2 else torch.int32
        assert torch.equal(written.view(bits), pool.view(bits))
        counts = (batch.token_ids, batch.metadata.context_lens, batch.sample_rows)
        steps.append((_Size(*map(len, counts)), layout.decodes))
        return recorded

    runner._steps.forward = both  # type: ignore[method-assign]
    return steps


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(tiny_engine_config(folder, kernels="cpu", check_invariants=False, **options))


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        *((dtype, "model") for dtype in ("float32", "bfloat16", "float16")),
        *(("bfloat16", f"int{n}") for n in (4, 8)),
    ],
)
@pytest.mark.parametrize("model", TINY_MODELS)
def test_replays_equal_the_plain_decoder(
    model: str, dtype: str, weights: str, tiny_models: dict[str, Path]
) -> None:
    """Requests of different lengths come and go, and some steps do not sample."""
    engine = engine_of(tiny_models[model], dtype=dtype, weights=weights, num_threads=2, token_budget=16)
    steps = check_every_step(engine)
    first = itertools.count(2)  # tokens, so that none shares a prefix
    for lengths in ((3, 20, 9), (31, 2), (5, 19, 8), (29, 4)):
        requests = [
            make_request(f"{lengths}{index}", [next(first), *range(2, 1 + length)], max_tokens=4 + 3 * index)
            for index, length in enumerate(lengths)
        ]
        run_to_end(engine, *requests)
    assert {1, 2, 3} <= {size.tokens for size, decodes in steps if decodes}
    assert {2, 3} <= {size.requests for size, decodes in steps if not decodes}
    recordings = engine.runner._steps._recordings
    screened = {_Kind(True, True)} if engine.runner.decoder.screened_rows else set()
    assert set(recordings) == {_Kind(True, False), _Kind(False, False), *screened}
    if weights == "model" and model != "Gemma2" and engine.runner.decoder.kernels.prefers_codes:
        assert screened, "the tiny models' heads are a large share of them"
    recorded = weights != "model" or not prefers_onednn(getattr(torch, dtype))
    assert all((recording is not None) == recorded for recording in recordings.values())


@pytest.mark.parametrize(
    ("rows", "context", "whole"),
    [(1, 100_000, True), (32, 8192, True), (33, 33, False), (512, 512, False), (3, 100_000, False)],
)
def test_only_short_steps_run_in_one_call(rows: int, context: int, whole: bool) -> None:
    assert runs_whole(rows, context) is whole


def test_long_steps_are_replayed_layer_by_layer_for_the_watchdog(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones before them make no difference."""
    monkeypatch.setattr("engine.execution.recorded_steps.WHOLE_ATTENTION", 16)
    engine = engine_of(tiny_models["Llama"])
    check_every_step(engine)
    layers = len(engine.runner.decoder.layers)
    replay, asked = CallRecording.replay, []

    def noted(self: CallRecording, sizes: Sequence[int], parts: int) -> Iterator[None]:
        asked.append((sizes[0], parts))
        before = engine.layers_run
        for part, _ in enumerate(replay(self, sizes, parts)):
            assert engine.layers_run == before + part * layers // parts
            yield

    monkeypatch.setattr(CallRecording, "replay", noted)
    for name, prompt in (("short", [2, 3, 4, 5]), ("long", [3, 4, 5, 6, 7])):
        run_to_end(engine, make_request(name, prompt, max_tokens=2, ignore_eos=True))
    assert asked == [(4, 1), (1, 1), (5, layers), (1, 1)]


def test_kernels_that_cannot_record_run_every_step(tiny_models: dict[str, Path]) -> None:
    engine = Engine(tiny_engine_config(tiny_models["Llama"], kernels="reference"))
    deltas = run_to_end(engine, make_request("one", [3, 4, 5], max_tokens=6, ignore_eos=True))
    assert sum(len(delta.token_ids) for delta in deltas["one"]) == 6
    assert engine.runner._steps._recordings == {_Kind(True, False): None, _Kind(False, False): None}


def test_a_failed_run_leaves_no_recording_open(tiny_models: dict[str, Path]) -> None:
    engine = engine_of(tiny_models["Llama"])
    kernels = engine.runner.decoder.kernels

    def fail(sizes: Sequence[int]) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        kernels.record(fail, (4,))
    x = torch.ones(2, 8)
    first, second = (kernels.rms_norm(x * scale, torch.ones(8), 1e-6) for scale in (1.0, -1.0))
    assert torch.equal(first, -second)  # results that nobody records have memory of their own


def test_what_depends_on_sizes_in_another_way_is_not_recorded(tiny_models: dict[str, Path]) -> None:
    kernels = engine_of(tiny_models["Llama"]).runner.decoder.kernels
    x, weight = torch.ones(9, 8), torch.ones(8)

    def norm(rows: int) -> Tensor:
        return kernels.rms_norm(x[:rows], weight, 1e-6)

    assert kernels.record(lambda sizes: norm(sizes[0]), (4, 5)) is not None
    assert kernels.record(lambda sizes: norm(sizes[0] + 1), (4,)) is None
    assert kernels.record(lambda sizes: norm(sizes[0] + sizes[1]), (4, 3)) is None
    assert kernels.record(lambda sizes: [norm(1) for _ in range(sizes[0])].pop(), (4,)) is None
    assert kernels.record(lambda sizes: norm(min(sizes[0], 3)), (4,)) is None
    assert kernels.record(lambda sizes: norm(-(-sizes[0] // 4)), (4,)) is None
    assert kernels.record(lambda sizes: norm(sizes[0] * sizes[1]), (3, 2)) is None


def test_one_token_of_a_longer_prompt_is_no_decode(tiny_models: dict[str, Path]) -> None:
    """With a budget of one token prompts go token by token, and only the last of each samples."""
    engine = engine_of(tiny_models["Llama"], token_budget=1)
    steps = check_every_step(engine)
    run_to_end(engine, make_request("one", [3, 4, 5], max_tokens=3, ignore_eos=True))
    prompt, decode = ((1, 1, 0), False), ((1, 1, 1), True)
    assert steps == [prompt, prompt, decode, decode, decode]


def test_steps_of_a_size_that_was_seen_allocate_no_buffers(tiny_models: dict[str, Path]) -> None:
    engine = engine_of(tiny_models["Llama"])

    def run(name: str, length: int) -> list[int]:
        run_to_end(engine, make_request(name, list(range(2, 2 + length)), max_tokens=5, ignore_eos=True))
        calls = engine.runner.decoder.kernels._calls  # type: ignore[attr-defined]
        return [buffer.data_ptr() for buffer in calls._buffers.values()]

    assert run("long", 30) == run("as long", 30) == run("shorter", 9)


def test_a_step_leaves_torch_its_threads(tiny_models: dict[str, Path]) -> None:
    """While it runs there is one, where the kernels have their own; the process may use torch otherwise."""
    engine = engine_of(tiny_models["Llama"], num_threads=2)
    before = torch.get_num_threads()
    seen: set[int] = set()
    engine.runner.on_logits = lambda _sequences, _logits: seen.add(torch.get_num_threads())
    try:
        torch.set_num_threads(3)
        run_to_end(engine, make_request("one", [3, 4], max_tokens=2, ignore_eos=True))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == ({1} if engine.runner.decoder.kernels.own_threads else {3})
