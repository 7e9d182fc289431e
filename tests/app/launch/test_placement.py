"""What replicas ask of Ray always fits, or one line says why it does not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ray._raylet import IMPLICIT_RESOURCE_PREFIX

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


def places(number: int, part: float) -> dict[str, Any]:
    """What an engine asks of several nodes, each of which has this many places for engines."""
    name = f"{IMPLICIT_RESOURCE_PREFIX}engine:{number}_per_node"
    return {"num_cpus": 0.001, "resources": {name: part}}


@pytest.mark.parametrize("cores", [1.0, 2.0, 3.0, 8.0, 64.0])
def test_replicas_of_a_node_fit_its_cores(cores: float) -> None:
    for replicas in range(1, 65):
        given = one(engine_replicas=replicas)
        each = placement.actor_options(given, [{"CPU": cores}])["num_cpus"]
        assert each > 0
        assert round(each * 10_000) * replicas <= cores * 10_000  # Ray counts in these units
        placement.check_room([given], [{"CPU": cores}])


def test_on_several_nodes_engines_ask_for_a_place_and_no_share_of_the_processors() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 16.0}]
    assert placement.actor_options(one(engine_replicas=2), nodes) == places(1, 1.0)
    assert placement.actor_options(one(engine_replicas=4), nodes) == places(2, 0.5)
    assert placement.actor_options(one(engine_replicas=6), nodes) == places(3, 0.3333)
    assert placement.threads_of_an_engine(one(engine_replicas=4), nodes) == 2  # that is a share of the smallest
    assert placement.actor_options(one(engine_replicas=4, engine_cpus=0.5), nodes) == {"num_cpus": 0.5}


def test_a_head_without_processors_does_not_count() -> None:
    nodes = [{"CPU": 0.0}, {"memory": 1.0}, {"CPU": 8.0}, {"CPU": 8.0}]
    given = one(engine_replicas=4)
    assert placement.replicas_on_a_node(given.options, nodes) == 2
    assert placement.actor_options(given, nodes) == places(2, 0.5)
    assert placement.actor_options(given, [{"CPU": 0.0}, {"CPU": 8.0}]) == {"num_cpus": 0.001}


def test_nodes_without_gpus_do_not_count_where_gpus_are_wanted() -> None:
    nodes = [{"CPU": 2.0}, GPU_NODE, GPU_NODE]
    given = one(engine_replicas=2)
    assert placement.actor_options(given, nodes) == {"num_cpus": 0.001, "num_gpus": 1}
    assert placement.replicas_on_a_node(given.options, nodes) == 1
    on_cpu = one(engine_replicas=3, device="cpu")
    assert placement.actor_options(on_cpu, nodes) == places(1, 1.0)


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
    assert placement.actor_options(given, [{"CPU": 8.0}] * 2) == places(2, 0.5)
    for nodes in ([{"CPU": 8.0}], [{"CPU": 8.0}] * 2):
        placement.check_room([given], nodes)
    with pytest.raises(ConfigError, match=r"for 2 of 4 engine replicas .* lower max_replicas or engine_cpus"):
        placement.check_room(served(max_replicas=4, engine_cpus=4), [{"CPU": 8.0}])


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
    assert placement.actor_options(given, [GPU_NODE, GPU_NODE]) == {"num_cpus": 0.001, "num_gpus": 1}
    assert placement.replicas_on_a_node(given.options, [{"CPU": 16.0, "GPU": 4.0}]) == 4
    assert placement.replicas_on_a_node(given.options, [{"CPU": 16.0}]) == 8


def test_build_refuses_what_the_cluster_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cluster_nodes", lambda: [GPU_NODE])
    with pytest.raises(ConfigError, match="engine_replicas is 2"):
        application.build({"engine_replicas": 2})


def test_too_many_processors_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"for 0 of 2 engine replicas with 4 CPUs each; lower .* engine_cpus"):
        placement.check_room(served(engine_replicas=2, engine_cpus=4), [{"CPU": 2.0}])
    with pytest.raises(ConfigError, match=r"for 0 of 1 engine replicas with 4 CPUs each; lower engine_cpus$"):
        placement.check_room(served(engine_cpus=4), [{"CPU": 2.0}])
    placement.check_room(served(engine_cpus=0), [{"CPU": 2.0}])


def test_shares_of_a_processor_that_fit_exactly_fit() -> None:
    models = both({"engine_replicas": 7}, {"engine_replicas": 3}, engine_cpus=0.1)
    placement.check_room(models, [{"CPU": 1.0}])
    with pytest.raises(ConfigError, match=r"models: one: .* for 6 of 7"):
        placement.check_room(models, [{"CPU": 0.95}])


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


def start(asked: Mapping[str, Any], free: Sequence[dict[str, float]], number: int) -> list[int]:
    """Up to ``number`` actors, each on the first node that has what it asks for: Ray may do no better.

    Returns how many start on each node, and takes what they ask for from ``free``.
    """
    wanted = {"CPU": asked["num_cpus"], "GPU": asked.get("num_gpus", 0), **asked.get("resources", {})}
    started = [0] * len(free)
    for _ in range(number):
        for index, node in enumerate(free):
            left = {name: node.get(name, float(name.startswith(IMPLICIT_RESOURCE_PREFIX))) for name in wanted}
            if all(left[name] + 1e-9 >= amount for name, amount in wanted.items()):
                node.update({name: left[name] - amount for name, amount in wanted.items()})
                started[index] += 1
                break
    return started


CLUSTERS: list[list[dict[str, float]]] = [
    [{"CPU": 2.0}, {"CPU": 4.0}],
    [{"CPU": 4.0}, {"CPU": 4.0}],
    [{"CPU": 0.0}, {"CPU": 4.0}, {"CPU": 4.0}],  # with a head of its own
    [{"CPU": 0.0}, {"CPU": 2.0}, {"CPU": 4.0}, {"CPU": 16.0}],
    [{"CPU": 1.0}] * 7,
]


@pytest.mark.parametrize("nodes", CLUSTERS)
@pytest.mark.parametrize("change", ["stay", "join", "leave"])
def test_on_several_nodes_another_number_of_engines_finds_room_beside_those_that_run(
    nodes: list[dict[str, float]], change: str
) -> None:
    """With a share of the CPUs each, Serve waits for ever to have both numbers of engines at once.

    That holds as well where a node joined or left in between.
    """
    after = {"stay": nodes, "join": [*nodes, {"CPU": 3.0}], "leave": nodes[:-1]}[change]
    usable = sum(node["CPU"] > 0 for node in after)
    models = {number: one(engine_replicas=number) for number in range(1, 12)}
    for before, number in itertools.product(models, models):
        old = placement.actor_options(models[before], nodes)
        new = placement.actor_options(models[number], after)
        free = [dict(node) for node in nodes]
        running = start(old, free, before)
        assert sum(running) == before
        more = max(number - sum(running[: len(after)]), 0) if old == new else number
        started = start(new, [*free[: len(after)], *map(dict, after[len(nodes) :])], more)
        assert sum(started) == more
        if usable > 1:
            assert max(started) <= math.ceil(number / usable)


def test_as_many_engines_on_each_node_restart_none() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 4.0}, {"CPU": 4.0}]
    asked = [placement.actor_options(one(engine_replicas=number), nodes) for number in (1, 2, 3)]
    assert asked[0] == asked[1] == asked[2]
    joined = [*nodes, {"CPU": 1.0}]
    assert placement.actor_options(one(engine_replicas=3), joined) == asked[2]


@pytest.mark.parametrize("number", [1, 3, 7, 60, 99])
def test_a_node_has_as_many_places_as_wanted_in_what_ray_counts(number: int) -> None:
    (part,) = placement.actor_options(one(engine_replicas=2 * number), [{"CPU": 64.0}] * 2)[
        "resources"
    ].values()
    counted = round(part * 10_000)
    assert counted == part * 10_000
    assert 10_000 // counted == number


def test_a_deploy_starts_nothing_early_where_those_that_run_hold_more() -> None:
    """New ones, with fewer CPUs, would all have room; beside the old ones there is none."""
    nodes = [{"CPU": 4.0}, {"CPU": 6.0}]
    models = served(engine_replicas=2, engine_cpus=3)
    assert placement.surge_percents(models, nodes) == [20]
    assert placement.surge_percents(models, nodes, [{"CPU": 0.0}, {"CPU": 2.0}]) == [0]
    assert placement.surge_percents(models, nodes, [{"CPU": 0.0}, {"CPU": 3.0}]) == [20]
    assert placement.surge_percents(served(), nodes, [{}, {}]) == [0]


def test_what_may_wait_for_processors_is_told(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [{"CPU": 0.0}, {"CPU": 4.0}, {"CPU": 4.0}]
    placement.warn_of_lack(served(engine_replicas=9), nodes, nodes, {"engine": 2})
    placement.warn_of_lack(served(engine_replicas=4, engine_cpus=2), nodes, nodes, {})
    placement.warn_of_lack(served(max_replicas=4), [GPU_NODE, GPU_NODE], [GPU_NODE, GPU_NODE], {})
    assert caplog.text == ""
    placement.warn_of_lack(served(engine_replicas=3, engine_cpus=4), nodes, nodes, {})
    assert (
        "CPUs for 2 of 3 engine replicas with 4 CPUs each; lower engine_replicas or engine_cpus" in caplog.text
    )
    assert "or add nodes" in caplog.text
    caplog.clear()
    placement.warn_of_lack(served(), nodes[:1], nodes[:1], {})
    assert "no node that can hold an engine has joined" in caplog.text
    caplog.clear()
    full: list[dict[str, float]] = [{}, {}, {"CPU": 1.0}]
    placement.warn_of_lack(served(engine_replicas=4, engine_cpus=2), nodes, full, {"engine": 4})
    assert caplog.text == ""
    placement.warn_of_lack(served(engine_replicas=4, engine_cpus=1), nodes, full, {"engine": 2})
    assert "2 engine replicas run, and there is room now for 1 more with 1 CPU each" in caplog.text
    assert "engine_replicas=2" in caplog.text


def test_what_is_short_is_named(caplog: pytest.LogCaptureFixture) -> None:
    held: list[dict[str, float]] = [{"CPU": 16.0}, {"CPU": 16.0, "GPU": 1.0}]
    nodes = [GPU_NODE, GPU_NODE]
    placement.warn_of_lack(served(engine_replicas=2), nodes, held, {"engine": 2})
    placement.warn_of_lack(served(engine_replicas=1), nodes, held, {})
    assert caplog.text == ""
    placement.warn_of_lack(served(engine_replicas=2), nodes, held, {})
    assert (
        "room now for 1 of 2 engine replicas with 1 GPU each, because other deployments or applications hold "
        "GPUs; the others start only once these are free"
    ) in caplog.text
    caplog.clear()
    placement.warn_of_lack(served(engine_replicas=2), nodes, [{"CPU": 16.0}] * 2, {"engine": 1})
    assert "room now for 0 more with 1 GPU each, so the deploy of 2 waits until GPUs are free" in caplog.text
    assert "CPU" not in caplog.text
    caplog.clear()
    busy: list[dict[str, float]] = [{"CPU": 1.0, "GPU": 1.0}]
    placement.warn_of_lack(served(engine_cpus=2), [GPU_NODE], busy, {})
    assert "room now for 0 of 1 engine replicas with 2 CPUs each, because other" in caplog.text
    assert "hold CPUs" in caplog.text


def test_a_machine_with_too_few_gpus_is_told_so() -> None:
    with pytest.raises(
        ConfigError, match=r"there are GPUs for 1 of 3 engine replicas with 1 GPU each; lower max_replicas$"
    ):
        placement.check_room(served(max_replicas=3), [GPU_NODE])
    with pytest.raises(
        ConfigError, match=r"there are CPUs for 0 of 1 .* with 32 CPUs each; lower engine_cpus$"
    ):
        placement.check_room(served(engine_cpus=32), [GPU_NODE])


def test_without_a_cluster_nothing_is_said_of_processors(caplog: pytest.LogCaptureFixture) -> None:
    placement.warn_of_lack(served(), [], [], {})
    placement.warn_of_lack(served(engine_replicas=4, engine_cpus=2), [], [], {})
    assert caplog.text == ""


def test_what_is_free_is_of_the_nodes_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One joins at each look: what is free of it belongs to no node of the look before."""
    looks = itertools.count(1)

    def look() -> list[dict[str, Any]]:
        number = next(looks)
        return [{"NodeID": f"{n}", "Alive": True, "Resources": {"CPU": 4.0}} for n in range(number)]

    monkeypatch.setattr(placement.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(placement.ray, "nodes", look)
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: {})
    nodes, free = placement.nodes_and_free()
    assert len(nodes) == len(free) == 1


