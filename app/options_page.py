"""``docs/options.md``, generated: ``python -m app.options_page > docs/options.md``."""

from __future__ import annotations

from typing import Any

from app.config import OPTIONS, AppConfig, Option

INTRODUCTION = """\
# Options

This page is generated from the code: `python -m app.options_page > docs/options.md`.

Set an option in one of these ways:

- `make serve ARGS="port=8001 dtype=float32"`, or `option=value` after `python -m app` or after
  `serve run app.application:build`;
- under `args` of the application in `serve_config.yaml`;
- as `QUIRE_<OPTION>` in the environment, which overrides both; [deployment](deployment.md#options) says where
  the environment is read. [Launch options](#launch) are only read from the command line.

A size is a number of bytes, or text such as `512MB` or `2GiB`. `auto` is the same as omitting the option.

To change an option of a running application, change `args` and deploy again. The column *restarts* names the
deployments whose replicas are then replaced; if it is empty, running replicas stay. The column *live* names the
deployments whose `user_config` can change the option in running replicas instead.
[Deployment](deployment.md#deploying-again) describes how.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for group, field in AppConfig.model_fields.items():
        title, _, rest = (field.annotation.__doc__ or "").partition("\n\n")[0].partition(": ")
        rows = [_row(option) for option in OPTIONS.values() if option.group == group]
        parts.append(f"## {title}\n\n{rest[:1].upper()}{rest[1:]}\n")
        parts.append(
            "\n".join(["| option | default | restarts | live | meaning |", "|---|---|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def show_default(value: Any) -> str:
    """A default as users write it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(option: Option) -> str:
    cells = (
        f"`{option.name}`",
        f"`{show_default(option.default)}`",
        ", ".join(option.restarts),
        ", ".join(option.live_in),
        option.description,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
