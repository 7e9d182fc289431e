"""What a live run leaves behind, also as a file of JSON lines: its fleet and each request's arrival."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtests.client import OK
from loadtests.experiments.routing.fleet import Record
from loadtests.stats import median


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """One run's fleet, as far as the same arrivals can be served by a simulated one.

    ``system_tokens`` is the number of leading tokens that all prompts of a group share; the rest of a prompt is
    its own. ``prefill_rate`` is of one replica, in tokens/s; a decode step takes ``step_base + step_per_row *
    rows + step_per_kv_token * KV tokens`` seconds. Figures are of requests with ``warm_up <= t < until``.
    """

    arm: str
    seed: int
    replicas: int
    num_blocks: int  # of each replica
    block_size: int
    max_num_seqs: int
    token_budget: int
    system_tokens: int
    prefill_rate: float
    step_base: float
    step_per_row: float
    step_per_kv_token: float
    warm_up: float  # seconds
    until: float  # seconds

    def counted(self, records: Iterable[Record]) -> list[Record]:
        """Of simulated requests, those that arrived in the window that figures are of."""
        return [one for one in records if self.warm_up <= one.arrival < self.until]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``t`` and ``ended`` are seconds since the run began, ``ttft`` seconds since ``t``.

    ``replica`` is empty where no engine has begun the request; ``status`` 0 where no HTTP answer came.
    ``ttft`` and ``ended`` are missing where there was no token, or no whole answer.
    """

    t: float
    prompt_group: int
    prompt_tokens: int
    output_tokens: int
    replica: str
    cached: int
    ttft: float | None
    status: int
    ended: float | None

    @property
    def whole(self) -> bool:
        """Whether all of it arrived."""
        return self.status == OK and self.ttft is not None and self.ended is not None


@dataclass(frozen=True, slots=True)
class Recording:
    """A live run: its fleet, and its requests by time."""

    fleet: LiveFleet
    arrivals: tuple[Arrival, ...]

    @property
    def counted(self) -> list[Arrival]:
        """Those that arrived in the window that figures are of."""
        fleet = self.fleet
        return [one for one in self.arrivals if fleet.warm_up <= one.t < fleet.until]

    @property
    def failed(self) -> int:
        """Requests, those of the warm-up too, whose status was not 200 or that did not end."""
        return sum(not one.whole for one in self.arrivals)

    @property
    def throughput(self) -> float:
        """Output tokens per second, of the requests that ended within the window."""
        start, until = self.fleet.warm_up, self.fleet.until
        ended = [one for one in self.arrivals if one.ended is not None and start <= one.ended < until]
        return sum(one.output_tokens for one in ended) / (until - start)

    @property
    def cached_share(self) -> float:
        """Of the prompt tokens of the counted requests, what engines found cached."""
        return cached_share(self.counted)

    @property
    def ttft(self) -> float:
        """Median seconds to the first token of the counted requests; one without a token waits for ever."""
        return median(ttfts([self]))

    @property
    def balance(self) -> float:
        """Requests of the busiest replica over the mean."""
        counts = Counter(one.replica for one in self.counted if one.replica)
        return max(counts.values()) * self.fleet.replicas / counts.total() if counts else math.nan


def cached_share(requests: Sequence[Arrival | Record]) -> float:
    """Of these requests' prompt tokens, what was found cached."""
    prompt = sum(one.prompt_tokens if isinstance(one, Arrival) else one.prompt for one in requests)
    return sum(one.cached for one in requests) / prompt if prompt else 0.0


def ttfts(recordings: Iterable[Recording]) -> list[float]:
    """Seconds to the first token of the counted requests of all; infinite where none came."""
    counted = [arrival for one in recordings for arrival in one.counted]
    return [math.inf if arrival.ttft is None else arrival.ttft for arrival in counted]


def write(recording: Recording, path: Path) -> None:
    """One line for the fleet, under the key ``fleet``, and one for each request."""
    lines: Sequence[object] = [{"fleet": asdict(recording.fleet)}, *map(asdict, recording.arrivals)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> Recording:
    """A recording that ``write`` has left.

    Raises:
        ValueError: the file is not one; the message says which line is wrong.
    """
    lines = path.read_text().splitlines() or ["{}"]
    arrivals: list[Arrival] = []
    line = 1
    try:
        fleet = LiveFleet(**json.loads(lines[0])["fleet"])
        for text in lines[1:]:
            line += 1
            arrivals.append(Arrival(**json.loads(text)))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} line {line} is not of a recorded live run: {error}") from None
    return Recording(fleet, tuple(sorted(arrivals, key=lambda one: one.t)))
