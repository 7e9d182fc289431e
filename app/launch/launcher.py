"""Serve on this machine until interrupted; ``make serve`` ends up here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from app import config
from app.api.keys import KeyFile
from app.disk_room import RoomWatch
from app.launch import model_store, serving
from app.launch.access import check_access
from app.launch.instance import Instance, lack
from app.launch.local_server import LocalServer
from app.launch.preflight import check_memory_of_models, check_port, naming
from app.launch.terminal import ReplicaWatch, Say, Started, announce, shared_cores
from engine.devices import usable_cores
from engine.errors import ConfigError
from engine.models.folders import is_bundled

WATCH_EVERY_S = 10.0
"""Each check takes 15 to 25 ms of CPU time in the launcher and Serve's controller together."""


def serve_here(given: Mapping[str, Any], say: Say = print) -> None:
    """Start a server with the options ``given``, say where it answers, and run until SIGINT or SIGTERM.

    Raises:
        ConfigError: one line on why it cannot start.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    options = config.load(given)
    args = {name: value for name, value in given.items() if config.OPTIONS[name].group != "launch"}
    host, port = options.launch.host, options.launch.port
    if ":" in host and serving.haproxy_expected():
        raise ConfigError(
            f"cannot serve on {host}: Serve's HAProxy reaches replicas over IPv4 only; choose another host"
        )
    args |= check_access(options)
    keys_required = KeyFile(options.ingress.api_keys_file).required
    check_port(host, port)
    models = config.served_models(options)
    if options.service.models is not None:
        args["models"] = options.service.models
    folders = []
    for model in models:
        with naming(model), _leaving_at_once(model.options.service.model):
            folders.append(model_store.resolve(model.options.service.model))
    fits = check_memory_of_models(models, folders)
    if any(fit.pool is not None for fit in fits):
        on_cpu = [model for model, fit in zip(models, fits, strict=True) if fit.pool is not None]
        for line in shared_cores(on_cpu, usable_cores()):
            say(line)
    stop = threading.Event()
    initial = sum(model.options.scaling.initial_replicas for model in models)
    replicas = "1 engine replica" if initial == 1 else f"{initial} engine replicas"
    say(f"starting Ray and {replicas} with {', '.join(model.name for model in models)} ...")
    instance = Instance(options.ingress.instance)
    server = LocalServer(options.launch, instance)
    failed = False
    try:
        # Until Ray has started, an interrupt raises: the terminal sends it to Ray's processes as well, and Ray
        # would wait a minute for the ones that it ended.
        server.start()
        _on_interrupt(stop)
        ready = server.deploy(args, models, stop, say)
        if not stop.is_set():
            announce(
                server.url,
                server.proxy(),
                server.dashboard,
                options,
                [
                    Started(model, fit, ready[model.name], server.pool_tokens.get(model.name, ()))
                    for model, fit in zip(models, fits, strict=True)
                    if model.name in ready
                ],
                keys_required,
                say,
            )
            say(f"  Ray's logs, until it stops: {instance.ray_folder}")
            say("  stop with Ctrl-C")
        watch = ReplicaWatch(sum(ready.values()), say)
        room = RoomWatch(say)
        while not stop.wait(WATCH_EVERY_S):
            watch.update(server.ready())
            room.update(lack(), time.monotonic())
            server.attend()
        say("stopping (up to half a minute) ...")
    except KeyboardInterrupt:
        say("stopping (up to half a minute) ...")
    except Exception:
        failed = True
        if instance.has_logs:
            say(f"Ray's logs are in {instance.ray_folder}/session_latest/logs")
        raise
    finally:
        server.stop()
        instance.remove(keep_files=failed)


@contextmanager
def _leaving_at_once(model: str) -> Iterator[None]:
    """Let an interrupt end the process; otherwise the hub's threads would first finish their files."""
    numbers = () if is_bundled(model) else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_interrupt(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
