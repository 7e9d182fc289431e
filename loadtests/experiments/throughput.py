"""Our engine beside its rivals, or beside itself behind HTTP, in one run.

``python -m loadtests.throughput``: each round runs every workload on every side with the same fresh random
prompts, and the medians over the rounds are compared (``docs/benchmarks.md``): our bfloat16 with the rivals',
our int4 (or int8: ``--coded``) with vLLM's bfloat16 and llama.cpp's Q4_1. No speculation: answers to random
prompts repeat themselves. ``--http``: 32 streams of token ids through HAProxy, ingress and channel of
``python -m app``, and the same offline; with ``--peer vllm`` against vLLM's server (``peers/server.py``).
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
from engine.config import WeightsOption
from loadtests.client import MODEL, complete_all
from loadtests.cluster import application
from loadtests.experiments.peers import server
from loadtests.experiments.peers.process import LLAMA_CPP, VLLM, peer_processes
from loadtests.experiments.rivals import (
    OURS,
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
WARM_UP = Workload("warm-up", 1, 16, 0, 8, 0.0)
STREAMS = Workload("http", 32, 128, 0, 128, 0.95)
PEER_BARS = {  # least ratios, by workload
    (OURS, VLLM): {"a": 1.2, "b": 1.6, "c": 1.45, "d": 1.15},
    ("ours in int8", VLLM): {"a": 1.7, "c": 2.8},
    ("ours in int4", LLAMA_CPP): {"c": 1.6},
}
Rates = dict[str, dict[str, list[float]]]
"""Tokens a second of each round, by workload and side."""


def compare(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    workloads = [w for w in WORKLOADS if w.key in arguments.workloads]
    coded = f"ours in {arguments.coded}"
    llm, small = make_engine("model"), make_engine(arguments.coded)
    peer = Transformers(str(resolve(MODEL)))
    rival = f"transformers {peer.dtype}"
    sides: dict[str, Side] = {
        OURS: lambda workload, prompts: run_ours(llm, prompts, workload.output),
        coded: lambda workload, prompts: run_ours(small, prompts, workload.output),
        rival: peer,
    }
    with peer_processes(arguments.peers, THREADS, Path(tempfile.mkdtemp(prefix="quire-peers-"))) as peers:
        sides.update(peers)
        for side in sides.values():
            side(WARM_UP, WARM_UP.prompts(-1))
        rates = by_turns(sides, workloads, arguments.rounds)
    pairs = [(coded, OURS), (OURS, rival), (OURS, VLLM), (coded, VLLM), (coded, LLAMA_CPP)]
    figures: list[Figure] = []
    for workload in workloads:
        measured = {name: rate for name, rate in rates[workload.key].items() if rate}
        for name, rate in measured.items():
            figures.append(Figure(f"{workload.title} {name}", median(rate), " tokens/s"))
        for one, other in pairs:
            if other in measured:
                bar = workload.bar if other == rival else PEER_BARS.get((one, other), {}).get(workload.key)
                over = ratio(measured[one], measured[other])
                figures.append(Figure(f"{workload.title} {one} / {other}", over, "x", bar))
    title = f"{DTYPE}, output, median of {arguments.rounds}"
    finish("loadtests.throughput", figures, arguments, title, tokens_per_second=rates, threads=THREADS)


def make_engine(weights: WeightsOption) -> LLM:
    """Our engine, with its KV pool mapped, as vLLM's is when it is ready and an idle server's soon."""
    folder = resolve(MODEL)
    llm = LLM(folder, dtype=DTYPE, num_threads=THREADS, weights=weights, speculation=0, kv_memory=1 << 30)
    while llm.engine.prefault():
        pass
    return llm


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
    llm = make_engine("model")
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
        "--coded": (("int4", "int8"), "the other format of our weights"),
        "--workloads": ("abcd", "which to run, for example 'ac'"),
    }
    arguments = parse("throughput", __doc__, options)
    if arguments.peer != "none":
        server.compare(arguments)
    else:
        (compare_http if arguments.http else compare)(arguments)
