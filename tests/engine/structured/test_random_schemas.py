"""Random schemas and the bundled model at temperature 1: whatever it finishes is valid.

``QUIRE_SCHEMAS`` says how many schemas; see ``docs/structured_output.md``.
"""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path

import jsonschema
from structured_engines import random_schema

from engine.llm import LLM
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput

logger = logging.getLogger(__name__)
COUNT = int(os.environ.get("QUIRE_SCHEMAS", "16"))


def test_what_a_model_finishes_is_valid(bundled_model: Path) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(COUNT)]
    llm = LLM(bundled_model, max_model_len=1024, num_blocks=2048, max_num_seqs=32)
    params = [
        SamplingParams(max_tokens=300, seed=seed, structured_output=StructuredOutput.of_schema(schema))
        for seed, schema in enumerate(schemas)
    ]
    prompts = [f"Write JSON for this schema: {json.dumps(schema)[:200]}\n\n" for schema in schemas]
    results = llm.generate(prompts, params, progress=False)
    finished = 0
    for schema, result in zip(schemas, results, strict=True):
        assert result.error is None, (schema, result.error)
        if result.finish_reason is FinishReason.STOP:
            finished += 1
            assert result.text is not None
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(
                json.loads(result.text), schema, jsonschema.Draft202012Validator, format_checker=checker
            )
    logger.info(f"{finished} of {COUNT} finished, all of them valid")
    assert finished >= 0.7 * COUNT  # the others ran out of tokens
