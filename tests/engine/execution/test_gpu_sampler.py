"""The sampler chooses on a GPU as it does on a CPU."""

from __future__ import annotations

import pytest
import torch
from gpu_engines import GPU

from engine.execution.random import exponential
from engine.execution.sampler import Sampler, SampleRow
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates

pytestmark = [*GPU]

VOCAB = 5000


def logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(0))


def sample(
    rows: list[SampleRow], values: torch.Tensor
) -> tuple[list[int | Candidates], list[int | Candidates]]:
    return Sampler().sample(values.clone(), rows), Sampler().sample(values.cuda(), rows)


def test_greedy() -> None:
    """Ties go to the lower id; forbidden tokens are passed over."""
    values = logits(64)
    values[:, 40] = values[:, 4000] = 100.0
    params = SamplingParams(temperature=0.0)
    rows = [SampleRow(params, 0, row, (40,) if row % 2 else ()) for row in range(64)]
    cpu, gpu = sample(rows, values)
    assert cpu == gpu == [4000 if row % 2 else 40 for row in range(64)]


def test_the_likeliest() -> None:
    params = SamplingParams(n=1, use_beam_search=True, beam_width=4, temperature=0.0)
    cpu, gpu = sample([SampleRow(params, 0, row, best=8) for row in range(16)], logits(16))
    for a, b in zip(cpu, gpu, strict=True):
        assert isinstance(a, Candidates)
        assert isinstance(b, Candidates)
        assert a.tokens == b.tokens
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_random_numbers_are_the_same() -> None:
    keys = torch.tensor([[1], [-5], [1 << 62]])
    candidates = torch.arange(100_000)
    cpu, gpu = exponential(keys, candidates), exponential(keys.cuda(), candidates.cuda()).cpu()
    torch.testing.assert_close(cpu, gpu, rtol=1e-14, atol=0)  # the logarithm may round otherwise


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05, "top_p": 0.95, "temperature": 0.7}], ids=str
)
def test_draws(options: dict[str, float]) -> None:
    """The same but for a near tie now and then: exponentials round differently."""
    params = SamplingParams(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    rows = [SampleRow(params, seed, seed % 77) for seed in range(512)]
    cpu, gpu = sample(rows, logits(512))
    assert sum(a != b for a, b in zip(cpu, gpu, strict=True)) <= 2


def test_several_draws_of_a_row() -> None:
    params = SamplingParams(n=3, temperature=1.0)
    cpu, gpu = sample([SampleRow(params, row, 5, extra_seeds=(7, 8)) for row in range(32)], logits(32))
    same = [
        a.tokens == b.tokens
        for a, b in zip(cpu, gpu, strict=True)
        if isinstance(a, Candidates) and isinstance(b, Candidates)
    ]
    assert len(same) == 32
    assert sum(same) >= 31
