"""``docs/metrics.md``, generated: ``python -m app.metrics.page > docs/metrics.md``."""

from __future__ import annotations

from app.metrics.aliases import ALIASES
from app.metrics.samples import METRICS
from app.metrics.table import TABLE, Metric, MetricKind, Source
from app.routing.policies import ROUTING_REASONS

INTRODUCTION = """\
# Metrics

This page is generated from the code: `python -m app.metrics.page > docs/metrics.md`.

Two endpoints serve the same figures in Prometheus's text format:

- **`GET /metrics` of the server**, with a key if the server has keys. Only an `admin` key sees other keys'
  usage, and models that are not in its own `models`. One scrape covers the whole fleet, whichever
  ingress answers, so scrape a single address:

  ```yaml
  scrape_configs:
    - job_name: quire
      authorization: {credentials_file: /etc/quire/metrics.key}   # if the server has keys
      static_configs: [{targets: ["quire.example:8000"]}]
  ```

  Every figure has the label `model_name`. All except those of [scaling](#scaling) also have `replica`, the
  Serve replica that counted it (ingress or engine). Each replica appears once, so `sum` without
  `by (replica)` counts nothing twice. With several models, an ingress counts each model separately; a refusal
  before the model is known counts for the first model. An engine sends its figures to each ingress once a
  second, with its tokens. The ingress that is scraped asks the other ingresses, and omits those that do not
  answer within 2 s. An ingress without others looks for new ones every 5 s. Answers are cached for 1 s.
  [What it costs](live_page.md#what-it-costs).
- **Ray's endpoint on each node**, with the prefix `ray_` and Ray's labels `WorkerId`, `deployment`, `replica`.
  Figures are up to 12 s old. The label `route` is called `path` there. Histograms have the type `gauge`,
  because Ray's own histograms cost too much per token; `rate` and `histogram_quantile` work the same way.
  Figures by key are omitted, because anyone who can reach the port can read it. Ray's Serve LLM board finds
  the names that it expects. Its panels for NIXL and KV offloading stay empty, because engines do not send KV
  to each other and do not share KV on the host between requests. [Deployment](deployment.md#monitoring) says
  how to scrape this endpoint.

`GET /dashboard` shows the fleet live in a browser ([the live page](live_page.md)), and `python -m app.top` in a
terminal.

A counter's name ends with `_total`; a histogram has `_bucket`, `_sum` and `_count`. A replica's figures start
at 0 when the replica starts, and disappear with it.

"""

_TITLES = {
    Source.INGRESS: ("Clients and ingresses", "Counted by each ingress."),
    Source.ENGINE: ("Engines", "Counted by each engine replica."),
    Source.SCALING: (
        "Scaling",
        "Counted by the scaling policy in Serve's controller, if there is one; without the label `replica`.",
    ),
}

_REASONS = """\
## Why a replica was chosen

`quire_routing_decisions_total{reason}` says why a replica was chosen over the second-best one:

"""

_CHOSEN = {
    "only": "is the only one that can run the request",
    "prefix": "has more of the prompt cached",
    "wait": "has fewer prompts to compute first",
    "compute": "computes the prompt faster, or delays fewer running streams",
    "streaming": "decodes faster, or slows down fewer sequences",
    "eviction": "evicts fewer cached blocks",
    "admission": "has sequence slots and blocks, or will have them sooner",
    "balance": "costs as much as others and has less booked",
    "victims": "will stay, while cheaper ones may stop soon",
    "policy": "was chosen by a `routing` other than `prefix`",
    "fault": "was chosen after an error in the decision; see `quire_faults_total`",
}
"""What each of ``ROUTING_REASONS`` says of the chosen replica."""

_ALIASES = """\
## Other names

For vLLM's dashboards, `/metrics` has the same figures under `vllm:`, and Ray's endpoint under `ray_vllm_`:

"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for source, (title, counted) in _TITLES.items():
        rows = [_row(metric) for metric in TABLE if metric.source is source]
        parts += [f"## {title}\n\n{counted}\n\n", _table(("Metric", "Type", "Meaning"), rows)]
    aliases: list[tuple[str, ...]] = [
        (f"`{_name(alias.name, alias.kind)}`", _original(alias.of, alias.values)) for alias in ALIASES
    ]
    reasons: list[tuple[str, ...]] = [(f"`{reason}`", _CHOSEN[reason]) for reason in ROUTING_REASONS]
    parts += [_REASONS, _table(("reason", "the chosen replica"), reasons)]
    parts += [_ALIASES, _table(("Name", "Metric"), aliases)]
    return "".join(parts).rstrip("\n") + "\n"


def _row(metric: Metric) -> tuple[str, ...]:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    values = f" {', '.join(f'`{value}`' for value in metric.values)}." if metric.values else ""
    name = _name(metric.full_name, metric.kind)
    return f"`{name}{labels}`", metric.kind.value, metric.meaning + values


def _original(name: str, values: tuple[str, ...]) -> str:
    metric = METRICS[name]
    original = f"`{_name(metric.full_name, metric.kind)}`"
    return f"{original}, {' and '.join(f'`{value}`' for value in values)}" if values else original


def _name(name: str, kind: MetricKind) -> str:
    return f"{name}_total" if kind is MetricKind.COUNTER else name


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    print(page(), end="")
