"""Our engine beside its rivals, or beside itself behind HTTP, in one run.

``python -m loadtests.throughput``: each round runs every workload on every side with the same fresh random
prompts, and the medians over the rounds are compared (``docs/benchmarks.md``): our bfloat16 with the rivals',
our int4 with llama.cpp's Q4_1. Without speculation: answers to random prompts repeat themselves. ``--http``:
32 streams of token ids through HAProxy, ingress and channel of ``python -m app``, and the same offline; with
``--peer vllm`` against vLLM's server (``peers/server.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import tempfile
from functools import partial
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from app.launch.model_store import resolve
from engine import LLM
from loadtests.client import MODEL, complete_all
from loadtests.cluster import application
from loadtests.experiments.peers import server
from loadtests.experiments.peers.process import LLAMA_CPP, peer_processes
from loadtests.experiments.rivals import (
    OURS,
    OURS_INT4,
    TRANSFORMERS,
    WORKLOADS,
    Prompts,
    Side,
    Transformers,
    Workload,
    run_ours,
    tokens_per_second,
)
from loadtests.report import Figure, finish, most, parse
from loadtests.stats import median, ratio

THREADS = 2
DTYPE = "bfloat16"  # of our engine
KV_BYTES = 2 << 30  # as peers/vllm.sh has it: the first round or two find pages that the system has yet to map
WARM_UP = Workload("warm-up", 1, 16, 0, 8, 0.0)
STREAMS = Workload("http", 32, 128, 0, 128, 0.95)
Rates = dict[str, dict[str, list[float]]]
"""Tokens a second of each round, by workload and side."""


def compare(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    folder = str(resolve(MODEL))
    workloads = [w for w in WORKLOADS if w.key in arguments.workloads]
    llm, small = (
        LLM(folder, dtype=DTYPE, num_threads=THREADS, weights=weights, speculation=0, kv_memory=KV_BYTES)
        for weights in ("model", "int4")
    )
    peer = Transformers(folder)
    sides: dict[str, Side] = {
        OURS: lambda workload, prompts: run_ours(llm, prompts, workload.output),
        OURS_INT4: lambda workload, prompts: run_ours(small, prompts, workload.output),
        TRANSFORMERS: peer,
    }
    logs = Path(tempfile.mkdtemp(prefix="quire-peers-"))
    with peer_processes(arguments.peers, THREADS, logs) as peers:
        sides.update(peers)
        for side in sides.values():
            side(WARM_UP, WARM_UP.prompts(-1))
        rates = by_turns(sides, workloads, arguments.rounds)
    figures: list[Figure] = []
    for workload in workloads:
        ours = rates[workload.key][OURS]
        figures.append(Figure(f"{workload.title} {OURS}", median(ours), " tokens/s"))
        for name, theirs in rates[workload.key].items():
            if theirs and name != OURS:
                title, bar = name, None
                if name == TRANSFORMERS:
                    title, bar = f"{name} {peer.dtype}", workload.bar
                figures.append(Figure(f"{workload.title} {title}", median(theirs), " tokens/s"))
                if name == OURS_INT4:
                    figures.append(Figure(f"{workload.title} {name} / {OURS}", ratio(theirs, ours), "x"))
                    continue
                of_like_weights = OURS_INT4 if name == LLAMA_CPP else OURS
                over = ratio(rates[workload.key][of_like_weights], theirs)
                figures.append(Figure(f"{workload.title} {of_like_weights} / {title}", over, "x", bar))
    title = f"{DTYPE}, output, median of {arguments.rounds}"
    finish("loadtests.throughput", figures, arguments, title, tokens_per_second=rates, threads=THREADS)


def by_turns(sides: dict[str, Side], workloads: list[Workload], rounds: int) -> Rates:
    """The same fresh prompts for all sides in each round."""
    rates: Rates = {w.key: {side: [] for side in sides} for w in workloads}
    turns = [(number, w, name) for number in range(rounds) for w in workloads for name in sides]
    for number, workload, name in tqdm(turns, unit="run"):
        if name != LLAMA_CPP or workload.requests == 1:
            run = partial(sides[name], workload, workload.prompts(number))
            rates[workload.key][name].append(tokens_per_second(run))
    return rates


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
    """All prompts at once, a stream each; the tokens that usage reports. ``RuntimeError``: one is not whole."""
    outcomes = asyncio.run(complete_all(url, prompts, output, limit_s=600.0, model=model))
    fault = next((outcome.fault for outcome in outcomes if outcome.fault), "")
    if fault:
        raise RuntimeError(fault)
    return sum(outcome.tokens for outcome in outcomes)


def compare_http(arguments: argparse.Namespace) -> None:
    name = f"{MODEL}-{secrets.token_hex(4)}"  # of no other server
    served, offline, shares, idle = (list[float]() for _ in range(4))
    llm = LLM(str(resolve(MODEL)), dtype=DTYPE, num_threads=THREADS, speculation=0)
    options = f"model={MODEL} served_model_name={name} dtype={DTYPE} threads={THREADS} speculation=0".split()
    with application([*options, "engine_replicas=1"]) as (process, url, _):
        run_ours(llm, [[5, 6, 7, 8]], 4)
        run_http(url, name, [[5, 6, 7, 8]], 4)
        for number in tqdm(range(arguments.rounds), unit="round"):
            prompts = STREAMS.prompts(number)
            before = processor_time(process)
            served.append(tokens_per_second(partial(run_http, url, name, prompts, STREAMS.output)))
            after = processor_time(process)
            engine, rest = (b - a for a, b in zip(before, after, strict=True))
            shares.append(rest / engine)
            offline.append(tokens_per_second(partial(run_ours, llm, prompts, STREAMS.output)))
            idle.append((processor_time(process)[1] - after[1]) * offline[-1] / served[-1] / engine)
    figures = [
        Figure("over HTTP", median(served), " tokens/s"),
        Figure("offline", median(offline), " tokens/s"),
        Figure("HTTP / offline", ratio(served, offline), "x", STREAMS.bar),
        most("processor time of everything but the engine / the engine's", median(shares), 0.12),
        Figure("what the same takes in that time when idle / the engine's", median(idle)),
    ]
    title = f"{STREAMS.requests} streams, {STREAMS.prompt} in, {STREAMS.output} out"
    finish("loadtests.throughput --http", figures, arguments, title, threads=THREADS)


def main() -> None:
    options = {
        "--http": (False, "one engine behind HTTP against itself offline, or the peer's server"),
        "--peer": (("none", "vllm"), "whose server to compare with over HTTP"),
        "--peers": (os.environ.get("QUIRE_PEERS", ""), "folder with the other engines' environments"),
        "--served": (list(server.WORKLOADS), "which workloads, with --peer: A to C, or a prompt's tokens"),
        "--deployments": (server.DEPLOYMENTS, "of our engine, with --peer"),
        "--rounds": (3, "of each workload on each side"),
        "--workloads": ("abcd", "which to run, for example 'ac'"),
    }
    arguments = parse("throughput", __doc__, options)
    if arguments.peer != "none":
        server.compare(arguments)
    else:
        (compare_http if arguments.http else compare)(arguments)
