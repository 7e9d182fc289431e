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
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from app.api.chat import PromptTokenizer
from app.launch.model_store import resolve
from loadtests.experiments.routing_live.arms import COMPARED, LiveArm, missing
from loadtests.experiments.routing_live.judge import HEADER, figures, rows
from loadtests.experiments.routing_live.oracle import replay
from loadtests.experiments.routing_live.recording import Recording, cached_share, write
from loadtests.experiments.routing_live.stage import HELD, MAX_NUM_SEQS, Plan, Stage
from loadtests.experiments.routing_live.traffic import Shape, Traffic
from loadtests.report import add_arguments, finish, print_table
from loadtests.streams import MODEL

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
    made.add_argument(
        "--rate", type=above_zero, metavar="R", help="requests per second, instead of a calibration"
    )
    made.add_argument(
        "--load", type=above_zero, default=LOAD, help=f"share of the calibrated capacity ({LOAD})"
    )
    made.add_argument(
        "--requests",
        type=int,
        default=plan.counted,
        metavar="N",
        help=f"of each run that count, on average ({plan.counted})",
    )
    made.add_argument(
        "--zipf", type=float, default=0.0, metavar="A", help="popularity's exponent (0: all equal)"
    )
    made.add_argument("--record", type=Path, metavar="DIR", help="keep the recorded arrivals of each run here")
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
    runs: dict[LiveArm, list[Recording]] = {arm: [] for arm in arms}
    oracle: list[float] = []
    with tqdm(unit="request", desc="live", disable=None) as bar:
        stage = Stage(traffic, arguments.replicas, bar.set_description, bar.update, arguments.dtype)
        try:
            stage.start()
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray's handler would skip the clean-up
            rate = arguments.rate
            if rate is None:
                capacity = stage.capacity()
                rate = arguments.load * capacity
                bar.write(f"calibration: {capacity:.2f} requests/s with everything cached; rate {rate:.2f}")
            for seed in range(1, arguments.seeds + 1):
                for arm in arms:
                    one = stage.run(arm, seed, rate, plan)
                    runs[arm].append(one)
                    bar.write(said(one, time.monotonic() - began))
                    sys.stdout.flush()
                    if arguments.record is not None:
                        arguments.record.mkdir(parents=True, exist_ok=True)
                        write(one, arguments.record / f"{arm.value}-{seed}.jsonl")
        finally:
            stage.stop()
    print(
        f"\n{arguments.replicas} replicas, {traffic.shape.groups} system prompts of {traffic.shape.system} "
        "tokens; "
        f"pools of {stage.blocks} blocks: {HELD:.0%} of these and {MAX_NUM_SEQS} running requests' own; "
        f"{rate:.2f} requests/s for {plan.counted / rate:.0f} s"
    )
    for one in runs.get(LiveArm.PREFIX, []):
        oracle.append(cached_share(one.fleet.counted(replay(one))))
        print(
            f"seed {one.fleet.seed}: the oracle finds {oracle[-1]:.1%} of these arrivals' prompts cached, "
            f"prefix found {one.cached_share:.1%}"
        )
    table = rows(runs) + [[arm.value, "-", why, *["-"] * (len(HEADER) - 3)] for arm, why in absent.items()]
    print_table(HEADER, table)
    print(f"{time.monotonic() - began:.0f} s")
    finish(
        COMMAND,
        figures(runs, oracle),
        arguments,
        rate=rate,
        oracle=oracle,
        blocks=stage.blocks,
        fleets=[asdict(one.fleet) for recordings in runs.values() for one in recordings],
        absent={arm.value: why for arm, why in absent.items()},
    )


def said(one: Recording, now: float) -> str:
    """A line about a run that has ended."""
    return (
        f"{now:6.1f} s  {one.fleet.arm}, seed {one.fleet.seed}: {one.throughput:.1f} tokens/s, "
        f"cached {100 * one.cached_share:.1f} %, TTFT p50 {one.ttft:.2f} s, {one.failed} of "
        f"{len(one.arrivals)} failed"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
