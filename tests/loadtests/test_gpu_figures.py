"""What is said of a GPU: its name, what its memory has no room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loadtests import report
from loadtests.experiments import gpu_kernels, kernels


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
