"""What this machine computes on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from engine import devices
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "driver", "found", "cpu"),
    [
        ("cpu", True, True, True),
        ("auto", False, True, True),  # torch is not asked
        ("auto", True, True, False),
        ("auto", True, False, True),  # torch without CUDA
        ("cuda", False, True, False),
    ],
)
def test_torch_is_asked_where_a_driver_is(
    device: str, driver: bool, found: bool, cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nvidiactl"
    if driver:
        file.touch()
    monkeypatch.setattr(devices, "_DRIVERS", (file,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    assert devices.on_cpu(device) == cpu


@pytest.mark.parametrize(
    ("cores", "quota", "usable"), [(64, 2.0, 2), (64, 2.5, 2), (64, 0.5, 1), (2, 8.0, 2), (2, math.inf, 2)]
)
def test_a_container_uses_as_many_cores_as_its_quota(
    cores: int, quota: float, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(devices, "cpu_quota", lambda: quota)
    assert devices.usable_cores() == usable


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU here"):
        devices.on_cpu("cuda")
    with pytest.raises(ConfigError, match="'tpu' is unknown"):
        devices.on_cpu("tpu")
