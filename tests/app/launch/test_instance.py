"""What a server has for itself on its host."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import constants

from app.disk_room import ROOM
from app.launch.instance import KEPT, OWNER, Instance, _open_lock, remove_orphans
from engine.errors import ConfigError

NODE = "f" * 56
LONGEST_SOCKET = 97
"""Characters that HAProxy takes."""


def test_two_instances_share_nothing() -> None:
    one, two = Instance(), Instance()
    assert one.name != two.name
    first, second = one.controller_environment(), two.controller_environment()
    own = {name for name in first if "_PORT" in name or "/" in first[name]}
    assert len(own) == 14
    assert all(first[name] != second[name] for name in own)
    ranges = [
        {int(value) for name, value in environment.items() if name.endswith("_PORT")}
        for environment in (first, second)
    ]
    assert max(ranges[0]) < min(ranges[1]) or max(ranges[1]) < min(ranges[0])
    for instance in (one, two):
        instance.remove()
        assert not instance.folder.exists()


def test_every_name_that_serve_fixes_is_replaced() -> None:
    """A new release that adds a port or a path must be looked at."""
    instance = Instance()
    ours = instance.controller_environment()
    fixed = {
        name
        for name, value in vars(constants).items()
        if name.startswith("RAY_SERVE_")
        and (name.endswith("_PORT") or "/tmp" in str(value) or str(value).startswith("/"))
        and value is not None
    }
    assert fixed - ours.keys() == set()
    instance.remove()


def test_sockets_have_short_paths() -> None:
    instance = Instance()
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(instance.controller_environment()[name])
        assert len(str(path.parent / NODE / path.name)) <= LONGEST_SOCKET
    instance.remove()


def test_rays_own_processes_inherit_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    monkeypatch.setenv("AUTOSCALER_METRIC_PORT", "44217")
    monkeypatch.setenv("DASHBOARD_METRIC_PORT", "44227")
    instance = Instance()
    instance.prepare_environment()
    assert "RAY_ADDRESS" not in os.environ
    assert os.environ["AUTOSCALER_METRIC_PORT"] not in ("44217", os.environ["DASHBOARD_METRIC_PORT"])
    instance.remove()


def test_only_rays_processes_inherit_what_serve_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    instance, before = Instance(), dict(os.environ)
    with instance.inherited():
        assert os.environ.items() >= instance.controller_environment().items()
    assert dict(os.environ) == before
    instance.remove()


KILLED = """
import os, signal, sys
from pathlib import Path
from app.launch import instance
instance.PLACE = Path(sys.argv[1])
own = instance.Instance()
print(own.folder, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_killed_servers_go_and_all_others_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "ray").mkdir()
    (tmp_path / "quire-of-another-program").mkdir()
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / OWNER).touch()
    (tmp_path / "quire-link").symlink_to(tmp_path / "else")
    (tmp_path / "quire-file").touch()
    assert remove_orphans(tmp_path) == [], "its server lives"
    process.communicate("\n")
    assert process.returncode == -9
    assert remove_orphans(tmp_path) == [folder]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"quire-of-another-program", "else", "quire-link", "quire-file"}
    assert (tmp_path / "else" / OWNER).exists()


def test_a_folder_that_is_kept_stays_for_its_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.launch.instance.PLACE", tmp_path)
    failed = Instance()
    assert failed.folder.parent == tmp_path
    Path(failed.ray_folder).mkdir()
    failed.remove(keep_files=True)
    assert remove_orphans(tmp_path) == []
    assert (failed.folder / KEPT).exists()


def test_a_folder_without_logs_does_not_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Launches that fail before Ray starts would leave one each."""
    monkeypatch.setattr("app.launch.instance.PLACE", tmp_path)
    failed = Instance()
    failed.remove(keep_files=True)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_servers_killed_while_they_made_one_go(tmp_path: Path) -> None:
    empty, half = tmp_path / "quire-abcd_123", tmp_path / "quire-efgh_456"
    for folder in (empty, half):
        folder.mkdir()
    (half / f"{OWNER}.new").touch()
    lock = _open_lock(half)
    assert lock is not None
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert remove_orphans(tmp_path) == [empty], "the other one is about to be complete"
    os.close(lock)
    assert remove_orphans(tmp_path) == [half]


def test_a_folder_that_rays_worker_made_anew_after_its_server_goes(tmp_path: Path) -> None:
    """Workers that were starting when their server was killed end half a minute after it."""
    anew, kept, other = tmp_path / "quire-abcd_123", tmp_path / "quire-efgh_456", tmp_path / "quire-other"
    for folder in (anew, kept, other):
        (folder / "ray" / "session" / "logs").mkdir(parents=True)
    (anew / "ray" / "session" / "logs" / "worker.log").touch()
    (kept / KEPT).touch()
    assert remove_orphans(tmp_path) == [anew]
    assert sorted(tmp_path.iterdir()) == [kept, other]


def test_a_folder_that_another_launch_removes_meanwhile_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("app.launch.instance.PLACE", tmp_path)
    make, made = tempfile.mkdtemp, []

    def mkdtemp(**where: Any) -> str:
        made.append(make(**where))
        if len(made) == 1:
            assert remove_orphans(tmp_path) == [Path(made[0])]
        return made[-1]

    monkeypatch.setattr("app.launch.instance.tempfile.mkdtemp", mkdtemp)
    instance = Instance()
    assert instance.folder == Path(made[1])
    assert remove_orphans(tmp_path) == []
    instance.remove()


@pytest.mark.parametrize("failing", ["tempfile.mkdtemp", "_own", "haproxy.write_script"])
def test_a_place_that_is_full_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "name")

    monkeypatch.setattr("app.launch.instance.PLACE", tmp_path)
    monkeypatch.setattr(f"app.launch.instance.{failing}", full)
    with pytest.raises(ConfigError, match=f"server in {tmp_path}: No space left on device; it must be wri"):
        Instance()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_one_line_that_says_how_much_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray starts in less than half of it, with its dashboard too; in 200 KiB it prints pages of errors."""
    free, orphan = 200 * 2**10, tmp_path / "quire-abcd_123"
    seen = []

    def disk_usage(place: Path) -> Any:
        seen.append((place, orphan.exists()))
        return SimpleNamespace(free=free)

    orphan.mkdir()
    monkeypatch.setattr("app.launch.instance.PLACE", tmp_path)
    monkeypatch.setattr("app.disk_room.shutil.disk_usage", disk_usage)
    with pytest.raises(ConfigError) as refused:
        Instance()
    assert str(refused.value) == (
        f"{tmp_path} has 200 KiB free, but Ray's sockets and logs need 8 MiB there; delete files, or mount a "
        f"larger file system as {tmp_path} (no option moves them, because paths of sockets must be short)"
    )
    assert seen == [(tmp_path, False)], "what a killed server left is deleted first"
    assert list(tmp_path.iterdir()) == []
    free = ROOM - 1
    with pytest.raises(ConfigError):
        Instance()
    free = ROOM
    Instance().remove()
