"""HAProxy as Serve runs it, through ``app/launch/haproxy.py``, in front of an ingress of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from certificates import certificate
from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_SESSION_ID,
)
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from app.api import tenant
from app.launch import haproxy, serving
from app.launch.instance import Instance
from app.launch.port_block import PortBlock

pytestmark = pytest.mark.skipif(not serving.haproxy_expected(), reason="no HAProxy here")

LIMIT_S = 200.0  # on a busy machine
NEIGHBOR = ("127.0.0.2", 0)
"""Another address of this machine to connect from."""


@dataclass
class Ingress:
    """Answers to /ready, to /long once it is ``finishing``, and to anything else never.

    Notes what it is asked, and which clients leave.
    """

    answer: bytes = b"own"
    media_type: bytes = b"application/json"
    asked: int = 0
    left: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    last_head: bytes = b""
    finishing: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = b""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path, self.last_head = head.split(b" ")[1], head
                if b"content-length: " in head:
                    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                if path not in (b"/ready", b"/-/healthz"):
                    self.asked += 1
                    if path != b"/long":
                        await reader.read(1)
                        raise ConnectionError
                    await self.finishing.wait()
                headers = b"content-type: %s\r\ncontent-length: %d\r\n" % (self.media_type, len(self.answer))
                writer.write(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n" + self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.put_nowait(path)
        finally:
            writer.close()


@dataclass
class Setting:
    """What Serve would have written: HAProxy with one ingress, and another server as its fallback."""

    folder: Path
    ports: PortBlock

    def __post_init__(self) -> None:
        self.front, self.back, self.other = (self.ports.take() for _ in range(3))
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=self.front),
            socket_path=str(self.folder / "admin.sock"),
            metrics_socket_path=str(self.folder / "metrics.sock"),
            server_state_base=str(self.folder),
            server_state_file=str(self.folder / "state"),
            stats_port=self.ports.take(),
            metrics_port=self.ports.take(),
            is_head=True,
            has_received_routes=True,
        )
        self.config = self.folder / "haproxy.cfg"
        backend = BackendConfig(
            name="http-quire",
            path_prefix="/",
            app_name="quire",
            servers=[ServerConfig("ingress", "127.0.0.1", self.back)],
            fallback_server=ServerConfig("fallback", "127.0.0.1", self.other),
        )
        self.write = lambda **backends: HAProxyApi(  # type: ignore[no-untyped-call]
            config, backends, config_file_path=str(self.config)
        )._generate_config_file_internal()
        self.write(quire=backend)
        self.script = self.folder / haproxy.NAME
        assert haproxy.write_script(self.script)

    @property
    def command(self) -> list[str]:
        """As Serve gives it."""
        return [str(self.script), "-db", "-f", str(self.config), "-dR"]

    async def open(self) -> asyncio.StreamWriter:
        return (await asyncio.open_connection("127.0.0.1", self.front))[1]

    async def get(self, path: str = "/ready", headers: bytes = b"") -> bytes:
        """The whole answer; empty if the connection is refused."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.front)
        except ConnectionRefusedError:
            return b""
        writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%s\r\n" % (path.encode(), headers))
        try:
            return await reader.read()
        finally:
            writer.close()

    async def until(self, ends_with: bytes) -> bytes:
        """Ask until the answer ends so."""
        while not (answer := await self.get()).endswith(ends_with):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return answer

    async def until_refused(self) -> None:
        """Until HAProxy takes no more connections. Closing its port resets those that it has not accepted."""
        with contextlib.suppress(ConnectionError):
            while await self.get():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.fixture
def setting() -> Any:
    instance = Instance()
    yield Setting(instance.folder, instance.ports)
    instance.remove()


