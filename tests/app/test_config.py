"""Options: where they come from, how they are written, what is refused."""

from __future__ import annotations

import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._common.ray_option_utils import validate_actor_options

from app import application, config, option_groups
from app.launch import serving
from app.option_groups import SMALLEST_CPU
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_defaults() -> None:
    options = config.load({}, {})
    assert (options.service.model, options.scaling.engine_replicas, options.ingress.ingress_replicas) == (
        "smollm2-135m-instruct",
        1,
        1,
    )
    assert options.service.model_name == "smollm2-135m-instruct"


def test_words_are_read_as_their_type() -> None:
    options = config.load(
        {"engine_replicas": "3", "prefix_caching": "false", "kv_memory": "2GiB", "max_model_len": "auto"}, {}
    )
    assert options.scaling.engine_replicas == 3
    assert options.engine.prefix_caching is False
    assert options.engine.kv_memory == 2 * 2**30
    assert options.engine.max_model_len is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("1.5 GiB", 3 * 2**29), ("500MB", 500_000_000), ("2kib", 2048), (4096, 4096)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert config.load({"kv_memory": text}, {}).engine.kv_memory == size


@pytest.mark.parametrize("name", sorted(config.OPTIONS))
def test_auto_is_the_same_as_not_given(name: str) -> None:
    assert config.load({name: "auto"}, {}) == config.load({}, {})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("fp16", "float16"),
        ("Float", "float32"),
        ("fp32", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_other_names_of_data_types_are_the_same_options(name: str, meant: str) -> None:
    """Also for what decides whether a deploy restarts engines."""
    assert config.load({"dtype": name}, {}) == config.load({"dtype": meant}, {})
    assert config.load({}, {"QUIRE_DTYPE": name}).fixed("engine")["dtype"] == meant
    (model,) = config.served_models(config.load({"models": {"a": {"dtype": name}}}, {}))
    assert model.options.engine.dtype == meant


@pytest.mark.parametrize("name", sorted(config.OPTIONS))
@pytest.mark.parametrize("value", ["x y", 1.5, "-3", [1], {"a": 1}, True, math.nan, "1e999"])
def test_no_error_has_the_words_of_a_library(name: str, value: object) -> None:
    try:
        said = str(config.load({name: value}, {}))
    except ConfigError as error:
        said = str(error)
    assert not re.search(r"valid|Input|String|to parse|pattern", said)


def test_all_wrong_options_are_named_whatever_is_wrong_with_them() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({"bloks": 5, "kv_memory": "2 cows", "port": 0, "min_replicas": 1, "routing": "x"}, {})
    for words in (
        "unknown option bloks",
        "kv_memory: '2 cows'",
        "port=0",
        "routing='x'",
        "min_replicas needs max",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"recovery=swap needs .*unknown option bloks"):
        config.load({"bloks": 5, "recovery": "swap", "swap_space": 0}, {})


def test_a_fixed_number_of_replicas() -> None:
    scaling = config.load({"engine_replicas": 3}, {}).scaling
    assert not scaling.scales
    assert (scaling.lower_limit, scaling.initial_replicas, scaling.upper_limit) == (3, 3, 3)
    assert scaling.limiting_option == "engine_replicas"


@pytest.mark.parametrize(
    ("args", "least", "first", "most"),
    [
        ({"max_replicas": "4"}, 1, 1, 4),
        ({"max_replicas": 4, "min_replicas": "2"}, 2, 2, 4),
        ({"max_replicas": 4, "engine_replicas": 2}, 1, 2, 4),
        ({"max_replicas": 4, "min_replicas": 0}, 0, 1, 4),
        ({"max_replicas": 4, "min_replicas": 0, "engine_replicas": 3}, 0, 3, 4),
        ({"max_replicas": 4, "min_replicas": 3, "engine_replicas": 1}, 3, 3, 4),
        ({"max_replicas": 4, "engine_replicas": 4}, 1, 4, 4),
    ],
)
def test_replicas_that_follow_demand(args: dict[str, int], least: int, first: int, most: int) -> None:
    scaling = config.load(args, {}).scaling
    assert scaling.scales
    assert (scaling.lower_limit, scaling.initial_replicas, scaling.upper_limit) == (least, first, most)
    assert scaling.limiting_option == "max_replicas"
    assert scaling.to_zero == (least == 0)


@pytest.mark.parametrize("cpus", [0.0, SMALLEST_CPU, 0.33333, 1.5])
def test_ray_takes_the_cpus_that_an_engine_may_request(cpus: float) -> None:
    assert config.load({"engine_cpus": cpus}, {}).scaling.engine_cpus == cpus
    validate_actor_options({"num_cpus": cpus}, in_options=True)


def test_ray_refuses_smaller_parts_of_a_cpu() -> None:
    with pytest.raises(ValueError, match=f"cannot go beyond {SMALLEST_CPU}"):
        validate_actor_options({"num_cpus": 0.9 * SMALLEST_CPU}, in_options=True)


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_replicas needs max_replicas"):
        config.load({"min_replicas": 1}, {})
    with pytest.raises(ConfigError, match="min_replicas=3 exceeds max_replicas=2"):
        config.load({"min_replicas": 3, "max_replicas": 2}, {})
    with pytest.raises(ConfigError, match="engine_replicas=4 exceeds max_replicas=2"):
        config.load({"engine_replicas": 4}, {"QUIRE_MAX_REPLICAS": "2"})


@pytest.mark.parametrize(
    ("args", "warned"),
    [
        ({"scaling_shadow": True}, ["scaling_shadow has no effect without max_replicas"]),
        (
            {"startup_s": 5, "ttft_target_s": 2},
            ["ttft_target_s, startup_s have no effect without max_replicas"],
        ),
        ({"startup_s": 5, "max_wait_s": 2}, []),  # admission grants it
        ({"ttft_target_s": 5, "max_wait_s": 2}, ["ttft_target_s has no effect without max_replicas"]),
        ({"scaling_shadow": True, "max_replicas": 2}, []),
        ({}, []),
    ],
)
def test_scaling_options_without_scaling_are_warned_of(
    args: dict[str, Any], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config.load(args, {})
    assert [record.getMessage() for record in caplog.records] == warned


def test_a_misspelt_option_is_answered_with_the_likely_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^unknown option max_replcas; did you mean max_replicas\? docs/options.md has them all$",
    ):
        config.load({"max_replcas": 2}, {})
    with pytest.raises(ConfigError, match=r"^unknown option xyzzy; options: "):
        config.load({"xyzzy": 2}, {})


def test_who_wakes_a_replica_waits_for_it_to_start() -> None:
    waits = {"unavailable_after_s": 30, "startup_s": 40}
    assert config.load({"max_replicas": 2, **waits}, {}).replica_wait_s == 30
    assert config.load({"max_replicas": 2, "min_replicas": 0, **waits}, {}).replica_wait_s == 80
    longer = {**waits, "unavailable_after_s": 100}
    assert config.load({"max_replicas": 2, "min_replicas": 0, **longer}, {}).replica_wait_s == 100


@pytest.mark.parametrize("name", ["QUIRE_RAY_DASHBOARD", "QUIRE_RAY_COLLECT", "QUIRE_PORT"])
def test_a_variable_that_sets_nothing_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config.load({}, {name: "1"})
    assert len(caplog.messages) == 1
    assert name in caplog.text
    caplog.clear()
    config.load({}, {config.RAY_COLLECTS: "0"})
    assert caplog.messages == []


def test_environment_wins() -> None:
    environment = {"QUIRE_MAX_NUM_SEQS": "7", "QUIRE_CACHE": "/somewhere", "OTHER": "1"}
    assert config.load({"max_num_seqs": 9}, environment).engine.max_num_seqs == 7


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modell": "x"}, ["modell", "did you mean model?"]),
        ({"engine_replicas": 0}, ["engine_replicas=0", "must be at least 1"]),
        ({"engine_cpus": 0.00005}, ["engine_cpus=5e-05", "must be 0 or at least 0.0001"]),
        ({"engine_cpus": -1}, ["engine_cpus=-1", "must be at least 0"]),
        ({"engine_cpus": "inf"}, ["engine_cpus='inf'", "must be at most 10000"]),
        ({"engine_replicas": "many"}, ["engine_replicas='many'", "integer"]),
        ({"kv_memory": "2 bananas"}, ["kv_memory", "2 bananas", "GiB"]),
        ({"memory_fraction": 1.5}, ["memory_fraction=1.5", "must be at most 1"]),
        ({"prefix_caching": "maybe"}, ["prefix_caching='maybe'", "must be true or false"]),
        ({"startup_s": "soon"}, ["startup_s='soon'", "must be a number"]),
        ({"served_model_name": 5}, ["served_model_name=5", "must be text, in quotes"]),
        ({"tracing_endpoint": "collector:4318"}, ["must be an address that begins with http:// or https://"]),
        ({"log_level": "LOUD"}, ["log_level='LOUD'", "must be one of DEBUG, INFO"]),
        ({"max_replicas": 10**9}, ["max_replicas=1000000000", "must be at most 10000"]),
        ({"scale_down_after_s": 600_000}, ["scale_down_after_s=600000", "must be at most 500000"]),
        ({"startup_s": "inf"}, ["startup_s='inf'", "must be at most 500000"]),
        ({"tpot_target_s": math.nan}, ["tpot_target_s=nan", "must be at most 500000"]),
    ],
)
def test_wrong_options_are_named_in_one_line(args: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(args, {})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "name", ["drain_timeout_s", "stuck_after_s", "max_wait_s", "max_lag_s", "unavailable_after_s"]
)
def test_a_time_after_which_something_happens_may_be_infinite(name: str) -> None:
    """Then it never happens."""
    options = config.load({name: "inf"}, {})
    group = options.service if name in ("drain_timeout_s", "stuck_after_s") else options.ingress
    assert getattr(group, name) == math.inf


