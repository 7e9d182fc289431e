"""What is said of a GPU: its name, what its memory has no room for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loadtests import report
from loadtests.experiments import kernels


@pytest.mark.parametrize(("free", "room"), [(5 * 2048, True), (5 * 2048 - 1, False)])
def test_copies_for_all_heads_need_room(monkeypatch: pytest.MonkeyPatch, free: int, room: bool) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    keys = torch.zeros(512, dtype=torch.bfloat16)
    assert kernels.room_for_copies(keys, keys) is room


def test_a_full_gpu_is_not_taken_for_a_shape_that_a_backend_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(kernels, "seconds", full)
    one = torch.zeros(1, 8, 4, 8)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.fastest_sdpa(one, one, one, False)


def test_the_machine_names_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    assert report.gpu() == {}
    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "A100")
    )
    where = report.gpu()
    assert (where["gpu"], where["torch"]) == ("A100", torch.__version__)


def test_figures_are_saved_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cut_off(_: kernels.Gpu) -> Iterator[kernels.Measured]:
        yield kernels.Measured("decode", 0.5, 1.0, 4e9, 1e9, kernels.BYTES)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.Gpu, "measure", cut_off)
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["--device", "cuda", "--json", str(tmp_path / "k.json")])
    assert '"decode: rate"' in (tmp_path / "k.json").read_text()


def test_a_kernel_that_torch_contradicts_ends_the_command() -> None:
    result = torch.randn(4, 2, 8)  # tokens, heads, size
    theirs = result.view(2, 2, 2, 8).transpose(1, 2)
    kernels.check("decode", result, theirs)
    with pytest.raises(SystemExit, match="decode: the kernel and torch disagree"):
        kernels.check("decode", result * 1.1, theirs)
