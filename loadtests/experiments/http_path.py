"""One engine behind the whole HTTP path against the same engine offline.

The application runs as users run it (``python -m app``, one engine replica, two threads); 32 streams of token
ids go through HAProxy, ingress and channel. Then the same prompts go through ``engine.LLM`` in this process.
Processor time is read from the operating system for the engine's process and for everything else that the
application started; the load generator is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from functools import partial

import psutil
from tqdm import tqdm

from app.launch.model_store import resolve
from engine import LLM
from loadtests.client import Client
from loadtests.cluster import application
from loadtests.experiments.rivals import Prompts, Workload, run_ours, tokens_per_second
from loadtests.report import Figure, finish, most, print_figures
from loadtests.stats import median, ratio

STREAMS = Workload("http", 32, 128, 0, 128, 0.8)
STREAM_LIMIT_S = 600.0


def processor_time(application: psutil.Process) -> tuple[float, float]:
    """Seconds of processor time of the engine replica, and of all else that the application started."""
    engine = rest = 0.0
    for process in [application, *application.children(recursive=True)]:
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "ServeReplica" in title and "engine" in title.lower():
            engine += times.user + times.system
        else:
            rest += times.user + times.system
    return engine, rest


def run_http(url: str, model: str, prompts: Prompts, output: int) -> int:
    """All prompts at once, each in a stream of its own; the number of tokens that usage reports.

    Raises:
        RuntimeError: a stream was not whole.
    """

    async def everything() -> int:
        async with Client(url, model, STREAM_LIMIT_S) as client:
            outcomes = await asyncio.gather(*(client.complete(prompt, output) for prompt in prompts))
        fault = next((outcome.fault for outcome in outcomes if outcome.fault), "")
        if fault:
            raise RuntimeError(fault)
        return sum(outcome.tokens for outcome in outcomes)

    return asyncio.run(everything())


def compare_http(arguments: argparse.Namespace) -> None:
    """Run both in turns and report."""
    name = f"{arguments.model}-{secrets.token_hex(4)}"  # of no other server
    options = {
        "model": arguments.model,
        "served_model_name": name,
        "dtype": arguments.dtype,
        "engine_replicas": 1,
        "threads": arguments.threads,
    }
    served: list[float] = []
    offline: list[float] = []
    shares: list[float] = []
    client_seconds: list[float] = []
    llm = LLM(str(resolve(arguments.model)), dtype=arguments.dtype, num_threads=arguments.threads)
    with application([f"{key}={value}" for key, value in options.items()]) as (process, url):
        run_ours(llm, [[5, 6, 7, 8]], 4)
        run_http(url, name, [[5, 6, 7, 8]], 4)
        for number in tqdm(range(arguments.rounds), unit="round"):
            prompts = STREAMS.prompts(arguments.seed + number)
            before, own_before = processor_time(process), time.process_time()
            served.append(tokens_per_second(partial(run_http, url, name, prompts, STREAMS.output)))
            client_seconds.append(time.process_time() - own_before)
            engine, rest = (b - a for a, b in zip(before, processor_time(process), strict=True))
            shares.append(rest / engine)
            offline.append(tokens_per_second(partial(run_ours, llm, prompts, STREAMS.output)))
    figures = [
        Figure("over HTTP", median(served), " tokens/s"),
        Figure("offline", median(offline), " tokens/s"),
        Figure("HTTP / offline", ratio(served, offline), "x", STREAMS.bar),
        most("processor time of everything but the engine / the engine's", median(shares), 0.2),
        Figure("processor time of the load generator", median(client_seconds), " s a round"),
    ]
    print_figures(f"{STREAMS.requests} streams, {STREAMS.prompt} in, {STREAMS.output} out", figures)
    rounds = {"http": served, "offline": offline, "shares": shares}
    finish("loadtests.throughput --http", figures, arguments, rounds=rounds, threads=arguments.threads)
