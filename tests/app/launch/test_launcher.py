"""What keeps ``make serve`` from starting is told in one clear line."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayTaskError
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.exceptions import RayServeException
from ray.serve.schema import APIType
from safetensors.torch import save_file

from app import __main__ as command
from app import application, config, option_groups
from app.launch import launcher, local_server, preflight, serving, terminal
from app.launch.instance import Instance
from app.launch.model_starts import RETRY_S, SETTLE_S, ModelStarts
from engine.errors import ConfigError
from engine.kv.pool_size import PoolSize


@pytest.fixture
def taken_port() -> object:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.OPTIONS:
        monkeypatch.delenv(f"QUIRE_{name.upper()}", raising=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = Instance("mine")
    yield made
    made.remove()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(list(arguments)) == 1
    line = capsys.readouterr().err
    assert line.startswith("quire: ")
    assert line.count("\n") == 1
    return line


def test_port_in_use(capsys: pytest.CaptureFixture[str], taken_port: int) -> None:
    line = refusal(capsys, "--port", str(taken_port))
    assert f"127.0.0.1:{taken_port}" in line
    assert "port=" in line


@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_no_port(capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert f"port='{port}'" in refusal(capsys, f"port={port}")


def test_unknown_and_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "modell" in refusal(capsys, "modell=x")
    assert "engine_replicas='none of them'" in refusal(capsys, "engine_replicas=none of them")
    assert "'model' is not of the form option=value" in refusal(capsys, "model")
    assert "dtype='int3'" in refusal(capsys, "dtype=int3")


def test_what_was_meant_is_hinted_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert "write max_replicas=4" in refusal(capsys, "--max_replicas=4")
    assert "write max_replicas=4" in refusal(capsys, "--max-replicas=4", "seed=1")
    assert "write max_replicas=..." in refusal(capsys, "--max-replicas", "4")
    for given, meant in {"--prot": "port", "--engine-replica=2": "engine_replicas"}.items():
        line = refusal(capsys, given, "8001")
        assert line.startswith(f"quire: unknown switch '{given}'; did you mean {meant}? "), line
    assert "unknown switch '--zzz'; options: admin_routes, " in refusal(capsys, "--zzz")
    assert "name is missing before '='" in refusal(capsys, "=3")


def test_missing_model_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refusal(capsys, f"model={tmp_path / 'nothing'}", f"port={free_port()}")
    assert "nothing" in line


GIB = 2**30
MIB = 2**20
TOKEN = 2 * 4 * 8 * 64 * 2  # bytes of KV in 16 bits: 4 layers, 8 heads of 64
HEADS = 2 * 1000 * 512  # the embedding table, and the head that is packed from it
WEIGHTS = HEADS + 4 * (4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512) + 512  # numbers


def save_model(folder: Path, dtype: str) -> Path:
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": dtype,
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({"model.norm.weight": torch.ones(512)}, folder / "model.safetensors")
    return folder


def check(folder: Path, available: int, **args: Any) -> preflight.Fit:
    return preflight.check_memory(config.load({"device": "cpu", **args}, {}), folder, available)


def test_too_little_memory(tmp_path: Path) -> None:
    save_model(tmp_path, "bfloat16")
    check(tmp_path, 6 * GIB, engine_replicas=3, kv_memory="1GiB")
    with pytest.raises(ConfigError, match=r"kv_memory asks for 1 GiB .* by each of 3 engines; lower kv_memory"):
        check(tmp_path, 5 * GIB, engine_replicas=3, kv_memory="1GiB")
    with pytest.raises(ConfigError, match=r"3 engine replicas need about 1\.8\d GiB .* 1 GiB are available"):
        check(tmp_path, GIB, engine_replicas=3)


def test_memory_for_as_many_replicas_as_may_be(tmp_path: Path) -> None:
    save_model(tmp_path, "bfloat16")
    check(tmp_path, 6 * GIB, max_replicas=3, kv_memory="1GiB")
    with pytest.raises(ConfigError, match=r"by each of 3 engines; lower kv_memory"):
        check(tmp_path, 5 * GIB, max_replicas=3, kv_memory="1GiB")
    with pytest.raises(ConfigError, match=r"3 engine replicas need .* lower max_replicas"):
        check(tmp_path, GIB, max_replicas=3)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"engine_replicas": 3}, "3"),
        (
            {"max_replicas": 4},
            "1, 1 to 4 with demand (first token within 2 s, 0.05 s per token; "
            "down after twice the startup time of lower need)",
        ),
        (
            {"max_replicas": 2, "min_replicas": 0, "ttft_target_s": 1.5, "scale_down_after_s": 20},
            "1, 0 to 2 with demand (first token within 1.5 s, 0.05 s per token; down after 20 s of lower need)",
        ),
        (
            {"max_replicas": 4, "engine_replicas": 3, "scaling_policy": "occupancy"},
            "3, 1 to 4 with demand (70% of the KV blocks in use; "
            "down after twice the startup time of lower need)",
        ),
        (
            {"max_replicas": 4, "scaling_shadow": True},
            "1, 1 to 4 with demand (first token within 2 s, 0.05 s per token; "
            "down after twice the startup time of lower need; shadow mode: reported only)",
        ),
    ],
)
def test_how_many_replicas_is_told(args: dict[str, Any], line: str) -> None:
    assert terminal.replicas_line(config.load(args, {}).scaling, 3) == line


def test_replicas_that_are_not_ready_are_told_as_such() -> None:
    two = config.load({"engine_replicas": 2}, {}).scaling
    assert terminal.replicas_line(two, 1) == "2 (1 ready so far)"
    scaled = config.load({"engine_replicas": 2, "max_replicas": 4}, {}).scaling
    assert terminal.replicas_line(scaled, 1).startswith("2 (1 ready so far), 1 to 4 with demand")


def test_more_replicas_than_cores_are_warned_of() -> None:
    assert terminal.shared_cores(config.served_models(config.load({"max_replicas": 2}, {})), 2) == []
    assert terminal.shared_cores(config.served_models(config.load({"max_replicas": 8}, {})), 2) == [
        "warning: 8 engine replicas would share 2 cores: more than 2 do not shorten a step; "
        "lower max_replicas or raise tpot_target_s"
    ]
    assert terminal.shared_cores(config.served_models(config.load({}, {})), 1) == []
    assert terminal.shared_cores(config.served_models(config.load({"engine_replicas": 2}, {})), 1) == [
        "warning: 2 engine replicas would share 1 core: more than 1 do not shorten a step; "
        "lower engine_replicas"
    ]


def test_replicas_that_come_and_go_are_told_once() -> None:
    said: list[str] = []
    watch = terminal.ReplicaWatch(1, said.append)
    for ready in (1, 2, 2, None, 2, 0):
        watch.update(ready)
    assert said == ["engine replicas: 1 -> 2", "engine replicas: 2 -> 0"]


@pytest.mark.parametrize(
    ("health", "replicas", "started"),
    [
        ({}, 1, False),
        ({"routable": 0, "asleep": False}, 0, False),
        ({"routable": 1}, 1, True),
        ({"routable": 0, "asleep": True}, 0, True),
        ({"routable": 0, "asleep": True}, 1, False),  # it has loaded, but the ingress has yet to hear of it
    ],
)
def test_what_went_to_sleep_at_once_has_started(health: dict[str, Any], replicas: int, started: bool) -> None:
    assert local_server.serves(health, replicas) is started


class Controller:
    """Stands for the handle of Serve's controller, which answers with ``answer`` or fails with it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.get_serve_instance_details = self

    def remote(self) -> Any:
        return self.answer


