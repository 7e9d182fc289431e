"""What an engine replica answers is what an ingress calls; who is to blame where one refuses arguments."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError
from ray.serve._private.replica import UserCallableWrapper
from ray.serve.exceptions import RayServeException

from app.channel.engine_calls import EngineCall, EngineCalls
from app.channel.failures import is_defect, reason_of
from app.replica import EngineReplica

CALLS = (
    EngineCall(EngineCalls.channel, "c", 1, b"", True, target="r"),
    EngineCall(EngineCalls.generate, "c", b"", meta={}),
    EngineCall(EngineCalls.beat, "c", 1, 0, [], [], False, False, target="r"),
    EngineCall(EngineCalls.reset_prefix_cache, target="r"),
    EngineCall(EngineCalls.block_map, "prefix", [], target="r"),
    EngineCall(EngineCalls.wake, wait=True),
)
REFUSALS = (
    "takes 2 positional arguments but 3 were given",
    "got an unexpected keyword argument 'target'",
    "missing 1 required keyword-only argument: 'other'",
)
WRONG = (
    EngineCall(EngineCalls.beat, "c", 1, target="r"),  # type: ignore[call-arg]
    EngineCall(EngineCalls.wake, True),  # type: ignore[call-arg]
    EngineCall(EngineCalls.block_map, "prefix", [], targets="r"),  # type: ignore[call-arg]
)


def shape(method: object) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(method).parameters.values()  # type: ignore[arg-type]
    return [(one.name, one.kind, one.default) for one in parameters]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_replicas_take_what_ingresses_send(call: EngineCall) -> None:
    assert call.fits()
    assert shape(getattr(EngineReplica, call.name)) == shape(getattr(EngineCalls, call.name))


def test_all_calls_are_tried_here() -> None:
    assert {call.name for call in CALLS} == {name for name in vars(EngineCalls) if not name.startswith("_")}


@pytest.mark.parametrize("words", REFUSALS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_replica_that_takes_other_arguments_is_of_another_version(call: EngineCall, words: str) -> None:
    error = TypeError(f"EngineReplica.{call.name}() {words}")
    for one in (
        error,
        RayTaskError(call.name, "", error),
        RayTaskError(call.name, "", error).as_instanceof_cause(),
    ):
        assert not is_defect(one, call)
        assert reason_of(one, 1.0, call) == "it runs a different version of Quire than this ingress"
    assert is_defect(error), "it is no answer to a call"
    assert is_defect(TypeError(f"EngineReplica.{call.name}() failed"), call)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_replica_without_the_method_is_of_another_version(call: EngineCall) -> None:
    wrapper = object.__new__(UserCallableWrapper)  # what Serve calls methods through, without a replica
    wrapper._is_function, wrapper._callable = False, SimpleNamespace(other=print)
    wrapper._cached_user_method_info = {}
    with pytest.raises(RayServeException, match="does not exist") as refused:
        wrapper.get_user_method_info(call.name)
    error = refused.value
    for one in (
        error,
        RayTaskError(call.name, "", error),
        RayTaskError(call.name, "", error).as_instanceof_cause(),
    ):
        assert not is_defect(one, call)
        assert reason_of(one, 1.0, call) == "it runs a different version of Quire than this ingress"
    with pytest.raises(RayServeException, match="does not exist") as other:
        wrapper.get_user_method_info("another")  # which the method calls in turn
    for message in ("the replica is shutting down", str(other.value)):
        assert reason_of(RayServeException(message), 1.0, call) == message


@pytest.mark.parametrize("words", REFUSALS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_what_a_replica_calls_wrongly_in_turn_is_a_defect(call: EngineCall, words: str) -> None:
    for method in (f"ChannelHub.{call.name}", "EngineThread.submit", "EngineReplica.other"):
        error = TypeError(f"{method}() {words}")
        assert is_defect(error, call)
        assert is_defect(RayTaskError(call.name, "", error), call)


@pytest.mark.parametrize("call", WRONG, ids=lambda call: call.name)
def test_a_call_that_a_replica_of_the_same_version_refuses_is_a_defect(call: EngineCall) -> None:
    method = partial(getattr(EngineReplica, call.name), None)
    with pytest.raises(TypeError, match=rf"^EngineReplica\.{call.name}\(\) ") as refused:
        call.send(SimpleNamespace(remote=method))
    error = refused.value
    assert is_defect(error, call)
    assert is_defect(RayTaskError(call.name, "", error), call)
    assert reason_of(error, 1.0, call) == str(error)
