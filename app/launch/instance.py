"""What belongs to one server on this host: a name, a folder, and ports.

By default Serve and HAProxy use the same ports and paths in every cluster. Two servers that did would answer
each other's clients: HAProxy falls back to whatever listens on port 8500.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from app.config import CACHE_SECRET
from app.disk_room import PLACE, lack_of_room, least_free
from app.launch import haproxy, serving
from app.launch.port_block import PortBlock
from engine.errors import ConfigError

GRPC_PORTS, INGRESS_PORTS = 10, 150
"""Serve keeps the port of an ingress for an hour after its end, so there are more ports than ingresses."""

PREFIX = "quire-"

OWNER = "owner.lock"
"""A file in the folder, locked for as long as the process lives that made it."""

KEPT = "kept-for-its-logs"
"""What ``OWNER`` becomes where a failed launch leaves its logs; who has read them may delete the folder."""

RAY = "ray"
"""Ray's temporary folder, in the folder."""

_NEW = f"{OWNER}.new"
_MADE = re.compile(f"{PREFIX}[a-z0-9_]{{8}}")
"""As ``mkdtemp`` names a folder."""


class Instance:
    """Created at launch; ``remove`` releases everything. All files are in ``folder``."""

    def __init__(self, name: str | None = None) -> None:
        """Without a ``name``, a random one is chosen.

        Raises:
            ConfigError: this host has no free ports, or its ``PLACE`` takes no files or has no room.
        """
        self.name = name or secrets.token_hex(4)
        self.ports = PortBlock()
        self._secret = secrets.token_hex(32)
        self._owner: int | None = None
        try:
            remove_orphans(PLACE)
            if (short := lack()) is not None:
                raise ConfigError(
                    f"{short}; delete files, or mount a larger file system as {PLACE} (no option moves them, "
                    "because paths of sockets must be short)"
                )
            self.folder, self._owner = _make_folder()
            try:
                self.stats_port = self.ports.take()
                self._controller = self._controller_environment()
            except (OSError, ConfigError):
                self.remove()
                raise
        except ConfigError:
            self.ports.release()
            raise
        except OSError as error:
            self.ports.release()
            raise ConfigError(
                f"cannot make the files of a server in {PLACE}: {error.strerror}; it must be writable and have "
                "room for Ray's logs"
            ) from error

    @property
    def ray_folder(self) -> str:
        """Ray's temporary folder, with the list of metrics endpoints."""
        return str(self.folder / RAY)

    @property
    def has_logs(self) -> bool:
        """Whether Ray has started far enough to leave logs."""
        return Path(self.ray_folder).is_dir()

    def controller_environment(self) -> dict[str, str]:
        """The environment of Serve's controller, which proxies and replicas inherit."""
        drawn = {CACHE_SECRET: os.environ.get(CACHE_SECRET) or self._secret}
        return {**serving.controller_environment(), **self._controller, **drawn}

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """A context in which Ray starts: all its workers inherit ``controller_environment``.

        A worker with its own environment would load Ray twice.
        """
        before = dict(os.environ)
        os.environ.update(self.controller_environment())
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

    def prepare_environment(self) -> None:
        """Set in this process what Ray's own processes inherit, before Ray starts."""
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, any other work starves the replicas
        # Ray would otherwise start a worker for each core in advance.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        for variable in ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"):
            os.environ[variable] = str(self.ports.take())

    def remove(self, keep_files: bool = False) -> None:
        """Release the ports, and delete the folder; with ``keep_files``, one with logs stays, as ``KEPT``."""
        self.ports.release()
        if keep_files and self.has_logs:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / OWNER).rename(self.folder / KEPT)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def _controller_environment(self) -> dict[str, str]:
        files = self.folder / "ha"
        http_low, http_high = self.ports.take_range(INGRESS_PORTS)
        grpc_low, grpc_high = self.ports.take_range(GRPC_PORTS)
        return {
            **self._wrapper(),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(self.ports.take()),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(self.ports.take()),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http_low),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http_high),
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc_low),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc_high),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self.stats_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(self.ports.take()),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(files / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(files / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(files / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(files / "server-state"),
            # A leaving ingress answers for this long, because HAProxy takes seconds to learn of its successor.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        }

    def _wrapper(self) -> dict[str, str]:
        """Have Serve run HAProxy through ``app/launch/haproxy.py``, unless the user names a binary."""
        script = self.folder / haproxy.NAME
        if haproxy.BINARY in os.environ or not serving.haproxy_expected() or not haproxy.write_script(script):
            return {}
        return {haproxy.BINARY: str(script)}


def remove_orphans(place: Path) -> list[Path]:
    """Delete this user's folders whose server was killed before it could; returns them."""
    orphans = []
    for folder in place.glob(f"{PREFIX}*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = _open_lock(folder)
            if lock is None:
                # Another program's, or kept for its logs; or, if empty, its server was killed while making it.
                if _MADE.fullmatch(folder.name):
                    if os.listdir(folder) == [RAY]:  # a worker of Ray's outlived its server, and made it anew
                        shutil.rmtree(folder, ignore_errors=True)
                    else:
                        folder.rmdir()
                    orphans.append(folder)
                continue
        except OSError:  # it is not empty, or it has just gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            orphans.append(folder)
        finally:
            os.close(lock)
    return orphans


def lack() -> str | None:
    """What ``PLACE`` lacks, if it has too little room."""
    least = least_free([PLACE])
    return None if least is None else lack_of_room(*least)


def _open_lock(folder: Path) -> int | None:
    for name in (OWNER, _NEW):
        with contextlib.suppress(FileNotFoundError):
            return os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW)
    return None


def _make_folder() -> tuple[Path, int]:
    """A folder that this process owns, and the descriptor of its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
        try:
            return folder, _own(folder)
        except FileNotFoundError:
            continue  # another launch took it for one left behind
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _own(folder: Path) -> int:
    """Lock the folder's file; no child inherits the lock. Returns its descriptor.

    Raises:
        FileNotFoundError: the folder has been removed.
    """
    new = folder / _NEW
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / OWNER)
    except OSError:
        os.close(lock)
        raise
    return lock
