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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from app import config
from app.launch import model_store, serving
from app.launch.replica_lines import Progress, ReplicaWatch, Say, replicas_line, shared_cores
from app.routing.fleet import DEPLOYMENT
from engine.errors import ConfigError
from engine.sizes import format_bytes

if TYPE_CHECKING:
    from engine.kv.pool_size import PoolSize

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900.0
WATCH_EVERY_S = 1.0
STATUS_TIMEOUT_S = 2.0
LOADED = ("RUNNING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")  # what a new controller finds is recovering
PROCESS_BYTES = 600 * 2**20
"""Of an engine replica's process before its weights and KV: interpreter, torch, Ray."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What one engine replica will hold."""

    dtype: str
    pool: PoolSize | None  # as planned before the start; None on a GPU, which is not asked yet
    context_length: int  # tokens


def check_port(host: str, port: int, option: str = "port= (or --port)") -> None:
    """Whether the server will be able to listen.

    Raises:
        ConfigError: another process listens there, or this machine has no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; choose another --host") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop what uses it or choose another port "
                f"with {option}"
            ) from None


def check_memory(options: config.AppConfig, folder: Path, available: int | None = None) -> Fit:
    """Whether weights and KV pools fit in ``available`` bytes, of as many replicas as there may be.

    The system says what is available if it is not given. On a GPU weights and pools are elsewhere, and each
    replica checks for itself.

    Raises:
        ConfigError: they do not fit, or the model cannot be read.
    """
    import torch

    from engine.capacity import kv_bytes_per_token
    from engine.execution.model_runner import resolve_device, resolve_max_model_len
    from engine.kv.pool_size import available_memory, plan_pool
    from engine.models.config import read_model_config
    from engine.models.loader import Checkpoint, resolve_dtype

    model = read_model_config(folder)
    with Checkpoint(folder, model) as checkpoint:
        dtype = resolve_dtype(options.dtype, model, checkpoint)
    name = str(dtype).removeprefix("torch.")
    length = resolve_max_model_len(options.max_model_len, model.max_position_embeddings)
    gpu = resolve_device(options.device).type != "cpu"
    each = PROCESS_BYTES + (0 if gpu else model.num_parameters * dtype.itemsize)
    if available is None:
        available = available_memory(torch.device("cpu"), options.memory_fraction)
    most = options.most_replicas
    left = available - each * most
    if left <= 0:
        raise ConfigError(
            f"{most} engine replicas need about {format_bytes(each * most)} ({format_bytes(each)} each) beside "
            f"their KV pools but {format_bytes(available)} are available; lower {options.replicas_option}, or "
            "choose a smaller model"
        )
    if gpu:
        return Fit(name, None, length)
    engine = options.engine_config(str(folder), 1)
    return Fit(name, plan_pool(engine, "cpu", kv_bytes_per_token(model, dtype), length, left), length)


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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    options = config.load(args)
    options.engine_config("", 1)
    if ":" in host and serving.haproxy_expected():
        raise ConfigError(
            f"cannot serve on {host}: Serve's HAProxy reaches replicas over IPv4 only; choose another --host"
        )
    check_port(host, port)
    fit = check_memory(options, model_store.resolve(options.model))
    if fit.pool is not None:
        from engine.execution.model_runner import usable_cores

        for line in shared_cores(options, usable_cores()):
            say(line)
    stop = threading.Event()
    say(f"starting Ray and {options.first_replicas} engine replica(s) with {options.model_name} ...")
    server = LocalServer(host, port)
    try:
        # Until Ray has started an interrupt raises: the terminal sends it to Ray's processes as well, and Ray
        # would wait a minute for those that it ended.
        server.start()
        _on_interrupt(stop)
        server.deploy(args, options, stop, say)
        if not stop.is_set():
            _announce(server, options, fit, say)
        watch = ReplicaWatch(options.first_replicas, say)
        while not stop.wait(WATCH_EVERY_S):
            watch.update(server.ready())
        say("stopping (up to half a minute) ...")
    except KeyboardInterrupt:
        say("stopping (up to half a minute) ...")
    finally:
        server.stop()


class LocalServer:
    """Ray and Serve of this process: everything ends with ``stop``."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._stats_port = free_port(8404)
        self.dashboard = ""
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}

    @property
    def url(self) -> str:
        """Where clients reach it from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> None:
        """Ray and Serve, no application yet."""
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets any other work starve the replicas
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
        import ray
        from ray import serve

        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.WARNING)
        context = ray.init(
            address="local",
            dashboard_host="127.0.0.1",
            include_dashboard=True,  # at 8265 or the next free port, which Ray finds only if none is named
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self.dashboard = str(context.dashboard_url or "")
        serve.start(
            http_options={"host": self.host, "port": self.port},
            controller_options={"runtime_env": {"env_vars": self._environment()}},
        )

    def deploy(
        self, args: Mapping[str, Any], options: config.AppConfig, stop: threading.Event, say: Say
    ) -> None:
        """Deploy and wait until every engine replica takes requests, or ``stop`` is set; ``say`` how far it is.

        ``args`` are what the application is built with, ``options`` what comes of them.

        Raises:
            ConfigError: the application cannot start; the message says why.
        """
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from app.launch import placement

        nodes = placement.cluster_nodes()
        placement.check_gpus(options, nodes)
        placement.check_cpus(options, nodes)
        quire = {name: value for name, value in os.environ.items() if name.startswith(config.ENV_PREFIX)}
        document = serving.deploy_config(args, self.host, self.port)
        document["controller_options"]["runtime_env"]["env_vars"] = self._environment()
        if quire:
            document["applications"][0]["runtime_env"] = {"env_vars": quire}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(document))
        progress = Progress(options.first_replicas, say)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not stop.wait(0.2):
            application = serve.status().applications.get(serving.APP_NAME)
            status = str(application.status) if application is not None else ""
            if status.endswith("DEPLOY_FAILED"):
                raise ConfigError(_cause(application))
            if status.endswith("RUNNING") and serves(self._health(), _counted(application)):
                return
            if time.monotonic() > deadline:
                raise ConfigError(f"the application did not start within {START_TIMEOUT_S:g} s: {status}")
            progress.update(_counted(application, "RUNNING"), time.monotonic())

    def ready(self) -> int | None:
        """Engine replicas that run; None if Serve cannot say so now, as while its controller restarts."""
        import ray
        from ray.exceptions import RayError
        from ray.serve.context import _get_global_client
        from ray.serve.exceptions import RayServeException
        from ray.serve.schema import ServeInstanceDetails

        try:
            # serve.status() would wait without a limit, and an interrupt as long as it.
            asked = _get_global_client()._controller.get_serve_instance_details.remote()
            details = ServeInstanceDetails(**ray.get(asked, timeout=STATUS_TIMEOUT_S))
        except (RayError, RayServeException):
            return None
        application = details._get_status().applications.get(serving.APP_NAME)
        return None if application is None else _counted(application, *LOADED)

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

        # Serve's own shutdown would wait for streams; whoever stops this server wants it gone.
        children = [
            process for process in psutil.Process().children(recursive=True) if process.pid not in self._before
        ]
        started = ray.is_initialized()
        ray.shutdown()
        # What an interrupted start leaves behind has nobody to tell it to end.
        for process in psutil.wait_procs(children, timeout=5 if started else 0)[1]:
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

    def _health(self) -> dict[str, Any]:
        """What ``/health`` says; nothing if it cannot be reached or is not well."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return dict(json.load(response))
        except (urllib.error.URLError, ValueError, OSError):
            return {}


