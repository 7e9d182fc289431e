"""What the runner chooses for each kind of request, and blocks that leave the device and come back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from model_checkpoints import save_tiny
from sequences import make_sequence
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.batch import Layout
from engine.execution.model_runner import ModelRunner
from engine.kv.kv_cache import KVCache
from engine.kv.transfers import Transfers
from engine.logit_edits import LogitEdits
from engine.sampling_params import SamplingParams
from engine.scheduling.beam_search import BeamSearch
from engine.scheduling.candidates import Candidates
from engine.scheduling.sequence import ScheduledChunk, SequenceGroup
from engine.seeds import sequence_seed
from kernels import AttentionMetadata, PackedLinear
from kernels.interface import Choices

PROMPT = [5, 17, 42, 8, 61, 33, 90, 12, 4]
SEED = 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runner")
    save_tiny(path, "Llama", eos_token_id=1, bos_token_id=0)
    return path


def make_runner(folder: Path, recovery: str = "auto", swap_space: int | None = None) -> ModelRunner:
    return ModelRunner(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            block_size=4,
            num_blocks=16,
            num_threads=1,
            token_budget=64,
            swap_space=swap_space,
            recovery=recovery,
        )
    )


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder)


def chunk(params: SamplingParams, group: SequenceGroup | None = None, seed: int = SEED) -> ScheduledChunk:
    """The whole prompt of a sequence whose blocks are 3, 0 and 7."""
    sequence = make_sequence(PROMPT, [3, 0, 7], params, group=group, seed=seed)
    return ScheduledChunk(sequence, 0, len(PROMPT), True)


def test_an_ordinary_request_gets_a_token(runner: ModelRunner) -> None:
    made = runner.run([chunk(SamplingParams(seed=1)), chunk(SamplingParams(temperature=0.0))])
    assert [type(outcome) for outcome in made] == [int, int]


@pytest.mark.parametrize("best_of", [None, 4], ids=["all returned", "ranked"])
def test_the_first_step_of_a_group_draws_for_each_sequence(runner: ModelRunner, best_of: int | None) -> None:
    params = SamplingParams(n=3, best_of=best_of, temperature=1.5)
    (made,) = runner.run([chunk(params, SequenceGroup("r", params, None))])
    seeds = [sequence_seed(SEED, sequence) for sequence in range(params.width)]
    alone = runner.run([chunk(SamplingParams(temperature=1.5), seed=seed) for seed in seeds])
    assert isinstance(made, Candidates)
    assert list(made.tokens) == alone
    assert len(set(alone)) > 1
    assert len(made.logprobs) == params.width
    assert max(made.logprobs) < 0.0


def test_later_steps_of_a_group_draw_one_token(runner: ModelRunner) -> None:
    plain = SamplingParams(n=2, temperature=1.5)
    ranked = SamplingParams(n=2, best_of=3, temperature=1.5)
    token, candidates, alone = runner.run(
        [
            chunk(plain, SequenceGroup("r", plain, None, forked=True), seed=5),
            chunk(ranked, SequenceGroup("r", ranked, None, forked=True), seed=5),
            chunk(SamplingParams(temperature=1.5), seed=5),
        ]
    )
    assert token == alone
    assert isinstance(candidates, Candidates)
    assert candidates.tokens == (alone,)
    assert len(candidates.logprobs) == 1


@pytest.mark.parametrize("forked", [False, True])
def test_a_beam_gets_the_likeliest_tokens(runner: ModelRunner, forked: bool) -> None:
    params = SamplingParams(n=2, beam_width=3, use_beam_search=True, temperature=0.0, min_tokens=2)
    search = BeamSearch(
        3, length_penalty=1.0, early_stopping=False, end_token_ids=frozenset({1}), max_new_tokens=9
    )
    (made,) = runner.run([chunk(params, SequenceGroup("r", params, search, forked=forked))])
    assert isinstance(made, Candidates)
    assert len(made.tokens) == search.num_candidates
    assert list(made.logprobs) == sorted(made.logprobs, reverse=True)
    assert made.tokens[0] == runner.run([chunk(SamplingParams(temperature=0.0, min_tokens=2))])[0]
    assert 1 not in made.tokens  # min_tokens forbids the end


def test_no_stop_token_comes_before_min_tokens(runner: ModelRunner) -> None:
    (likeliest,) = runner.run([chunk(SamplingParams(temperature=0.0))])
    assert isinstance(likeliest, int)
    stop = {"temperature": 0.0, "max_tokens": 4, "stop_token_ids": (likeliest,)}
    held_off, stops = runner.run(
        [chunk(SamplingParams(**stop, min_tokens=2)), chunk(SamplingParams(**stop))]  # type: ignore[arg-type]
    )
    assert held_off != likeliest
    assert stops == likeliest


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("params", "temperatures"),
    [
        ([GREEDY], [0.0]),
        ([GREEDY, SamplingParams(temperature=0.0, max_tokens=3, stop_token_ids=(7,))], [0.0, 0.0]),
        ([GREEDY, SamplingParams(temperature=0.5), GREEDY], [0.0, 0.5, 0.0]),
        ([SamplingParams(), SamplingParams(temperature=0.5)], [1.0, 0.5]),
        ([SamplingParams(temperature=0.0, top_k=5, top_p=0.5)], [0.0]),
        ([SamplingParams(top_k=5)], None),
        ([SamplingParams(top_p=0.5)], None),
        ([SamplingParams(min_p=0.5)], None),
        ([SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,))], None),
        ([GREEDY, SamplingParams(temperature=0.0, logprobs=0)], None),
        ([SamplingParams(temperature=0.0, logit_bias={5: 1.0})], None),
        ([SamplingParams(temperature=0.0, repetition_penalty=1.1)], None),
        ([SamplingParams(temperature=0.0, presence_penalty=0.5)], None),
        ([GREEDY] * 5, None),
        ([GREEDY, SamplingParams(), SamplingParams()], None),
    ],
    ids=[
        *("greedy", "stop tokens", "a random one", "random ones", "greedy with filters", "top_k", "top_p"),
        *("min_p", "min_tokens", "logprobs", "bias", "repetition", "presence", "too many", "too many draws"),
    ],
)
def test_which_steps_leave_logits_out(
    runner: ModelRunner,
    params: list[SamplingParams],
    temperatures: list[float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever takes more than largest logits or draws without filters gets all."""
    monkeypatch.setattr(runner.decoder, "screened_rows", 4)
    forward, asked = runner._steps.forward, []

    def noted(layout: Layout, choices: Choices | None = None) -> Tensor:
        asked.append(None if choices is None else choices.temperature.tolist())
        return forward(layout, choices)

    monkeypatch.setattr(runner._steps, "forward", noted)
    chunks = [chunk(each) for each in params]
    for each in chunks:
        if each.sequence.params.edits_logits:
            each.sequence.edits = LogitEdits(each.sequence.params, len(PROMPT), runner.model.vocab_size)
    runner.run(chunks)
    seen: list[Tensor] = []
    monkeypatch.setattr(runner, "on_logits", lambda sequences, logits: seen.append(logits.clone()))
    runner.run([chunk(each) for each in params])
    assert asked == [temperatures, None]
    assert seen[0].isfinite().all(), "who looks at logits gets all"


