"""Tiny models that write characters, forms for their output, and small JSON schemas drawn at random."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
from tiny_engines import EOS

from engine.llm import LLM
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput

logger = logging.getLogger(__name__)
CHARACTERS = [chr(code) for code in range(32, 127)]
FIRST = 2
"""Token of the first character; those before it are special."""


def with_characters(model: Path, folder: Path) -> Path:
    """Copy a tiny model to ``folder`` with a tokenizer of one token for each printable ASCII character."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    vocabulary = {"<s>": 0, "</s>": EOS}
    for number, character in enumerate(CHARACTERS):
        vocabulary["Ġ" if character == " " else character] = FIRST + number
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": "<s>", **special}, {"id": EOS, "content": "</s>", **special}],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def text_of(tokens: list[int]) -> str:
    """What such a model wrote; its special tokens are nothing."""
    return "".join(CHARACTERS[token - FIRST] for token in tokens if token >= FIRST)


def tokens_of(text: str) -> list[int]:
    return [FIRST + CHARACTERS.index(character) for character in text]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema whose values are short enough for a small model to finish."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += ["object", "object", "object", "array", "array", "anyOf", "allOf", "ref"]
    kind = rng.choice(kinds) if depth else rng.choice(["object", "array", "anyOf", "ref"])
    match kind:
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}
        case "integer":
            low = rng.randint(-1000, 1000)
            bounds = {"minimum": low, "maximum": low + rng.randint(0, 5000)}
            return {"type": "integer", **(bounds if rng.random() < 0.7 else {"multipleOf": 7, **bounds})}
        case "number":
            low = rng.randint(-100, 100) / 4
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 99)}
        case "enum":
            return {"enum": rng.sample([1, "one", None, True, [1, 2], {"a": "b"}, 'q"\\', "é😀", 2.5], 3)}
        case "const":
            return {"const": rng.choice(["fixed", 0, False, None, [], {}, "a\nb"])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", "^(yes|no)$", r"^\d{3}-\d{2}$"])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4", "date-time"])}
        case "array":
            low = rng.randint(0, 2)
            limits = {"minItems": low, "maxItems": low + rng.randint(0, 3)}
            if rng.random() < 0.3:
                prefix = [random_schema(rng, depth + 1) for _ in range(2)]
                return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 2}
            return {"type": "array", "items": random_schema(rng, depth + 1), **limits}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
        case "allOf":
            a, b = random_schema(rng, 3), random_schema(rng, 3)
            parts = [{"properties": {"a": a}, "required": ["a"]}, {"properties": {"b": b}, "required": ["b"]}]
            known = {"properties": {"a": True, "b": True}, "additionalProperties": False}
            return {"type": "object", "allOf": parts, **known}
        case "ref":
            leaf = {"type": "object", "properties": {"v": random_schema(rng, 3)}, "required": ["v"]}
            node = {**leaf, "additionalProperties": False}
            if depth == 0:
                node["properties"] = {**leaf["properties"], "next": {"$ref": "#/$defs/node"}}
                return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
            return node
        case "object":
            names = rng.sample(["name", "age", "tags", "x y", 'q"', "ü", "id"], rng.randint(1, 4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            extra = rng.choice([False, False, {"type": "integer", "minimum": 0, "maximum": 9}])
            schema = {"type": "object", "properties": properties, "required": required}
            return {**schema, "additionalProperties": extra}
    return {"type": kind}


def finished_values(model: Path, schemas: Sequence[Any], max_tokens: int = 300) -> int:
    """How many of ``schemas`` the model writes a whole value for, at temperature 1; each must be valid."""
    llm = LLM(model, max_model_len=1024, num_blocks=2048, max_num_seqs=32, num_threads=1)
    params = [
        SamplingParams(max_tokens=max_tokens, seed=seed, structured_output=StructuredOutput.of_schema(schema))
        for seed, schema in enumerate(schemas)
    ]
    prompts = [f"Write JSON for this schema: {json.dumps(schema)[:200]}\n\n" for schema in schemas]
    finished = 0
    for schema, result in zip(schemas, llm.generate(prompts, params, progress=False), strict=True):
        assert result.error is None, (schema, result.error)
        if result.finish_reason is FinishReason.STOP:
            finished += 1
            assert result.text is not None
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(
                json.loads(result.text), schema, jsonschema.Draft202012Validator, format_checker=checker
            )
    logger.info(f"{finished} of {len(schemas)} schemas finished, all of them valid")
    return finished
