"""The application under test: as users start it, or on a Ray cluster of this process's own, to do harm to."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from app.launch import serving
from app.launch.instance import Instance
from app.launch.port_block import PortBlock
from app.launch.ray_processes import left_out
from app.option_groups import LaunchOptions
from loadtests.report import ROOT

START_TIMEOUT_S = 600.0  # of a machine that may be busy
POLL_S, WAIT_S, SLOW_POLL_S = 0.05, 0.1, 0.2
"""Between two looks at what is timed, what takes moments, and a start, which each look would slow down."""

# Made once, as that takes 20 ms of processor time. It keeps no connection: each look finds who answers now.
_HTTP = httpx.Client(timeout=10, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def seconds_until(condition: Callable[[], Any], limit_s: float, interval_s: float = POLL_S) -> float:
    """How long it takes until ``condition()`` is true, polled; ``limit_s`` or more: it never was."""
    began = time.perf_counter()
    while True:
        true = condition()
        seconds = time.perf_counter() - began
        if true or seconds >= limit_s:
            return seconds
        time.sleep(interval_s)


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str, interval_s: float = WAIT_S) -> Any:
    """Poll until ``condition()`` is true and return it.

    Raises:
        TimeoutError: it was not within ``timeout_s``; the message says ``what``.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"after {timeout_s:g} s: {what}")
        time.sleep(interval_s)
    return value


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def health(url: str, instance: str) -> dict[str, Any]:
    """The body of /health, or {} while nothing answers, or another server does."""
    try:
        response = _HTTP.get(f"{url}/health")
        body: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError):
        return {}
    return body if body.get("instance") == instance else {}


