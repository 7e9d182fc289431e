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


def served(**args: Any) -> tuple[config.ServedModel, ...]:
    return config.served_models(options(**args))


def one(**args: Any) -> config.ServedModel:
    return served(**args)[0]


@pytest.mark.parametrize("cores", [1.0, 2.0, 3.0, 8.0, 64.0])
def test_replicas_of_a_node_fit_its_cores(cores: float) -> None:
    for replicas in range(1, 65):
        given = one(engine_replicas=replicas)
        each = placement.actor_options(given, [{"CPU": cores}])["num_cpus"]
        assert each > 0
        assert round(each * 10_000) * replicas <= cores * 10_000  # Ray counts in these units
        placement.check_cpus([given], [{"CPU": cores}])


def test_a_share_of_the_smallest_node() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 16.0}]
    assert placement.actor_options(one(engine_replicas=4), nodes) == {"num_cpus": 2}
    assert placement.actor_options(one(engine_replicas=4, engine_cpus=0.5), nodes) == {"num_cpus": 0.5}


def test_a_head_without_processors_does_not_count() -> None:
    nodes = [{"CPU": 0.0}, {"memory": 1.0}, {"CPU": 8.0}, {"CPU": 8.0}]
    given = one(engine_replicas=4)
    assert placement.replicas_on_a_node(given.options, nodes) == 2
    assert placement.actor_options(given, nodes) == {"num_cpus": 4}


def test_nodes_without_gpus_do_not_count_where_gpus_are_wanted() -> None:
    nodes = [{"CPU": 2.0}, GPU_NODE, GPU_NODE]
    given = one(engine_replicas=2)
    assert placement.actor_options(given, nodes) == {"num_cpus": 16, "num_gpus": 1}
    assert placement.replicas_on_a_node(given.options, nodes) == 1
    on_cpu = one(engine_replicas=3, device="cpu")
    assert placement.actor_options(on_cpu, nodes) == {"num_cpus": 2}


def test_a_gpu_for_each_replica() -> None:
    placement.check_gpus(served(), [GPU_NODE])
    placement.check_gpus(served(engine_replicas=2), [GPU_NODE, GPU_NODE])
    placement.check_gpus(served(engine_replicas=2, device="cpu"), [GPU_NODE])
    placement.check_gpus(served(device="cuda"), [])  # nothing is known
    with pytest.raises(ConfigError, match=r"engine_replicas is 2 .* has 1; set engine_replicas to 1"):
        placement.check_gpus(served(engine_replicas=2), [GPU_NODE])
    with pytest.raises(ConfigError, match=r"engine_replicas is 1 .* has 0; set device to cpu"):
        placement.check_gpus(served(device="cuda"), [{"CPU": 2.0}])


def test_where_replicas_follow_demand_there_is_room_for_all_that_may_be() -> None:
    given = one(max_replicas=4)
    assert placement.actor_options(given, [{"CPU": 8.0}] * 2) == {"num_cpus": 4}
    for nodes in ([{"CPU": 8.0}], [{"CPU": 8.0}] * 2):
        placement.check_cpus([given], nodes)
    with pytest.raises(ConfigError, match=r"for 2 of 4 engine replicas .* lower max_replicas or engine_cpus"):
        placement.check_cpus(served(max_replicas=4, engine_cpus=4), [{"CPU": 8.0}])


def test_gpus_that_demand_may_want_can_join_later(caplog: pytest.LogCaptureFixture) -> None:
    placement.check_gpus(served(max_replicas=2), [GPU_NODE, GPU_NODE])
    assert caplog.text == ""
    placement.check_gpus(served(max_replicas=4, engine_replicas=2), [GPU_NODE, GPU_NODE])
    assert "max_replicas is 4" in caplog.text
    assert "has 2" in caplog.text
    lacking = served(max_replicas=4, engine_replicas=3)
    with pytest.raises(ConfigError, match=r"is 3 and .* has 2; set max_replicas to 2"):
        placement.check_gpus(lacking, [GPU_NODE, GPU_NODE])
    with pytest.raises(ConfigError, match=r"is 1 and .* has 0; set device to cpu"):
        placement.check_gpus(served(max_replicas=4, device="cuda"), [{"CPU": 2.0}])


def test_replicas_of_nodes_that_have_yet_to_join_share_none_of_these() -> None:
    given = one(max_replicas=8)
    assert placement.replicas_on_a_node(given.options, [GPU_NODE]) == 1
    assert placement.actor_options(given, [GPU_NODE, GPU_NODE]) == {"num_cpus": 16, "num_gpus": 1}
    assert placement.replicas_on_a_node(given.options, [{"CPU": 16.0, "GPU": 4.0}]) == 4
    assert placement.replicas_on_a_node(given.options, [{"CPU": 16.0}]) == 8


def test_build_refuses_what_the_cluster_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cluster_nodes", lambda: [GPU_NODE])
    with pytest.raises(ConfigError, match="engine_replicas is 2"):
        application.build({"engine_replicas": 2})


def test_too_many_processors_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"for 0 of 2 engine replicas with 4 CPUs each; lower .* engine_cpus"):
        placement.check_cpus(served(engine_replicas=2, engine_cpus=4), [{"CPU": 2.0}])
    with pytest.raises(ConfigError, match=r"for 0 of 1 engine replicas with 4 CPUs each; lower engine_cpus$"):
        placement.check_cpus(served(engine_cpus=4), [{"CPU": 2.0}])
    placement.check_cpus(served(engine_cpus=0), [{"CPU": 2.0}])


