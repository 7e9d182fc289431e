"""``python -m clients.neighbors``: what a client notices of others that misuse the server beside it.

One key sends what is well-formed, one request after the other; another key at the same time what is not: random
bodies that are malformed, and forms of output that take hours to compile. What the first one waits for then is
compared with what it waits for alone, by turns. Then: whether the time to the first token tells a key which
prompts another key has sent, and what it costs 32 streams to be held to a form.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from tqdm import tqdm

from loadtests.arrivals import closed_loop
from loadtests.client import MODEL, Client
from loadtests.cluster import application, seconds_until
from loadtests.report import Figure, finish, most
from loadtests.stats import median, ratio

KEYS = {name: f"qk_{secrets.token_hex(16)}" for name in ("alice", "mallory")}
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/score", "/tokenize", "/detokenize", "/admin/reset_prefix_cache", "/nothing",
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "input", "max_tokens", "temperature", "stream", "stop", "tools", "tool_choice", "n",
    "response_format", "logit_bias", "stream_options", "tokens", "model", "logprobs", "text", "guided_json",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**30, 1e308, "", "a", "\ud800", "<|im_end|>", [], [[]], {}, {"type": "x"},
    [None] * 50, ["a"] * 50, [{"role": "user"}], {"a": {"b": [1, {"c": "d"}]}}, "x" * 20_000, [-1, 2**40],
)  # fmt: skip
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}},
    },
    "required": ["name", "age", "tags"],
}
SCHEMAS: dict[str, tuple[dict[str, Any], float | None]] = {
    "a list of objects": ({"type": "array", "items": _PERSON, "minItems": 50}, 1.1),
    "a pattern of 2,000 characters": ({"type": "string", "pattern": "^[a-z ,.]{2000}$"}, None),
}
"""Each with the bar for the time between tokens; none for a long pattern, whose masks cost more to compute."""

AT_ONCE = 8
"""Malformed requests; each is followed by the next."""

LIMIT_S = 30.0
FORM_BAR_S = 2.0
TURNS = 10
PROMPT_TOKENS = 192
STREAMS, STREAM_TOKENS = 32, 64


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """A route, and a body that it must refuse, or at least survive."""
    fields = {name: draw.choice(VALUES) for name in draw.sample(FIELDS, draw.randint(1, 6))}
    fields["max_tokens"] = draw.choice((1, 2, -1, True))  # what happens to be valid is short
    body = json.dumps(fields).encode()
    match draw.randrange(6):
        case 0:
            body = body[: draw.randrange(len(body))]
        case 1:
            body = draw.randbytes(draw.randint(0, 200))
        case 2:
            body = b"[" * draw.randint(1, 50_000)
        case 3:
            place = draw.randrange(len(body))
            body = body[:place] + draw.choice((b"\xff", b"NaN", b"\0", b'"', b"}")) + body[place + 1 :]
    return draw.choice(ROUTES), body


def hostile(number: int) -> dict[str, Any]:
    """Fields of a request for an output whose form is costly; each is new to the server."""
    letters = "bcdefghijklmnopqrst"
    shared = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(50)} | {"a50": {}}
    node = {"type": "object", "properties": {f"p{number}": {"$ref": "#"}, "b": {"$ref": "#"}}}
    forms: tuple[Any, ...] = (
        {"allOf": [{"type": "string", "pattern": f".*[a-{c}].{{{50 + number}}}"} for c in letters]},
        {"type": "integer", "multipleOf": 999_983 + 2 * number},
        {"type": "object", "properties": {f"p{i}": {"enum": [i]} for i in range(4000 + number)}},
        {"$defs": shared, "$ref": "#/$defs/a0", "title": str(number)},
        {**node, "additionalProperties": False},
        {"enum": ["x" * 1_000_000, number]},
    )
    kind = number % (len(forms) + 2)
    if kind < len(forms):
        return {"guided_json": forms[kind]}
    if kind == len(forms):
        return {"guided_regex": f"((a{{0,1000}}){{0,1000}}){{0,{1000 + number}}}"}
    return {"guided_grammar": f'start: s\ns: s s s | "{number}" | ""'}


def send_malformed(url: str, key: str, seed: int, count: int) -> Counter[str]:
    """Statuses of ``count`` malformed requests; runs in a process of its own."""
    draw = random.Random(seed)

    async def all_of_them() -> Counter[str]:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, headers={"x-api-key": key}) as http:

            async def one(request: tuple[str, bytes]) -> str:
                route, body = request
                try:
                    answer = await http.post(route, content=body, headers={"content-type": "application/json"})
                except httpx.HTTPError as error:
                    return type(error).__name__
                return str(answer.status_code)

            return Counter(await closed_loop(AT_ONCE, [malformed(draw) for _ in range(count)], one))

    return asyncio.run(all_of_them())


def send_hostile(url: str, key: str, numbers: Sequence[int]) -> list[tuple[float, int]]:
    """Seconds and status of each form, one after the other; runs in a process of its own."""
    answers: list[tuple[float, int]] = []
    with httpx.Client(base_url=url, timeout=4 * LIMIT_S, headers={"x-api-key": key}) as http:
        for number in numbers:
            body = {"prompt": "a", "max_tokens": 1, **hostile(number)}
            began = time.perf_counter()
            status = http.post("/v1/completions", json=body).status_code
            answers.append((time.perf_counter() - began, status))
    return answers


class Neighbors:
    """All measurements, one after the other on one server, with which alice does what is well-formed."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self._process = url, process
        self._alice, self._mallory = (
            httpx.Client(base_url=url, timeout=LIMIT_S, headers={"x-api-key": key}) for key in KEYS.values()
        )
        self._draw = random.Random(1)
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._pool.submit(time.time).result()  # it has started

    def run(self, bodies: int, forms: int, prompts: int, rounds: int) -> list[Figure]:
        with self._pool, self._alice, self._mallory:
            self._alice_asks(10)
            parts: list[Callable[[], list[Figure]]] = [
                lambda: self.malformed_bodies(bodies),
                lambda: self.hostile_forms(forms),
                lambda: self.timing(prompts),
                *(partial(self.held_to_a_form, name, rounds) for name in SCHEMAS),
            ]
            return [figure for part in tqdm(parts, unit="part") for figure in part()]

    def malformed_bodies(self, count: int) -> list[Figure]:
        """``count`` malformed bodies on all routes."""
        send_malformed(self.url, KEYS["mallory"], -1, 100)  # to warm up
        memory = self._memory()
        alone, beside, results = self._by_turns(
            lambda turn: (send_malformed, self.url, KEYS["mallory"], turn, count // TURNS)
        )
        statuses = sum(results, Counter[str]())
        bad = sum(n for status, n in statuses.items() if not status.isdecimal() or int(status) >= 500)
        what = f"{statuses.total()} malformed bodies"
        return [
            most(f"{what}: with a 5xx, or without an answer", bad),
            most(f"{what}: median latency beside them over alone", ratio(beside, alone), 2.0, "x"),
            Figure(f"{what}: median latency alone", median(alone) * 1e3, " ms"),
            most(f"{what}: requests left", self._left()),
            Figure(f"{what}: memory of the ingress grew by", (self._memory() - memory) / 2**20, " MiB"),
        ]

    def hostile_forms(self, count: int) -> list[Figure]:
        """Forms that are exponential, recursive, doubling, or of 1 MB, beside well-formed requests."""
        alone, beside, results = self._by_turns(
            lambda turn: (send_hostile, self.url, KEYS["mallory"], range(turn, count, TURNS))
        )
        answers = [answer for result in results for answer in result]
        what = f"{len(answers)} hostile forms"
        return [
            most(f"{what}: the slowest answer", max(seconds for seconds, _ in answers), FORM_BAR_S, " s"),
            most(f"{what}: with a 5xx", sum(status >= 500 for _, status in answers)),
            Figure(f"{what}: refused", sum(status >= 400 for _, status in answers)),
            most(f"{what}: median latency beside them over alone", ratio(beside, alone), 1.5, "x"),
        ]

    def timing(self, count: int) -> list[Figure]:
        """Whether the time to the first token tells prompts that another key has sent from new ones."""
        others, new, own, hits = list[float](), list[float](), list[float](), 0
        for _ in range(count):
            prompt, fresh = self._prompt(), self._prompt()
            self._first_token(self._alice, prompt)
            asked = [(others, prompt), (new, fresh)]
            self._draw.shuffle(asked)
            for times, tokens in asked:
                seconds, cached = self._first_token(self._mallory, tokens)
                times.append(seconds)
                hits += cached
            own.append(self._first_token(self._mallory, prompt)[0])
        what = f"{count} prompts of {PROMPT_TOKENS} tokens"
        return [
            most(f"{what}: cached tokens of another key used", hits),
            most(f"{what}: AUC, another key's against new ones", area(others, new), 0.55),
            Figure(f"{what}: AUC, one's own against new ones", area(own, new)),
        ]

    def held_to_a_form(self, name: str, rounds: int) -> list[Figure]:
        """Streams that are held to a schema against free ones, by turns. Both sample at random, so that correct
        drafts speed up neither.
        """
        schema, bar = SCHEMAS[name]
        held: dict[str, Any] = {"guided_json": schema}

        async def gaps(fields: dict[str, Any]) -> float:
            async with Client(self.url, key=KEYS["alice"]) as client:
                asked = [f"Write about {self._draw.random()}: " for _ in range(STREAMS)]
                outcomes = await asyncio.gather(
                    *(client.complete(text, STREAM_TOKENS, temperature=1, **fields) for text in asked)
                )
            return median([gap for outcome in outcomes for gap in outcome.gaps])

        asyncio.run(gaps(held))  # compiles the schema
        gap_ratios, cost_ratios = list[float](), list[float]()
        for turn in range(rounds):
            gap, cost = dict[bool, float](), dict[bool, float]()
            for form in (True, False) if turn % 2 else (False, True):
                before = self._engine_s()
                gap[form] = asyncio.run(gaps(held if form else {}))
                cost[form] = self._engine_s() - before
            gap_ratios.append(gap[True] / gap[False])
            cost_ratios.append(cost[True] / cost[False])
        what = f"{STREAMS} streams held to {name} over free ones"
        return [
            Figure(f"{what}: median time between tokens", median(gap_ratios), "x", bar, at_most=True),
            Figure(f"{what}: processor time of the engine", median(cost_ratios), "x"),
        ]

    def _by_turns(self, job: Callable[[int], tuple[Any, ...]]) -> tuple[list[float], list[float], list[Any]]:
        """Latencies alone and while each ``job`` runs in the other process, and what the jobs return."""
        alone, beside, results = list[float](), list[float](), []
        for turn in range(TURNS):
            alone += self._alice_asks(5)
            running = self._pool.submit(*job(turn))
            while not running.done():
                beside += self._alice_asks(1)
            results.append(running.result())
        return alone, beside, results

    def _alice_asks(self, count: int) -> list[float]:
        """Seconds of each of ``count`` short answers."""
        times = []
        for _ in range(count):
            body = {"prompt": self._prompt()[:32], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            began = time.perf_counter()
            self._alice.post("/v1/completions", json=body).raise_for_status()
            times.append(time.perf_counter() - began)
        return times

    def _first_token(self, http: httpx.Client, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how much of the prompt was cached."""
        body = {"prompt": prompt, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
        began, seconds, cached = time.perf_counter(), 0.0, 0
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    seconds = seconds or time.perf_counter() - began
                    usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
                    cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return seconds, cached

    def _prompt(self) -> list[int]:
        return [self._draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]

    def _memory(self) -> int:
        """Bytes that only the ingress's process has."""
        return sum(one.memory_full_info().uss for one in self._replicas("ingress"))

    def _replicas(self, which: str) -> list[psutil.Process]:
        found = self._process.children(recursive=True)
        return [one for one in found if f"ServeReplica:quire:{which}" in " ".join(one.cmdline())]

    def _engine_s(self) -> float:
        """Processor time of the engine so far."""
        return sum(sum(one.cpu_times()[:2]) for one in self._replicas("engine"))

    def _left(self) -> int:
        """Requests that are live once nobody waits."""

        def live() -> int:
            return int(self._alice.get("/health").json()["live_requests"])

        seconds_until(lambda: not live(), LIMIT_S)
        return live()


def area(low: Sequence[float], high: Sequence[float]) -> float:
    """The share of pairs in which the first is lower: 0.5 if nothing tells them apart."""
    pairs = itertools.product(low, high)
    return sum((a < b) + (a == b) / 2 for a, b in pairs) / (len(low) * len(high))


@contextlib.contextmanager
def served() -> Iterator[Neighbors]:
    """A server of our own that knows both keys."""
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    os.environ["QUIRE_KEYS"] = ",".join(f"{name}:{digest}" for name, digest in digests.items())
    with application(["engine_replicas=1"]) as (process, url, _):
        yield Neighbors(url, process)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m clients.neighbors", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write every figure to this file")
    parser.add_argument("--check", action="store_true", help="exit non-zero unless every figure meets its bar")
    for name, default in (("--bodies", 10_000), ("--forms", 40), ("--prompts", 120), ("--rounds", 12)):
        parser.add_argument(name, type=int, default=default, help="(%(default)s)")
    options = parser.parse_args(arguments)
    with served() as neighbors:
        figures = neighbors.run(options.bodies, options.forms, options.prompts, options.rounds)
    finish("clients.neighbors", figures, options, "neighbor", model=MODEL)


if __name__ == "__main__":
    main(sys.argv[1:])
