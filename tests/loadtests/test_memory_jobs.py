from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest

from loadtests.experiments.memory.constants import ALPACA, SHAREGPT, SIGMA
from loadtests.experiments.memory.jobs import draw_lengths, make_jobs
from loadtests.experiments.memory.traces import TraceError, read_records, read_trace


@pytest.mark.parametrize("lengths", [SHAREGPT, ALPACA])
def test_lengths_have_their_means_and_their_limit(lengths) -> None:
    drawn = draw_lengths(lengths, 5_000, random.Random(0))
    assert statistics.fmean(prompt for prompt, _ in drawn) == pytest.approx(lengths.prompt, rel=0.002)
    assert statistics.fmean(output for _, output in drawn) == pytest.approx(lengths.output, rel=0.002)
    assert all(prompt >= 1 and output >= 1 and prompt + output <= 2_048 for prompt, output in drawn)


def test_lengths_spread_as_stated() -> None:
    drawn = draw_lengths(SHAREGPT, 5_000, random.Random(0))
    deciles = statistics.quantiles([output for _, output in drawn], n=10)
    assert deciles[8] / deciles[4] == pytest.approx(2.718281828 ** (1.2816 * SIGMA), rel=0.05)


def test_arrivals_come_at_their_rate() -> None:
    times = [job.arrival for job in make_jobs(ALPACA, 4.0, 4_000, 0)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_jobs_are_the_same_for_the_same_seed_and_share_only_the_prefix() -> None:
    jobs = make_jobs(ALPACA, 1.0, 20, 7, prefix=80)
    assert jobs == make_jobs(ALPACA, 1.0, 20, 7, prefix=80)
    assert jobs != make_jobs(ALPACA, 1.0, 20, 8, prefix=80)
    assert {job.prompt[:80] for job in jobs} == {tuple(range(1, 81))}
    own = [token for job in jobs for token in job.prompt[80:]]
    assert len(set(own)) == len(own)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.5,0,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1030, "output_length": 3, "hash_ids": [0, 1, 7]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE), 10)
    assert [(len(job.prompt), job.output) for job in trace.jobs] == [(374, 44), (1, 1), (396, 109)]
    assert [job.arrival for job in trace.jobs] == pytest.approx([0.0, 1.81941, 4.314579], abs=1e-5)
    assert (trace.factor, trace.clipped) == (1, 0)
    assert trace.rate == pytest.approx(3 / 4.314579, rel=1e-4)


def test_mooncake_shares_what_its_hashes_share(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE), 10)
    first, second = (job.prompt for job in trace.jobs)
    assert (len(first), len(second)) == (1_100, 1_030)
    assert first[:1_024] == second[:1_024]
    assert not set(first[1_024:]) & set(second[1_024:])
    assert len(set(first)) == 1_100
    assert trace.jobs[1].arrival == 1.5


def test_lengths_are_scaled_by_a_stated_factor(tmp_path: Path) -> None:
    long = '{"timestamp": 9, "input_length": 3000, "output_length": 900, "hash_ids": [0, 1, 8, 9, 10, 11]}\n'
    trace = read_trace(write(tmp_path, MOONCAKE + long), 10)
    assert trace.factor == 2
    assert [(len(job.prompt), job.output) for job in trace.jobs] == [(550, 250), (1_500, 450), (515, 1)]
    first, second = trace.jobs[0].prompt, trace.jobs[1].prompt
    assert first[:512] == second[:512]
    assert first[512] != second[512]


def test_the_longest_tenth_is_clipped(tmp_path: Path) -> None:
    lines = ["2023-11-16 18:15:46.6,100,10"] * 19 + ["2023-11-16 18:15:46.6,9000,10"]
    trace = read_trace(
        write(tmp_path, "\n".join([",".join(("TIMESTAMP", "ContextTokens", "GeneratedTokens")), *lines])), 99
    )
    assert (trace.factor, trace.clipped) == (1, 1)
    assert max(job.total for job in trace.jobs) == 2_048


def test_limit_reads_the_beginning_only(tmp_path: Path) -> None:
    assert len(read_records(write(tmp_path, AZURE + "not,a,line\n"), 3)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace: line 1: empty"),
        ("a,b\n", r"trace: line 1: the header is 'a,b' but must be 'TIMESTAMP,ContextTokens,GeneratedTokens'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", r"trace: line 2: no request"),
        (AZURE + "x,1,2\n", r"trace: line 5: TIMESTAMP is 'x'"),
        (AZURE + "2023-11-16 18:15:46,1\n", r"trace: line 5: 2 columns"),
        (AZURE + "2023-11-16 18:15:46,1,-2\n", r"trace: line 5: GeneratedTokens is '-2'"),
        (AZURE + "2023-11-16 18:15:46,x,2\n", r"trace: line 5: ContextTokens is 'x'"),
        (MOONCAKE + "{\n", r"trace: line 3: not JSON"),
        (MOONCAKE + "[]\n", r"trace: line 3: list but must be a JSON object"),
        (MOONCAKE + '{"timestamp": 0}\n', r"trace: line 3: without input_length, output_length, hash_ids"),
        (MOONCAKE.replace("1500", '"x"'), r"trace: line 2: timestamp is 'x'"),
        (MOONCAKE.replace("[0, 1, 7]", "[0]"), r"trace: line 2: 1 hash_ids but input_length 1030 has 3 blocks"),
        (MOONCAKE.replace("[0, 1, 7]", "[0, 1, true]"), r"trace: line 2: hash_ids must be"),
        (MOONCAKE.replace("1100", "1.5"), r"trace: line 1: input_length is 1.5"),
        (MOONCAKE.replace("1500", "NaN"), r"trace: line 2: timestamp is nan"),
        (MOONCAKE.replace("1500", "1e999"), r"trace: line 2: timestamp is inf"),
        (MOONCAKE.replace("1500", "1" + "0" * 400), r"trace: line 2: timestamp is 10000"),
        (MOONCAKE.replace("1100", "1" * 5_000), r"trace: line 1: not JSON"),
        (MOONCAKE.replace("1100", "100000001"), r"trace: line 1: input_length is 100000001 but .* 100000000"),
        (MOONCAKE + '{"a":' + "[" * 200_000 + "\n", r"trace: line 3: not JSON"),
        (MOONCAKE + " " * (1 << 21) + "\n", r"trace: line 3: longer than 1048576 characters"),
        (AZURE + "1" * 200_000 + ",1,2\n", r"trace: line 5: not CSV"),
        (AZURE + "2023-11-16 18:15:46," + "9" * 5_000 + ",2\n", r"trace: line 5: ContextTokens is '999"),
    ],
)  # fmt: skip
def test_wrong_files_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, text), 100)


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none: cannot be read"):
        read_trace(tmp_path / "none", 1)
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TraceError, match=r"binary: cannot be read"):
        read_trace(path, 1)
