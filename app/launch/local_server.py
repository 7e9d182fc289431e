"""This process's own Ray cluster and Serve, with the application on them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from app.config import ENGINE_DEPLOYMENT, ENV_PREFIX, RAY_COLLECTS, ServedModel
from app.disk_room import WATCHED
from app.launch import serving
from app.launch.haproxy import TLS
from app.launch.instance import Instance
from app.launch.model_starts import ModelStarts
from app.launch.ray_processes import left_out, pace_controller, proxies_later, without_agents
from app.launch.terminal import Progress, Say
from app.option_groups import LaunchOptions
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 900.0
STATUS_TIMEOUT_S = 2.0
CONTROL_INTERVAL = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S"
STARTING_S, RESTARTED_S, RUNNING_S = 0.1, 0.25, 0.5
"""How long Serve's controller rests between two looks at its replicas: while they start, after it had to
restart, and when they run. It shares its cores with the engines; at Serve's 0.1 s it takes 4% of one while
idle."""

TOLD_WITHIN_S = 3.0
"""How long a server that stops waits for its ingresses to end all requests."""

LOADED = ("RUNNING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")
"""States of replicas that have loaded; a new controller finds running ones RECOVERING."""


class LocalServer:
    """This process's own Ray and Serve; ``stop`` ends everything."""

    def __init__(self, launch: LaunchOptions, instance: Instance) -> None:
        """``instance`` is used, but not removed at the end."""
        self._launch = launch
        self._instance = instance
        self.dashboard = ""
        # By model: the different sizes of its engines' KV pools, the largest first, as /health last told them.
        # Where keys are required it tells none.
        self.pool_tokens: dict[str, Sequence[int]] = {}
        self._proxies: list[Any] = []  # answers that have yet to come
        self._args: Mapping[str, Any] = {}
        self._models: Sequence[ServedModel] = ()
        self._say: Say = print
        self._starts: ModelStarts | None = None
        self._tries: dict[str, int] = {}  # of models that Serve has given up, by name
        self._paced = True  # unless the user has set the controller's interval
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host, port = self._launch.host, self._launch.port
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "http" if self._launch.tls_file is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def _environment(self) -> dict[str, str]:
        """Of Serve's controller, and with it of HAProxy and all replicas."""
        tls = {} if self._launch.tls_file is None else {TLS: str(Path(self._launch.tls_file).resolve())}
        collects = {} if self._launch.ray_dashboard else {RAY_COLLECTS: "0"}
        return {**self._instance.controller_environment(), **tls, **collects, WATCHED: "1"}

    def start(self) -> None:
        """Start Ray and Serve, without the application.

        Raises:
            ConfigError: they do not start; one line on why.
        """
        self._instance.prepare_environment()
        # All processes inherit it from Ray's. Those with their own environment would load Ray twice.
        os.environ.update(self._environment())
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        self._paced = CONTROL_INTERVAL not in os.environ
        os.environ.setdefault(CONTROL_INTERVAL, str(RESTARTED_S))
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # of the replicas' log lines
        # By default twice a second: a third of what Ray's log monitor takes while idle.
        os.environ.setdefault("LOG_NAME_UPDATE_INTERVAL_S", "2")
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
        import ray

        # This process would otherwise only wait for Ray's processes.
        building = threading.Thread(target=import_module, args=(serving.IMPORT_PATH.partition(":")[0],))
        building.start()
        logging.getLogger("ray").setLevel(logging.WARNING)
        try:
            with self._processes():
                context = ray.init(
                    address="local",
                    _temp_dir=self._instance.ray_folder,
                    dashboard_host="127.0.0.1",
                    include_dashboard=self._launch.ray_dashboard,  # without dashboard_port at the next free one
                    log_to_driver=True,
                    logging_level=logging.ERROR,
                )
        except Exception as error:  # Ray raises a bare one if its node takes longer than 30 s
            raise ConfigError(f"Ray does not start: {_last_line(error)}{_token_hint(error)}") from error
        finally:
            building.join()
        if self._launch.ray_dashboard:
            self.dashboard = str(context.dashboard_url or "")
        self._start_serve()

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        """While Ray starts here, it starts only the processes that are needed."""
        with left_out(dashboard=self._launch.ray_dashboard), contextlib.ExitStack() as stack:
            if not self._launch.ray_dashboard:
                stack.enter_context(without_agents())
            yield

    def _start_serve(self) -> None:
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            with proxies_later() as self._proxies:
                serve.start(http_options={"host": self._launch.host, "port": self._launch.port})
        except (RayError, RayServeException, RuntimeError, OSError) as error:
            raise ConfigError(f"Serve does not start: {_last_line(error)}") from error

    def deploy(
        self, args: Mapping[str, Any], models: Sequence[ServedModel], stop: threading.Event, say: Say
    ) -> dict[str, int]:
        """Deploy, and wait until the engine replicas accept requests or ``stop`` is set.

        The application is built here, with ``args``, from which ``models`` were made, and the instance's name;
        Serve would start a process just to build it. ``say`` reports progress. Returns how many engine replicas
        of each model, by its name, accept requests: some seconds after the first, even if others have yet to.
        :meth:`attend` follows models that have none.

        Raises:
            ConfigError: the application, or every model, cannot start; the message says why.
        """
        from ray import serve

        from app.application import INGRESS
        from app.launch import placement

        nodes = placement.cluster_nodes()
        placement.check_gpus(models, nodes)
        placement.check_room(models, nodes)
        if "models" in args:
            os.environ.pop(f"{ENV_PREFIX}MODELS", None)  # the path of a file, which has been read
        self._args, self._models, self._say = args, models, say
        self._starts = starts = ModelStarts(models, INGRESS, say)
        self._pace(STARTING_S)
        self._run()
        progress = Progress(sum(model.options.scaling.initial_replicas for model in models), say)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not stop.wait(0.2):
            found = serve.status().applications.get(serving.APP_NAME)
            self._look(starts, found)
            if starts.complete(time.monotonic()):
                break
            self._check_proxies()
            if time.monotonic() > deadline:
                status = str(found.status) if found is not None else ""
                raise ConfigError(f"the application did not start within {START_TIMEOUT_S:g} s: {status}")
            progress.update(_counted(found, "RUNNING"), time.monotonic())
        self._pace(RUNNING_S)
        return dict(starts.ready)

    def _pace(self, seconds: float) -> None:
        from ray.serve.context import _get_global_client
        from ray.serve.exceptions import RayServeException

        if self._paced:
            with contextlib.suppress(RayServeException):  # without a controller, what follows says so
                pace_controller(_get_global_client()._controller, seconds)

    def _run(self) -> None:
        """Deploy, or deploy again; waits for nothing."""
        from ray import serve

        from app.application import build_with

        application = build_with({**self._args, "instance": self._instance.name}, None, self._tries, warn=False)
        serve.run_many(
            [serve.RunTarget(application, serving.APP_NAME)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _look(self, starts: ModelStarts, application: Any) -> None:
        health: dict[str, Mapping[str, Any]] = {}
        status = str(application.status) if application is not None else ""
        # Of several models one may serve long before the application is complete.
        if self._models[0].one_of_several or status.endswith(("RUNNING", "DEPLOY_FAILED", "UNHEALTHY")):
            health = _of_each(self._health(), self._models)
            self.pool_tokens = {name: own.get("pool_tokens", ()) for name, own in health.items()}
        starts.look(application, lambda model: _accepting(model, health, application), time.monotonic())

    def attend(self) -> None:
        """Follow models that did not serve at the start: announce those that do now, and retry failed ones.

        After a ``serve deploy`` on this cluster it does nothing: a retry would undo that deploy.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException
        from ray.serve.schema import APIType

        starts = self._starts
        if starts is None or not (starts.waiting or starts.failed) or (details := self._details()) is None:
            return
        deployed = details.applications.get(serving.APP_NAME)
        if deployed is None or deployed.source == APIType.DECLARATIVE:
            names = ", ".join(model.name for model in (*starts.waiting, *starts.failed))
            self._say(f"another deploy has replaced this one; the launcher no longer retries {names}")
            self._starts = None
            return
        self._look(starts, details._get_status().applications.get(serving.APP_NAME))
        if due := starts.due(time.monotonic()):
            for model in due:
                self._tries[model.name] = self._tries.get(model.name, 0) + 1
            try:
                self._run()
            except (ConfigError, RayError, RayServeException) as error:
                names = ", ".join(model.name for model in due)
                self._say(f"warning: {names} cannot be tried again now: {_last_line(error)}")

    def _check_proxies(self) -> None:
        """Look at the proxies that have answered, for which Serve has not waited.

        Raises:
            ConfigError: one does not start.
        """
        import ray
        from ray.exceptions import RayError

        if not self._proxies:
            return
        answered, self._proxies = ray.wait(self._proxies, num_returns=len(self._proxies), timeout=0)
        try:
            ray.get(answered)
        except (RayError, RuntimeError, OSError) as error:
            raise ConfigError(f"Serve's proxy does not start: {_last_line(error)}") from error

    def ready(self) -> int | None:
        """Number of running engine replicas; ``None`` if unknown.

        It is unknown while Serve's controller restarts, or builds another application: it then does not report
        the running one.
        """
        application = self._application()
        return _counted(application, *LOADED) if application is not None and application.deployments else None

    def _application(self) -> Any:
        """Serve's status of the application; ``None`` if unknown."""
        details = self._details()
        return None if details is None else details._get_status().applications.get(serving.APP_NAME)

    def _details(self) -> Any:
        """What Serve's controller reports about all that it runs; ``None`` if unknown."""
        import ray
        from ray.exceptions import RayError
        from ray.serve.context import _get_global_client
        from ray.serve.exceptions import RayServeException
        from ray.serve.schema import ServeInstanceDetails

        try:
            # serve.status() has no timeout, and would delay an interrupt.
            asked = _get_global_client()._controller.get_serve_instance_details.remote()
            return ServeInstanceDetails(**ray.get(asked, timeout=STATUS_TIMEOUT_S))
        except (RayError, RayServeException):
            return None

    def proxy(self) -> str:
        """Which proxy serves, judged by what listens."""
        if not serving.haproxy_expected():
            return "Serve's built-in proxy (HAProxy needs Linux)"
        with socket.socket() as probe:
            probe.settimeout(2.0)
            listens = probe.connect_ex(("127.0.0.1", self._instance.stats_port)) == 0
        return (
            "HAProxy"
            if listens
            else "Serve's built-in proxy (warning: HAProxy did not start; streams are slower)"
        )

    def stop(self) -> None:
        """End Ray and every process that it leaves behind."""
        import ray

        # Without Serve's own shutdown, which would wait for streams until they are complete.
        children = [
            process for process in psutil.Process().children(recursive=True) if process.pid not in self._before
        ]
        started = ray.is_initialized()
        if self._starts is not None:
            # In a thread, because some of Serve's calls have no timeout.
            telling = threading.Thread(target=_end_requests, daemon=True)
            telling.start()
            telling.join(TOLD_WITHIN_S)
        ray.shutdown()
        # Nothing else ends what an interrupted start leaves behind.
        for process in psutil.wait_procs(children, timeout=5 if started else 0)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _health(self) -> dict[str, Any]:
        """The answer of ``/health``; empty if it is not 200, or another server's."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5, context=_unverified()) as response:
                health = dict(json.load(response))
        except (urllib.error.URLError, ValueError, OSError):
            return {}
        return health if health.get("instance") == self._instance.name else {}


def _end_requests() -> None:
    """Have the ingresses tell clients of running requests that the server stops, if they can do so soon."""
    from ray import serve

    from app.application import INGRESS

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # nobody needs to know how this handle finds them
    try:
        handle = serve.get_deployment_handle(INGRESS, serving.APP_NAME)
        handle.broadcast("end_requests").results(timeout_s=TOLD_WITHIN_S)
    except Exception:  # of Serve, or of an ingress that is gone or not there yet: the server stops in any case
        logger.debug("clients of running requests were not told that the server stops", exc_info=True)


def _unverified() -> ssl.SSLContext:
    """For this server's own response: its certificate need not name the address used here."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def serves(health: Mapping[str, Any], replicas: int) -> bool:
    """Whether a model accepts requests, by ``/health`` and Serve's number of its engine replicas.

    With ``min_replicas=0`` and a short ``scale_down_after_s`` the last replica may stop before it is seen
    routable: asleep counts as started.
    """
    return health.get("routable", 0) > 0 or (health.get("asleep", False) and not replicas)


def _of_each(health: Mapping[str, Any], models: Sequence[ServedModel]) -> dict[str, Mapping[str, Any]]:
    """What ``/health`` says of each model, by name; if keys are required, it has their order, not names."""
    if not models[0].one_of_several:
        return {models[0].name: health}
    found = health.get("models", {})
    names = (model.name for model in models)
    return dict(found) if isinstance(found, dict) else dict(zip(names, found, strict=True))


def _accepting(model: ServedModel, health: Mapping[str, Mapping[str, Any]], application: Any) -> int:
    """How many engine replicas of a model accept requests; of one that is asleep, all that it starts with."""
    own = health.get(model.name, {})
    if not serves(own, _counted(application, deployment=model.deployment)):
        return 0
    routable: int = own.get("routable", 0)
    if not routable:
        return model.options.scaling.initial_replicas
    if model.options.ingress.replicas_per_ingress is None:
        return routable
    # An ingress with a part of the fleet knows nothing of the others.
    return max(routable, _counted(application, *LOADED, deployment=model.deployment))


def _counted(application: Any, *states: str, deployment: str | None = None) -> int:
    """Number of engine replicas in one of ``states``, or in any state; of one deployment, or of all."""
    deployments = application.deployments if application is not None else {}
    return sum(
        count
        for name, status in deployments.items()
        for state, count in status.replica_states.items()
        if (name.partition("-")[0] == ENGINE_DEPLOYMENT if deployment is None else name == deployment)
        and (not states or state in states)
    )


def _token_hint(error: BaseException) -> str:
    """What to do if Ray, which keeps a token in the home folder, cannot make it."""
    if isinstance(error, OSError) and str(error.filename).startswith(os.path.expanduser("~/.ray")):
        return "; set RAY_AUTH_TOKEN to a secret of 64 characters, or HOME to a folder that can be written"
    return ""


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
