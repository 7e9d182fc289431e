"""One real Ray cluster for all end-to-end tests of a worker."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from local_cluster import OPTIONS, BreakableCluster, deploy_evenly
from paced_model import save_paced

from app.launch.local_server import CONTROL_INTERVAL, RESTARTED_S

_CLUSTERS = contextlib.ExitStack()
"""What stops the cluster of this worker."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """After the last of these tests the cluster stops: idle, it takes a tenth of a core from the others."""
    yield
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _CLUSTERS.close()


@pytest.fixture(scope="session")
def bare_cluster() -> Iterator[BreakableCluster]:
    """Ray and Serve without an application."""
    os.environ["RAY_metrics_report_interval_ms"] = "1000"  # noqa: SIM112  (instead of ten seconds until its figures are seen)
    # As in a server whose controller has restarted: at Serve's 0.1 s it takes twice the processor time.
    os.environ[CONTROL_INTERVAL] = str(RESTARTED_S)
    os.environ["RAY_gcs_server_port_wait_time_s"] = "300"  # noqa: SIM112  (for Ray's first process on a busy machine)
    with _CLUSTERS:
        _CLUSTERS.callback(os.environ.pop, CONTROL_INTERVAL, None)
        cluster = BreakableCluster.started()
        _CLUSTERS.callback(cluster.stop)
        yield cluster


@pytest.fixture(scope="module")
def deployed(bare_cluster: BreakableCluster, bundled_model: Path) -> BreakableCluster:
    """The bundled model on two engine replicas of one thread each, whatever another file has deployed.

    Weights of 8 bits halve the time of a token, and say the same on every replica, too.
    """
    bare_cluster.ensure(**OPTIONS, weights="int8")
    return bare_cluster


@pytest.fixture(scope="session")
def paced_model(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Path:
    """See the module of that name."""
    return save_paced(tmp_path_factory.mktemp("paced"), bundled_model, 1)


@pytest.fixture
def paced(bare_cluster: BreakableCluster, paced_model: Path) -> BreakableCluster:
    """The same deployment of ``paced_model``, with both replicas routable: for streams that get disturbed.

    Each engine gets some of them.
    """
    deploy_evenly(bare_cluster, paced_model)
    return bare_cluster


@pytest.fixture
def cluster(deployed: BreakableCluster) -> BreakableCluster:
    """``deployed`` with both replicas routable, whatever the test before did to it."""
    deployed.settle(2)
    return deployed


@pytest.fixture
def http(cluster: BreakableCluster) -> Iterator[httpx.Client]:
    """A client of the application."""
    with cluster.http() as client:
        yield client


@pytest.fixture
def sdk(cluster: BreakableCluster, http: httpx.Client) -> openai.OpenAI:
    """OpenAI's client of the application."""
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, http_client=http)
