"""The README's table of options says what the code does, and docs/options.md is what the code generates."""

from __future__ import annotations

import re
from pathlib import Path

from app import options_page
from app.config import OPTIONS

ROOT = Path(__file__).parent.parent


def option_rows() -> dict[str, str]:
    """Option -> default, as the README's table gives them."""
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| option | default |") :].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `([^`|]+)` \| ", table, flags=re.MULTILINE))


def test_the_readme_names_options_that_exist_with_their_defaults() -> None:
    rows = option_rows()
    assert len(rows) >= 8
    assert rows.keys() <= OPTIONS.keys()
    assert rows == {name: options_page.show_default(OPTIONS[name].default) for name in rows}


def test_the_page_of_options_is_what_the_code_generates() -> None:
    written = (ROOT / "docs" / "options.md").read_text()
    assert written == options_page.page(), "run: python -m app.options_page > docs/options.md"


def test_the_page_has_every_option_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ", options_page.page(), flags=re.MULTILINE)
    assert rows == list(OPTIONS)
