"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from leftovers import give_back, loggers_restored

from app.launch.model_store import resolve

# Torch's own threads wait for each other in a loop: where several workers share the cores, each takes those of
# others. The kernels under test have threads of their own. Torch reads this on its import, here or in a child.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.disable()  # until all modules are imported: there is no garbage worth seeking

# Examples take as long as a busy machine lets them.
hypothesis.settings.register_profile(
    "quire", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("quire")

END_TO_END = Path(__file__).parent / "e2e"
DEPLOYMENTS = (
    "deployed",
    "paced",
    "growing",
    "larger",
    "pressed",
    "small",
    "restartable",
    "old_weights",
    "new_weights",
    "several",
    "scaled",
)
"""Fixtures of these tests that deploy, in the order in which they start the fewest replicas."""
SECOND_RAY = {"test_autoscaling.py", "test_deploys.py", "test_routing_faults.py", "test_unlike_replicas.py"}
"""Files that take about half of the time of all: two workers, each with a Ray of its own, share them."""

SERVER = "server"
"""Group of the tests that use the fixture of that name."""

MUCH, MORE = 1_500_000_000, 500_000_000
"""Bytes of this process from which on what the tests before have left is given back, and by which it must have
grown since the last time: that takes a second."""


def pytest_configure(config: pytest.Config) -> None:
    """Files of one folder come together: between others, pytest 9.1 loses its fixtures (pytest#14971)."""
    config.args.sort()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """With ``--dist loadgroup``, one worker runs a whole file, and two all end-to-end tests, each on one Ray.

    These come first, whatever the order of the others: they take the longest. Among them, those that need
    the same deployment come together, so that there are few. Next come those of a server in the process: only
    one worker starts it.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
        if end_to_end(item) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # processes start slowly on a busy machine
    yield
    items.sort(key=turn)  # stable: the order is otherwise as shuffled


def pytest_collection_finish() -> None:
    """What all modules have imported stays: no collection of garbage need walk over its millions of objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


def end_to_end(item: pytest.Item) -> bool:
    """Whether a test needs Ray."""
    return item.path.parent == END_TO_END


def needs_server(item: pytest.Item) -> bool:
    """Whether a test talks to a server in its process, which takes seconds to load."""
    return "server" in getattr(item, "fixturenames", ())


def group(item: pytest.Item) -> str:
    """Tests of the same group run on the same worker."""
    if end_to_end(item):
        return "second Ray" if item.path.name in SECOND_RAY else "first Ray"
    return SERVER if needs_server(item) else str(item.path)


def turn(item: pytest.Item) -> int:
    """Lower ones come first."""
    if not end_to_end(item):
        return len(DEPLOYMENTS) + (not needs_server(item))
    used = getattr(item, "fixturenames", ())
    return max((place for place, name in enumerate(DEPLOYMENTS) if name in used), default=0)


class Memory:
    """Of this process, for the fixture below."""

    too_much = MUCH

    @classmethod
    def look(cls) -> None:
        """Give back what is left over, if that is too much by now."""
        if psutil.Process().memory_info().rss > cls.too_much:
            give_back()
            cls.too_much = max(psutil.Process().memory_info().rss + MORE, MUCH)


@pytest.fixture(scope="module", autouse=True)
def _no_engines_of_other_modules() -> None:
    """Without this the engines of all modules add up."""
    Memory.look()


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """An ingress or a replica in this process sets up logging, which would print what later tests log."""
    with loggers_restored():
        yield


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; fetched and converted once if this machine has not got it yet."""
    return resolve("smollm2-135m-instruct")
