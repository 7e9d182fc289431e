"""Run everything on this machine: its own Ray, Serve and the application, until interrupted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from app import config, model_store, serving
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900.0
PROCESS_BYTES = 600 * 2**20
"""Of an engine replica's process before its weights and KV: interpreter, torch, Ray."""

Say = Callable[[str], None]


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Whether the server will be able to listen.

    Raises:
        ConfigError: another process listens there.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop what uses it or choose another port "
                f"with {option}"
            ) from None


def check_memory(options: config.AppConfig, folder: Path, available: int | None = None) -> None:
    """Whether weights and KV pools of all replicas fit in ``available`` bytes (the system says if not given).

    Raises:
        ConfigError: they cannot.
    """
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if options.dtype == "float32":
        weights *= 2  # checkpoints are in 16 bits
    each = PROCESS_BYTES + weights + (options.kv_memory or 0)
    needed = each * options.engine_replicas
    available = psutil.virtual_memory().available if available is None else available
    if needed > available:
        raise ConfigError(
            f"{options.engine_replicas} engine replicas need about {needed / 2**30:.1f} GiB "
            f"({each / 2**30:.1f} GiB each) but {available / 2**30:.1f} GiB are available; "
            "lower engine_replicas or kv_memory, or choose a smaller model"
        )


def free_port(preferred: int) -> int:
    """``preferred`` if nothing listens there on any interface, else some free port."""
    for port in (preferred, 0):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return int(listener.getsockname()[1])
    raise ConfigError("no free port is left on this machine")


def serve_here(args: Mapping[str, Any], host: str, port: int, say: Say = print) -> None:
    """Start, say where it answers, and run until SIGINT or SIGTERM.

    Raises:
        ConfigError: one clear line on why it cannot start.
    """
    options = config.load(args)
    options.engine_config("", 1)
    check_port(host, port)
    bundled = options.model == config.BUNDLED_MODEL
    folder = model_store.pull() if bundled else model_store.resolve(options.model)
    check_memory(options, folder)
    stop = threading.Event()
    _on_interrupt(stop)
    say(f"starting Ray and {options.engine_replicas} engine replica(s) with {options.model_name} ...")
    server = LocalServer(host, port)
    try:
        server.start()
        _on_interrupt(stop)  # Ray has put a handler of its own in place
        server.deploy(args, stop)
        if not stop.is_set():
            _announce(server, options, say)
        while not stop.wait(1.0):
            pass
        say("stopping ...")
    finally:
        server.stop()


class LocalServer:
    """Ray and Serve of this process: everything ends with ``stop``."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._stats_port = free_port(8404)
        self._dashboard_port = free_port(8265)
        self.dashboard = ""
        self._before: set[int] = set()

    @property
    def url(self) -> str:
        """Where clients reach it from this machine."""
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    def start(self) -> None:
        """Ray and Serve, no application yet."""
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
        import ray
        from ray import serve

        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.WARNING)
        context = ray.init(
            address="local",
            dashboard_host="127.0.0.1",
            dashboard_port=self._dashboard_port,
            include_dashboard=True,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self.dashboard = str(context.dashboard_url or "")
        serve.start(
            http_options={"host": self.host, "port": self.port},
            controller_options={"runtime_env": {"env_vars": self._environment()}},
        )

    def deploy(self, args: Mapping[str, Any], stop: threading.Event) -> None:
        """Deploy and wait until every engine replica takes requests, or ``stop`` is set.

        Raises:
            ConfigError: the application cannot start; the message says why.
        """
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        quire = {name: value for name, value in os.environ.items() if name.startswith(config.ENV_PREFIX)}
        document = serving.deploy_config(args, self.host, self.port)
        document["controller_options"]["runtime_env"]["env_vars"] = self._environment()
        if quire:
            document["applications"][0]["runtime_env"] = {"env_vars": quire}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(document))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not stop.wait(0.2):
            application = serve.status().applications.get(serving.APP_NAME)
            status = str(application.status) if application is not None else ""
            if status.endswith("DEPLOY_FAILED"):
                raise ConfigError(_cause(application))
            if status.endswith("RUNNING") and self._routable():
                return
            if time.monotonic() > deadline:
                raise ConfigError(f"the application did not start within {START_TIMEOUT_S:g} s: {status}")

    def proxy(self) -> str:
        """Which proxy serves, by what listens."""
        if not serving.haproxy_expected():
            return "Serve's stock proxy (HAProxy is there on Linux only)"
        with socket.socket() as probe:
            probe.settimeout(2.0)
            listens = probe.connect_ex(("127.0.0.1", self._stats_port)) == 0
        return (
            "HAProxy" if listens else "Serve's stock proxy (warning: HAProxy did not start; streams are slower)"
        )

    def stop(self) -> None:
        """End Ray and whatever process is left of it."""
        import ray

        if not ray.is_initialized():
            return
        # Serve's own shutdown would wait for streams; whoever stops this server wants it gone.
        children = [
            process for process in psutil.Process().children(recursive=True) if process.pid not in self._before
        ]
        ray.shutdown()
        for process in psutil.wait_procs(children, timeout=5)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _environment(self) -> dict[str, str]:
        return {
            **serving.controller_environment(),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self._stats_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port(9101)),
            # Nobody balances load in front of a server on one machine.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }

    def _routable(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(json.load(response).get("routable", 0) > 0)
        except (urllib.error.URLError, ValueError, OSError):
            return False


def _on_interrupt(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())


def _announce(server: LocalServer, options: config.AppConfig, say: Say) -> None:
    say(f"Quire serves {options.model_name} at {server.url}/v1 through {server.proxy()}")
    say(f"  engine replicas {options.engine_replicas}, ingress replicas {options.ingress_replicas}")
    if server.dashboard:
        say(f"  dashboard http://{server.dashboard}")
    say(
        f"  try: curl -N {server.url}/v1/chat/completions -H 'content-type: application/json' -d "
        f'\'{{"model": "{options.model_name}", "stream": true, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}\''
    )
    say("  stop with Ctrl-C")


def _cause(application: Any) -> str:
    """The last line that says something of a deployment's failure."""
    messages = [deployment.message for deployment in application.deployments.values()] + [application.message]
    lines = [line.strip() for message in messages if message for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line] or lines or ["unknown cause"]
    return f"the application cannot start: {telling[-1]}"