def test_screened_steps_choose_as_others_do(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        temperatures = (0.0, 0.6) if seed % 2 else (1.0, 1.7)
        chunks = [chunk(SamplingParams(temperature=each), seed=seed) for each in temperatures]
        screened = runner.run(chunks)
        with monkeypatch.context() as patch:
            patch.setattr(runner.decoder, "screened_rows", 0)
            assert runner.run(chunks) == screened


def test_the_cache_hears_of_each_block_that_a_step_writes(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[int]] = []
    monkeypatch.setattr(runner.kv_cache, "before_writing", lambda blocks: told.append(list(blocks)))
    whole = chunk(SamplingParams(temperature=0.0))
    for start, length in ((0, 9), (0, 4), (3, 2), (4, 5), (8, 1)):
        runner.run([ScheduledChunk(whole.sequence, start, length, False)])
    assert told == [[3, 0, 7], [3], [3, 0], [0, 7], [7]]


def test_the_rotary_table_has_the_positions_that_are_served(folder: Path, runner: ModelRunner) -> None:
    short = ModelRunner(EngineConfig(model=str(folder), device="cpu", num_blocks=4, max_model_len=20))
    assert len(short.decoder.cos_sin) == 20
    assert len(runner.decoder.cos_sin) == runner.max_model_len


@pytest.mark.parametrize("context", [1, 5, 20])
def test_a_decode_for_calibration_stays_within_what_is_served(folder: Path, context: int) -> None:
    short = ModelRunner(
        EngineConfig(model=str(folder), device="cpu", kernels="reference", num_blocks=4, max_model_len=context)
    )
    seen = []
    forward = short._steps.forward

    def kept(layout: Layout) -> Tensor:
        seen.append(layout.positions)
        return forward(layout)

    short._steps.forward = kept  # type: ignore[method-assign]
    short.decode(8)
    assert seen == [list(range(min(context, 8)))]


def test_warming_up_takes_each_kind_of_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder)
    seen = []
    rows_seen: dict[tuple[int, int], set[int]] = {}  # by features in and out: what a kernel is compiled for
    forward, linear = runner.decoder.forward, runner.decoder.kernels.linear

    def kept(tokens: Tensor, pool: Tensor, metadata: AttentionMetadata, rows: Tensor) -> Tensor:
        seen.append((metadata.max_query_len, metadata.max_context_len))
        return forward(tokens, pool, metadata, rows)

    def counted(x: Tensor, packed: PackedLinear) -> Tensor:
        rows_seen.setdefault((packed.in_features, packed.out_features), set()).add(x.shape[0])
        return linear(x, packed)

    monkeypatch.setattr(runner.decoder, "forward", kept)
    monkeypatch.setattr(runner.decoder.kernels, "linear", counted)
    runner.warm_up()
    assert seen == [(64, 64), (1, 1), (1, 64)]  # as many as the pool holds
    assert (runner.model.hidden_size, runner.model.vocab_size) in rows_seen
    for rows in rows_seen.values():  # of every product, both kinds that float32 has on a GPU
        assert min(rows) <= 16 < max(rows)