@contextlib.asynccontextmanager
async def running(setting: Setting, **environment: str) -> AsyncIterator[None]:
    environment = {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(*setting.command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def run(use: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(use(), LIMIT_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def changed(config: str, cores: int = 2, **environment: str) -> str:
    return haproxy.changed(config, Path("/503.http"), 40_000, cores, environment)


def test_serves_template_gets_every_change(setting: Setting) -> None:
    before, after = setting.config.read_text().splitlines(), changed(setting.config.read_text()).splitlines()
    assert sorted(set(after) - set(before)) == sorted(
        [
            "    nbthread 1",
            "    maxconn 16384",
            "    timeout http-request 10s",
            "    errorfile 502 /503.http",
            "    errorfile 503 /503.http",
            "    errorfile 504 /503.http",
            f"    server fallback 127.0.0.1:{setting.other} check backup disabled",
            "    tcp-request connection track-sc0 src table quire_addresses",
            "    tcp-request connection reject if { sc0_conn_cur gt 8192 }",
            "    http-request del-header x-request-id if { req.fhdr(x-request-id) -m reg [^[:print:]] }",
            f"    http-request del-header '^({haproxy.STEERING})$' -m reg",
            "    http-request set-header x-quire-client %[src]",
            "    http-response set-header connection close"
            " if { res.hdr(content-type) -m beg text/event-stream }",
            "backend quire_addresses",
            "    stick-table type ipv6 size 100k expire 10m store conn_cur",
        ]
    )
    assert {"    option splice-request", "    option splice-response"} <= set(before) - set(after)
    assert changed("\n".join(after)) == "\n".join(after), "a second time it changes nothing"


@pytest.mark.parametrize(
    ("files", "environment", "most", "each"),
    [
        (1_000_000, {}, 16_384, 8_192),
        (20_000, {}, 9_850, 4_925),
        (20_000, {"RAY_SERVE_HAPROXY_MAXCONN": "1000"}, 1_000, 500),
        (1_000_000, {"QUIRE_HAPROXY_CONNECTIONS_PER_ADDRESS": "7"}, 16_384, 7),
        (sys.maxsize, {}, 16_384, 8_192),
        (100, {}, 1, 1),
    ],
)
def test_connections_follow_the_limit_of_open_files(
    setting: Setting, files: int, environment: dict[str, str], most: int, each: int
) -> None:
    config = haproxy.changed(setting.config.read_text(), Path("/503.http"), files, 2, environment)
    assert f"    maxconn {most}\n" in config
    assert f"sc0_conn_cur gt {each} }}" in config


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (7, 1), (8, 2), (64, 4)])
def test_haproxy_has_a_thread_for_four_cores(setting: Setting, cores: int, threads: int) -> None:
    config = setting.config.read_text()
    assert "    nbthread 4\n" in config
    assert f"    nbthread {threads}\n" in changed(config, cores)
    assert "    nbthread 4\n" in changed(config, cores, RAY_SERVE_HAPROXY_NBTHREAD="4"), "the operator's"


@pytest.mark.parametrize("wrong", ["many", "0", "-1", "1.5"])
def test_a_limit_that_is_no_number_is_named(wrong: str) -> None:
    with pytest.raises(SystemExit, match=rf"CONNECTIONS_PER_ADDRESS='{wrong}': must be a whole number"):
        changed("", **{haproxy.PER_ADDRESS: wrong})


def test_a_client_that_leaves_ends_its_request_however_it_was_sent(setting: Setting) -> None:
    async def use() -> None:
        ingress = Ingress()
        async with await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back), running(setting):
            await setting.until(b"own")
            for number, sends in enumerate([1, 2, 2, 2, 3, 3]):
                writer = await setting.open()
                request = b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" % number + b"x" * 100
                for part in {1: [request], 2: [request[:-100], request[-100:]]}.get(
                    sends, [request[:-100], request[-100:-50], request[-50:]]
                ):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.02)  # else the kernel joins them
                await until(lambda: ingress.asked > number)  # noqa: B023
                writer.close()
                while await ingress.left.get() != b"/%d" % number:
                    pass  # an idle connection of a health check

    run(use)


async def half_a_request(setting: Setting) -> bytes:
    """What comes back; empty if the connection is refused."""
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", setting.front, local_addr=NEIGHBOR)
        with contextlib.closing(writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost")
            return await reader.read()
    return b""


@pytest.mark.parametrize(
    ("given", "passes"),
    [(b"abc-123, x y", True), (b"a\xffb", False), (b"\xc3\xa9", False), (b"ok\r\nx-request-id: \xff", False)],
)
def test_a_request_id_that_serve_cannot_read_is_left_out(setting: Setting, given: bytes, passes: bool) -> None:
    async def test() -> None:
        ingress = Ingress()
        server = await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back)
        async with server, running(setting):
            await setting.until(b"own")
            assert (await setting.get("/ready", b"x-request-id: %s\r\nx-mark: m\r\n" % given)).endswith(b"own")
            while b"x-mark: m" not in ingress.last_head:
                await setting.get("/ready", b"x-request-id: %s\r\nx-mark: m\r\n" % given)
            assert (b"x-request-id: " + given in ingress.last_head) is passes
            assert (b"\xff" in ingress.last_head) is False

    run(test)


