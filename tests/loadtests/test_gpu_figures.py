"""What is said of a GPU: how long it was busy, its name, what its memory has no room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd import profiler_util as untyped

from loadtests import report
from loadtests.experiments import gpu_kernels, kernels
from loadtests.experiments.gpu_engine import gpu_seconds

profiler_util: Any = untyped


def event(number: int, name: str, device: DeviceType, *, annotation: bool = False) -> Any:
    """A millisecond."""
    return profiler_util.FunctionEvent(
        id=number,
        name=name,
        thread=0,
        start_us=0.0,
        end_us=1000.0,
        device_type=device,
        is_user_annotation=annotation,
        use_device="cuda",
        stack=[],
    )


def test_a_kernel_counts_once() -> None:
    """Its operator has its time as well, and so has a named region around it."""
    operator = event(1, "aten::mm", DeviceType.CPU)
    operator.append_kernel("gemm", 0, 1000.0)
    kernel = event(2, "gemm", DeviceType.CUDA)
    region = event(3, "a step", DeviceType.CUDA, annotation=True)
    events = profiler_util.EventList([operator, kernel, region], use_device="cuda")
    events._build_tree()
    averages = events.key_averages()
    assert sum(one.self_device_time_total for one in averages) > 1000.0
    assert gpu_seconds(averages) == pytest.approx(1e-3)


@pytest.mark.parametrize(("free", "room"), [(5 * 2048, True), (5 * 2048 - 1, False)])
def test_copies_for_all_heads_need_room(monkeypatch: pytest.MonkeyPatch, free: int, room: bool) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    keys = torch.zeros(512, dtype=torch.bfloat16)
    assert gpu_kernels.room_for_copies(keys, keys) is room


def test_a_full_gpu_is_not_taken_for_a_shape_that_a_backend_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(gpu_kernels, "seconds", full)
    one = torch.zeros(1, 8, 4, 8)
    with pytest.raises(torch.OutOfMemoryError):
        gpu_kernels.fastest_sdpa(one, one, one, False)


def test_the_machine_names_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    assert report.gpu() == {}
    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "A100")
    )
    where = report.gpu()
    assert (where["gpu"], where["torch"]) == ("A100", torch.__version__)


@pytest.mark.parametrize("option", ["--threads", "--rounds"])
def test_options_of_the_cpu_are_refused_on_a_gpu(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cuda", option, "2"])
    assert "--device cpu" in capsys.readouterr().err


def test_figures_are_saved_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cut_off(keep: object) -> None:
        assert callable(keep)
        keep([report.Figure("bandwidth", 2.0)])
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_kernels, "measure", cut_off)
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["--device", "cuda", "--json", str(tmp_path / "k.json")])
    assert '"bandwidth"' in (tmp_path / "k.json").read_text()
