"""What it costs to be looked at: the processor time of a loaded server, and of its own counting.

``python -m tests.observation_cost`` (three minutes): clients stream chats with five system prompts from two
engines of one thread. By turns nobody looks, three live pages are open, one of them with an opened replica, and
``/metrics`` is read once a second. What the ingress takes more for an event of a stream, times the events of a
second, is a share of the machine's processor time, and so of the throughput of one that does nothing else.
What the server counts cannot be turned off: its parts run in this process, as often as the server runs them,
and are compared with the processor time of all processes of the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import NamedTuple

import httpx
import psutil
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.api.caller import Caller
from app.api.request_record import RequestRecord
from app.api.request_trace import RequestTracer
from app.fleet.journal import AttemptNotes, Journal
from app.logs import configure
from app.metrics.engine_figures import engine_samples
from app.metrics.ray_export import EVERY_S, RayExport
from app.metrics.samples import pack, unpack
from app.metrics.table import Source
from app.routing.prefix_flow import MAX_PLACEMENTS, PrefixFlow
from loadtests.client import Client, Outcome
from loadtests.cluster import application, replica_pids
from loadtests.report import Figure, finish, most, parse
from loadtests.workloads import ChatTraffic
from tests.app.engine_stats import SCALING, STATS

OPTIONS = ["engine_replicas=2", "threads=1", "prefix_words=true", "kv_memory=64MB"]
CLIENTS, TOKENS = 10, 64
CORES = psutil.cpu_count() or 1
SETTLE_S = 1.0  # a page asks for more at its beginning
BAR = 1.0  # %


class Spent(NamedTuple):
    """Seconds of processor time, and what they were spent on."""

    ingress: float
    everything: float
    events: int
    requests: int
    seconds: float

    def since(self, before: Spent) -> Spent:
        return Spent(*(now - then for now, then in zip(self, before, strict=True)))

    @classmethod
    def of_all(cls, some: list[Spent]) -> Spent:
        """Their sum."""
        return cls(*map(sum, zip(*some, strict=True)))


@dataclass
class Load:
    """Clients that stream one chat after the other."""

    client: Client
    outcomes: list[Outcome] = field(default_factory=list)

    async def one(self, number: int) -> None:
        traffic = ChatTraffic(0, number, num_systems=5, system_words=60)
        while True:
            outcome = Outcome()
            self.outcomes.append(outcome)
            await self.client.chat(traffic.next_messages(), TOKENS, outcome=outcome)
            if outcome.fault:
                raise RuntimeError(outcome.fault)
            traffic.answered(outcome.text)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.one(number)) for number in range(CLIENTS)]
            yield
            for task in tasks:
                task.cancel()


async def follow(http: httpx.AsyncClient, opened: bool) -> None:
    """As a browser with the live page: its events, its prefixes, and with a replica ``opened`` its blocks."""

    async def again(every_s: float, path: str, **params: str) -> None:
        while True:
            (await http.get(path, params=params)).raise_for_status()
            await asyncio.sleep(every_s)

    model, replica = await what_there_is(http)
    async with asyncio.TaskGroup() as group:
        group.create_task(again(2.0, "/dashboard/prefixes", model=model))
        if opened:
            wanted = {"model": model, "replica": replica, "by": "prefix"}
            group.create_task(again(1.0, "/dashboard/blocks", **wanted))
        while True:
            async with http.stream("GET", "/dashboard/events") as response:
                async for _ in response.aiter_raw():
                    pass


async def what_there_is(http: httpx.AsyncClient) -> tuple[str, str]:
    """The model and one of its engine replicas."""
    text = (await http.get("/metrics")).raise_for_status().text
    line = next(line for line in text.splitlines() if line.startswith("quire_kv_occupancy{"))
    labels = dict(part.split("=") for part in line.partition("{")[2].partition("}")[0].split(","))
    return labels["model_name"].strip('"'), labels["replica"].strip('"')


async def nobody(http: httpx.AsyncClient) -> None:
    await asyncio.Event().wait()


async def three_pages(http: httpx.AsyncClient) -> None:
    await asyncio.gather(*(follow(http, opened=number == 0) for number in range(3)))


async def scraper(http: httpx.AsyncClient) -> None:
    while True:
        (await http.get("/metrics")).raise_for_status()
        await asyncio.sleep(1.0)


LOOKING: dict[str, Callable[[httpx.AsyncClient], Awaitable[None]]] = {
    "nobody looks": nobody,
    "three live pages": three_pages,
    "/metrics once a second": scraper,
}


def spent(server: psutil.Process, ingress: psutil.Process, outcomes: list[Outcome]) -> Spent:
    """So far."""
    processes = [server, *server.children(recursive=True)]
    used = [sum(process.cpu_times()[:2]) for process in processes if process.is_running()]
    events = sum(len(outcome.events) for outcome in outcomes)
    done = sum(outcome.done for outcome in outcomes)
    return Spent(sum(ingress.cpu_times()[:2]), sum(used), events, done, time.monotonic())


async def measure(server: psutil.Process, url: str, rounds: int, seconds: float) -> dict[str, list[Spent]]:
    """Each round's, by turns, in the order and against it."""
    (pid,) = replica_pids(server, "ingress")
    ingress = psutil.Process(pid)
    found: dict[str, list[Spent]] = {name: [] for name in LOOKING}
    async with Client(url) as client, httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        load = Load(client)
        async with load.running():
            for number in range(rounds):
                for name in [*LOOKING][:: -1 if number % 2 else 1]:
                    looking = asyncio.ensure_future(LOOKING[name](http))
                    await asyncio.wait((looking,), timeout=SETTLE_S)
                    before = spent(server, ingress, load.outcomes)
                    await asyncio.wait((looking,), timeout=seconds)
                    found[name].append(spent(server, ingress, load.outcomes).since(before))
                    if looking.done():
                        looking.result()
                    looking.cancel()
                    await asyncio.wait((looking,))
    return found