@pytest.mark.parametrize(
    ("media_type", "requests"), [(b"application/json", 2), (b"text/event-stream; charset=utf-8", 1)]
)
def test_a_connection_ends_with_a_stream(setting: Setting, media_type: bytes, requests: int) -> None:
    """The HAProxy that began a stream may know no living ingress once it has ended."""

    async def use() -> None:
        ingress = Ingress(media_type=media_type)
        async with await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back), running(setting):
            await setting.until(b"own")
            reader, writer = await asyncio.open_connection("127.0.0.1", setting.front)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"own")).startswith(b"HTTP/1.1 200")
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert (await reader.read()).count(b"own") == requests - 1
            writer.close()

    run(use)


def test_headers_that_would_steer_serve_do_not_reach_it(setting: Setting) -> None:
    steering = [
        b"serve_multiplexed_model_id",
        b"Serve-Multiplexed-Model-Id",
        b"ray_serve_multiplexed_model_id",
        b"X-Serve-Router-Replica",
        b"x_serve_anything",
        SERVE_SESSION_ID.encode(),
        b"X_Session_Id",
        SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER.encode(),
        SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER.encode(),
        b"x-quire-client",
    ]
    passing = [b"x-serve", b"my-x-serve-a", b"serve-model", b"x-session-id-2", b"authorization", b"x-tenant"]

    async def test() -> None:
        ingress = Ingress()
        server = await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back)
        async with server, running(setting):
            await setting.until(b"own")
            sent = b"".join(name + b": mark\r\n" for name in [*steering, *passing])
            while b": mark" not in ingress.last_head:  # else of a health check
                assert (await setting.get("/ready", sent)).endswith(b"own")
            lines = [line.lower().split(b": ") for line in ingress.last_head.strip().split(b"\r\n")[1:]]
            assert sorted(name for name, value in lines if value == b"mark") == sorted(passing)
            assert haproxy.CLIENT_ADDRESS == tenant.CLIENT_ADDRESS
            address = haproxy.CLIENT_ADDRESS.encode()
            assert [value for name, value in lines if name == address] == [b"127.0.0.1"]

    run(test)


def test_with_a_certificate_clients_connect_by_https(setting: Setting) -> None:
    pem = certificate(setting.folder)

    async def test() -> None:
        ingress = Ingress()
        context = ssl.create_default_context(cafile=str(setting.folder / "cert.pem"))
        server = await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back)
        async with server, running(setting, **{haproxy.TLS: str(pem)}):
            answer = b""
            while not answer.endswith(b"own"):
                with contextlib.suppress(ConnectionError):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", setting.front, ssl=context, server_hostname="localhost"
                    )
                    writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                    answer = await reader.read()
                    writer.close()
                await asyncio.sleep(0.05)
            assert b"own" not in await setting.get()  # by plain HTTP

    run(test)


def test_one_address_cannot_take_all_connections(setting: Setting) -> None:
    async def use() -> None:
        ingress = Ingress()
        limit = {haproxy.PER_ADDRESS: "20"}
        async with (
            await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back),
            running(setting, **limit),
        ):
            await setting.until(b"own")
            ends = [asyncio.create_task(half_a_request(setting)) for _ in range(50)]
            await until(lambda: sum(end.done() for end in ends) == 30)
            assert {end.result() for end in ends if end.done()} == {b""}
            assert (await setting.get()).endswith(b"own")
            for end in ends:
                end.cancel()

    run(use)


def test_without_an_ingress_clients_are_told_to_try_again(setting: Setting) -> None:
    """Another server, on the port where Serve's fallback would listen, is not asked."""

    async def use() -> None:
        other = Ingress(answer=b"other")
        async with await asyncio.start_server(other.handle, "127.0.0.1", setting.other), running(setting):
            head, _, body = (await setting.until(b"}")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 5\r\n" in head
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("service_unavailable_error", "unavailable")
            ingress = Ingress()
            async with await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back):
                await setting.until(b"own")

    run(use)


def test_before_serve_knows_of_the_application_clients_are_told_to_try_again(setting: Setting) -> None:
    setting.write()

    async def use() -> None:
        async with running(setting):
            assert (await setting.until(b"}")).startswith(b"HTTP/1.1 503 ")

    run(use)


def test_a_path_of_no_application_is_not_found() -> None:
    """Serve's answer, where a route prefix is not /."""
    config = "backend default_backend\n    http-request return status 404 x\n"
    assert "status 404" in changed(f"    use_backend quire if is_quire\n{config}")
    assert "deny_status 503" in changed(config)


