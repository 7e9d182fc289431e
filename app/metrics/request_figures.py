"""What one ingress counts of requests: how long clients wait for tokens, and how requests end."""

from __future__ import annotations

from collections import Counter

from app.metrics.samples import METRICS, Samples
from app.metrics.table import REFUSALS
from engine.histogram import Histogram


def _histogram(name: str) -> Histogram:
    return Histogram(METRICS[name].bounds)


class RequestFigures:
    """Belongs to one ingress's event loop."""

    def __init__(self) -> None:
        self.first_token = _histogram("time_to_first_token_seconds")
        self.inter_token = _histogram("inter_token_seconds")
        self.per_output_token = _histogram("time_per_output_token_seconds")
        self.whole = _histogram("request_seconds")
        self.prompt_tokens = _histogram("request_prompt_tokens")
        self.output_tokens = _histogram("request_output_tokens")
        self.ended: Counter[tuple[str, str]] = Counter()
        """Requests, by route and outcome."""
        self.key_requests: Counter[str] = Counter()  # by the id of the API key, as the next ones
        self.key_prompt_tokens: Counter[str] = Counter()
        self.key_cached_tokens: Counter[str] = Counter()
        self.key_output_tokens: Counter[str] = Counter()
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))

    def samples(self) -> Samples:
        """The samples of every metric in the table that is counted here."""
        return {
            "time_to_first_token_seconds": {(): self.first_token.totals},
            "inter_token_seconds": {(): self.inter_token.totals},
            "time_per_output_token_seconds": {(): self.per_output_token.totals},
            "request_seconds": {(): self.whole.totals},
            "request_prompt_tokens": {(): self.prompt_tokens.totals},
            "request_output_tokens": {(): self.output_tokens.totals},
            "ended_requests": dict(self.ended.items()),
            **{
                name: {(key,): count for key, count in getattr(self, name).items()}
                for name in ("key_requests", "key_prompt_tokens", "key_cached_tokens", "key_output_tokens")
            },
            "refused_requests": {(reason,): count for reason, count in self.refused.items()},
        }
