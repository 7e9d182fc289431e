"""The size of the KV pool: every source of the limit, and one clear line when there is too little."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.calibration import MAX_BUDGET, MIN_BUDGET, budget_for, calibrate, processor_clock
from engine.kv.pool_size import available_memory, cgroup_available, plan_pool

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNLIMITED = 1 << 62


def plan(available: int, device: str = "cpu", max_model_len: int = 4096, **options: Any) -> int:
    config = EngineConfig(model="m", **options)
    return plan_pool(config, device, 32 * KIB, max_model_len, available).num_blocks  # a block is 512 KiB


def test_a_cpu_takes_a_bounded_share() -> None:
    assert plan(8 * GIB) == 4096  # a quarter
    assert plan(100 * GIB) == 8192  # no more than 4 GiB
    assert plan(256 * MIB) == 256  # a sequence of 4096 tokens needs more than the quarter


def test_a_gpu_takes_what_its_fraction_leaves() -> None:
    assert plan(8 * GIB, device="cuda") == 16384


@pytest.mark.parametrize("engines", [1, 2, 3, 5, 8])
def test_engines_on_one_machine_share_its_memory(engines: int) -> None:
    """All of them may see the same bytes free, since a pool's pages are taken when they are written."""
    blocks = plan(8 * GIB, memory_sharers=engines)
    assert blocks * engines * 512 * KIB <= 4 * GIB
    assert blocks == min(8 * GIB // 4, 4 * GIB // engines) // (512 * KIB)
    assert plan(8 * GIB, device="cuda", memory_sharers=engines) == 16384  # a GPU each
    most = int(8 * GIB * 0.8) // engines // (512 * KIB)
    assert plan(8 * GIB, memory_sharers=engines, num_blocks=most) == most
    with pytest.raises(ConfigError, match="num_blocks asks for"):
        plan(8 * GIB, memory_sharers=engines, num_blocks=most + 1)


def test_engines_that_share_are_named_where_memory_is_short() -> None:
    with pytest.raises(ConfigError, match=r"by each of 4 engines; lower kv_memory, or run fewer engines here"):
        plan(8 * GIB, memory_sharers=4, kv_memory=2 * GIB)
    with pytest.raises(ConfigError, match=r"by each of 4 engines; lower max_model_len"):
        plan(512 * MIB, memory_sharers=4)


def test_explicit_sizes_win() -> None:
    assert plan(8 * GIB, kv_memory=3 * MIB + 5) == 6
    assert plan(8 * GIB, kv_memory=3 * MIB, num_blocks=11) == 11


@pytest.mark.parametrize(
    ("available", "options", "words"),
    [
        (100 * MIB, {}, ["max_model_len=4096", "128 MiB", "80 MiB", "kv_memory"]),
        (GIB, {"kv_memory": 2 * GIB}, ["kv_memory asks for 2 GiB", "819.2 MiB"]),
        (GIB, {"num_blocks": 4096}, ["num_blocks asks for 2 GiB", "lower num_blocks"]),
        (GIB, {"kv_memory": 1000}, ["1000 bytes", "524288", "raise kv_memory"]),
    ],
)
def test_too_little_is_one_line_that_names_the_option(
    available: int, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        plan(available, **options)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def swap_blocks(available: int, device: str = "cpu", ram: int = 0, **options: Any) -> int:
    config = EngineConfig(model="m", **options)
    return plan_pool(config, device, 32 * KIB, 4096, available, ram).host_blocks


def test_a_gpu_swaps_to_a_bounded_share_of_the_ram() -> None:
    assert swap_blocks(8 * GIB, "cuda", 8 * GIB) == 4096  # a quarter
    assert swap_blocks(8 * GIB, "cuda", 8 * GIB, memory_sharers=4) == 1024
    assert swap_blocks(8 * GIB, "cuda", 100 * GIB) == 8192  # no more than 4 GiB
    assert swap_blocks(8 * GIB, "cuda", 100 * GIB, swap_space=6 * GIB) == 12_288
    assert swap_blocks(8 * GIB, "cuda", MIB) == 0
    assert plan(8 * GIB, "cuda", swap_space=0) == plan(8 * GIB, "cuda")  # the RAM is not the GPU's memory


def test_recomputing_takes_no_memory_to_swap_to() -> None:
    assert swap_blocks(8 * GIB, "cuda", 8 * GIB, recovery="recompute") == 0
    assert swap_blocks(8 * GIB, recovery="recompute", swap_space=GIB) == 0


@pytest.mark.parametrize("engines", [1, 3])
def test_on_a_cpu_swap_space_and_pool_share_the_limit(engines: int) -> None:
    assert swap_blocks(8 * GIB) == 0
    part = int(8 * GIB * 0.8) // engines // (512 * KIB)
    options: dict[str, Any] = {"memory_sharers": engines, "swap_space": GIB + 5}
    assert swap_blocks(8 * GIB, **options) == 2048
    assert plan(8 * GIB, **options) == min(plan(8 * GIB, memory_sharers=engines), part - 2048)
    assert plan(8 * GIB, num_blocks=part - 2048, **options) == part - 2048
    with pytest.raises(
        ConfigError, match=r"num_blocks asks for .* beside 1 GiB of swap_space; lower num_blocks or"
    ):
        plan(8 * GIB, num_blocks=part - 2047, **options)


def test_the_swap_space_may_leave_the_pool_less_than_its_usual_share() -> None:
    assert plan(GIB, swap_space=600 * MIB) == int(GIB * 0.8) // (512 * KIB) - 1200
    with pytest.raises(
        ConfigError, match=r"max_model_len=4096 tokens needs 128 MiB .* lower max_model_len or swap"
    ):
        plan(GIB, swap_space=700 * MIB)


@pytest.mark.parametrize(
    ("available", "options", "words"),
    [
        (GIB, {"swap_space": GIB}, ["swap_space asks for 1 GiB", "819.2 MiB", "lower swap_space"]),
        (GIB, {"swap_space": 700 * MIB, "memory_sharers": 4}, ["204.8 MiB", "each of 4", "run fewer"]),
        (GIB, {"swap_space": 1000}, ["swap_space gives 1000 bytes", "524288", "raise swap_space"]),
        (GIB, {"recovery": "swap"}, ["recovery=swap", "a CPU takes none", "set swap_space"]),
    ],
)
def test_wrong_swap_space_is_one_line_that_names_it(
    available: int, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        plan(available, **options)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_swapping_beside_a_gpu_needs_ram() -> None:
    assert swap_blocks(8 * GIB, "cuda", 8 * GIB, recovery="swap") == 4096
    with pytest.raises(ConfigError, match="1 MiB of RAM are free; set swap_space"):
        swap_blocks(8 * GIB, "cuda", MIB, recovery="swap")
    with pytest.raises(ConfigError, match=r"swap_space asks for 7 GiB of RAM but only 6\.4 GiB"):
        swap_blocks(80 * GIB, "cuda", 8 * GIB, swap_space=7 * GIB)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box/job\n",
            f"{group}/box/memory.max": f"{2 * GIB}\n",
            f"{group}/box/memory.current": f"{GIB}\n",
            f"{group}/box/memory.stat": f"anon 5\ninactive_file {256 * MIB}\n",
            f"{group}/box/job/memory.max": "max\n",
            f"{group}/box/job/memory.current": "77\n",
            f"{group}/box/job/memory.stat": "inactive_file 0\n",
        },
    )
    assert cgroup_available(root) == GIB + 256 * MIB


def test_cgroup_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{GIB}\n",  # the container's own group is the mount's top
            f"{group}/memory.usage_in_bytes": f"{300 * MIB}\n",
            f"{group}/memory.stat": f"total_inactive_file {100 * MIB}\n",
        },
    )
    assert cgroup_available(root) == 824 * MIB


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
            "sys/fs/cgroup/memory/memory.stat": "",
        },
    ],
)
def test_no_cgroup_limit(files: dict[str, str], tmp_path: Path) -> None:
    assert cgroup_available(write(tmp_path, files)) == UNLIMITED


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {"memory.max": "100\n", "memory.current": "170\n", "memory.stat": "inactive_file 20\n"}
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", **{f"{group}/{k}": v for k, v in files.items()}})
    assert cgroup_available(root) == 0


