"""The decoder against transformers, on tiny random models of every family and RoPE type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import FAMILIES, ROPES, VOCAB, PagedRun, save_tiny
from model_variants import TOLERANCE, VARIANTS, expect
from torch import Tensor

from engine.models.loader import load_model
from kernels.interface import Kernels, PackedLinear
from kernels.reference import ReferenceKernels
from kernels.registry import get_kernels


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        from kernels.cpu.build import BuildError, find_compilers

        try:
            find_compilers()
        except BuildError:
            pytest.skip("no C++ compiler here")
    return get_kernels(request.param, "cpu", 2)


def check(folder: Path, model: Any, kernels: Kernels) -> None:
    """Whole prompts, then the same in chunks and single tokens, in a batch with another sequence."""
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (60, 23)]
    expected = [expect(model, sequence) for sequence in sequences]
    assert min(float(logits.abs().max()) for logits in expected) > 1.0
    decoder = load_model(folder, kernels, torch.float32, "cpu")

    whole = PagedRun(decoder, sequences).step([60, 23])
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, torch.cat(expected), atol=TOLERANCE, rtol=0)

    run = PagedRun(decoder, sequences)
    begin = [0, 0]
    for counts in ([13, 0], [1, 5], [30, 1], [1, 1], [1, 16], [14, 0]):
        wanted = [expected[i][begin[i] : begin[i] + counts[i]] for i in (0, 1)]
        torch.testing.assert_close(run.step(counts), torch.cat(wanted), atol=TOLERANCE, rtol=0)
        begin = [begin[i] + counts[i] for i in (0, 1)]
    assert begin == [60, 23]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_every_rope(family: str, rope: str, kernels: Kernels, tmp_path: Path) -> None:
    tied = (list(FAMILIES).index(family) + list(ROPES).index(rope)) % 2 == 0
    model = save_tiny(tmp_path, family, rope_parameters=dict(ROPES[rope]), tie_word_embeddings=tied)
    check(tmp_path, model, kernels)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, kernels: Kernels, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    check(tmp_path, save_tiny(tmp_path, family, **changes), kernels)


def test_sampled_rows_are_the_rows_of_the_whole(kernels: Kernels, tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    decoder = load_model(tmp_path, kernels, torch.float32, "cpu")
    sequences = [torch.arange(30), torch.arange(30, 45)]
    everything, some = PagedRun(decoder, sequences), PagedRun(decoder, sequences)
    rows = torch.tensor([29, 44])
    torch.testing.assert_close(
        some.step([30, 15], rows), everything.step([30, 15])[rows], atol=TOLERANCE, rtol=0
    )


def test_a_step_that_samples_nothing_still_writes_the_cache(kernels: Kernels, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "Llama")
    decoder = load_model(tmp_path, kernels, torch.float32, "cpu")
    sequence = torch.arange(21)
    run = PagedRun(decoder, [sequence])
    empty = run.step([20], torch.empty(0, dtype=torch.int64))
    assert empty.shape == (0, VOCAB)
    torch.testing.assert_close(run.step([1])[0], expect(model, sequence)[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Olmo2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(
    dtype: torch.dtype, family: str, kernels: Kernels, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, family)
    decoder = load_model(tmp_path, kernels, dtype, "cpu")
    assert decoder.dtype == dtype
    sequence = torch.arange(24)
    logits = PagedRun(decoder, [sequence]).step([24])
    exact = expect(model, sequence)
    # Against transformers in the same dtype: ours may not lose more than it does, up to a factor of two.
    theirs = expect(model.to(dtype), sequence).float()
    assert (logits - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embedding_and_norm_round_as_in_transformers(
    dtype: torch.dtype, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path, family).to(dtype)
    seen: list[Tensor] = []
    multiplied: list[Tensor] = []
    plain, product = ReferenceKernels.rms_norm, ReferenceKernels.linear

    def recorded(kernels: ReferenceKernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = plain(kernels, x, weight, eps)
        seen.extend((x.clone(), normed))
        return normed

    def recorded_product(kernels: ReferenceKernels, x: Tensor, packed: PackedLinear) -> Tensor:
        multiplied.append(x.clone())
        return product(kernels, x, packed)

    monkeypatch.setattr(ReferenceKernels, "rms_norm", recorded)
    monkeypatch.setattr(ReferenceKernels, "linear", recorded_product)
    decoder = load_model(tmp_path, ReferenceKernels(), dtype, "cpu")
    tokens = torch.arange(VOCAB)
    PagedRun(decoder, [tokens]).step([VOCAB])
    with torch.inference_mode():
        embedded = model.model.embed_tokens(tokens)
        layer = model.model.layers[0]
        if decoder.layers[0].before_attention is None:
            assert torch.equal(multiplied[0], embedded)
            assert torch.equal(seen[1], layer.self_attn.q_norm(seen[0]))
        else:
            assert torch.equal(seen[0], embedded)
            assert torch.equal(seen[1], layer.input_layernorm(embedded))
