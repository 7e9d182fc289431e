"""The client's request ID is used if it is well-formed."""

from __future__ import annotations

import re

import pytest
from starlette.datastructures import Headers

from app.api.request_id import request_id_of


@pytest.mark.parametrize(
    "given", ["a", "...", ".a", "c463848f-8b1d-4520-a63d-376223a69fb2", "trace:1/2@x.y_z+=", "x" * 128]
)
def test_a_well_formed_id_is_kept(given: str) -> None:
    assert request_id_of(Headers({"X-Request-ID": given})) == given


@pytest.mark.parametrize("given", ["", ".", "..", "x" * 129, "a b", "a\nb", "é", "<script>"])
def test_any_other_is_replaced(given: str) -> None:
    new = request_id_of(Headers(raw=[(b"x-request-id", given.encode("latin-1"))]))
    assert re.fullmatch("[0-9a-f]{32}", new)
    assert new != request_id_of(Headers(raw=[]))