def test_the_reserve_is_left_free() -> None:
    cpu = torch.device("cpu")
    assert available_memory(cpu, 0.9, reserve=UNLIMITED) == 0
    assert 0 < available_memory(cpu, 0.9) < UNLIMITED


class Machine:
    """A clock that moves only while it prefills, at ``rate`` tokens per second after ``overhead``."""

    def __init__(self, rate: float, overhead: float) -> None:
        self.now, self.rate, self.overhead = 0.0, rate, overhead

    def prefill(self, tokens: int) -> None:
        self.now += self.overhead + tokens / self.rate


@pytest.mark.parametrize(("rate", "budget"), [(100, 32), (600, 64), (5_000, 496), (1e6, 2048)])
def test_the_budget_follows_the_measured_rate(rate: float, budget: int) -> None:
    machine = Machine(rate, overhead=0.0)
    measured = calibrate(machine.prefill, 100_000, clock=lambda: machine.now)
    assert measured.prefill_rate == pytest.approx(rate)
    assert measured.token_budget == budget
    assert machine.now < 1.0


def test_overhead_counts_less_in_longer_trials() -> None:
    machine = Machine(10_000, overhead=0.005)
    measured = calibrate(machine.prefill, 100_000, clock=lambda: machine.now)
    assert 7_000 < measured.prefill_rate < 10_000


def test_the_processor_clock_counts_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = processor_clock(2)
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    assert clock() == 1.5  # two busy threads used three seconds of processors


def test_a_small_context_limits_the_trial() -> None:
    seen: list[int] = []
    calibrate(seen.append, 20, clock=iter(range(1000)).__next__)
    assert max(seen) <= 20


def test_the_budget_is_bounded() -> None:
    assert budget_for(0.0) == MIN_BUDGET
    assert budget_for(1e9) == MAX_BUDGET
