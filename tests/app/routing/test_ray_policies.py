"""Ray's own routers as choices: what its prefix tree gets to see, and what happens where it is not there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from app import application, config
from app.channel import wire
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams


@pytest.fixture
def router() -> Any:
    """One that holds nothing yet."""
    module = pytest.importorskip("app.routing.ray_policies", reason="no ray.llm here", exc_type=ImportError)
    return object.__new__(module.PrefixAffinityRouter)


@dataclass
class Pending:
    args: list[Any]
    kwargs: dict[str, Any]


def seen(router: Any, token_ids: list[int]) -> str:
    """What the tree gets of a request with this prompt."""
    payload = wire.pack_submission(wire.Submission("request", 1, token_ids, SamplingParams(max_tokens=1)))
    text = router._extract_text_from_request(Pending(["cid", payload], {"meta": {}}))
    assert isinstance(text, str)
    return text


def test_the_tree_sees_one_character_for_each_token(router: Any) -> None:
    tokens = [0, 5, 5, 49_151, 0xD800, 0xD900, 150_000, 500_000]
    text = seen(router, tokens)
    assert len(text) == len(tokens)
    assert len(set(text)) == len(set(tokens))
    text.encode()  # no halves of surrogate pairs
    assert seen(router, [*tokens[:4], 7]).startswith(text[:4])


def test_calls_that_are_not_requests_are_nothing_to_the_tree(router: Any) -> None:
    assert router._extract_text_from_request(Pending(["cid", 1], {"target": "replica"})) is None


def test_a_router_that_cannot_be_imported_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    options = config.load({"routing": "prefix_affinity"}, {})
    monkeypatch.setitem(sys.modules, "app.routing.ray_policies", None)
    with pytest.raises(ConfigError, match="routing=prefix_affinity needs parts of Ray"):
        application.check_router(options)
    application.check_router(config.load({}, {}))
