"""What is in progress at one ingress, in total and per client, so that no client can fill it alone."""

from __future__ import annotations

from collections import Counter, defaultdict

from app.api.errors import overloaded, too_many_live, too_much_of_a_client
from app.fleet.overload import OverloadControl
from app.option_groups import IngressOptions
from engine.errors import InvalidRequestError, QuireError

CLIENT_SHARE = 0.875
"""Part of ``max_live_choices`` that one client may have by default."""


class LiveRequests:
    """Counts choices, each from its request's arrival to the end of the response; used on the event loop.

    A client that is not known (an empty name) has no limit of its own. Limits hold for all models together.
    """

    def __init__(self) -> None:
        self.count = 0
        self._of_clients: Counter[str] = Counter()
        self._of_models: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by client
        self._tokens: Counter[str] = Counter()  # of prompts, by client

    def admit(
        self, client: str, choices: int, options: IngressOptions, overload: OverloadControl, model: str = ""
    ) -> Permit:
        """Take permits for the choices of one request, before anything is done for it.

        Raises:
            ApiError: 429 or 503, with the limit.
            InvalidRequestError: the request alone is beyond its client's limit, or the ingress's.
        """
        refusal = overload.refusal(lambda: self.share_ahead(client, choices, model))
        if refusal is not None:
            raise overloaded(refusal)
        most = options.max_live_choices
        own_most = options.max_client_choices or max(round(CLIENT_SHARE * most), 1)
        own = self._of_clients[client] + choices
        if client and own > own_most:
            raise _too_much(own, choices, own_most, "max_client_choices", "choices", overload)
        if choices > most:  # no wait would help
            raise InvalidRequestError(
                f"the request has {choices} choices but at most {most} may be in progress (max_live_choices)"
            )
        if self.count + choices > most:
            raise too_many_live(self.count, most, overload.retry_after_s())
        self.count += choices
        self._of_clients[client] = own
        self._of_models[model][client] += choices
        return Permit(self, client, choices, overload, model)

    def share_ahead(self, client: str, choices: int, model: str = "") -> float:
        """The share of live choices that a model's engines serve before the next request of a client.

        They serve clients in fair shares, so of each other client, at most as much as this one's own is ahead.
        """
        live = self._of_models[model]
        if not live:
            return 1.0
        own = live[client] + choices
        return min(sum(min(count, own) for count in live.values()) / live.total(), 1.0)

    def add_tokens(self, client: str, tokens: int, options: IngressOptions, overload: OverloadControl) -> None:
        """Count the prompt tokens of a request.

        Raises:
            ApiError: 429, beyond the client's limit.
            InvalidRequestError: the request alone is beyond it.
        """
        most = options.max_client_tokens
        own = self._tokens[client] + tokens
        if client and most is not None and own > most:
            raise _too_much(own, tokens, most, "max_client_tokens", "prompt tokens", overload)
        self._tokens[client] = own

    def release(self, client: str, choices: int, tokens: int, model: str = "") -> None:
        """The response has ended."""
        self.count -= choices
        for counter, amount in (
            (self._of_clients, choices),
            (self._of_models[model], choices),
            (self._tokens, tokens),
        ):
            counter[client] -= amount
            if counter[client] <= 0:
                del counter[client]


class Permit:
    """The permits of one request; release them once."""

    def __init__(
        self, live: LiveRequests, client: str, choices: int, overload: OverloadControl, model: str
    ) -> None:
        self._live = live
        self._client = client
        self._choices = choices
        self._overload = overload
        self._model = model
        self._tokens = 0

    def add_tokens(self, tokens: int, options: IngressOptions) -> None:
        """Count the tokens of the request's prompts."""
        self._live.add_tokens(self._client, tokens, options, self._overload)
        self._tokens = tokens

    def release(self) -> None:
        """The response has ended."""
        self._live.release(self._client, self._choices, self._tokens, self._model)


def _too_much(
    would_have: int, asked: int, most: int, option: str, what: str, overload: OverloadControl
) -> QuireError:
    if asked > most:  # no wait would help
        return InvalidRequestError(
            f"the request has {asked} {what} but one client may have at most {most} in progress ({option})",
            code="client_limit_exceeded",
        )
    return too_much_of_a_client(f"{would_have} {what}", most, option, overload.retry_after_s())
