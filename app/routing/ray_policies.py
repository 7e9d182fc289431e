"""Ray's ``PrefixCacheAffinityRouter`` as a choice of the application, to be compared with.

Importing this module fails where Ray's LLM library cannot be imported. Serve ships it by value (see ``fleet``).
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor
from ray.serve.request_router import PendingRequest

import app.channel.wire as wire
from app.routing.router import PowerOfTwoRouter, _PinnedCalls

_FIRST_CHAR, _SURROGATES, _AFTER_SURROGATES = 0x100, 0xD800, 0xE000


class PrefixAffinityRouter(_PinnedCalls, PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's tree of the prompts that were sent, with Ray's defaults; calls with ``target=`` keep their replica.

    Ray's tree compares characters; here each token is one, so that it matches exactly the tokens of a prompt.
    The tree belongs to this process and ends with it: Ray's own outlives its replicas, and still names them.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called once by Serve on the router's loop; ``options`` are Ray's."""
        _PinnedCalls.initialize_state(self)
        PrefixCacheAffinityRouter.initialize_state(
            self, **{"tree_actor": PrefixTreeActor.options(num_cpus=0).remote(), **options}
        )

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str | None:
        """Of a request that is to be placed; of other calls nothing, so that Ray passes over them."""
        if "meta" not in pending_request.kwargs:
            return None
        return text_of(wire.unpack_submission(pending_request.args[1]).token_ids)

    # Between what Ray ranks first, by the length of Serve's queue, as Serve does it itself.
    _route = PowerOfTwoRouter._route


def text_of(tokens: list[int]) -> str:
    """One character for each token, the same for the same token; none is half of a surrogate pair."""
    shift = _AFTER_SURROGATES - _SURROGATES
    chars = [token + _FIRST_CHAR for token in tokens]
    return "".join([chr(char if char < _SURROGATES else char + shift) for char in chars])