PARENT = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(process.pid, flush=True)
process.wait()
"""


def test_it_dies_with_its_parent_and_lets_answers_end(setting: Setting) -> None:
    async def use() -> None:
        ingress = Ingress()
        async with await asyncio.start_server(ingress.handle, "127.0.0.1", setting.back):
            command = [sys.executable, "-c", PARENT, *setting.command]
            parent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert parent.stdout is not None
            process = psutil.Process(int(await parent.stdout.readline()))
            await setting.until(b"own")
            long = asyncio.create_task(setting.get("/long"))
            await until(lambda: ingress.asked > 0)
            parent.kill()
            await parent.wait()
            await setting.until_refused()
            ingress.finishing.set()
            assert (await long).endswith(b"own"), "the answer goes on"
            await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)

    run(use)


def test_a_connection_reset_before_it_is_accepted_counts_as_refused(setting: Setting) -> None:
    async def use() -> None:
        with socket.create_server(("127.0.0.1", setting.front)) as listener:
            refused = asyncio.create_task(setting.until_refused())
            # The connection is in the backlog, and nobody accepts it.
            await until(lambda: bool(select.select([listener], [], [], 0)[0]))
        await refused

    run(use)


def test_it_starts_though_shared_memory_is_full(tmp_path: Path) -> None:
    """Clients would otherwise keep to the ingresses of the last start: the kernel kills each later HAProxy."""
    script, config = tmp_path / haproxy.NAME, tmp_path / "haproxy.cfg"
    haproxy.write_script(script)
    config.write_text(
        "defaults\n    mode http\n    timeout client 9s\n    timeout server 9s\n    timeout connect 9s\n"
        "frontend http_frontend\n    bind 127.0.0.1:1\n"
    )
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    full = "mount -t tmpfs -o size=64k tmpfs /dev/shm; ! head -c 1m /dev/zero > /dev/shm/file 2> /dev/null"
    if subprocess.run([*apart, full], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    twice = f"{script} -c -f {config}; {script} -c -f {config}; ls /dev/shm"
    ran = subprocess.run([*apart, f"{full}; {twice}"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(haproxy.START_MESSAGES) == 1, "a later start removes what an earlier one left"


def test_links_in_shared_memory_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, dead = (tmp_path / f"{haproxy.START_MESSAGES}{pid}" for pid in (os.getpid(), 2**30))
    alive, file = (tmp_path / f"{haproxy.START_MESSAGES}{pid}" for pid in (os.getppid(), 2**30 + 1))
    for link in (own, dead, alive):
        link.symlink_to(os.devnull)
    file.touch()
    monkeypatch.setattr(haproxy, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(haproxy, "MESSAGES_ROOM", 0)
    haproxy.avoid_full_memory()
    assert sorted(tmp_path.iterdir()) == sorted([alive, file]), "there is room again"
    monkeypatch.setattr(haproxy, "MESSAGES_ROOM", 2**63)
    haproxy.avoid_full_memory()
    assert own.is_symlink()
    monkeypatch.setattr(haproxy, "SHARED_MEMORY", tmp_path / "none")
    haproxy.avoid_full_memory()


def test_another_users_link_does_not_leave_haproxy_without_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, dead = (tmp_path / f"{haproxy.START_MESSAGES}{pid}" for pid in (os.getpid(), 2**30))
    dead.symlink_to(os.devnull)
    unlink = Path.unlink

    def refuse(self: Path) -> None:
        if self == dead:
            raise PermissionError(1, "Operation not permitted", str(self))
        unlink(self)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(haproxy, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(haproxy, "MESSAGES_ROOM", 2**63)
    haproxy.avoid_full_memory()
    assert own.is_symlink()
    assert dead.is_symlink()


def test_users_who_name_a_binary_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance()
    path = instance.controller_environment()[haproxy.BINARY]
    assert Path(path).name == haproxy.NAME
    assert serving.haproxy_mended({haproxy.BINARY: path})
    instance.remove()
    monkeypatch.setenv(haproxy.BINARY, "/usr/sbin/haproxy")
    named = Instance()
    assert haproxy.BINARY not in named.controller_environment()
    assert not serving.haproxy_mended()
    named.remove()


def test_it_does_not_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(haproxy.BINARY, "/nowhere/quire-haproxy")
    assert Path(haproxy.haproxy_binary()).name == "haproxy"