@pytest.mark.parametrize(
    "fault", [GetTimeoutError("late"), ActorUnavailableError("restarts", None), RayServeException("gone")]
)
def test_a_status_that_cannot_be_read_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, instance: Instance
) -> None:
    def get(asked: Exception, *, timeout: float) -> None:
        raise asked

    client = SimpleNamespace(_controller=Controller(fault))
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    monkeypatch.setattr("ray.get", get)
    assert local_server.LocalServer(option_groups.LaunchOptions(port=1), instance).ready() is None


def test_a_node_of_ray_that_is_late_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    def late(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("ray.init", late)
    with pytest.raises(ConfigError, match=r"^Ray does not start: Exception: The current node timed out"):
        local_server.LocalServer(option_groups.LaunchOptions(), instance).start()


def test_a_home_that_is_read_only_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, instance: Instance, tmp_path: Path
) -> None:
    """Ray makes a token there."""

    def read_only(**_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / ".ray"))

    monkeypatch.setattr(os, "environ", {**os.environ, "HOME": str(tmp_path)})
    monkeypatch.setattr("ray.init", read_only)
    with pytest.raises(ConfigError, match=rf"^Ray does not start: .*'{tmp_path}/\.ray'; set RAY_AUTH_TOKEN to"):
        local_server.LocalServer(option_groups.LaunchOptions(), instance).start()


