"""The number of engine replicas follows demand on a real Serve, and nothing that breaks moves it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import ray
import yaml
from local_cluster import SOON_S, BreakableCluster, paced_options
from monitoring import DEPLOY, alert_queries, board_queries, ray_board_queries
from ray import serve
from ray.serve.context import _get_global_client
from scaled_toy import FIRST, asked, broken, toy

from app.launch import serving
from app.launch.port_block import PortBlock
from app.metrics.aliases import ALIASES
from app.metrics.fleet_figures import KEPT_S
from app.metrics.table import TABLE, MetricKind
from loadtests.client import Client, Outcome, complete
from loadtests.cluster import SLOW_POLL_S, LocalCluster, wait_for
from loadtests.locust_run import NAMES, scrape
from loadtests.workloads import prompts

DOWN_AFTER_S = 3.0
OPTIONS: dict[str, Any] = {
    "num_blocks": 96,  # of 16 tokens
    "engine_replicas": 1,
    "max_replicas": 2,
    "min_replicas": 0,
    # KV decides: on a busy machine of two cores steps are slow however many replicas there are.
    "ttft_target_s": 600,
    "tpot_target_s": 60,
    "scaling_reserve": 0,
    "scale_down_after_s": DOWN_AFTER_S,
    "startup_s": 30,
}
BUSY, TOKENS = 32, 80  # together more blocks than 75% of one pool, wherever each is in its answer
FEW = 2
FEW_EVENTS_S = 0.1  # a step
STARTED_S = 240.0
REPORTS = 5  # of each replica, one for each decision; the window of the toys has two


class Clients:
    """So many clients, each of which streams its prompt again and again, on a thread of their own."""

    def __init__(self, cluster: LocalCluster, texts: list[str], max_tokens: int) -> None:
        self._url, self._instance = cluster.url, cluster.instance
        self._texts = texts
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self.first: list[Outcome] = []

    def __enter__(self) -> Clients:
        self._running = self._pool.submit(asyncio.run, self._stream_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.stop()
        self._pool.shutdown()

    def stop(self) -> None:
        """Each ends its stream."""
        self._stop.set()
        self._running.result(timeout=STARTED_S)

    async def _stream_all(self) -> None:
        await asyncio.gather(*map(self._stream, range(len(self._texts))))

    async def _stream(self, place: int) -> None:
        text = self._texts[place]
        # First answers of all lengths, or all streams would be short at the same time.
        most = 1 + place * self._max_tokens // len(self._texts)
        self.first.append(await complete(self._url, text, most, instance=self._instance))
        assert self.first[-1].done
        while not self._stop.is_set():
            self.outcomes[text].append(
                await complete(self._url, text, self._max_tokens, instance=self._instance)
            )

    def check(self) -> None:
        """None was refused or cut, and each said what it said when it was asked before."""
        for outcomes in self.outcomes.values():
            for outcome in outcomes:
                assert outcome.status == 200
                assert outcome.errors == []
                assert outcome.done
                assert outcome.finish_reason == "length"
            assert len({outcome.text for outcome in outcomes}) == 1


def running(deployment: str = "engine", application: str = serving.APP_NAME) -> int:
    """Replicas that serve."""
    # Not serve.status(), which pickles the router again and again: tens of milliseconds of processor time.
    found = _get_global_client().get_serve_details()["applications"][application]["deployments"][deployment]
    return sum(replica["state"] == "RUNNING" for replica in found["replicas"])


def stays(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether something is so, whenever one looks, for as long as many decisions take."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if not condition():
            return False
        time.sleep(SLOW_POLL_S)
    return True


def stays_for_reports(path: Path) -> bool:
    """Whether all toys with the orders ``path`` run until each has been asked for ``REPORTS`` more reports."""
    enough = asked(path).stat().st_size + FIRST * REPORTS
    while asked(path).stat().st_size < enough:
        if running("toy", "toy") != FIRST:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def scaled(bare_cluster: BreakableCluster, paced_model: Path) -> BreakableCluster:
    """One replica of at most two, which goes when it has nothing to do."""
    bare_cluster.ensure(**{**paced_options(paced_model), **OPTIONS})
    return bare_cluster


def test_the_fleet_follows_demand_and_outlives_its_controller(scaled: BreakableCluster) -> None:
    """In one go, as each step begins with what the one before has started."""
    # More than one replica has blocks for; their events shall leave the processor to the replica that starts.
    with scaled.slow_steps(FEW_EVENTS_S) as go_on, Clients(scaled, prompts(BUSY), TOKENS) as clients:
        wait_for(lambda: running() == 2, STARTED_S, "no second replica has come", SLOW_POLL_S)
        scaled.wait_routable(2)
        assert len(scaled.engine_pids()) == 2
        no_replica_stops_when_the_controller_dies(scaled)
        go_on()
    clients.check()
    with scaled.slow_steps(FEW_EVENTS_S) as go_on, Clients(scaled, prompts(FEW, seed=5), TOKENS // 2) as few:
        wait_for(
            lambda: all(len(few.outcomes[text]) for text in prompts(FEW, seed=5)), SOON_S, "no stream ends"
        )
        wait_for(lambda: len(scaled.engine_pids()) == 1, STARTED_S, "the second replica stays", SLOW_POLL_S)
        scaled.wait_routable(1)
        assert stays(lambda: running() == 1, 2.0), "the last one went although it has work"
        go_on()
    few.check()
    the_last_one_goes_and_comes_back_for_the_first_request(scaled)


def no_replica_stops_when_the_controller_dies(scaled: BreakableCluster) -> None:
    before = scaled.engine_pids()
    controller = _get_global_client()._controller
    old = ray.get(controller.get_pid.remote())
    scaled.kill(old)

    def back() -> bool:
        try:
            return bool(ray.get(controller.get_pid.remote(), timeout=5) != old) and running() == 2
        except (ray.exceptions.RayError, KeyError):
            return False

    wait_for(back, SOON_S, "the controller has not come back with its replicas")
    # Longer than the window after which it would stop one that is not needed.
    assert stays(lambda: scaled.engine_pids() == before, 2.0 * DOWN_AFTER_S)
    # The new controller may still be finding out that one of them is well.
    wait_for(lambda: running() == 2, SOON_S, "the controller does not find both replicas running")
    assert scaled.engine_pids() == before


def the_last_one_goes_and_comes_back_for_the_first_request(scaled: BreakableCluster) -> None:
    wait_for(lambda: not scaled.engine_pids(), STARTED_S, "the last replica stays", SLOW_POLL_S)
    wait_for(lambda: scaled.health().get("status") == "asleep", SOON_S, "the ingress does not know of it")
    with scaled.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").json()["data"][0]["object"] == "model"
    assert stays(lambda: not scaled.engine_pids(), 2.0), "it was woken for nobody"
    # It is looked at while they run: soon after their end it may have gone again.
    with scaled.slow_steps() as go_on, ThreadPoolExecutor(1) as clients:
        answers = clients.submit(asyncio.run, both(scaled.url, scaled.instance))
        wait_for(lambda: scaled.health().get("status") == "ok", STARTED_S, "no replica has come back")
        assert len(scaled.engine_pids()) == 1
        go_on()
        outcomes = answers.result()
    for outcome in outcomes:
        assert (outcome.status, outcome.errors, outcome.finish_reason) == (200, [], "length")


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)"
)
def test_prometheus_has_data_for_all_boards_and_alerts(scaled: BreakableCluster, tmp_path: Path) -> None:
    """Ours and Ray's own; and it counts what the clients count."""
    wait_for(lambda: len(scaled.ingress_pids()) == 1, SOON_S, "an old ingress is still there")
    time.sleep(KEPT_S)  # for so long /metrics says what it was before
    before = scrape(scaled.url)
    with (
        scaled.slow_steps(FEW_EVENTS_S),
        prometheus_of(scaled, tmp_path) as result,
        Clients(scaled, prompts(FEW), 16) as clients,
    ):
        # The same prompt again: something is found cached.
        again = [asyncio.run(one_more(scaled.url, scaled.instance)) for _ in range(2)]
        # Nothing may hold the target at the moment.
        ours = {query for query in board_queries() + alert_queries() if "quire_scaling_held" not in query}
        unseen = {*ours, *ray_board_queries()}

        def all_seen() -> bool:
            unseen.difference_update({query for query in unseen if result(query)})
            return not unseen

        with contextlib.suppress(TimeoutError):
            wait_for(all_seen, SOON_S, "some queries return nothing", 1.0)
        assert not unseen
        ends = {MetricKind.GAUGE: "", MetricKind.COUNTER: "_total", MetricKind.HISTOGRAM: "_bucket"}
        table = {
            one.full_name + ends[one.kind] for one in TABLE if not one.by_key and one.name != "scaling_held"
        }
        others = {f"vllm:{alias.name}{ends[alias.kind]}" for alias in ALIASES}

        def missing() -> set[str]:
            samples = result('count({job="quire"}) by (__name__)')
            return (table | others) - {sample["metric"]["__name__"] for sample in samples}

        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not missing(), SOON_S, "some metrics are not there", 1.0)
        assert missing() == set()
        clients.stop()
        sent = [*again, *clients.first, *(one for many in clients.outcomes.values() for one in many)]
        told = (len(sent), sum(one.usage["prompt_tokens"] for one in sent), sum(one.tokens for one in sent))

        def counted() -> bool:
            counts = NAMES[: len(told)]
            values = [(result(f"sum({metric})"), before[name]) for metric, name in counts]
            return all(value for value, _ in values) and told == tuple(
                float(value[0]["value"][1]) - earlier for value, earlier in values
            )

        wait_for(counted, SOON_S, "Prometheus has other counts than the clients")