def test_the_build_tells_of_what_may_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "cluster_nodes", lambda: [{"CPU": 4.0}] * 2)
    monkeypatch.setattr(placement, "nodes_and_free", lambda: ([{"CPU": 4.0}] * 2, [{"CPU": 0.0}] * 2))
    monkeypatch.setattr(placement, "running_replicas", lambda: {"engine": 2})
    monkeypatch.setattr(application, "check_models", lambda _: True)
    built: list[int] = []
    monkeypatch.setattr(application, "engine_deployment", lambda *args: built.append(args[-1]) or Unbound())
    application.build({"engine_replicas": 3, "engine_cpus": 2})
    assert "2 engine replicas run, and there is room now for 0 more" in caplog.text
    assert built == [0]


class Unbound:
    """Stands for a deployment."""

    def bind(self, *_: object) -> Unbound:
        return self


def test_what_is_free_and_who_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "Alive": name != "dead", "Resources": {"CPU": 4.0}} for name in ("a", "dead", "b")
    ]
    actors = [
        "SERVE_REPLICA::quire#engine#x1",
        "SERVE_REPLICA::quire#engine#x2",
        "SERVE_REPLICA::quire#ingress#y",
    ]
    named = [{"name": name, "namespace": "serve"} for name in [*actors, "SERVE_CONTROLLER_ACTOR"]]
    monkeypatch.setattr(placement.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(placement.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: {"b": {"CPU": 1.0}, "dead": {}})
    monkeypatch.setattr(placement.ray.util, "list_named_actors", lambda all_namespaces: named)
    assert placement.nodes_and_free() == ([{"CPU": 4.0}] * 2, [{}, {"CPU": 1.0}])
    assert placement.running_replicas() == {"engine": 2, "ingress": 1}


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


def test_which_node_is_rays_head(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": "head", "Resources": {"CPU": 4.0, "node:__internal_head__": 1.0}},
        {"NodeID": "other", "Resources": {"CPU": 4.0}},
    ]
    monkeypatch.setattr(placement.ray, "nodes", lambda: nodes)
    assert [placement.on_head(name) for name in ("head", "other", "gone")] == [True, False, False]


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
    placement.check_room(models, nodes)
    assert placement.surge_percents(models, nodes) == [0, 0]
    assert placement.surge_percents(models, [*nodes, {"CPU": 4.0}]) == [20, 20]
    with pytest.raises(
        ConfigError, match=r"models: one: .* for 2 of 3 engine replicas with 4 CPUs each; lower engine"
    ):
        placement.check_room(both({"engine_replicas": 3}, {"engine_replicas": 1}, engine_cpus=4), nodes)
    with pytest.raises(
        ConfigError,
        match=r"one: .* there are GPUs for 0 of 1 engine .* 1 GPU each; set device to cpu for some$",
    ):
        placement.check_room(both({}, {}), [GPU_NODE])


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
