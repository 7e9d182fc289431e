"""The decoder on a GPU against transformers on the CPU, in float32 without TF32, and in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_engines import GPU
from model_checkpoints import FAMILIES, ROPES, VOCAB, PagedRun, save_tiny
from model_variants import TOLERANCE, VARIANTS, expect

from engine.models.loader import load_model
from kernels.registry import get_kernels

pytestmark = [*GPU]


@pytest.fixture(params=["triton", "reference"])
def kernels_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(folder: Path, family: str, name: str, **changes: object) -> None:
    """Whole prompts, then the same in chunks and single tokens, in a batch with another sequence."""
    model = save_tiny(folder, family, **changes)
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (60, 23)]
    expected = [expect(model, sequence) for sequence in sequences]
    decoder = load_model(folder, get_kernels(name, "cuda"), torch.float32, "cuda")
    whole = PagedRun(decoder, sequences).step([60, 23]).cpu()
    torch.testing.assert_close(whole, torch.cat(expected), atol=TOLERANCE, rtol=0)
    run = PagedRun(decoder, sequences)
    begin = [0, 0]
    for counts in ([13, 0], [1, 5], [30, 1], [1, 1], [1, 16], [14, 0]):
        wanted = [expected[i][begin[i] : begin[i] + counts[i]] for i in (0, 1)]
        torch.testing.assert_close(run.step(counts).cpu(), torch.cat(wanted), atol=TOLERANCE, rtol=0)
        begin = [begin[i] + counts[i] for i in (0, 1)]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_every_rope(family: str, rope: str, kernels_name: str, tmp_path: Path) -> None:
    check(tmp_path, family, kernels_name, rope_parameters=dict(ROPES[rope]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, kernels_name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    check(tmp_path, family, kernels_name, **changes)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Olmo2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(
    dtype: torch.dtype, family: str, kernels_name: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, family)
    decoder = load_model(tmp_path, get_kernels(kernels_name, "cuda"), dtype, "cuda")
    sequence = torch.arange(24)
    logits = PagedRun(decoder, [sequence]).step([24]).cpu()
    exact = expect(model, sequence)
    # Against transformers in the same dtype: ours may not lose more than it does, up to a factor of two.
    theirs = expect(model.to(dtype), sequence).float()
    assert (logits - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_transformers_on_the_gpu(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "Llama").cuda()
    decoder = load_model(tmp_path, get_kernels("auto", "cuda"), torch.float32, "cuda")
    assert decoder.kernels.name == "triton"
    sequence = torch.arange(60)
    expected = expect(model, sequence.cuda())
    torch.testing.assert_close(PagedRun(decoder, [sequence]).step([60]), expected, atol=TOLERANCE, rtol=0)
