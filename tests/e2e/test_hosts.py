"""One host, several servers, and clients that leave, idle, or find no ingress."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
from local_cluster import SOON_S, BreakableCluster

from app.launch.port_block import PortBlock
from loadtests.client import INSTANCE
from loadtests.cluster import application, gone, replica_pids, wait_for

ALONE = ("engine_replicas=1", "kv_memory=64MiB", "threads=1", "engine_cpus=1")
IDLE = 4100
POLL_S = 0.02
KILLED_S = 10.0
"""Within which a process that was killed has gone; Ray's, left alone, would run for longer."""
HTTP = httpx.Client(timeout=SOON_S, limits=httpx.Limits(max_keepalive_connections=0))  # connects anew each time
BODY = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


def test_why_ray_does_not_start_is_told_in_one_line(paced_model: Path) -> None:
    """Here its first process has no time to start, as on a busy machine."""
    ports = PortBlock()
    command = [sys.executable, "-m", "app", f"port={ports.take()}", *ALONE, f"model={paced_model}"]
    environment = {**os.environ, "RAY_gcs_server_port_wait_time_s": "0"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    ports.release()
    (told,) = re.findall("^Ray's logs are in (.*)/ray/session_latest/logs$", ended.stdout, re.MULTILINE)
    assert ended.returncode == 1

    def nothing_runs() -> bool:
        commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        return not any(told in command for command in commands)

    wait_for(nothing_runs, KILLED_S, "some process of Ray's is left")
    shutil.rmtree(told)
    assert re.fullmatch("quire: Ray does not start: .*\n", ended.stderr)


def answer_of(url: str) -> str:
    """The instance that answers, ``503`` if HAProxy says that none can, or ``refused``."""
    try:
        response = HTTP.get(f"{url}/v1/models")
    except httpx.TransportError:
        return "refused"
    if response.status_code == 503 and INSTANCE not in response.headers:
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["code"] == "unavailable"
        return "503"
    assert response.status_code == 200
    return response.headers[INSTANCE]


def test_a_server_answers_only_for_itself_and_haproxy_dies_with_it(
    cluster: BreakableCluster, paced_model: Path
) -> None:
    with application([*ALONE, f"model={paced_model}", "served_model_name=neighbor"]) as (
        process,
        url,
        instance,
    ):
        lets_no_other_answer(cluster, process, url, instance)
        end_all_but_haproxy(process)
        assert answer_of(url) == "refused"


def lets_no_other_answer(cluster: BreakableCluster, process: psutil.Process, url: str, instance: str) -> None:
    """While its ingress is gone, another server on this host runs on."""
    assert answer_of(url) == instance
    assert answer_of(cluster.url) == cluster.instance
    seen: dict[str, Counter[str]] = {url: Counter(), cluster.url: Counter()}
    restarted = threading.Event()

    def poll(address: str) -> None:
        while not restarted.wait(POLL_S):
            seen[address][answer_of(address)] += 1

    polling = [threading.Thread(target=poll, args=(address,)) for address in seen]
    for thread in polling:
        thread.start()
    try:
        (old,) = replica_pids(process, "ingress")
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: gone(old), SOON_S, "the ingress is not killed")
        wait_for(lambda: seen[url]["503"] > 0, SOON_S, "nobody noticed")
        after = seen[url][instance]
        wait_for(lambda: seen[url][instance] > after, SOON_S, "no ingress has come back")
    finally:
        restarted.set()
        for thread in polling:
            thread.join()
    assert seen[url].keys() <= {instance, "503", "refused"}
    assert seen[cluster.url].keys() == {cluster.instance}


def end_all_but_haproxy(server: psutil.Process) -> None:
    """Only the death of its processes may end HAProxy; its files are left for this to delete."""

    def only_haproxy() -> psutil.Process | None:
        """Once the one before the last reload has ended, which waits for its connections."""
        with contextlib.suppress(psutil.NoSuchProcess):  # another one has just ended
            found = [child for child in server.children(recursive=True) if child.name() == "haproxy"]
            return found[0] if len(found) == 1 else None
        return None

    haproxy = wait_for(only_haproxy, SOON_S, "there is not one HAProxy")
    children = server.children(recursive=True)
    command = haproxy.cmdline()
    folder = Path(command[command.index("-f") + 1]).parents[2]
    for one in [server, *children]:
        if one.pid != haproxy.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    wait_for(lambda: all(gone(one.pid) for one in children), SOON_S, "HAProxy, or another process, is left")
    shutil.rmtree(folder)


def send_apart(port: int) -> socket.socket:
    """A request for one whole answer, its body after its headers, as HTTP libraries send it."""
    body = json.dumps(BODY).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
    threading.Event().wait(0.05)  # two packets, not one
    connection.sendall(body)
    return connection


def test_whole_answers_end_when_their_clients_leave(cluster: BreakableCluster) -> None:
    clients = [send_apart(cluster.port) for _ in range(6)]
    live = lambda: sum(state["live_requests"] for state in cluster.inspect())  # noqa: E731
    wait_for(lambda: live() == 6, SOON_S, "not all requests run")
    for client in clients:
        client.close()
    wait_for(lambda: cluster.health()["live_requests"] == 0, SOON_S, "requests outlive their clients")
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    # Far less than the answers that nobody waits for.
    assert all(state["running"] == 0 for state in cluster.inspect())


def test_idle_connections_lock_nobody_out(cluster: BreakableCluster) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4 * IDLE + 1000:  # HAProxy allows one address a quarter
        pytest.skip("this machine allows too few open files")
    with contextlib.ExitStack() as connections:
        connections.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for _ in range(IDLE):
            half = connections.enter_context(socket.create_connection(("127.0.0.1", cluster.port)))
            half.sendall(b"GET /health HTTP/1.1\r\nhost")
        assert HTTP.get(f"{cluster.url}/health", timeout=30).json()["status"] == "ok"