def test_a_user_without_a_home_folder_is_told_what_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert local_server._token_hint(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/ray/x")) == ""


def test_another_servers_health_does_not_count(monkeypatch: pytest.MonkeyPatch, instance: Instance) -> None:
    body = {"instance": "other", "routable": 1}
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout, context: io.StringIO(json.dumps(body)))
    server = local_server.LocalServer(option_groups.LaunchOptions(), instance)
    assert server._health() == {}
    body["instance"] = "mine"
    assert server._health() == body


def test_replicas_that_a_new_controller_finds_have_not_gone() -> None:
    states = {ReplicaState.RECOVERING: 1, ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1}
    engine = SimpleNamespace(replica_states={**states, ReplicaState.STOPPING: 1})
    application = SimpleNamespace(deployments={config.ENGINE_DEPLOYMENT: engine})
    assert local_server._counted(application, *local_server.LOADED) == 2
    assert local_server._counted(application, "RUNNING") == 1
    assert local_server._counted(application) == 4
    assert local_server._counted(None) == 0


def test_pools_of_every_kind_are_counted(tmp_path: Path) -> None:
    """One sequence of 4096 tokens takes 32 MiB, so two replicas of 630 MiB do not fit into 1300 MiB."""
    save_model(tmp_path, "bfloat16")
    assert TOKEN * 4096 == 32 * MIB
    with pytest.raises(ConfigError, match="max_model_len=4096"):
        check(tmp_path, 1300 * MIB, engine_replicas=2)
    with pytest.raises(ConfigError, match="num_blocks asks for 1 GiB"):
        check(tmp_path, 3 * GIB, engine_replicas=2, num_blocks=8192)


def test_the_planned_pool_is_that_of_the_replicas(tmp_path: Path) -> None:
    save_model(tmp_path, "bfloat16")
    fit = check(tmp_path, 10 * GIB, engine_replicas=4)
    assert fit.dtype == "bfloat16"
    assert fit.pool is not None
    left = 10 * GIB - 4 * (preflight.PROCESS_BYTES + 2 * WEIGHTS)
    assert fit.pool.num_blocks == left // 8 // (16 * TOKEN)


@pytest.mark.parametrize(
    ("stored", "asked"), [("float32", "float32"), ("float32", "auto"), ("bfloat16", "float32")]
)
def test_weights_are_counted_in_the_dtype_that_they_will_have(tmp_path: Path, stored: str, asked: str) -> None:
    save_model(tmp_path, stored)
    needed = preflight.PROCESS_BYTES + 4 * WEIGHTS
    pool = {"engine_replicas": 1, "num_blocks": 1, "dtype": asked}
    assert check(tmp_path, needed + MIB, **pool).dtype == "float32"
    with pytest.raises(
        ConfigError, match=r"an engine replica needs about .* its KV pool, .* available; choose a smaller"
    ):
        check(tmp_path, needed, **pool)


def test_the_limit_of_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "bfloat16")
    monkeypatch.setattr("engine.kv.pool_size.cgroup_available", lambda: 100 * MIB)
    with pytest.raises(ConfigError, match="100 MiB are available"):
        preflight.check_memory(config.load({"device": "cpu"}, {}), tmp_path)


def test_ports_of_every_family(taken_port: int) -> None:
    preflight.check_port("localhost", free_port())
    with pytest.raises(ConfigError, match=r"cannot listen on no such host: .*host"):
        preflight.check_port("no such host", 8000)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:"):
        preflight.check_port("192.0.2.1", 8000)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ports_of_version_6(instance: Instance) -> None:
    with socket.socket(socket.AF_INET6) as listener:
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=r"cannot listen on ::1:.*port="):
            preflight.check_port("::1", port)
    preflight.check_port("::1", port)
    server = local_server.LocalServer(option_groups.LaunchOptions(host="::", port=port), instance)
    assert server.url == f"http://[::1]:{port}"


def test_progress_is_told_every_few_seconds() -> None:
    said: list[str] = []
    progress = terminal.Progress(2, said.append)
    for now, ready in [(100.0, 0), (100.2, 0), (104.9, 1), (105.0, 1), (111.0, 2)]:
        progress.update(ready, now)
    assert [line.strip() for line in said] == [
        "waiting for engine replicas: 0 of 2 ready",
        "waiting for engine replicas: 1 of 2 ready after 5 s",
        "waiting for proxy, ingress, and channels",
    ]


