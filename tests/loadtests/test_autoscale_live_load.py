"""The load of the live run of autoscaling, on a server that counts what is open."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from loadtests.cluster import wait_for
from loadtests.experiments.autoscale_live.load import Load

ANSWER_TOKENS = 2
LIMIT_S = 30.0


class Server:
    """Answers each request once it is let; says how many are open."""

    def __init__(self) -> None:
        self.open = 0
        self.answered = 0
        self.status = 200
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._handle, "127.0.0.1", 0), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    def stop(self) -> None:
        self.release()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        tokens = json.loads(await reader.readexactly(length))["max_tokens"]
        self.open += 1
        await self._released.wait()
        chunks = [
            {"choices": [{"text": "a", "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": tokens}},
        ]
        writer.write(f"HTTP/1.1 {self.status} Whatever\r\nconnection: close\r\n\r\n".encode())
        for chunk in chunks if self.status == 200 else []:
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        self.open -= 1
        self.answered += 1
        writer.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def load(server: Server) -> Iterator[Load]:
    load = Load(server.url, ANSWER_TOKENS)
    load.start()
    yield load
    load.stop()


def test_clients_ask_again_until_they_are_told_to_leave(server: Server, load: Load) -> None:
    load.clients(3)
    wait_for(lambda: server.open == 3, LIMIT_S, "no three requests are open")
    assert load.open_requests == 3
    server.release()
    wait_for(lambda: server.answered >= 9, LIMIT_S, "the clients do not ask again")
    load.clients(0)
    wait_for(lambda: load.open_requests == 0, LIMIT_S, "the clients do not leave")
    assert len(load.asked) >= 9
    assert all(one.whole for one in load.asked)


def test_fewer_clients_leave_only_when_answered(server: Server, load: Load) -> None:
    load.clients(3)
    wait_for(lambda: server.open == 3, LIMIT_S, "no three requests are open")
    load.clients(1)
    server.release()
    wait_for(lambda: server.answered >= 6, LIMIT_S, "nobody asks any more")
    wait_for(lambda: load.open_requests <= 1, LIMIT_S, "more than one client is left")
    assert all(one.whole for one in load.asked)


def test_a_stream_takes_turns_until_it_may_end(server: Server, load: Load) -> None:
    load.start_streams(2, 8)
    wait_for(lambda: server.open == 2, LIMIT_S, "no two streams are open")
    assert load.open_streams == 2
    server.release()
    wait_for(lambda: server.answered >= 6, LIMIT_S, "the streams take no other turn")
    turns = load.streams(LIMIT_S)
    assert len(turns) == 2
    assert all(one.whole for stream in turns for one in stream)
    assert [[one.tokens for one in stream][:2] for stream in turns] == [[8, 2], [8, 2]]


def test_a_refused_stream_takes_no_other_turn(server: Server, load: Load) -> None:
    server.status = 503
    server.release()
    load.start_streams(1, 8)
    wait_for(lambda: load.open_streams == 0 and server.answered, LIMIT_S, "the stream does not end")
    ((turn,),) = load.streams(LIMIT_S)
    assert not turn.complete
    assert turn.status == 503


def test_stopping_hangs_up(server: Server) -> None:
    load = Load(server.url, ANSWER_TOKENS)
    load.start()
    load.clients(2)
    load.start_streams(1, 8)
    wait_for(lambda: server.open == 3, LIMIT_S, "nothing is open")
    load.stop()
    assert load.open_requests == 0
    assert load.open_streams == 0