def serves(health: Mapping[str, Any], replicas: int) -> bool:
    """Whether the application takes requests, by what ``/health`` says and Serve's number of engine replicas.

    Where the last replica may go, short windows let it go before it is seen routable: asleep is started, too.
    """
    return health.get("routable", 0) > 0 or (health.get("asleep", False) and not replicas)


def _counted(application: Any, *states: str) -> int:
    """Engine replicas in one of ``states``, or in any; those that run have loaded."""
    engine = application.deployments.get(DEPLOYMENT) if application is not None else None
    found = engine.replica_states.items() if engine else ()
    return sum(count for state, count in found if not states or state in states)


def _on_interrupt(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())


def _announce(server: LocalServer, options: config.AppConfig, fit: Fit, say: Say) -> None:
    say(f"Quire serves {options.model_name} at {server.url}/v1 through {server.proxy()}")
    say(f"  engine replicas {replicas_line(options)}, ingress replicas {options.ingress_replicas}")
    pool = fit.pool
    kv = f", KV of about {pool.tokens:,} tokens ({pool.num_blocks:,} blocks) in each replica" if pool else ""
    say(f"  weights and KV in {fit.dtype}{kv}")
    if pool and pool.tokens < fit.context_length:
        say(
            f"  warning: no request can be longer than the {pool.tokens:,} tokens of the KV pool, though the "
            f"context length is {fit.context_length:,}; raise kv_memory"
        )
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
