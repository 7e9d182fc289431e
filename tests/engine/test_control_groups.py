"""What containers limit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.control_groups import cpu_quota

V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"sys/fs/cgroup/pod/cpu.max": "150000 100000", "sys/fs/cgroup/pod/box/cpu.max": "400000 100000"}, 1.5),
        ({f"{V1}/cpu.cfs_quota_us": "50000\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_tightest_quota_of_processor_time(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    for name, text in {**files, "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/box\n0::/pod/box\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf
