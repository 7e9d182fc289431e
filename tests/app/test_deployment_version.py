"""A change of the options restarts what it concerns, and nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import constants, deploy_utils
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig

from app import application, config, deployment_version
from app.launch import serving

FIXED = {"engine_cpus": 1, "threads": 1}  # no shares, which depend on the number of replicas

CHANGES: dict[str, Any] = {
    "model": "/models/other",
    "served_model_name": "other",
    "log_level": "DEBUG",
    "log_format": "json",
    "drain_timeout_s": 5,
    "stuck_after_s": 5,
    "unavailable_after_s": 61,
    "max_live_choices": 5,
    "max_wait_s": 5,
    "tenant_header": "x-tenant",
    "admin_routes": True,
    "ingress_replicas": 2,
    "routing": "least_tokens",
    "engine_replicas": 5,
    "max_replicas": 5,
    "ttft_target_s": 5,
    "scaling_shadow": True,
    "threads": 2,
    "engine_cpus": 2,
    "max_num_seqs": 5,
    "kv_memory": "1GiB",
    "device": "cpu",
}


class Replica:
    """Stands for the engine replica's class."""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve asks for the job, and Ray would start a cluster to have one."""
    job = SimpleNamespace(get_job_id=lambda: "job")
    monkeypatch.setattr(deploy_utils, "ray", SimpleNamespace(get_runtime_context=lambda: job))


def as_serve_gets_them(**args: Any) -> dict[str, DeploymentConfig]:
    """Each deployment's configuration in the controller after ``serve deploy``."""
    built = build_app(application.assemble(config.load({**FIXED, **args}, {}), Replica), name="quire")
    found = {}
    for one in built.deployments:
        made = deploy_utils.get_deploy_args(
            one.name, one._replica_config, deployment_config=one._deployment_config, version="of all"
        )
        found[one.name] = DeploymentConfig.from_proto_bytes(made["deployment_config_proto_bytes"])
    return found


@cache
def changed(name: str = "") -> dict[str, DeploymentConfig]:
    """The same with one of ``CHANGES``, or with none; made once for all tests."""
    return as_serve_gets_them(**({name: CHANGES[name]} if name else {}))


def test_replicas_run_on_one_loop_and_none_has_an_environment_of_its_own() -> None:
    """Ray loads twice in a worker that has one."""
    built = build_app(application.assemble(config.load(FIXED, {}), Replica), name="quire")
    assert not [one.name for one in built.deployments if "runtime_env" in one._replica_config.ray_actor_options]
    assert (
        serving.controller_environment().items()
        >= {**serving.ONE_LOOP, **serving.SELDOM, **serving.INLINED}.items()
    )
    assert {*serving.ONE_LOOP, *serving.SELDOM} <= vars(constants).keys()
    assert serving.ONE_LOOP["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] == "0"


def test_a_serve_that_could_end_with_a_full_dev_shm_is_warned_of() -> None:
    """It was started by ``serve run``, or with an earlier ``serve_config.yaml``."""
    (name,) = serving.INLINED
    assert serving.full_shm_warning({**serving.controller_environment()}) is None
    told = serving.full_shm_warning({})
    assert told is not None
    assert (
        f"a full /dev/shm will end Ray on its node, with all replicas there: set {name}=8388608 as in" in told
    )


def test_serve_knows_what_restarts_haproxy_soon() -> None:
    """Serve ignores a variable that it does not know."""
    name = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
    assert serving.HAPROXY_ENVIRONMENT[name] == "3"
    assert name in Path(constants.__file__).read_text()


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_restarts_what_it_concerns(name: str) -> None:
    before, after = changed(), changed(name)
    restarted = {one for one in before if before[one].version != after[one].version}
    reports = {"engine"} if name == "max_replicas" else set()  # Serve passes on those of new replicas only
    assert restarted == set(config.OPTIONS[name].restarts) | reports


def test_engines_restart_when_their_number_begins_or_ceases_to_follow_demand() -> None:
    fixed, three, four = (
        as_serve_gets_them(),
        as_serve_gets_them(max_replicas=3),
        as_serve_gets_them(max_replicas=4),
    )
    assert restarted(fixed, three) == restarted(three, fixed) == {"ingress", "engine"}
    assert restarted(three, four) == {"ingress"}


def test_what_the_names_promise() -> None:
    """The declarations themselves, for the options whose change is most frequent or most expensive."""
    restarts = {name: set(config.OPTIONS[name].restarts) for name in CHANGES}
    assert restarts["model"] == {"ingress", "engine"}
    assert restarts["max_num_seqs"] == restarts["threads"] == restarts["kv_memory"] == {"engine"}
    for name in ("routing", "unavailable_after_s", "log_level", "max_replicas", "engine_replicas"):
        assert restarts[name] == {"ingress"}
    assert restarts["stuck_after_s"] == set()
    # Ingresses go by them: when a replica died, and which share of a key's limits is theirs.
    assert restarts["drain_timeout_s"] == restarts["ingress_replicas"] == {"ingress"}


def test_what_restarts_no_engine_reaches_those_that_run() -> None:
    before, after = as_serve_gets_them(), as_serve_gets_them(log_level="DEBUG", stuck_after_s=5)
    assert before["engine"].version == after["engine"].version
    now = config.load({}, {}).with_live(after["engine"].user_config, "engine").service
    assert (now.log_level, now.stuck_after_s) == ("DEBUG", 5)


def test_other_options_leave_engines_as_they_are() -> None:
    assert as_serve_gets_them()["engine"] == as_serve_gets_them(unavailable_after_s=61)["engine"]


def test_no_option_of_args_reconfigures_an_ingress() -> None:
    """While it reconfigures, Serve takes it from HAProxy, and there may be no other."""
    before = changed()["ingress"].user_config
    for name in CHANGES:
        assert changed(name)["ingress"].user_config == before


def test_equal_options_make_equal_deployments() -> None:
    assert as_serve_gets_them(max_replicas=3) == as_serve_gets_them(max_replicas=3)


def test_other_code_restarts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ingresses and engines of different releases would not understand each other."""
    before = as_serve_gets_them()
    monkeypatch.setattr(deployment_version, "_code", lambda: "another release")
    after = as_serve_gets_them()
    assert all(before[name].version != after[name].version for name in ("ingress", "engine"))


def test_another_class_restarts_the_engines() -> None:
    class Other(Replica):
        pass

    options = config.load({}, {})
    versions = {deployment_version.version_of(options, "engine", one) for one in (Replica, Other)}
    assert len(versions) == 2


def test_an_ingress_leaves_when_the_next_one_answers() -> None:
    assert as_serve_gets_them()["ingress"].max_surge_percent == 100


def restarted(before: dict[str, DeploymentConfig], after: dict[str, DeploymentConfig]) -> set[str]:
    """Those whose replicas are replaced, or new."""
    return {one for one in after if one not in before or before[one].version != after[one].version}


def test_another_model_restarts_no_engine_of_the_others() -> None:
    one = as_serve_gets_them(models={"a": {}})
    two = as_serve_gets_them(models={"a": {}, "b": {"dtype": "float32"}})
    assert set(two) == {"ingress", "engine-a", "engine-b"}
    assert restarted(one, two) == {"ingress", "engine-b"}
    assert restarted(two, one) == {"ingress"}


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({"dtype": "float16"}, {"engine-b"}),
        ({"kv_memory": "1GiB"}, {"engine-b"}),
        ({"max_replicas": 3}, {"ingress", "engine-b"}),
        ({"tool_parser": "mistral"}, {"ingress"}),
        ({"model": "/models/other"}, {"ingress", "engine-b"}),
    ],
)
def test_an_option_of_one_model_restarts_its_engines_only(change: dict[str, Any], replaced: set[str]) -> None:
    before = as_serve_gets_them(models={"a": {}, "b": {}})
    after = as_serve_gets_them(models={"a": {}, "b": change})
    assert restarted(before, after) == replaced
    assert before["engine-a"] == after["engine-a"]


def test_the_order_of_the_models_concerns_the_ingress() -> None:
    """The first is for requests that name none."""
    one, other = as_serve_gets_them(models=["a", "b"]), as_serve_gets_them(models=["b", "a"])
    assert restarted(one, other) == {"ingress"}


def test_another_try_of_a_model_changes_its_deployment_and_restarts_nothing() -> None:
    options = config.load({**FIXED, "models": {"a": {}, "b": {}}}, {})
    first, again = (
        {one.name: one._deployment_config for one in build_app(made, name="quire").deployments}
        for made in (
            application.assemble(options, Replica),
            application.assemble(options, Replica, tries={"b": 1}),
        )
    )
    assert {name for name in first if dict(first[name]) != dict(again[name])} == {"engine-b"}
    assert {name: one.version for name, one in first.items()} == {
        name: one.version for name, one in again.items()
    }
