"""The public JSON-Schema test suite: what a supported schema lets through is valid.

``QUIRE_SCHEMA_SUITE`` names a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite; without it
there is nothing to run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer
from structured_engines import finished_values

from engine.errors import InvalidRequestError
from engine.structured.grammar import Grammar, build_grammar, load_llg_tokenizer, lowered
from engine.structured_output import StructuredOutput

logger = logging.getLogger(__name__)
SUITE = os.environ.get("QUIRE_SCHEMA_SUITE", "")
pytestmark = pytest.mark.skipif(not SUITE, reason="QUIRE_SCHEMA_SUITE names no checkout of the suite")


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path) -> LLTokenizer:
    return load_llg_tokenizer(bundled_model, 49152, [2])


@pytest.fixture(scope="module")
def supported(tokenizer: LLTokenizer) -> list[tuple[dict[str, Any], Grammar]]:
    """The groups of the suite whose schema can be used, with its grammar."""
    files = sorted((Path(SUITE) / "tests" / "draft2020-12").glob("*.json"))
    assert files
    groups = [group for file in files for group in json.loads(file.read_text())]
    found = []
    for group in groups:
        form = StructuredOutput.of_schema(group["schema"])
        with contextlib.suppress(InvalidRequestError):
            found.append((group, build_grammar(tokenizer, form, lowered(form))))
    logger.info(f"{len(found)} of {len(groups)} schemas can be used")
    assert len(found) > 150
    return found


def test_nothing_invalid_can_be_written(tokenizer: LLTokenizer, supported: Any) -> None:
    values, unwritable, wrong = 0, 0, []
    for group, grammar in supported:
        for test in group["tests"]:
            values += 1
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            matcher = grammar.form.lexer.matcher()
            allowed = bool(matcher.consume_tokens(tokenizer.tokenize_str(text))) and matcher.is_accepting()
            if allowed and not test["valid"]:
                wrong.append((group["schema"], text))
            unwritable += test["valid"] and not allowed
    logger.info(f"{values} values, {unwritable} valid ones cannot be written")
    assert wrong == []
    assert unwritable < 0.05 * values


def checkable(schema: Any) -> bool:
    """Whether the library that validates can read it: Python's ``re`` knows no ``\\p{Letter}``."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=checker)
    except jsonschema.SchemaError:
        return False
    return True


@pytest.mark.timeout(3600)  # of hundreds, on a busy machine
def test_what_a_model_finishes_is_valid(bundled_model: Path, supported: Any) -> None:
    schemas = [group["schema"] for group, _ in supported if checkable(group["schema"])]
    assert finished_values(bundled_model, schemas) >= 0.25 * len(schemas)  # the others are open, and ran out
