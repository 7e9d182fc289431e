"""The option ``models``: what may be written, what each model gets, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app import config
from app.model_entries import NAME
from engine.errors import ConfigError

OTHER = {"small": {}, "Qwen/Qwen3-0.6B": {"dtype": "float32", "max_replicas": "4"}}


def served(models: Any, **args: Any) -> tuple[config.ServedModel, ...]:
    return config.served_models(config.load({"models": models, **args}, {}))


@pytest.mark.parametrize(
    "written",
    [
        OTHER,
        [{"name": "small"}, {"name": "Qwen/Qwen3-0.6B", "dtype": "float32", "max_replicas": 4}],
        ["small", {"name": "Qwen/Qwen3-0.6B", "dtype": "float32", "max_replicas": 4}],
        "{small: {}, Qwen/Qwen3-0.6B: {dtype: float32, max_replicas: 4}}",
        "[small, {name: Qwen/Qwen3-0.6B, dtype: float32, max_replicas: 4}]",
    ],
)
def test_however_they_are_written(written: Any) -> None:
    small, large = served(written)
    assert (small.name, small.options.service.model, small.options.engine.dtype) == ("small", "small", "auto")
    assert (large.name, large.options.service.model_name) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert (large.options.engine.dtype, large.options.scaling.upper_limit) == ("float32", 4)
    assert (small.neighbors, large.neighbors) == ((4,), (1,))


@pytest.mark.parametrize("nested", [False, True])
def test_from_a_file(tmp_path: Path, nested: bool) -> None:
    text = "small:\nlarge: {model: Qwen/Qwen3-0.6B}\n"
    if nested:
        text = "models:\n" + "".join(f"  {line}\n" for line in text.splitlines())
    path = tmp_path / "models.yaml"
    path.write_text(text)
    for found in (served(str(path)), config.served_models(config.load({}, {"QUIRE_MODELS": str(path)}))):
        assert [model.options.service.model for model in found] == ["small", "Qwen/Qwen3-0.6B"]


def test_a_models_own_options_count_before_the_applications() -> None:
    plain, own, default = served(
        {
            "a": {},
            "b": {"dtype": "bfloat16", "tool_parser": "mistral"},
            "c": {"dtype": "auto", "kv_memory": "auto"},
        },
        dtype="float32",
        tool_parser="hermes",
        kv_memory="1GiB",
        max_live_choices=7,
    )
    assert [model.options.engine.dtype for model in (plain, own, default)] == ["float32", "bfloat16", "auto"]
    assert [model.options.engine.kv_memory for model in (plain, own, default)] == [2**30, 2**30, None]
    assert [model.options.ingress.tool_parser for model in (plain, own, default)] == [
        "hermes",
        "mistral",
        "hermes",
    ]
    assert {model.options.ingress.max_live_choices for model in (plain, own, default)} == {7}


def test_one_model_needs_no_entry() -> None:
    (only,) = config.served_models(config.load({"model": "/models/tiny"}, {}))
    assert (only.name, only.deployment, only.neighbors, only.one_of_several) == ("tiny", "engine", (), False)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "models is empty; name at least one"),
        ([], "models is empty"),
        (7, "models=7: must be a mapping"),
        ({"": {}}, "the name ''; a name is 1 to 128"),
        ({"a b": {}}, "the name 'a b'"),
        (["a" * 129], "a name is 1 to 128"),
        ({1: {}}, "the name 1"),
        (["a", "b", {"name": "a"}], "has 'a' twice"),
        ("{a: {}, a: {}}", "'a' appears twice"),
        ("{a: [", "is not YAML"),
        ("/no/such/file.yaml", r"models=/no/such/file\.yaml cannot be read: No such file"),
        ([{"model": "a"}], "must be a mapping with name"),
        ({"a": 3}, "models: a: 3 must be a mapping"),
        ({"a": {"name": "b"}}, "models: a: remove name from the options"),
        ({"a": {"dtpe": "float32"}}, "models: a: unknown option dtpe; did you mean dtype?"),
        ({"a": {"dtype": "x"}}, "models: a: dtype='x': must be one of"),
        ({"a": {"port": 1}}, "models: a: port cannot differ between models; set it for the whole application"),
        ({"a": {"api_keys_file": "x", "log_level": "INFO"}}, "api_keys_file, log_level cannot differ"),
        ({"a": {"served_model_name": "b"}}, "served_model_name cannot differ"),
        ({"a": {"models": {}}}, "models cannot differ"),
        ({"a": {"ttft_target_s": 3}}, "models: a: ttft_target_s needs max_replicas"),
        ({"a": {"dtype": "x"}, "b": {"block_size": 0}}, "models: a: dtype.*; models: b: block_size=0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(models: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        served(models)
    assert "\n" not in str(caught.value)


def test_unknown_options_are_answered_with_those_of_a_model() -> None:
    with pytest.raises(ConfigError) as caught:
        served({"a": {"x": 1}})
    listed = str(caught.value).partition("options: ")[2].split(", ")
    assert {"dtype", "max_replicas", "model", "tool_parser"} <= set(listed)
    assert {"port", "models", "routing"}.isdisjoint(listed)


@pytest.mark.parametrize("name", ["model", "served_model_name"])
def test_the_only_models_name_has_no_place_beside_several(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be combined with models"):
        served(OTHER, **{name: "a"})


@given(st.lists(st.from_regex(NAME, fullmatch=True), min_size=2, unique=True))
@example(["a/b", "a-b", "a:b", "a~b", "a~2fb"])
def test_each_model_has_a_deployment_of_its_own(names: list[str]) -> None:
    deployments = [config.deployment_of(name) for name in names]
    assert len(set(deployments)) == len(names)
    for deployment in deployments:
        assert deployment.startswith("engine-")
        assert not set(deployment) & set("/#:")


def test_a_warning_only_for_what_no_model_reads(caplog: pytest.LogCaptureFixture) -> None:
    served(OTHER, ttft_target_s=3)
    assert caplog.text == ""
    served(["a", "b"], ttft_target_s=3)
    assert "ttft_target_s has no effect" in caplog.text


def test_a_mapping_may_merge_others() -> None:
    text = "{small: &common {dtype: float32, kv_memory: 2GiB}, large: {<<: *common, kv_memory: 1GiB}}"
    small, large = served(text)
    assert [model.options.engine.dtype for model in (small, large)] == ["float32", "float32"]
    assert [model.options.engine.kv_memory for model in (small, large)] == [2 << 30, 1 << 30]


def test_the_folder_of_an_unknown_user_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        served("~nobody-here/models.yaml")
