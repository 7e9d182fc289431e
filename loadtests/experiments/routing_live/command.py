"""``python -m loadtests.routing --live``: how well requests are routed on real Ray Serve, on this machine.

Replicas of the bundled model, one thread each, with pools that hold 60 % of 8 system prompts of 400 tokens
beside their running requests. Each run starts cold: every process of the application anew, then each system
prompt once, then Poisson arrivals at one rate for all, sent whether or not earlier ones were answered. The rate
is fixed by a calibration before the first run: a share of what the fleet serves when everything is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from app.api.prompt_tokenizer import PromptTokenizer
from app.launch.model_store import resolve
from loadtests.client import MODEL
from loadtests.experiments.fleet import started
from loadtests.experiments.routing_live.judge import (
    COMPARED,
    HEADER,
    cached_share,
    counted,
    figures,
    rows,
    ttfts,
)
from loadtests.experiments.routing_live.stage import HELD, MAX_NUM_SEQS, LiveArm, Plan, Run, Stage, missing
from loadtests.experiments.routing_live.traffic import Shape, Traffic
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.stats import median

COMMAND = "loadtests.routing --live"
LOAD = 0.65
"""Of the calibrated capacity: above what is served without regard to prefixes, below what is with it."""


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, but is {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    plan = Plan()
    made = argparse.ArgumentParser(
        prog=f"python -m {COMMAND}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each arm (3)")
    made.add_argument(
        "--arms", nargs="+", type=LiveArm, choices=list(LiveArm), default=list(COMPARED), metavar="ROUTING",
        help=f"of {', '.join(LiveArm)} (default: {' '.join(COMPARED)})",
    )  # fmt: skip
    made.add_argument("--dtype", default="auto", help="of the engines: float32 where bf16 has instructions")
    made.add_argument("--replicas", type=int, default=2, choices=(2, 3, 4), help="engine replicas (2)")
    made.add_argument("--rate", type=above_zero, metavar="R", help="requests per second, instead of --load")
    made.add_argument(
        "--load", type=above_zero, default=LOAD, help=f"share of the calibrated capacity ({LOAD})"
    )
    made.add_argument(
        "--requests", type=int, default=plan.counted, metavar="N",
        help=f"of each run that count, on average ({plan.counted})",
    )  # fmt: skip
    made.add_argument(
        "--zipf", type=float, default=0.0, metavar="A", help="popularity's exponent (0: all equal)"
    )
    add_arguments(made)
    return made


def main(argv: Sequence[str]) -> None:
    """Run the arms by turns, print their table, hold the figures to their bars."""
    arguments = parser().parse_args(argv)
    if min(arguments.seeds, arguments.requests) < 1:
        parser().error("--seeds and --requests must be at least 1")
    began = time.monotonic()
    absent = {arm: why for arm in arguments.arms if (why := missing(arm))}
    arms = [arm for arm in dict.fromkeys(arguments.arms) if arm not in absent]
    traffic = asyncio.run(Traffic.make(Shape(zipf=arguments.zipf), PromptTokenizer(resolve(MODEL))))
    plan = Plan(counted=arguments.requests)
    runs: dict[LiveArm, list[Run]] = {arm: [] for arm in arms}
    with tqdm(unit="request", desc="live", disable=None) as bar, started() as cluster:
        stage = Stage(cluster, traffic, arguments.replicas, bar.set_description, bar.update, arguments.dtype)
        capacity = stage.capacity()
        rate = arguments.rate or arguments.load * capacity
        load = f"{rate:.2f} requests/s, {rate / capacity:.0%} of what the fleet serves when all is cached"
        bar.write(load)
        for seed in range(1, arguments.seeds + 1):
            for arm in arms:
                one = stage.run(arm, seed, rate, plan)
                runs[arm].append(one)
                bar.write(said(one, time.monotonic() - began))
                sys.stdout.flush()
    print(
        f"\n{arguments.replicas} replicas, {traffic.shape.groups} system prompts of {traffic.shape.system} "
        f"tokens; pools of {stage.blocks} blocks: {HELD:.0%} of these and {MAX_NUM_SEQS} running ones' own\n"
        f"load: {load}, for {plan.counted / rate:.0f} s"
    )
    table = rows(runs) + [[arm.value, "-", why, *["-"] * (len(HEADER) - 3)] for arm, why in absent.items()]
    print_table(HEADER, table)
    print(f"{time.monotonic() - began:.0f} s")
    finish(
        COMMAND,
        [
            Figure("load", rate, " requests/s"),
            Figure("load, of what the fleet serves when all is cached", rate / capacity),
            *figures(runs, traffic.shape.system),
        ],
        arguments,
        blocks=stage.blocks,
        table=table,
    )


def said(run: Run, now: float) -> str:
    """A line about a run that has ended."""
    return (
        f"{now:6.1f} s  {run.arm}, seed {run.seed}: {run.throughput:.1f} tokens/s, cached "
        f"{100 * cached_share(counted([run])):.1f} %, TTFT p50 {median(ttfts([run])):.2f} s, "
        f"{run.refused + run.broken} of {len(run.replies)} failed"
    )