def test_on_one_node_there_is_room_for_a_successor() -> None:
    """A deploy starts new replicas before it stops old ones; threads do not shrink for it."""
    for cores, replicas in ((2.0, 1), (2.0, 2), (16.0, 1), (64.0, 5)):
        given, nodes = one(engine_replicas=replicas), [{"CPU": cores}]
        each = placement.actor_options(given, nodes)["num_cpus"]
        assert round(each * 10_000) * (replicas + 1) <= cores * 10_000
        assert placement.threads_of_an_engine(given, nodes) == max(1, int(cores / replicas))
        assert placement.surge_percents([given], nodes)[0] > 0


@pytest.mark.parametrize("node", [{"CPU": 2.0}, {"CPU": 16.0, "GPU": 4.0}])
def test_on_one_node_another_number_of_engines_finds_room_and_restarts_none(node: dict[str, float]) -> None:
    """With a share of the CPUs each, Serve waits for ever to have both numbers of engines at once."""
    asked = [placement.actor_options(one(engine_replicas=number), [node]) for number in (1, 2, 3)]
    assert asked[0] == asked[1] == asked[2]
    assert asked[0]["num_cpus"] * 5 <= node["CPU"]


def test_threads_follow_what_is_asked_for() -> None:
    nodes = [{"CPU": 16.0}]
    assert placement.threads_of_an_engine(one(engine_replicas=4, engine_cpus=2), nodes) == 2
    assert placement.threads_of_an_engine(one(engine_replicas=4, engine_cpus=2, threads=3), nodes) == 3
    assert placement.threads_of_an_engine(one(engine_replicas=4, engine_cpus=0.5), nodes) == 1


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
        ({"engine_replicas": 1}, [{"CPU": 8.0}], 1),
        ({"engine_replicas": 20}, [{"CPU": 64.0}], 1),  # there is memory for as many
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
    given = one(**args)
    (percent,) = placement.surge_percents([given], nodes)
    assert -(-percent * given.options.scaling.upper_limit // 100) == replicas  # as Serve rounds


def test_a_node_is_asked_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": f"{name}.local", "Alive": alive, "Resources": resources}

    monkeypatch.setattr(placement.ray, "is_initialized", lambda: True)
    nodes = [node("head", CPU=0.0), node("a", CPU=8.0), node("b", CPU=8.0), node("dead", False, CPU=8.0)]
    monkeypatch.setattr(placement.ray, "nodes", lambda: nodes)
    assert placement.engine_nodes(options()) == {"a": "a.local", "b": "b.local"}


def both(one: dict[str, Any], other: dict[str, Any], **args: Any) -> tuple[config.ServedModel, ...]:
    return served(models={"one": one, "other": other}, **args)


def test_models_share_the_cores_of_a_node() -> None:
    for nodes, engines, threads in (([{"CPU": 16.0}], 4, 4), ([{"CPU": 16.0}] * 2, 3, 5)):
        models = both({"engine_replicas": 1}, {"max_replicas": 3}, device="cpu")
        assert [placement.threads_of_an_engine(model, nodes) for model in models] == [threads] * 2
        assert [placement.engines_on_a_node(model, nodes) for model in models] == [engines] * 2
    models = both({"threads": 3}, {"engine_cpus": 2.0}, engine_replicas=1)
    assert [placement.threads_of_an_engine(model, [{"CPU": 16.0}]) for model in models] == [3, 2]


def test_what_an_engine_asks_for_does_not_depend_on_other_models() -> None:
    """Serve would restart it."""
    nodes = [{"CPU": 16.0}, {"CPU": 16.0}]
    alone = served(models={"one": {}})[0]
    beside = both({}, {"engine_replicas": 7})[0]
    assert (
        placement.actor_options(alone, nodes) == placement.actor_options(beside, nodes) == {"num_cpus": 0.001}
    )
    assert placement.actor_options(both({"engine_cpus": 3}, {})[0], nodes) == {"num_cpus": 3}


def test_models_share_what_they_ask_for() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 4.0}]
    models = both({"engine_replicas": 2}, {"engine_replicas": 1}, engine_cpus=4)
    placement.check_cpus(models, nodes)
    assert placement.surge_percents(models, nodes) == [0, 0]
    assert placement.surge_percents(models, [*nodes, {"CPU": 4.0}]) == [20, 20]
    with pytest.raises(
        ConfigError, match=r"models: one: .* for 2 of 3 engine replicas with 4 CPUs each; lower engine"
    ):
        placement.check_cpus(both({"engine_replicas": 3}, {"engine_replicas": 1}, engine_cpus=4), nodes)


def test_models_share_the_gpus(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [GPU_NODE, GPU_NODE]
    placement.check_gpus(both({"engine_replicas": 1}, {"engine_replicas": 1}), nodes)
    placement.check_gpus(both({"engine_replicas": 2}, {"device": "cpu"}), nodes)
    assert caplog.text == ""
    placement.check_gpus(both({"engine_replicas": 1}, {"max_replicas": 2}), nodes)
    assert "may have 3 engine replicas" in caplog.text
    with pytest.raises(ConfigError, match=r"start with 2 of one \+ 1 of other, but the cluster has 2; lower"):
        placement.check_gpus(both({"engine_replicas": 2}, {"engine_replicas": 1}), nodes)
    assert placement.surge_percents(both({"engine_replicas": 1}, {"engine_replicas": 1}), nodes) == [0, 0]
