"""What arrives when: traces, and synthetic loads for what traces do not show."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from loadtests.experiments.autoscaling.constants import LONGEST_TRACE_S, MOST_REQUESTS
from loadtests.traces import TraceError, read_records

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Workload:
    """Requests in the order of their arrival: seconds, and lengths in tokens."""

    name: str
    arrival: Floats
    prompt: Floats
    output: Floats
    seconds: float
    hit_share: float = 0.0  # of each prompt, found in the prefix cache
    overload_at: float = math.inf  # from then on more comes than the first replicas can serve


def poisson(
    name: str,
    rate: npt.ArrayLike,
    seconds: float,
    prompt: tuple[float, float],
    output: tuple[float, float],
    seed: int,
) -> Workload:
    """Poisson arrivals at ``rate`` requests per second, one rate for each equal part of the time.

    Lengths are log-normal: mean, and standard deviation of the logarithm.
    """
    draw = np.random.default_rng(seed)
    rates = np.atleast_1d(np.asarray(rate, float))
    part = seconds / len(rates)
    counts = draw.poisson(rates * part)
    starts = np.repeat(np.arange(len(rates)) * part, counts)
    arrival = np.sort(starts + draw.random(len(starts)) * part)

    def lengths(mean: float, spread: float) -> Floats:
        drawn = draw.lognormal(math.log(mean) - spread**2 / 2, spread, len(arrival))
        return np.maximum(np.rint(drawn), 1.0)

    return Workload(name, arrival, lengths(*prompt), lengths(*output), seconds)


CHAT = ((1_000.0, 0.8), (250.0, 0.6))

_PARTS = np.linspace(0.0, 1.0, 60)  # of half an hour
_ARCH = np.sin(np.pi * _PARTS)
_HOURS = np.linspace(0.0, 1.0, 240)
_DAY = 0.1 + 0.9 * np.sin(np.pi * _HOURS) ** 2 * (1.0 - 0.25 * np.exp(-(((_HOURS - 0.5) / 0.06) ** 2)))

# Seed to workload.
# A day in two hours: from a tenth of the peak up and back, with a dent at noon.
DAY = partial(poisson, "day", 120.0 * _DAY, 7_200.0, *CHAT)
# Three times the rate in the middle third.
STEP_UP = partial(poisson, "step x3", [20.0, 60.0, 20.0], 1_800.0, *CHAT)
# Six ramps from a tenth of the peak, each ending at once.
SAW_TOOTH = partial(poisson, "saw-tooth", 80.0 * np.tile(np.linspace(0.1, 1.0, 60), 6), 3_600.0, *CHAT)
# Next to nothing, then ten minutes of load, then next to nothing.
BURST = partial(poisson, "idle, burst", [0.05, 60.0, 0.05], 1_800.0, *CHAT)
# Short prompts, long answers: KV-bound. The rate doubles and falls back, as it does for the next two.
LONG_DECODE = partial(poisson, "long decode", 10.0 * (0.6 + 0.6 * _ARCH), 1_800.0, (600.0, 0.5), (2_500.0, 0.5))
# Prefill-bound.
LONG_PROMPTS = partial(
    poisson, "long prompts", 6.0 * (0.5 + 0.9 * _ARCH), 1_800.0, (12_000.0, 0.5), (100.0, 0.5)
)
# Short prompts and answers: sequence slots run out first.
SHORT_CHAT = partial(poisson, "short chat", 60.0 * (0.5 + 0.9 * _ARCH), 1_800.0, (50.0, 0.5), (500.0, 0.5))

_CALM_S, _RUSH_S = 60.0, 10.0


def constant(rate: float, seconds: float, seed: int) -> Workload:
    return poisson("constant", rate, seconds, *CHAT, seed)


def overload(rate: float, seed: int) -> Workload:
    """Chat at a constant rate, then at ten times that."""
    parts = [*[rate] * round(_CALM_S / _RUSH_S), 10.0 * rate]
    made = poisson("prompts x10", parts, _CALM_S + _RUSH_S, *CHAT, seed)
    # It may begin at any moment between two samples of the reports.
    shift = float(np.random.default_rng(seed).random())
    seconds = made.seconds + shift
    return replace(made, arrival=made.arrival + shift, seconds=seconds, overload_at=_CALM_S + shift)


JITTER_S = 10.0
"""Copies of a trace's request come within so many seconds after it."""


def trace(path: Path, times: int, seed: int) -> Workload:
    """A recorded load (Azure's CSV), each request ``times`` times.

    Nothing is shared between prompts.

    Raises:
        ConfigError: no file, with a wrong line (which it names), or too much for one run.
    """
    most = MOST_REQUESTS // times
    try:
        records = read_records(path, most + 1)
    except TraceError as error:
        raise ConfigError(str(error)) from error
    if len(records) > most:
        raise ConfigError(
            f"{path}: more than {most} requests, {times} times each, exceed the {MOST_REQUESTS} of one run; "
            "a smaller --times or a shorter file does not"
        )
    length = records[-1].arrival - records[0].arrival
    if length > LONGEST_TRACE_S:
        raise ConfigError(
            f"{path}: {length:.0f} s from the first request to the last, but at most {LONGEST_TRACE_S:.0f} s "
            "can be simulated"
        )
    rows = np.array([(one.arrival, one.prompt, one.output) for one in records], float)
    rows[:, 0] -= rows[0, 0]
    many = np.repeat(rows, times, axis=0)
    if times > 1:
        many[:, 0] += np.random.default_rng(seed).random(len(many)) * JITTER_S
    many = many[np.argsort(many[:, 0], kind="stable")]
    name = f"{path.stem}{f' x {times}' if times > 1 else ''}"
    arrival, prompt, output = many[:, 0].copy(), np.maximum(many[:, 1], 1.0), np.maximum(many[:, 2], 1.0)
    return Workload(name, arrival, prompt, output, math.ceil(arrival[-1]))
