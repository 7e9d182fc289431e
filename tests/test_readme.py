"""The README's tables say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from app.config import AppConfig

README = Path(__file__).parent.parent / "README.md"


def option_rows() -> dict[str, str]:
    """Option -> default, as the README's table gives them."""
    return dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \| ", README.read_text(), flags=re.MULTILINE))


def test_the_table_has_every_option_once() -> None:
    assert sorted(option_rows()) == sorted(AppConfig.model_fields)


def test_the_table_gives_the_defaults() -> None:
    defaults = AppConfig()
    for name, written in option_rows().items():
        value = getattr(defaults, name)
        if value is None:
            assert written == "auto", name
        elif isinstance(value, bool):
            assert written == str(value).lower(), name
        elif isinstance(value, int | float):
            assert float(written) == value, name
        else:
            assert written == value, name
