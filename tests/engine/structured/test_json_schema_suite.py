"""The public JSON-Schema test suite: what a supported schema lets through is valid.

``QUIRE_SCHEMA_SUITE`` names a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite; without it
there is nothing to run.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from engine.errors import InvalidRequestError
from engine.structured.grammar import build, load_llg_tokenizer, lowered
from engine.structured_output import StructuredOutput

logger = logging.getLogger(__name__)
SUITE = os.environ.get("QUIRE_SCHEMA_SUITE", "")


@pytest.mark.skipif(not SUITE, reason="QUIRE_SCHEMA_SUITE names no checkout of the suite")
def test_nothing_invalid_can_be_written(bundled_model: Path) -> None:
    tokenizer = load_llg_tokenizer(bundled_model, 49152, [2])
    files = sorted((Path(SUITE) / "tests" / "draft2020-12").glob("*.json"))
    assert files
    groups = [group for file in files for group in json.loads(file.read_text())]
    supported, values, unwritable, wrong = 0, 0, 0, []
    for group in groups:
        try:
            form = StructuredOutput.of_schema(group["schema"])
            grammar = build(tokenizer, form, lowered(form))
        except InvalidRequestError:
            continue
        supported += 1
        for test in group["tests"]:
            values += 1
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            matcher = grammar.matcher()
            allowed = bool(matcher.consume_tokens(tokenizer.tokenize_str(text))) and matcher.is_accepting()
            if allowed and not test["valid"]:
                wrong.append((group["schema"], text))
            unwritable += test["valid"] and not allowed
    logger.info(
        f"{supported} of {len(groups)} schemas, {values} values, {unwritable} valid ones cannot be written"
    )
    assert wrong == []
    assert supported > 150
    assert unwritable < 0.05 * values