@pytest.mark.parametrize("keys_required", [False, True])
def test_what_is_announced_can_be_followed(keys_required: bool) -> None:
    said: list[str] = []
    url = "http://127.0.0.1:8001"
    fit = preflight.Fit("bfloat16", PoolSize(100, 16, 1), 4096)
    options = config.load({}, {})
    terminal.announce(
        url,
        "HAProxy",
        "127.0.0.1:8266",
        options,
        [terminal.Started(*config.served_models(options), fit, 1, [1600])],
        keys_required,
        said.append,
    )
    text = "\n".join(said)
    assert f"{url}/ to chat, {url}/dashboard for the fleet, {url}/docs" in text
    assert "Ray's dashboard http://127.0.0.1:8266" in text
    assert "KV in bfloat16, 1,600 tokens (100 blocks) in each replica" in text
    assert "limited to the 1,600 tokens of the KV pool" in text
    words = shlex.split(said[-1].partition("try: ")[2])
    assert ("authorization: Bearer KEY" in words) == keys_required
    assert ("any name, and an API key as the password" in text) == keys_required
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == options.service.model_name
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


TWO: dict[str, Any] = {"a": {"engine_replicas": 1}, "b": {"max_replicas": 3, "dtype": "float32"}}


def two_models(folder: Path) -> tuple[config.ServedModel, ...]:
    models = {name: {**options, "model": str(folder)} for name, options in TWO.items()}
    return config.served_models(config.load({"device": "cpu", "models": models}, {}))


def test_models_share_the_memory(tmp_path: Path) -> None:
    """Each of four engines may use a quarter of what all weights leave."""
    save_model(tmp_path, "bfloat16")
    needed = 4 * preflight.PROCESS_BYTES + (2 + 3 * 4) * WEIGHTS
    a, b = preflight.check_memory_of_models(two_models(tmp_path), [tmp_path] * 2, needed + GIB)
    assert a.pool is not None
    assert b.pool is not None
    assert a.pool.num_blocks == GIB // 8 // (16 * TOKEN)
    assert (a.pool.bytes, a.dtype, b.dtype) == (b.pool.bytes, "bfloat16", "float32")
    with pytest.raises(
        ConfigError, match=r"models: a: an engine replica needs .* pool, 3 of other models another"
    ):
        preflight.check_memory_of_models(two_models(tmp_path), [tmp_path] * 2, needed)


def test_the_share_of_each_model_is_announced(tmp_path: Path) -> None:
    said: list[str] = []
    fits = [preflight.Fit("bfloat16", PoolSize(100, 16, 1), 16), preflight.Fit("float32", None, 16)]
    options = config.load({"models": TWO, "threads": 2}, {})
    models = config.served_models(options)
    served = [
        terminal.Started(models[0], fits[0], 1, [1584]),
        terminal.Started(models[1], fits[1], 1, [32]),
    ]
    terminal.announce("http://here", "HAProxy", "", options, served, False, said.append)
    assert said[0] == "Quire serves a, b at http://here/v1 through HAProxy"
    assert "a: engine replicas 1, each with 2 CPU threads" in said[1]
    assert said[2] == (
        "    KV in bfloat16, 1,584 tokens (99 blocks) in each replica, not the 1,600 planned before the start"
    )
    assert "b: engine replicas 1, 1 to 3 with demand" in said[3]
    assert said[4] == "    KV in float32, 32 tokens in each replica"


POOL = PoolSize(100, 16, 1)
LIMITED = (
    "  warning: requests are limited to the 1,600 tokens of the KV pool, below the context length of 2,000; "
    "raise kv_memory"
)


