"""The sampler against a plain float64 definition, and its draws against the distribution they promise."""

from __future__ import annotations

import math
import random
import weakref

import numpy as np
import pytest
import torch

import engine.execution.sampler as sampler
from engine.errors import QuireError
from engine.execution.random import draw_key, exponential
from engine.execution.sampler import GROUPS_OF, Sampler, SampleRow
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.seeds import request_seed
from kernels.cpu import CpuKernels

DRAWS = 8_000

# Computed with plain integers, apart from the code under test.
KNOWN_KEYS = (258863698125685209, 1386899933978734384)
KNOWN_DRAW = 0.06886300212498425
KNOWN_SEED = 8281872861307171038


@pytest.fixture(params=["torch", "cpu"])
def chooser(request: pytest.FixtureRequest) -> Sampler:
    """The sampler in torch, and the one that draws with the C++ kernel."""
    return Sampler() if request.param == "torch" else Sampler(CpuKernels(2))


def sample_many(
    chooser: Sampler, logits: torch.Tensor, params: SamplingParams, draws: int = DRAWS, seed: int = 7
) -> np.ndarray:
    """Tokens of ``draws`` consecutive positions of one sequence whose logits never change."""
    rows = [SampleRow(params, seed, position) for position in range(draws)]
    return np.array(chooser.sample(logits.repeat(draws, 1), rows))