def test_tokens_alone_follow_those_before(runner: ModelRunner) -> None:
    cache = KVCache(runner.model, 3, 4, runner.dtype, runner.device)
    with torch.inference_mode():
        whole = runner.forward_alone(PROMPT, cache)
        cache.pool.zero_()
        runner.forward_alone(PROMPT[:5], cache)
        torch.testing.assert_close(runner.forward_alone(PROMPT[5:], cache, 5), whole)


def test_swapped_blocks_serve_from_other_places(folder: Path) -> None:
    """The second half of a prompt computes the same after its first half left the device and came back."""
    runner = make_runner(folder, swap_space=1 << 20)
    params = SamplingParams(n=3, best_of=4, temperature=1.5)
    whole = chunk(params, SequenceGroup("r", params, None))
    (expected,) = runner.run([whole])
    sequence = whole.sequence
    runner.run([ScheduledChunk(sequence, 0, 4, False), ScheduledChunk(sequence, 4, 3, False)])
    out, _ = runner.transfer(Transfers(swap_out=[(3, 5), (0, 6)]))
    runner.kv_cache.pool.fill_(1e4)
    _, back = runner.transfer(Transfers(swap_in=[(5, 8), (6, 9)], copies=[(1, 2)]))
    assert out > 0.0
    assert back > 0.0
    sequence.block_table = [8, 9, 1]
    assert runner.run([ScheduledChunk(sequence, 7, 2, True)]) == [expected]


def test_the_start_tells_the_swap_space(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engine"):
        assert make_runner(folder).memory.host_blocks == 0
        assert "swap space" not in caplog.text
        runner = make_runner(folder, "swap", swap_space=1 << 20)
    block = 4 * runner.bytes_per_token
    assert runner.memory.host_blocks == (1 << 20) // block == runner.kv_cache.host_blocks
    assert f"{runner.memory.host_blocks} blocks; recovery of preempted requests: swap" in caplog.text
    with pytest.raises(ConfigError, match="set swap_space"):
        make_runner(folder, "swap")
