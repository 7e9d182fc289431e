"""What weights in fewer bits cost in quality: ``python -m loadtests.perplexity``.

Perplexity of text that comes with every Python: half English, the language reference that ``help()`` shows
(``pydoc_data.topics``), half code, ``argparse``, ``tarfile`` and ``typing`` of the standard library. Windows of
1,024 tokens are read one by one; every token but the first counts, with all before it as its context. The bars
are for the built-in model.
"""

from __future__ import annotations

import argparse as argparse_module
import math
import tarfile
import typing
from inspect import getsource
from pydoc_data import topics

import torch
from torch import Tensor

from engine.config import WeightsOption
from engine.devices import usable_cores
from engine.kv.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.folders import BUNDLED_NAME, local_folder
from engine.models.loader import load_model
from engine.tokenizer import load_tokenizer
from kernels.interface import AttentionMetadata
from kernels.registry import get_kernels
from loadtests.report import Figure, finish, parse

WINDOW, BLOCK = 1024, 16  # tokens
BARS: dict[WeightsOption, float] = {"model": 0.0, "int8": 0.5, "int4": 1.0}  # per cent of more perplexity


def windows(tokenizer: typing.Any, tokens: int) -> dict[str, list[Tensor]]:
    """``tokens`` tokens, half English and half code, in windows."""
    english = "\n\n".join(text for _, text in sorted(topics.topics.items()))
    code = "\n\n".join(getsource(module) for module in (argparse_module, tarfile, typing))
    cut = {}
    for name, text in (("English", english), ("code", code)):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: tokens // 2]
        if len(ids) < tokens // 2:
            raise SystemExit(f"there are only {len(ids)} tokens of {name}")
        cut[name] = [torch.tensor(ids[first : first + WINDOW]) for first in range(0, len(ids), WINDOW)]
    return cut


@torch.inference_mode()
def surprise(decoder: Decoder, tokens: Tensor) -> float:
    """Sum of the negative log probabilities of all tokens of a window but the first."""
    count = len(tokens)
    positions = torch.arange(count)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(WINDOW // BLOCK, dtype=torch.int32)[None],
        positions=positions,
        slot_mapping=positions.clone(),
        max_query_len=count,
        max_context_len=count,
    )
    cache = KVCache(decoder.config, WINDOW // BLOCK, BLOCK, torch.bfloat16, torch.device("cpu"))
    logits = decoder.forward(tokens, cache.pool, metadata, positions[:-1])
    likely = logits.gather(1, tokens[1:, None])[:, 0] - logits.logsumexp(1)
    return -float(likely.double().sum())


def main() -> None:
    declared = {
        "--tokens": (50_000, "tokens of text in all"),
        "--model": (BUNDLED_NAME, "folder or name"),
        "--weights": (BARS, "values of the option; the first is what others are compared with"),
        "--kernels": ("auto", "implementation"),
    }
    options = parse("perplexity", __doc__, declared)
    folder, kernels = local_folder(options.model), get_kernels(options.kernels, "cpu", usable_cores())
    text = windows(load_tokenizer(folder), options.tokens)
    figures: list[Figure] = []
    base = 0.0
    for weights in options.weights:
        decoder = load_model(folder, kernels, torch.bfloat16, "cpu", weights)
        total, counted = 0.0, 0
        for name, parts in text.items():
            lost, tokens = sum(surprise(decoder, part) for part in parts), sum(len(part) - 1 for part in parts)
            figures.append(Figure(f"{weights}: {tokens:,} tokens of {name}", math.exp(lost / tokens)))
            total, counted = total + lost, counted + tokens
        figures.append(Figure(f"{weights}: both", math.exp(total / counted)))
        base = base or total / counted
        more = 100 * math.expm1(total / counted - base)
        figures.append(Figure(f"{weights}: above {options.weights[0]}", more, "%", BARS[weights], True))
    finish("loadtests.perplexity", figures, options, "perplexity")