def processor_time(call: Callable[[], object], times: int) -> float:
    """Seconds of one call."""
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


class Nowhere(SpanExporter):
    """A collector that takes everything."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def of_request(sample: float | None) -> float:
    """Seconds for the end of a request: its figures, its line, and its trace if it is sampled."""
    now = time.monotonic()
    ran = AttemptNotes(
        now, "engine", "prefix", placed=now, first_token=now, ended=now, queue_s=0.0, prefill_s=0.0
    )
    tracer = None if sample is None else RequestTracer(Nowhere(), sample)
    record = RequestRecord(Caller("", "r"), "chat", True, tracer=tracer, journals=[Journal(now, [ran])])
    seconds = processor_time(record.end, 5_000)
    if tracer is not None:
        tracer.close()
    return seconds


def of_prefixes() -> float:
    """Seconds to find those of as many requests as are remembered, with 16 system prompts of 20 blocks."""
    flow = PrefixFlow()
    for number in range(MAX_PLACEMENTS):
        flow.add([number % 16 + 1] * 20 + [number + 100] * 10, "engine", "prefix", [5] * 480, 320)
    return processor_time(lambda: flow.groups(str), 20)


def counting() -> dict[str, float]:
    """Seconds of processor time for an event, for a request, and in each second for an engine."""
    configure("INFO", "json", "cost")
    (handler,) = logging.getLogger("app").handlers
    with open(os.devnull, "w") as nowhere:
        handler.setStream(nowhere)  # type: ignore[attr-defined]
        record = RequestRecord(Caller("", "r"), "chat", True)
        tokens = iter(range(1, 10**9))
        event = processor_time(lambda: record.token(0, next(tokens), None), 100_000)
        request, sampled, traced = (of_request(sample) for sample in (None, 0.01, 1.0))
    export = RayExport(Source.ENGINE)

    def figures() -> None:
        unpack(pack(engine_samples(STATS, SCALING, 0)))

    engine = processor_time(figures, 300)
    engine += processor_time(lambda: export.update("m", engine_samples(STATS, SCALING, 0)), 300) / EVERY_S
    traces = {"sampled": sampled - request, "traced": traced - request}
    return {"event": event, "request": request, "engine": engine, "prefixes": of_prefixes(), **traces}


COUNTED = {
    "event": "counting an event",
    "request": "counting a request, and its line in the log",
    "engine": "an engine's figures, each second",
    "sampled": "a request, with tracing at the default sample of 1%: more",
    "traced": "a request that is traced: more",
    "prefixes": f"finding the prefixes of {MAX_PLACEMENTS:,} requests",
}


def looking(rounds: int, seconds: float) -> tuple[list[Figure], Spent]:
    """What viewers cost, and what was spent while nobody looked."""
    with application(OPTIONS) as (server, url, _):
        found = asyncio.run(measure(server, url, rounds, seconds))
    alone = Spent.of_all(found["nobody looks"])
    per_s = alone.events / alone.seconds
    figures = [
        Figure("nobody looks: events of streams", per_s, "/s"),
        Figure("nobody looks: processor time of an event", 1e3 * alone.everything / alone.events, " ms"),
        Figure("nobody looks: of the ingress", 1e3 * alone.ingress / alone.events, " ms"),
    ]
    for name, there in found.items():
        if name != "nobody looks":
            # Of each round, as other work on the machine makes all of them dearer at once.
            more = [
                100 * (one.ingress / one.events - without.ingress / without.events) * per_s / CORES
                for one, without in zip(there, found["nobody looks"], strict=True)
            ]
            figures.append(most(f"{name}: of the machine's processor time", mean(more), BAR, "%"))
            figures.append(Figure(f"{name}: standard error", stdev(more) / len(more) ** 0.5, "%"))
    return figures, alone


def main() -> None:
    """Print the figures, and with ``--check`` exit 1 if one is above its bar."""
    parts = {"looking": looking, "counting": counting}
    options = {
        "--only": (parts, "parts"),
        "--rounds": (16, "of each"),
        "--seconds": (2.5, "of each stretch"),
    }
    arguments = parse("tests.observation_cost", __doc__, options)
    figures: list[Figure] = []
    alone = None
    if "looking" in arguments.only:
        figures, alone = looking(arguments.rounds, arguments.seconds)
    if "counting" in arguments.only:
        costs = counting()
        figures += [Figure(name, 1e6 * costs[part], " µs") for part, name in COUNTED.items()]
        if alone is not None:
            often = {"event": alone.events, "request": alone.requests, "engine": 2.0 * alone.seconds}
            share = sum(costs[part] * times for part, times in often.items()) / alone.everything
            figures.append(most("all that is counted: of the server's processor time", 100 * share, BAR, "%"))
    finish("tests.observation_cost", figures, arguments, "what it costs to be looked at")


if __name__ == "__main__":
    main()