def probabilities(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The definition: softmax of the scaled logits, then min-p, top-k, top-p by a full sort."""
    scaled = logits.numpy().astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    keep = p >= params.min_p * p.max()
    if params.top_k:
        keep &= p >= np.sort(p)[::-1][min(params.top_k, len(p)) - 1]
    if params.top_p < 1.0:
        left = np.where(keep, p, 0.0)
        left /= left.sum()
        order = np.sort(left)[::-1]
        last = np.searchsorted(np.cumsum(order), params.top_p)
        keep &= left >= order[min(last, len(order) - 1)]
    p = np.where(keep, p, 0.0)
    return p / p.sum()


def chi_square_bound(degrees: int) -> float:
    """Upper bound that a true chi-square variable passes once in about 100,000 (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.3 * math.sqrt(2 / (9 * degrees))) ** 3


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=10),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [50, 300])
def test_draws_follow_the_defined_distribution(chooser: Sampler, params: SamplingParams, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    expected = probabilities(logits, params)
    counts = np.bincount(sample_many(chooser, logits, params), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    often = expected * DRAWS >= 5
    rest_expected = DRAWS * expected[~often].sum()
    statistic = (((counts - expected * DRAWS) ** 2)[often] / (expected[often] * DRAWS)).sum()
    if rest_expected >= 5:
        statistic += (counts[~often].sum() - rest_expected) ** 2 / rest_expected
    assert statistic < chi_square_bound(max(int(often.sum()) - 1 + (rest_expected >= 5), 1))


@pytest.mark.parametrize("seed", range(6))
def test_filters_keep_exactly_the_defined_set(chooser: Sampler, seed: int) -> None:
    """With near-equal logits every kept token is drawn soon, so the drawn set is the kept set."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.rand(60, generator=generator) * 0.5
    for params in (
        SamplingParams(top_k=1 + seed * 5),
        SamplingParams(top_p=0.15 * (seed + 1)),
        SamplingParams(min_p=0.65 + 0.05 * seed),
        SamplingParams(top_k=30, top_p=0.5, min_p=0.7, temperature=0.8 + 0.2 * seed),
    ):
        kept = set(np.nonzero(probabilities(logits, params))[0].tolist())
        assert set(sample_many(chooser, logits, params, draws=2000).tolist()) == kept


def test_top_p_of_a_large_vocabulary_matches_a_full_sort(chooser: Sampler) -> None:
    """The shortcut that leaves out unlikely tokens must not change the nucleus."""
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 3
    for top_p in (0.05, 0.5, 0.9, 0.999):
        for top_k in (0, 100):
            params = SamplingParams(top_p=top_p, top_k=top_k)
            kept = probabilities(logits, params) > 0
            assert kept[sample_many(chooser, logits, params, draws=100)].all()
            # the least likely token of the nucleus can be drawn: alone with all others forbidden it is not lost
            last = int(np.where(kept, probabilities(logits, params), 2.0).argmin())
            lifted = torch.where(torch.from_numpy(kept), logits, torch.tensor(-1e4))
            lifted[last] = logits.max()
            assert last in sample_many(chooser, lifted, SamplingParams(), draws=100) or kept.sum() > 2000


@pytest.mark.parametrize("depth", [8.0, 11.0, 14.0, 17.0])
def test_a_nucleus_of_very_unlikely_tokens_is_whole(chooser: Sampler, depth: float) -> None:
    """One token is likely, 20,000 are far below it, and 5,000 further still are no longer in the nucleus."""
    logits = torch.zeros(1, 25_001)
    logits[0, 1:], logits[0, 20_001:] = -depth, -depth - 3
    unlikely = math.exp(-depth)
    wanted, total = 1 + 19_999.5 * unlikely, 1 + 20_000 * unlikely + 5_000 * math.exp(-depth - 3)
    filters: tuple[dict[str, float], ...] = ({"top_p": wanted / total}, {"top_k": 20_001})
    for each in filters:
        row = SampleRow(SamplingParams(**each), 1, 0, extra_seeds=tuple(range(2, 20_001)))
        (drawn,) = chooser.sample(logits.clone(), [row])
        assert isinstance(drawn, Candidates)
        below = [token for token in drawn.tokens if token > 0]
        share = 20_000 * unlikely / (1 + 20_000 * unlikely)
        assert abs(len(below) - 20_000 * share) < 5 * math.sqrt(20_000 * share)
        assert max(below) <= 20_000


def test_ties_with_the_last_kept_token_are_kept(chooser: Sampler) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert set(sample_many(chooser, logits, SamplingParams(top_k=2), 500).tolist()) == {1, 2, 3}


def test_greedy_takes_the_lowest_id_on_ties(chooser: Sampler) -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [400, 700]] = 5.0
    rows = [SampleRow(SamplingParams(temperature=t), 0, 0) for t in (0.0, 9e-6)]
    assert chooser.sample(logits, rows) == [400, 0]


def test_tiny_and_large_temperatures_do_not_overflow(chooser: Sampler) -> None:
    logits = torch.tensor([[3e4, -3e4, 2.9e4, 0.0]]).repeat(2, 1)
    rows = [SampleRow(SamplingParams(temperature=t), 1, 2) for t in (1e-5, 2.0)]
    assert chooser.sample(logits, rows) == [0, 0]


def test_each_row_heeds_its_own_forbidden_tokens(chooser: Sampler) -> None:
    logits = torch.tensor([[9.0, 5.0, 1.0]]).repeat(3, 1)
    greedy = SamplingParams(temperature=0.0)
    rows = [SampleRow(greedy, 0, 0, forbidden=forbidden) for forbidden in ((), (0,), (0, 1))]
    assert chooser.sample(logits, rows) == [0, 1, 2]


def test_forbidden_tokens_are_never_chosen(chooser: Sampler) -> None:
    logits = torch.tensor([[5.0, 4.0, -1.0]])
    for temperature in (0.0, 1.0):
        rows = [SampleRow(SamplingParams(temperature=temperature), 3, 1, forbidden=(0, 1))]
        assert chooser.sample(logits.clone(), rows) == [2]


@pytest.mark.parametrize("vocab", [1, 31, 32, 97, 4096])
def test_masks_leave_out_all_other_tokens(chooser: Sampler, vocab: int) -> None:
    """Whatever the words beyond the vocabulary hold; rows without a mask keep all tokens."""
    generator = np.random.default_rng(vocab)
    kept = generator.random((3, vocab)) < 0.5
    kept[:, generator.integers(vocab)] = True
    bits = np.ones((3, 32 * (-(-vocab // 32) + 1)), dtype=bool)
    bits[:, :vocab] = kept
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1))
    greedy = SamplingParams(temperature=0)
    masked = {0: 0, 2: 1, 3: 2}
    allowed = {row: torch.from_numpy(masks[number]) for row, number in masked.items()}
    rows = [SampleRow(greedy, 0, 0, allowed=allowed.get(i)) for i in range(5)]
    expected = logits.clone()
    for row, number in masked.items():
        expected[row, torch.from_numpy(~kept[number])] = -math.inf
    seen = logits.clone()
    assert chooser.sample(seen, rows) == expected.argmax(dim=1).tolist()
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(chooser: Sampler, bad: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0]])
    with pytest.raises(QuireError, match="finite"):
        chooser.sample(logits, [SampleRow(SamplingParams(), 0, 0)])
    with pytest.raises(QuireError, match="finite"):  # forbidding other tokens changes nothing about it
        chooser.sample(logits.clone(), [SampleRow(SamplingParams(), 0, 0, forbidden=(0, 2))])


@pytest.mark.parametrize("best", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_has_no_outcome_and_harms_no_other(
    chooser: Sampler, temperature: float, best: int
) -> None:
    params = SamplingParams(temperature=temperature)
    rows = [
        SampleRow(params, 5, place, forbidden=(0, 1, 2) if place == 1 else (), best=best) for place in range(3)
    ]
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    first, second, third = chooser.sample(logits.clone(), rows)
    assert second == Candidates((), ())
    assert [first, third] == chooser.sample(logits[[0, 2]], [rows[0], rows[2]])


@pytest.mark.parametrize("vocab", [97, 1000, 49_152])
def test_a_row_depends_on_no_other_row(chooser: Sampler, vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(33, vocab, generator=generator) * 2
    rows = [
        SampleRow(
            SamplingParams(
                temperature=[0.0, 0.7, 1.0, 1.5][index % 4],
                top_k=[0, 20][index % 2],
                top_p=[1.0, 0.9, 0.5][index % 3],
            ),
            seed=index,
            position=100 + index,
        )
        for index in range(33)
    ]
    together = chooser.sample(logits.clone(), rows)
    alone = [chooser.sample(logits[index : index + 1].clone(), [row])[0] for index, row in enumerate(rows)]
    backwards = chooser.sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 300, 5_000])
def test_the_kernel_draws_what_torch_draws(vocab: int) -> None:
    choices = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(30):
        logits = torch.randn(9, vocab, generator=generator) * choices.choice([0.1, 1.0, 3.0, 10.0])
        if choices.random() < 0.3:
            logits = logits.mul(2).round()  # ties
        rows = [
            SampleRow(
                SamplingParams(
                    temperature=choices.choice([0.0, 1e-3, 0.7, 1.0, 2.0]),
                    top_k=choices.choice([0, 0, 1, 5, 300, max(vocab - 1, 0), vocab, 10**12]),
                    top_p=choices.choice([1.0, 1.0, 0.999999, 0.9, 0.5, 1e-9]),
                    min_p=choices.choice([0.0, 0.0, 1e-30, 0.05, 1.0]),
                ),
                seed=choices.getrandbits(62),
                position=choices.randrange(10_000),
                forbidden=(0,) if vocab > 1 and choices.random() < 0.2 else (),
                extra_seeds=tuple(range(choices.choice([0, 0, 3]))),
                best=choices.choice([0, 0, 0, 2]),
            )
            for _ in range(9)
        ]
        expected = Sampler().sample(logits.clone(), rows)
        for threads in (1, 2):
            assert Sampler(CpuKernels(threads)).sample(logits.clone(), rows) == expected


def test_rows_that_draw_nothing_have_the_kernel_take_their_largest() -> None:
    """Also those with a temperature so small that drawing would overflow, and those of a beam."""
    rows = [
        SampleRow(SamplingParams(temperature=0.0, top_p=0.5), 1, 0, extra_seeds=(4, 5)),
        SampleRow(SamplingParams(temperature=0.5, top_p=0.5), 2, 0),
        SampleRow(SamplingParams(temperature=0.5, top_p=0.5), 3, 0, best=2),
        SampleRow(SamplingParams(temperature=9e-6), 3, 0),
    ]
    options = sampler._DrawOptions().of(rows)
    assert options.num_draws.tolist() == [3, 1, 1, 1]
    assert options.temperature.tolist() == [0.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 300, 5_000])
def test_the_first_of_the_largest_is_taken_wherever_it_is(chooser: Sampler, vocab: int) -> None:
    places = sorted({*range(0, vocab, 7), *range(max(vocab - 70, 0), vocab)})
    logits = torch.randn(len(places), vocab, generator=torch.Generator().manual_seed(vocab)) - 100
    for row, place in enumerate(places):
        logits[row, place] = logits[row, place + (vocab - place) // 2] = -1.5
    rows = [SampleRow(SamplingParams(temperature=0.0), 0, 0)] * len(places)
    assert chooser.sample(logits, rows) == places


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_one_bad_logit_is_an_error_wherever_it_is(
    chooser: Sampler, vocab: int, bad: float, temperature: float
) -> None:
    for place in range(vocab):
        logits = torch.randn(2, vocab)
        logits[1, place] = bad
        with pytest.raises(QuireError, match="finite"):
            chooser.sample(logits, [SampleRow(SamplingParams(temperature=temperature), 0, 0)] * 2)


def test_what_a_sampler_keeps_from_one_batch_to_the_next_changes_no_draw() -> None:
    """Batches with the same parameters at the next positions, and with a change of each kind."""
    logits = torch.randn((3, 5_000), generator=torch.Generator().manual_seed(3))
    params, other = SamplingParams(top_p=0.9), SamplingParams(temperature=0.5, top_k=40)
    greedy = SamplingParams(temperature=0.0)
    batches = [
        [SampleRow(params, seed, 10) for seed in (1, 2, 3)],
        [SampleRow(params, seed, 11) for seed in (1, 2, 3)],
        [SampleRow(params, seed, position) for seed, position in ((1, 12), (2, 5), (4, 12))],
        [SampleRow(each, seed, 13) for each, seed in ((params, 1), (other, 2), (params, 4))],
        [SampleRow(each, seed, 14) for each, seed in ((params, 1), (greedy, 2), (params, 4))],
        [SampleRow(params, 1, 15), SampleRow(params, 2, 15, extra_seeds=(4,)), SampleRow(params, 5, 15)],
        [SampleRow(params, 1, 16), SampleRow(params, 2, 16), SampleRow(params, 4, 16, extra_seeds=(5,))],
        [SampleRow(params, 2, 17), SampleRow(params, 1, 17)],
    ]
    kept = Sampler(CpuKernels(1))
    replayed = torch.empty_like(logits)  # steps of one size have the same tensor
    for rows in batches:
        some = logits[: len(rows)]
        own = replayed.copy_(some) if len(rows) == len(logits) else some.clone()
        assert kept.sample(own, rows) == Sampler().sample(some.clone(), rows)


def test_logits_stay_in_memory_no_longer_than_their_step() -> None:
    kept, logits = Sampler(CpuKernels(1)), torch.zeros(2, 100)
    left = weakref.ref(logits)
    kept.sample(logits, [SampleRow(SamplingParams(), seed, 10) for seed in (1, 2)])
    del logits
    assert left() is None


def test_the_kth_largest_weight_is_exact_for_any_k() -> None:
    weights = torch.rand(4, 1000, generator=torch.Generator().manual_seed(0))
    ordered = weights.sort(dim=1, descending=True).values
    for ks in ([1, 256, 257, 999], [1000, 2, 500, 3]):
        expected = [float(ordered[row, k - 1]) for row, k in enumerate(ks)]
        assert sampler._largest(weights, [0, 1, 2, 3], ks) == expected


def test_one_row_with_a_large_top_k_makes_no_other_row_work_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, k: sizes.append((len(self), k)) or topk(self, k))
    large = [SampleRow(SamplingParams(top_k=k), 0, 0) for k in (999, 1000, 5000)]
    small = [SampleRow(SamplingParams(top_k=7), 0, 0)] * 29
    Sampler().sample(torch.randn(32, 1000), [*large, *small])
    assert sizes == [(29, 7)]


def test_a_draw_depends_on_seed_and_position(chooser: Sampler) -> None:
    logits = torch.zeros(1, 5000)
    draws = [
        chooser.sample(logits.clone(), [SampleRow(SamplingParams(), seed, position)])[0]
        for seed in (-(2**63), -1, 0, 1, 2**63 - 1)
        for position in (0, 1, 2, 131_071)
    ]
    assert len(set(draws)) == len(draws)


def test_the_kernel_works_out_the_same_keys() -> None:
    rows = [
        SampleRow(SamplingParams(), seed, position)
        for seed in (-(2**63), -5, -1, 0, 1, 2**62 + 12_345, 2**63 - 1)
        for position in (0, 1, 12, 131_071, 2**31)
    ]
    logits = torch.zeros(len(rows), 5000)
    assert Sampler(CpuKernels(1)).sample(logits.clone(), rows) == Sampler().sample(logits, rows)


def test_exponential_draws_have_the_right_moments_and_no_correlation() -> None:
    keys = torch.tensor([[draw_key(seed, position)] for seed in range(20) for position in range(20)])
    draws = exponential(keys, torch.arange(500)).numpy()
    count = draws.size
    assert draws.min() > 0
    assert abs(draws.mean() - 1) < 5 / math.sqrt(count)
    assert abs(draws.var() - 1) < 5 * math.sqrt(8 / count)
    for a, b in ((draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(count)


def key_of_bits(bits: int, candidate: int) -> int:
    """The key that gives ``candidate`` these 64 bits: the mixing backwards."""

    def unshift(z: int, by: int) -> int:
        x = z
        for _ in range(64 // by):
            x = z ^ x >> by
        return x

    z = unshift(bits, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    z = (unshift(z, 30) - (candidate + 1) * 0x9E3779B97F4A7C15) % 2**64
    return z - 2**64 if z >= 2**63 else z


@pytest.mark.parametrize("bits", [0, 1 << 11, 1 << 12, 0x9E3779B97F4A7C15, 2**64 - 2**12, 2**64 - 1])
def test_draws_are_above_zero_and_finite_to_the_last_bit(bits: int) -> None:
    """The largest number below 1 must not round to it: a draw of 0 has no winner."""
    draw = exponential(torch.tensor([key_of_bits(bits, 3)]), torch.tensor([3])).item()
    assert draw == pytest.approx(-math.log1p((bits // 2**12 + 0.5 - 2**52) / 2**52), rel=1e-12)
    assert 0 < draw < 40


def test_the_hash_is_fixed_for_ever() -> None:
    """A running request may move between versions of the code: these numbers must not change."""
    assert draw_key(0, 0) == KNOWN_KEYS[0]
    assert draw_key(-5, 12) == KNOWN_KEYS[1]
    assert exponential(torch.tensor([draw_key(1, 2)]), torch.tensor([3])).item() == pytest.approx(
        KNOWN_DRAW, rel=1e-14
    )
    assert request_seed(0, "a") == KNOWN_SEED
    assert request_seed(0, "a") != request_seed(1, "a") != request_seed(1, "b")
    assert GROUPS_OF == 64


def test_the_nucleus_is_the_same_worked_out_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sorting whole rows, some at a time, as by looking only at the likeliest tokens; ties included."""
    weights = torch.randn((40, 3000), generator=torch.Generator().manual_seed(0)).mul(2).exp()
    weights[:10] = weights[:10].round()
    weights /= weights.amax(dim=1, keepdim=True)
    weights[3, 100:] = 0.0
    rows = list(range(0, 40, 3))
    thresholds = [0.0 if row % 2 else 0.001 * row for row in range(40)]
    top_p = [(0.05, 0.5, 0.9, 0.999, 1e-9)[row % 5] for row in rows]
    expected = [
        sampler._nucleus_threshold(weights[row].numpy(), thresholds[row], share)
        for row, share in zip(rows, top_p, strict=True)
    ]
    for at_once in (1, 3000 * 4, 1 << 22):
        monkeypatch.setattr(sampler, "_SORTED_AT_ONCE", at_once)
        assert sampler._nucleus_thresholds(weights, rows, thresholds, top_p) == expected