@pytest.mark.parametrize(
    ("fit", "pools", "lines"),
    [
        (  # with keys, the launcher is not told
            preflight.Fit("bfloat16", POOL, 1600),
            [],
            ["  KV in bfloat16, an estimated 1,600 tokens (100 blocks) in each replica"],
        ),
        (
            preflight.Fit("bfloat16", POOL, 1600),
            [1600],
            ["  KV in bfloat16, 1,600 tokens (100 blocks) in each replica"],
        ),
        (
            preflight.Fit("bfloat16", POOL, 2000),
            [3200],
            [
                "  KV in bfloat16, 3,200 tokens (200 blocks) in each replica, not the 1,600 planned before the "
                "start"
            ],
        ),
        (  # a request may go to the largest
            preflight.Fit("bfloat16", PoolSize(200, 16, 1), 2000),
            [1600, 800],
            [
                "  KV in bfloat16, 800 to 1,600 tokens in each replica, not the 3,200 planned before the start",
                LIMITED,
            ],
        ),
        (preflight.Fit("bfloat16", None, 2000), [], ["  weights and KV in bfloat16"]),
        (
            preflight.Fit("bfloat16", None, 2000),
            [1600],
            ["  KV in bfloat16, 1,600 tokens in each replica", LIMITED],
        ),
    ],
)
def test_what_engines_hold_is_told_as_they_say_it(
    fit: preflight.Fit, pools: list[int], lines: list[str]
) -> None:
    assert terminal.fit_lines(fit, pools) == lines


@pytest.mark.parametrize(("of_b", "serving_b"), [("asleep", True), ("unavailable", False)])
def test_each_model_must_accept_requests(of_b: str, serving_b: bool) -> None:
    a, b = config.served_models(config.load({"models": TWO}, {}))
    engine = SimpleNamespace(replica_states={ReplicaState.RUNNING: 1})
    application = SimpleNamespace(deployments={"engine-a": engine, "ingress": engine})
    each = {"a": {"routable": 1}, "b": {"routable": 0, "asleep": of_b == "asleep"}}
    with_keys = list(each.values())  # the launcher has no key, so it gets no names
    for models in (each, with_keys):
        health = local_server._of_each({"routable": 1, "models": models}, (a, b))
        assert local_server._accepting(a, health, application) == 1
        assert local_server._accepting(b, health, application) == serving_b
    assert local_server._accepting(b, local_server._of_each({}, (a, b)), application) == 0
    assert local_server._counted(application) == 1


@pytest.mark.parametrize(
    ("args", "health", "accepting"),
    [
        ({"engine_replicas": 3}, {"routable": 2}, 2),
        ({"engine_replicas": 3, "replicas_per_ingress": 1}, {"routable": 1}, 3),
        ({"engine_replicas": 2, "max_replicas": 3}, {"routable": 1}, 1),
        ({"engine_replicas": 3}, {"routable": 0}, 0),
    ],
)
def test_replicas_that_accept_requests_are_counted(
    args: dict[str, Any], health: dict[str, Any], accepting: int
) -> None:
    (model,) = config.served_models(config.load(args, {}))
    engine = SimpleNamespace(replica_states={ReplicaState.RUNNING: 3})
    application = SimpleNamespace(deployments={"engine": engine, "ingress": engine})
    assert local_server._accepting(model, {model.name: health}, application) == accepting


TRIGGERS = {"DEPLOY_FAILED": "REPLICA_STARTUP_FAILED", "DIED": "HEALTH_CHECK_FAILED"}


CANNOT = (
    "warning: b cannot start, but the others can: ValueError: no memory for engine-b; the next try is in 60 s"
)


def status_of(**deployments: str) -> SimpleNamespace:
    """An application in Serve's words: of each deployment its status; one that is healthy has a replica."""
    found = {
        name: SimpleNamespace(
            status=DeploymentStatus.DEPLOY_FAILED if status == "DIED" else DeploymentStatus(status),
            status_trigger=DeploymentStatusTrigger(TRIGGERS.get(status, "UNSPECIFIED")),
            replica_states={ReplicaState.RUNNING: 1} if status == "HEALTHY" else {},
            message=f"RuntimeError: {name} died"
            if status == "DIED"
            else f"Traceback:\nValueError: no memory for {name}\n"
            if status == "DEPLOY_FAILED"
            else "",
        )
        for name, status in deployments.items()
    }
    words = {"DEPLOY_FAILED" if word == "DIED" else word for word in deployments.values()} - {"HEALTHY"}
    application = SimpleNamespace(status=min(words, default="RUNNING"), deployments=found, message="")
    return SimpleNamespace(applications={serving.APP_NAME: application})


