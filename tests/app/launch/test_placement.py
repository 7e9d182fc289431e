"""What replicas ask of Ray always fits, or one line says why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from app import application, config
from app.launch import placement
from engine.errors import ConfigError

GPU_NODE = {"CPU": 16.0, "GPU": 1.0}


def options(**args: Any) -> config.AppConfig:
    return config.load(args, {})


@pytest.mark.parametrize("cores", [1.0, 2.0, 3.0, 8.0, 64.0])
def test_replicas_of_a_node_fit_its_cores(cores: float) -> None:
    for replicas in range(1, 65):
        given = options(engine_replicas=replicas)
        each = placement.actor_options(given, [{"CPU": cores}])["num_cpus"]
        assert each > 0
        assert round(each * 10_000) * replicas <= cores * 10_000  # Ray counts in these units
        placement.check_cpus(given, [{"CPU": cores}])


def test_a_share_of_the_smallest_node() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 16.0}]
    assert placement.actor_options(options(engine_replicas=4), nodes) == {"num_cpus": 2}
    assert placement.actor_options(options(engine_replicas=4, engine_cpus=0.5), nodes) == {"num_cpus": 0.5}


def test_a_head_without_processors_does_not_count() -> None:
    nodes = [{"CPU": 0.0}, {"memory": 1.0}, {"CPU": 8.0}, {"CPU": 8.0}]
    given = options(engine_replicas=4)
    assert placement.replicas_on_a_node(given, nodes) == 2
    assert placement.actor_options(given, nodes) == {"num_cpus": 4}


def test_nodes_without_gpus_do_not_count_where_gpus_are_wanted() -> None:
    nodes = [{"CPU": 2.0}, GPU_NODE, GPU_NODE]
    given = options(engine_replicas=2)
    assert placement.actor_options(given, nodes) == {"num_cpus": 16, "num_gpus": 1}
    assert placement.replicas_on_a_node(given, nodes) == 1
    on_cpu = options(engine_replicas=3, device="cpu")
    assert placement.actor_options(on_cpu, nodes) == {"num_cpus": 2}


def test_a_gpu_for_each_replica() -> None:
    placement.check_gpus(options(), [GPU_NODE, GPU_NODE])
    placement.check_gpus(options(device="cpu"), [GPU_NODE])
    placement.check_gpus(options(device="cuda"), [])  # nothing is known
    with pytest.raises(ConfigError, match=r"engine_replicas is 2 .* has 1; set engine_replicas to 1"):
        placement.check_gpus(options(), [GPU_NODE])
    with pytest.raises(ConfigError, match=r"engine_replicas is 2 .* has 0; set device to cpu"):
        placement.check_gpus(options(device="cuda"), [{"CPU": 2.0}])


def test_where_replicas_follow_demand_there_is_room_for_all_that_may_be() -> None:
    given = options(max_replicas=4)
    assert placement.actor_options(given, [{"CPU": 8.0}]) == {"num_cpus": 1}
    placement.check_cpus(given, [{"CPU": 8.0}])
    with pytest.raises(ConfigError, match=r"for 2 of 4 engine replicas .* lower max_replicas or engine_cpus"):
        placement.check_cpus(options(max_replicas=4, engine_cpus=4), [{"CPU": 8.0}])


def test_gpus_that_demand_may_want_can_join_later(caplog: pytest.LogCaptureFixture) -> None:
    placement.check_gpus(options(max_replicas=2), [GPU_NODE, GPU_NODE])
    assert caplog.text == ""
    placement.check_gpus(options(max_replicas=4, engine_replicas=2), [GPU_NODE, GPU_NODE])
    assert "max_replicas is 4" in caplog.text
    assert "has 2" in caplog.text
    lacking = options(max_replicas=4, engine_replicas=3)
    with pytest.raises(ConfigError, match=r"is 3 and .* has 2; set max_replicas to 2"):
        placement.check_gpus(lacking, [GPU_NODE, GPU_NODE])
    with pytest.raises(ConfigError, match=r"is 1 and .* has 0; set device to cpu"):
        placement.check_gpus(options(max_replicas=4, device="cuda"), [{"CPU": 2.0}])


def test_replicas_of_nodes_that_have_yet_to_join_share_none_of_these() -> None:
    given = options(max_replicas=8)
    assert placement.replicas_on_a_node(given, [GPU_NODE]) == 1
    assert placement.actor_options(given, [GPU_NODE]) == {"num_cpus": 16, "num_gpus": 1}
    assert placement.replicas_on_a_node(given, [{"CPU": 16.0, "GPU": 4.0}]) == 4
    assert placement.replicas_on_a_node(given, [{"CPU": 16.0}]) == 8


def test_build_refuses_what_the_cluster_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cluster_nodes", lambda: [GPU_NODE])
    with pytest.raises(ConfigError, match="engine_replicas is 2"):
        application.build({})


def test_too_many_processors_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"for 0 of 2 engine replicas with 4 CPUs each; lower .* engine_cpus"):
        placement.check_cpus(options(engine_cpus=4), [{"CPU": 2.0}])
    placement.check_cpus(options(engine_cpus=0), [{"CPU": 2.0}])


def test_on_one_node_there_is_room_for_a_successor() -> None:
    """A deploy starts new replicas before it stops old ones; threads do not shrink for it."""
    for cores, replicas in ((2.0, 1), (2.0, 2), (16.0, 1), (64.0, 5)):
        given, nodes = options(engine_replicas=replicas), [{"CPU": cores}]
        each = placement.actor_options(given, nodes)["num_cpus"]
        assert round(each * 10_000) * (replicas + 1) <= cores * 10_000
        assert placement.threads_of_an_engine(given, nodes) == max(1, int(cores / replicas))
        assert placement.surge_percent(given, nodes) > 0


def test_threads_follow_what_is_asked_for() -> None:
    nodes = [{"CPU": 16.0}]
    assert placement.threads_of_an_engine(options(engine_replicas=4, engine_cpus=2), nodes) == 2
    assert placement.threads_of_an_engine(options(engine_replicas=4, engine_cpus=2, threads=3), nodes) == 3
    assert placement.threads_of_an_engine(options(engine_replicas=4, engine_cpus=0.5), nodes) == 1


@pytest.mark.parametrize(
    ("args", "nodes", "replicas"),
    [
        ({"engine_replicas": 1}, [GPU_NODE], 0),  # the only GPU is taken
        ({"engine_replicas": 1, "engine_cpus": 1}, [GPU_NODE], 0),
        ({"engine_replicas": 1}, [{"CPU": 16.0, "GPU": 2.0}], 1),
        ({"engine_replicas": 2}, [GPU_NODE, GPU_NODE], 0),
        ({"engine_replicas": 2}, [GPU_NODE, GPU_NODE, GPU_NODE], 1),
        ({"engine_replicas": 2}, [{"CPU": 8.0}, {"CPU": 8.0}], 0),  # one on each, which a third would disturb
        ({"engine_replicas": 1}, [{"CPU": 8.0}, {"CPU": 8.0}], 1),
        ({"engine_replicas": 2, "engine_cpus": 4}, [{"CPU": 8.0}], 0),
        ({"engine_replicas": 2, "engine_cpus": 4}, [{"CPU": 12.0}], 1),
        ({"engine_replicas": 20, "engine_cpus": 1}, [{"CPU": 64.0}], 4),  # as many as Serve replaces at a time
        ({"engine_replicas": 20, "engine_cpus": 1}, [{"CPU": 22.0}], 2),
        ({"engine_replicas": 200, "engine_cpus": 1}, [{"CPU": 201.0}], 2),
    ],
)
def test_as_many_start_early_as_there_is_room_for(
    args: dict[str, Any], nodes: list[dict[str, float]], replicas: int
) -> None:
    given = options(**args)
    percent = placement.surge_percent(given, nodes)
    assert -(-percent * given.scaling.upper_limit // 100) == replicas  # as Serve rounds


def test_a_node_is_asked_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": f"{name}.local", "Alive": alive, "Resources": resources}

    monkeypatch.setattr(placement.ray, "is_initialized", lambda: True)
    nodes = [node("head", CPU=0.0), node("a", CPU=8.0), node("b", CPU=8.0), node("dead", False, CPU=8.0)]
    monkeypatch.setattr(placement.ray, "nodes", lambda: nodes)
    assert placement.engine_nodes(options()) == {"a": "a.local", "b": "b.local"}