def test_other_variables_are_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes sets some for a service called quire; a misspelt option is heard of."""
    kubernetes = {"QUIRE_PORT": "tcp://10.0.0.1:8000", "QUIRE_SERVICE_HOST": "10.0.0.1"}
    options = config.load({}, {**kubernetes, "QUIRE_MODLE": "x", "QUIRE_BLOCK_SIZE": "32"})
    assert options == config.load({"block_size": 32}, {})
    assert [record.getMessage() for record in caplog.records] == [
        "QUIRE_PORT in the environment is ignored: only the command line sets port",
        "QUIRE_SERVICE_HOST in the environment sets no option and is ignored",
        "QUIRE_MODLE in the environment sets no option and is ignored; did you mean QUIRE_MODEL?",
    ]


def test_variables_of_quires_other_parts_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    config.load({}, {"QUIRE_CACHE": "/somewhere", "QUIRE_URL": "http://x", "QUIRE_LOAD_USERS": "3"})
    assert caplog.records == []


def test_engine_refuses_unknown_dtypes() -> None:
    with pytest.raises(ConfigError, match="dtype='int3': must be one of auto, bfloat16"):
        config.load({"dtype": "int3"}, {})


def test_engine_gets_every_option_of_its_own() -> None:
    engine = config.load({"block_size": 32, "num_blocks": 50, "seed": 3}, {}).engine_config("folder", 2)
    assert (engine.model, engine.block_size, engine.num_blocks, engine.seed) == ("folder", 32, 50, 3)
    assert engine.num_threads == 2


def test_engine_gets_the_options_of_recovery_and_order() -> None:
    args = {"swap_space": "64MiB", "recovery": "swap", "priority_aging": "2.5", "check_at_idle": "true"}
    engine = config.load(args, {}).engine_config("folder", 2)
    assert (engine.swap_space, engine.recovery) == (64 * 2**20, "swap")
    assert (engine.priority_aging, engine.check_at_idle) == (2.5, True)
    assert config.load({}, {}).engine_config("folder", 2).swap_space is None
    assert config.load({"swap_space": "0"}, {}).engine_config("folder", 2).swap_space == 0
    with pytest.raises(ConfigError, match="recovery"):
        config.load({"recovery": "hope"}, {})


def test_the_tenants_header_is_a_headers_name() -> None:
    assert config.load({}, {}).ingress.tenant_header is None
    assert config.load({"tenant_header": "X-Tenant"}, {}).ingress.tenant_header == "X-Tenant"
    for name in ("x tenant", "x-tenant:", "x\ntenant"):
        with pytest.raises(ConfigError, match="tenant_header"):
            config.load({"tenant_header": name}, {})
    assert config.load({}, {}).ingress.admin_routes is False


def test_replicas_share_memory_unless_told_that_nodes_are_apart() -> None:
    options = config.load({"engine_replicas": 4}, {})
    assert options.engine_config("folder", 1).memory_sharers == 4
    assert options.engine_config("folder", 1, replicas_on_a_node=2).memory_sharers == 2


def test_live_options_keep_what_was_given_at_the_start() -> None:
    """A ``user_config`` with one option must not reset another to its default."""
    start = config.load({"max_live_choices": 100, "log_level": "WARNING", "max_replicas": 2}, {})
    quiet = start.with_live({"log_level": "DEBUG"}, "engine")
    assert (quiet.service.log_level, quiet.ingress.max_live_choices) == ("DEBUG", 100)
    fewer = start.with_live({"max_live_choices": "3"}, "ingress")
    assert (fewer.service.log_level, fewer.ingress.max_live_choices) == ("WARNING", 3)
    assert start.with_live({}, "ingress") == start
    assert fewer.scaling == start.scaling


def test_only_live_options_change_live() -> None:
    start = config.load({}, {})
    with pytest.raises(
        ConfigError,
        match="user_config of engine cannot change block_size; its live options: log_level, log_format; ",
    ):
        start.with_live({"block_size": 3}, "engine")
    with pytest.raises(ConfigError, match="max_live_choices=0: must be at least 1"):
        start.with_live({"max_live_choices": 0}, "ingress")


def test_every_option_is_declared_once_with_a_default_and_a_meaning() -> None:
    names = [name for group in declared() for name in group]
    assert sorted(names) == sorted(config.OPTIONS)
    assert all(option.description for option in config.OPTIONS.values())
    assert config.OPTIONS["max_live_choices"].live
    assert not config.OPTIONS["block_size"].live


def declared() -> list[list[str]]:
    """The names in each group."""
    annotations = [field.annotation for field in config.AppConfig.model_fields.values()]
    return [list(typing.get_type_hints(group)) for group in annotations]


def test_choices_and_routers_agree() -> None:
    assert set(config.ROUTERS) == set(typing.get_args(option_groups.Routing))


def test_launch_options_have_their_own_place(caplog: pytest.LogCaptureFixture) -> None:
    assert config.load({"host": "::1", "port": "8001"}, {}).launch == option_groups.LaunchOptions(
        host="::1", port=8001
    )
    assert config.load({}, {"QUIRE_PORT": "1", "QUIRE_HOST": "x"}).launch == option_groups.LaunchOptions()
    assert len(caplog.records) == 2
    with pytest.raises(ConfigError, match="args cannot set port; set http_options"):
        application.build({"port": 8001})


def test_model_name_of_a_folder_is_its_last_part() -> None:
    assert config.load({"model": "/models/tiny/"}, {}).service.model_name == "tiny"
    assert (
        config.load({"model": "/models/tiny", "served_model_name": "small"}, {}).service.model_name == "small"
    )


def test_config_file_says_what_the_launcher_does() -> None:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    args = document["applications"][0]["args"]
    config.load(args, {})
    expected = serving.deploy_config(args)
    if serving.haproxy_expected():
        assert document == expected
    else:
        assert document["applications"] == expected["applications"]


def test_a_choice_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"routing='nearest': must be one of prefix, least_tokens, round_robin"
    ):
        config.load({"routing": "nearest"}, {})


@pytest.mark.parametrize(
    ("args", "longest", "reachable", "grace"),
    [
        ({"engine_replicas": 3}, math.inf, 3, 60.0),
        ({"engine_replicas": 3, "scaling_shadow": True}, math.inf, 3, 60.0),
        ({"max_replicas": 8}, 2.0, 8, 60.0),
        ({"max_replicas": 8, "scaling_shadow": True}, math.inf, 1, 0.0),
        ({"max_replicas": 8, "engine_replicas": 3, "scaling_shadow": True}, math.inf, 3, 0.0),
        ({"max_replicas": 8, "min_replicas": 2, "scaling_shadow": True, "max_wait_s": 5}, 5.0, 2, 0.0),
    ],
)
def test_admission_counts_on_the_replicas_that_demand_can_bring(
    args: dict[str, Any], longest: float, reachable: int, grace: float
) -> None:
    options = config.load(args, {})
    assert (options.max_wait_s, options.scaling.reachable_replicas, options.scaling.startup_grace_s) == (
        longest,
        reachable,
        grace,
    )


def test_an_option_of_one_deployment_is_refused_by_the_other() -> None:
    with pytest.raises(
        ConfigError, match=r"of engine cannot change max_live_choices; its live options: log_level"
    ):
        config.load({}, {}).with_live({"max_live_choices": 3}, "engine")


def test_every_live_option_is_applied_somewhere() -> None:
    """A live option in a group that no deployment applies would be listed as live and do nothing."""
    assert [name for name, option in config.OPTIONS.items() if option.live and not option.live_in] == []


def test_an_option_that_is_taken_back_has_its_default_again() -> None:
    start = config.load({"log_level": "DEBUG", "stuck_after_s": 3, "max_num_seqs": 5}, {})
    now = start.with_live(config.load({}, {}).user_config(), "engine")
    assert (now.service.log_level, now.service.stuck_after_s) == ("INFO", 10)
    assert now.engine.max_num_seqs == 5  # which needs a restart


def test_options_from_args_and_from_the_config_file_are_told_apart() -> None:
    """The file's ``user_config`` replaces the builder's, and may name live options only."""
    start = config.load({}, {})
    deployed = config.load({"log_level": "ERROR", "stuck_after_s": 4}, {}).user_config()
    assert start.with_live(deployed, "engine").service.stuck_after_s == 4
    both = start.with_live({**deployed, "log_level": "DEBUG"}, "engine")
    assert both.service.log_level == "DEBUG"
    with pytest.raises(ConfigError, match="user_config of engine cannot change stuck_after_s"):
        start.with_live({"stuck_after_s": 4}, "engine")