def test_replicas_have_not_gone_while_another_deploy_builds(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    """Meanwhile Serve names no deployment, though all run on."""
    server = local_server.LocalServer(option_groups.LaunchOptions(), instance)
    course = iter([status_of(engine="HEALTHY", ingress="HEALTHY"), status_of(), status_of(engine="UPDATING")])
    monkeypatch.setattr(server, "_details", lambda: SimpleNamespace(_get_status=lambda: next(course)))
    assert [server.ready() for _ in range(3)] == [1, None, 0]


def deploy_two(monkeypatch: pytest.MonkeyPatch, instance: Instance, *course: SimpleNamespace) -> list[str]:
    """What the launcher says while the application goes through ``course``; model a serves from the start."""
    statuses = iter(course)
    monkeypatch.setattr("app.application.build_with", lambda args, replica_class, tries, warn: args)
    monkeypatch.setattr("app.launch.placement.cluster_nodes", lambda: [{"CPU": 2.0}])
    monkeypatch.setattr("ray.serve.run_many", lambda *_, **__: None)
    monkeypatch.setattr("ray.serve.status", lambda: next(statuses))
    server = local_server.LocalServer(option_groups.LaunchOptions(), instance)
    paces: list[float] = []
    monkeypatch.setattr(server, "_pace", paces.append)  # to find its controller, Serve would start a Ray
    health = {"a": {"routable": 1, "pool_tokens": [32, 16]}, "b": {"routable": 0}}
    monkeypatch.setattr(server, "_health", lambda: {"models": health})
    models = config.served_models(config.load({"models": {"a": {}, "b": {}}}, {}))
    said: list[str] = []
    started = server.deploy(
        {}, models, cast(threading.Event, SimpleNamespace(wait=lambda _: False)), said.append
    )
    assert started == {"a": 1}
    assert server.pool_tokens == {"a": [32, 16], "b": ()}
    assert paces == [local_server.STARTING_S, local_server.RUNNING_S]
    return said


def test_a_model_that_cannot_start_is_named_and_the_others_serve(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    starting = status_of(**{"engine-a": "UPDATING", "engine-b": "UPDATING", "ingress": "UPDATING"})
    half = status_of(**{"engine-a": "UPDATING", "engine-b": "DEPLOY_FAILED", "ingress": "UPDATING"})
    failed = status_of(**{"engine-a": "HEALTHY", "engine-b": "DEPLOY_FAILED", "ingress": "HEALTHY"})
    said = deploy_two(monkeypatch, instance, starting, half, failed)
    (warning,) = [line for line in said if "warning" in line]
    assert warning == CANNOT


class Attended:
    """A server of the models a, which serves, and b, which cannot start; ``tried`` counts the tries of b.

    ``source`` is how the application that Serve runs was deployed; ``None``: there is none any more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, instance: Instance) -> None:
        self.said: list[str] = []
        self.tried: list[dict[str, int]] = []
        self.now = 100.0
        self.source: APIType | None = APIType.IMPERATIVE
        self.server = server = local_server.LocalServer(option_groups.LaunchOptions(), instance)
        server._models = config.served_models(config.load({"models": {"a": {}, "b": {}}}, {}))
        server._say, server._starts = self.said.append, ModelStarts(server._models, "ingress", self.said.append)
        monkeypatch.setattr(server, "_details", self._details)
        monkeypatch.setattr(server, "_health", lambda: {"models": {"a": {"routable": 1}}})
        monkeypatch.setattr(local_server, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("ray.serve.run_many", lambda *_, **__: None)
        monkeypatch.setattr("app.application.build_with", self._build)

    def attend(self, after: float = 0.0) -> None:
        self.now += after
        self.server.attend()

    def _details(self) -> SimpleNamespace:
        status = status_of(**{"engine-a": "HEALTHY", "engine-b": "DEPLOY_FAILED", "ingress": "HEALTHY"})
        deployed = {} if self.source is None else {serving.APP_NAME: SimpleNamespace(source=self.source)}
        return SimpleNamespace(applications=deployed, _get_status=lambda: status)

    def _build(self, args: object, replica_class: None, tries: dict[str, int], *, warn: bool) -> None:
        assert not warn
        self.tried.append(dict(tries))
        if len(self.tried) == 2:
            raise ConfigError("the folder of b is gone")


def test_a_model_that_cannot_start_is_deployed_again_by_itself(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    attended = Attended(monkeypatch, instance)
    attended.attend()
    assert (attended.said, attended.tried) == ([CANNOT], [])
    attended.attend(after=RETRY_S)
    assert attended.tried == [{"b": 1}]
    attended.attend(after=SETTLE_S)
    attended.attend(after=2 * RETRY_S)
    assert attended.tried == [{"b": 1}, {"b": 2}]
    assert attended.said[2:] == ["warning: b cannot be tried again now: ConfigError: the folder of b is gone"]


@pytest.mark.parametrize("source", [APIType.DECLARATIVE, None])
def test_a_retry_does_not_undo_what_serve_deploy_has_deployed_since(
    monkeypatch: pytest.MonkeyPatch, instance: Instance, source: APIType | None
) -> None:
    attended = Attended(monkeypatch, instance)
    attended.attend()
    attended.source = source
    attended.attend(after=RETRY_S)
    attended.attend(after=RETRY_S)
    told = "another deploy has replaced this one; the launcher no longer retries b"
    assert (attended.said, attended.tried) == ([CANNOT, told], [])


def test_without_any_model_that_can_start_the_launcher_ends(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    failed = status_of(**{"engine-a": "DEPLOY_FAILED", "engine-b": "DEPLOY_FAILED", "ingress": "UPDATING"})
    with pytest.raises(
        ConfigError, match=r"start: a: .*: no memory for engine-a; b: .*: no memory for engine-b$"
    ):
        deploy_two(monkeypatch, instance, failed)
    for others in ({}, {"engine-b": "DEPLOY_FAILED"}, {"engine-a": "DIED"}):
        with pytest.raises(ConfigError, match=r"cannot start: ValueError: no memory for ingress$"):
            deploy_two(monkeypatch, instance, status_of(ingress="DEPLOY_FAILED", **others))


def test_a_proxy_that_does_not_start_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    """Serve does not wait for it, and without it the launcher would, for as long as any start may take."""
    server = local_server.LocalServer(option_groups.LaunchOptions(), instance)
    server._check_proxies()  # Serve had none to start

    def answer(proxies: list[str]) -> None:
        if "broken" in proxies:
            raise RayTaskError("ready", "Traceback:\nOSError: the port is taken", OSError("the port is taken"))

    monkeypatch.setattr("ray.wait", lambda proxies, **_: (proxies[:1], proxies[1:]))
    monkeypatch.setattr("ray.get", answer)
    server._proxies = ["fine", "broken"]
    server._check_proxies()
    with pytest.raises(ConfigError, match=r"proxy does not start: .*the port is taken"):
        server._check_proxies()


def test_an_engine_that_dies_meanwhile_is_not_taken_for_one_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    """Serve starts another, whatever becomes of the other models."""
    died = status_of(**{"engine-a": "DIED", "engine-b": "UPDATING", "ingress": "UPDATING"})
    both = status_of(**{"engine-a": "DIED", "engine-b": "DEPLOY_FAILED", "ingress": "UPDATING"})
    back = status_of(**{"engine-a": "HEALTHY", "engine-b": "DEPLOY_FAILED", "ingress": "HEALTHY"})
    said = deploy_two(monkeypatch, instance, died, died, both, back)
    assert [line for line in said if "warning" in line] == [
        "warning: an engine replica of a has died; Serve starts another",
        CANNOT,
    ]


def test_models_of_a_file_reach_the_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have another folder, where the file may not be."""
    (tmp_path / "models.yaml").write_text("{a: {}, b: {}}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher.model_store, "resolve", lambda name: tmp_path / name)
    monkeypatch.setattr(
        launcher, "check_memory_of_models", lambda models, folders: [preflight.Fit("bfloat16", None, 1)] * 2
    )
    given: dict[str, Any] = {}

    class Server:
        url, dashboard = "http://here", ""

        def __init__(self, *_: object) -> None: ...

        def start(self) -> None: ...

        def deploy(self, args: dict[str, Any], models: Any, stop: Any, say: Any) -> None:
            given.update(args)
            raise ConfigError("enough")

        def stop(self) -> None: ...

    monkeypatch.setattr(launcher, "LocalServer", Server)
    with pytest.raises(ConfigError, match="enough"):
        launcher.serve_here({"models": "models.yaml", "port": str(free_port())})
    assert given == {"models": [{"name": "a"}, {"name": "b"}]}


def test_warnings_about_options_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher loads the options and then builds the application; Serve may build it without a launcher."""
    monkeypatch.setenv("QUIRE_MODLE", "x")
    monkeypatch.setattr(launcher.model_store, "resolve", lambda name: tmp_path)
    monkeypatch.setattr(launcher, "check_memory_of_models", lambda *_: [preflight.Fit("bfloat16", None, 1)])
    monkeypatch.setattr(local_server.LocalServer, "start", lambda self: None)
    monkeypatch.setattr("app.launch.placement.cluster_nodes", lambda: [{"CPU": 8.0}])
    monkeypatch.setattr(application, "check_models", lambda models: True)
    built: list[config.AppConfig] = []
    monkeypatch.setattr(application, "assemble", lambda options, *_: built.append(options))

    def run(*_: object, **__: object) -> None:
        raise ConfigError("enough")

    monkeypatch.setattr("ray.serve.run_many", run)
    told = [
        "QUIRE_MODLE in the environment sets no option and is ignored; did you mean QUIRE_MODEL?",
        "scaling_shadow has no effect without max_replicas",
    ]
    with pytest.raises(ConfigError, match="enough"):
        launcher.serve_here({"scaling_shadow": "true", "port": str(free_port())}, lambda line: None)
    assert [message for message in caplog.messages if message in told] == told
    caplog.clear()
    application.build({"scaling_shadow": "true"})
    assert [message for message in caplog.messages if message in told] == told
    assert len(built) == 2


def test_a_server_watches_the_room_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it serves, ``/tmp`` may be filled by others: Ray's logs, and with them the server's, then end."""

    def attend(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher.model_store, "resolve", lambda name: tmp_path)
    monkeypatch.setattr(launcher, "check_memory_of_models", lambda *_: [preflight.Fit("bfloat16", None, 1)])
    for name in ("start", "deploy", "ready", "proxy"):
        monkeypatch.setattr(local_server.LocalServer, name, lambda self, *given: {} if given else None)
    monkeypatch.setattr(local_server.LocalServer, "attend", attend)
    monkeypatch.setattr(launcher, "announce", lambda *_: None)
    monkeypatch.setattr(launcher, "WATCH_EVERY_S", 0.001)
    monkeypatch.setattr(launcher, "lack", lambda: "too little")
    said: list[str] = []
    launcher.serve_here({"port": str(free_port())}, said.append)
    assert [line.split(";")[0] for line in said[-2:]] == ["too little", "stopping (up to half a minute) ..."]


class Told:
    """In Serve's place: the handle of the ingresses, which answer with ``answer``."""

    def __init__(self, events: list[str], answer: Callable[[], None]) -> None:
        self._events, self._answer = events, answer

    def broadcast(self, method: str) -> Told:
        self._events.append(method)
        return self

    def results(self, timeout_s: float) -> list[None]:
        self._answer()
        return []


def no_answer() -> None:
    raise RayServeException("the ingress is gone")


@pytest.mark.parametrize("answer", [lambda: None, no_answer])
def test_requests_end_before_the_server_is_killed(
    monkeypatch: pytest.MonkeyPatch, instance: Instance, answer: Callable[[], None]
) -> None:
    events: list[str] = []
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda name, app: Told(events, answer))
    monkeypatch.setattr("ray.shutdown", lambda: events.append("killed"))
    monkeypatch.setattr(local_server, "TOLD_WITHIN_S", 60.0)
    server = local_server.LocalServer(option_groups.LaunchOptions(), instance)
    server.stop()
    assert events == ["killed"]  # it has deployed nothing
    server._starts = ModelStarts([], "ingress", events.append)
    server.stop()
    assert events == ["killed", "end_requests", "killed"]


def test_a_server_stops_although_its_ingresses_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    asked, over = threading.Event(), threading.Event()
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: asked.set() or over.wait())
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(local_server, "TOLD_WITHIN_S", 0.01)
    server = local_server.LocalServer(option_groups.LaunchOptions(), instance)
    server._starts = ModelStarts([], "ingress", print)
    server.stop()
    assert asked.wait(60)
    over.set()


def test_a_server_outlives_what_its_lines_are_printed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """That may be a file in the full ``/tmp`` that a line is about."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", full := Full())
    command.say("too little")
    assert full.getvalue() == "too little\n"


def test_options_may_follow_switches(capsys: pytest.CaptureFixture[str]) -> None:
    assert "modell" in refusal(capsys, "--port", "8000", "modell=x")


@pytest.mark.skipif(not serving.haproxy_expected(), reason="no HAProxy here")
def test_version_6_behind_haproxy(capsys: pytest.CaptureFixture[str]) -> None:
    assert "IPv4 only" in refusal(capsys, "--host", "::1")