@contextlib.contextmanager
def prometheus_of(cluster: BreakableCluster, folder: Path) -> Iterator[Callable[[str], list[Any]]]:
    """What a query returns of a Prometheus that is configured as in ``deploy``, but for addresses and times."""
    text = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    for job in text["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        port = cluster.port if job["job_name"] == "quire" else cluster.metrics_port
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    text |= {"rule_files": [str(DEPLOY / "prometheus/alerts.yml")]}
    # An answer may take no longer than the interval, and a busy machine's takes more than a second.
    text["global"] = {"scrape_interval": "3s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(text))
    ports = PortBlock()
    address = f"127.0.0.1:{ports.take()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )

    def result(query: str) -> list[Any]:
        try:
            answer = http.get("/api/v1/query", params={"query": query})
        except httpx.TransportError:
            return []
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it starts
            return []
        assert answer.status_code == 200, answer.text
        found: list[Any] = answer.json()["data"]["result"]
        return found

    try:
        with httpx.Client(base_url=f"http://{address}") as http:
            yield result
    finally:
        process.kill()
        process.wait()
        ports.release()


async def one_more(url: str, instance: str) -> Outcome:
    """A completion that finds what the one before has left in the cache."""
    async with Client(url, instance) as client:
        return await client.stream("/v1/completions", 4, prompt=list(range(300, 364)), ignore_eos=True)


async def both(url: str, instance: str) -> list[Outcome]:
    return await asyncio.gather(*(complete(url, text, 8, instance=instance) for text in prompts(2)))


def test_reports_that_break_or_fail_to_come_move_nothing(
    bare_cluster: BreakableCluster, tmp_path: Path
) -> None:
    path = tmp_path / "orders.json"

    def order(**orders: Any) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(orders))
        temporary.replace(path)  # never half a file

    order(nan=True)
    asked(path).touch()  # none may have been asked when they run
    options = {"max_replicas": 4, "scale_down_after_s": 1, "scaling_reserve": 0}
    try:
        # The other application comes, and is scaled, beside one whose policy always fails.
        serve.run(broken(str(path), **options), name="broken", route_prefix=None)
        serve.run(toy(str(path), **options), name="toy", route_prefix=None)
        wait_for(lambda: running("toy", "toy") == FIRST, SOON_S, "the toys have not started")
        # Without the guards one replica would be enough after three reports of each.
        assert stays_for_reports(path), "no number is no demand"
        one = serve.get_deployment_handle("toy", "toy").broadcast("name").results(timeout_s=30)[:1]
        order(silent=one)
        assert stays_for_reports(path), "a third of the reports is missing"
        assert running("broken", "broken") == 1
        order(slow=one)
        wait_for(lambda: running("toy", "toy") < FIRST, SOON_S, "a straggler holds the fleet")
    finally:
        for name in ("toy", "broken"):
            serve.delete(name)