@contextlib.contextmanager
def running(
    command: Sequence[str], healthy: Callable[[], bool], cwd: Path | None = None
) -> Iterator[psutil.Process]:
    """A server in a session of its own, once it is healthy; it ends with this context.

    Raises ``RuntimeError`` with the end of its log if it ends, or is not healthy in time.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server outlives this process
    with tempfile.NamedTemporaryFile(prefix="quire-server-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd
        )
        try:
            seconds_until(lambda: process.poll() is not None or healthy(), START_TIMEOUT_S, 0.5)
            if process.poll() is not None or not healthy():
                end = Path(log.name).read_text()[-3000:]
                raise RuntimeError(f"the server has not started within {START_TIMEOUT_S:.0f} s:\n{end}")
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)  # it may stand still
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def application(options: Sequence[str]) -> Iterator[tuple[psutil.Process, str, str]]:
    """``python -m app`` with options (``key=value``) on a free port: process, address, instance."""
    ports, instance = PortBlock(), secrets.token_hex(4)
    port = ports.take()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "app", f"port={port}", f"instance={instance}"]
    try:
        with running([*command, *options], lambda: health(url, instance).get("status") == "ok") as process:
            yield process, url, instance
    finally:
        ports.release()


class LocalCluster:
    """Starts Ray and Serve on free ports; ``deploy`` puts the application there, or changes its options."""

    def __init__(self, import_path: str = serving.IMPORT_PATH, paths: Sequence[Path] = ()) -> None:
        """``import_path`` is the application's, ``paths`` where its modules lie beside this repository's."""
        self._import_path = import_path
        self._paths = [str(path) for path in (ROOT, *paths)]
        self._instance = Instance()
        self.port, self.metrics_port = self._instance.ports.take(), self._instance.ports.take()
        self.url = f"http://127.0.0.1:{self.port}"
        self.options: dict[str, Any] = {}
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}

    @property
    def instance(self) -> str:
        """What every answer must name."""
        return self._instance.name

    def start(self) -> None:
        """Ray and Serve, without any application."""
        self._instance.prepare_environment()
        paths = [*self._paths, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a look at /health is no news
        with self._instance.inherited(), left_out(logs=False):
            ray.init(
                address="local",
                _temp_dir=self._instance.ray_folder,
                include_dashboard=False,
                num_cpus=8,  # more than one configuration at a time while a change rolls
                log_to_driver=False,
                logging_level=logging.WARNING,
                _metrics_export_port=self.metrics_port,
            )
        # The head's proxy alone: that of another node of this host would take the same port.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})

    def deploy(self, **options: Any) -> None:
        """Deploy, or change the application; returns when every replica runs and has an open channel.

        A fleet that may go to zero may do so at once: there it returns when the application answers.
        """
        self.options = options
        self._apply(self._config())
        wait_for(self._running, START_TIMEOUT_S, "the application does not run", SLOW_POLL_S)
        if options.get("min_replicas") == 0:
            answers = lambda: self.health().get("status") in ("ok", "asleep")  # noqa: E731
            wait_for(answers, START_TIMEOUT_S, "no ingress answers", SLOW_POLL_S)
        else:
            self.wait_routable(options.get("engine_replicas", 1))

    def scale(self, replicas: int, ingresses: int = 1) -> None:
        """Tell Serve another number of engine and ingress replicas; returns at once."""
        config = self._config()
        config["applications"][0]["deployments"] = [
            {"name": "engine", "num_replicas": replicas},
            {"name": "ingress", "num_replicas": ingresses},
        ]
        self._apply(config)

    def cordon(self, replicas: list[str], lasts_s: float, after_s: float | None = None) -> None:
        """Tell every ingress that exactly these engine replicas get no new requests."""
        times = (lasts_s,) if after_s is None else (lasts_s, after_s)
        handle = serve.get_deployment_handle("ingress", serving.APP_NAME)
        handle.broadcast("cordon", replicas, *times).results(timeout_s=30)

    def ingresses(self) -> list[dict[str, Any]]:
        """Each ingress replica's own account of itself; none while one of them does not answer."""
        handle = serve.get_deployment_handle("ingress", serving.APP_NAME)
        try:
            return handle.broadcast("inspect").results(timeout_s=10)  # type: ignore[no-any-return]
        except (RayError, RayServeException, TimeoutError):
            return []

    def wait_routable(self, replicas: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the ingress that answers has exactly this many open channels."""
        routable = lambda: self.health().get("routable") == replicas  # noqa: E731
        wait_for(routable, timeout_s, f"no {replicas} replicas are routable", SLOW_POLL_S)

    def health(self) -> dict[str, Any]:
        """The body of /health, or {} while nothing answers."""
        return health(self.url, self.instance)

    def inspect(self) -> list[dict[str, Any]]:
        """Each engine replica's own account of itself, by name."""
        handle = serve.get_deployment_handle("engine", serving.APP_NAME)
        return sorted(handle.broadcast("inspect").results(timeout_s=30), key=lambda state: state["replica"])

    def idle(self) -> bool:
        """No request and no referenced block anywhere."""
        return all(
            state["live_requests"] == 0
            and state["referenced_blocks"] == 0
            and all(channel["attempts"] == 0 for channel in state["channels"].values())
            for state in self.inspect()
        )

    def channels(self) -> set[tuple[str, str, int]]:
        """(replica, client id, epoch) of every open channel."""
        return {
            (state["replica"], cid, channel["epoch"])
            for state in self.inspect()
            for cid, channel in state["channels"].items()
        }

    def connections(self) -> int:
        """Open connections of clients, by HAProxy's own account."""
        return sum(int(row["scur"]) for row in self.proxy_stats() if row["# pxname"] == "http_frontend")

    def proxy_stats(self) -> list[dict[str, str]]:
        """HAProxy's own account of what it listens on, and of whom it sends requests to."""
        (path,) = self._instance.folder.glob("ha/*/admin.sock")
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(path))
            admin.sendall(b"show stat\n")
            with admin.makefile() as answer:
                return list(csv.DictReader(answer))

    def kill(self, pid: int, how: signal.Signals = signal.SIGKILL) -> None:
        """A fault in one of this cluster's processes."""
        os.kill(pid, how)

    def ingress_pids(self) -> list[int]:
        """Processes of the ingress replicas."""
        return replica_pids(psutil.Process(), "ingress")

    def engine_pids(self) -> list[int]:
        """Processes of the engine replicas, stopping ones too."""
        return replica_pids(psutil.Process(), "engine")

    def stop(self) -> None:
        """Everything that was started, processes included."""
        children = [
            process for process in psutil.Process().children(recursive=True) if process.pid not in self._before
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # Ray lists there what ends with Serve's controller
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
        left = psutil.wait_procs(children, timeout=5)[1]
        # A proxy whose parent has died is nobody's child; its command names this cluster's folder.
        left += [one for one in psutil.process_iter() if str(self._instance.folder) in _command(one)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._instance.remove()

    def _config(self) -> dict[str, Any]:
        args = {**self.options, "instance": self.instance}
        config = serving.deploy_config(args, LaunchOptions(port=self.port))
        config["applications"][0]["import_path"] = self._import_path
        return config

    def _apply(self, config: dict[str, Any]) -> None:
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    def _running(self) -> bool:
        # Not serve.status(): here and in the controller it pickles the router, for tens of milliseconds.
        found = _get_global_client().get_serve_status(serving.APP_NAME).app_status
        if found.status == "DEPLOY_FAILED":
            raise RuntimeError(found.message)
        return bool(found.status == "RUNNING")


def replica_pids(server: psutil.Process, deployment: str) -> list[int]:
    """Processes of the replicas under ``server``, which has started Ray."""
    title = f":{serving.APP_NAME}:{deployment}"
    return sorted(process.pid for process in server.children(recursive=True) if title in _command(process))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
