"""How much context a model's KV cache holds in a given memory.

From a shell::

    python -m engine.capacity --model llama-3-70b --memory 40GiB --tp 8
    python -m engine.capacity --model /path/to/model --device-memory 24GiB --max-model-len 8192
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.config import DTYPE_ALIASES, WeightsOption
from engine.errors import ConfigError
from engine.models.config import SCREENED_SHARE, ModelConfig, read_model_config
from engine.models.dtypes import BYTES
from engine.models.folders import local_folder
from engine.models.registry import SHAPES
from engine.sizes import format_bytes, parse_bytes

_CODED_BYTES = {"int8": 34 / 32, "int4": 20 / 32}
"""Of a weight, with its share of the scale and minimum of its group."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits on each of ``tp`` devices; all sizes are bytes of one device."""

    model: str
    dtype: str  # and the form of matrices in fewer bits
    tp: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    kv_memory: int
    weights: int  # split evenly over the devices
    bytes_per_token: int
    bytes_per_sequence: int  # one sequence of the maximum length, in whole blocks
    num_blocks: int
    num_tokens: int
    max_length_sequences: float


def kv_bytes_per_token(config: ModelConfig, item_bytes: int, tp: int = 1) -> int:
    """Bytes of KV cache for one token on one of ``tp`` devices, of ``item_bytes`` a number.

    Raises:
        ConfigError: ``tp`` does not divide the KV heads.
    """
    if tp < 1 or config.num_kv_heads % tp:
        divisors = [str(n) for n in range(1, config.num_kv_heads + 1) if config.num_kv_heads % n == 0]
        raise ConfigError(
            f"tp is {tp}, which does not divide the model's {config.num_kv_heads} KV heads; "
            f"choose one of {', '.join(divisors)}"
        )
    return 2 * item_bytes * config.num_layers * (config.num_kv_heads // tp) * config.head_dim


def weight_bytes(config: ModelConfig, item_bytes: int, weights: WeightsOption, cpu: bool = False) -> int:
    """Bytes of a model's weights of ``item_bytes`` each; with ``auto`` the most that they may be.

    In few bits, the embedding table is there as in the file, too, and the output head has 8 bits. Otherwise, a
    ``cpu`` keeps a head that is the embedding table once more, and a large head may be screened, which takes
    another copy of it in 8 bits (``kernels/cpu/screened.py``).
    """
    table = config.vocab_size * config.hidden_size
    if weights not in _CODED_BYTES:
        parameters = config.num_parameters + (table if cpu and config.tie_word_embeddings else 0)
        screened = cpu and table >= SCREENED_SHARE * config.num_parameters
        return parameters * item_bytes + (int(table * _CODED_BYTES["int8"]) if screened else 0)
    layers = config.num_parameters - table * (1 if config.tie_word_embeddings else 2)
    return int(table * (item_bytes + _CODED_BYTES["int8"]) + layers * _CODED_BYTES[weights])


def plan(
    model: str,
    config: ModelConfig,
    *,
    kv_memory: int | None = None,
    device_memory: int | None = None,
    memory_fraction: float = 0.9,
    dtype: str = "bfloat16",
    weights: WeightsOption = "model",
    cpu: bool = False,
    tp: int = 1,
    block_size: int = 16,
    max_model_len: int | None = None,
) -> MemoryPlan:
    """Divide memory into blocks.

    Args:
        model: a name for the result.
        kv_memory: bytes of the pool on each device; or give
        device_memory: bytes of each device, of which ``memory_fraction`` holds weights and pool together.
        weights: how matrices are kept, as the engine's option of that name.
        cpu: the devices are CPUs, which keep more copies of the output head.
        max_model_len: longest sequence in tokens; ``None`` takes the model's.

    Raises:
        ConfigError: ``tp`` does not divide the KV heads, or not a single block fits.
    """
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size} but must be at least 1")
    if not 0.0 < memory_fraction <= 1.0:
        raise ConfigError(f"memory_fraction is {memory_fraction} but must be above 0 and at most 1")
    per_token = kv_bytes_per_token(config, BYTES[dtype], tp)
    own_weights = -(-weight_bytes(config, BYTES[dtype], weights, cpu) // tp)
    if kv_memory is None:
        if device_memory is None:
            raise ConfigError("give the memory of the KV pool (--memory) or of the device (--device-memory)")
        kv_memory = int(device_memory * memory_fraction) - own_weights
        if kv_memory <= 0:
            raise ConfigError(
                f"the weights take {format_bytes(own_weights)} of each device, more than {memory_fraction:.0%} "
                f"of {format_bytes(device_memory)}; raise tp or the device's memory"
            )
    length = config.max_position_embeddings if max_model_len is None else max_model_len
    if not 1 <= length <= config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {length} but must be from 1 to the model's context of "
            f"{config.max_position_embeddings}"
        )
    num_blocks = kv_memory // (per_token * block_size)
    if num_blocks < 1:
        raise ConfigError(
            f"{format_bytes(kv_memory)} hold no block of {block_size} tokens "
            f"({format_bytes(per_token * block_size)}); raise --memory or lower --block-size"
        )
    blocks_per_sequence = -(-length // block_size)
    return MemoryPlan(
        model=model,
        dtype=", ".join([dtype, *([weights] if weights in _CODED_BYTES else [])]),
        tp=tp,
        block_size=block_size,
        max_model_len=length,
        kv_memory=kv_memory,
        weights=own_weights,
        bytes_per_token=per_token,
        bytes_per_sequence=blocks_per_sequence * block_size * per_token,
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        max_length_sequences=num_blocks / blocks_per_sequence,
    )


def table(result: MemoryPlan) -> str:
    """The plan for people, one quantity a line."""
    devices = "one device" if result.tp == 1 else f"each of {result.tp} devices"
    rows = [
        ("KV cache of a token", format_bytes(result.bytes_per_token)),
        (f"sequence of {result.max_model_len:,} tokens", format_bytes(result.bytes_per_sequence)),
        ("KV pool", format_bytes(result.kv_memory)),
        (f"blocks of {result.block_size} tokens", f"{result.num_blocks:,}"),
        ("tokens", f"{result.num_tokens:,}"),
        ("sequences of the maximum length", f"{result.max_length_sequences:,.2f}"),
        ("weights", format_bytes(result.weights)),
        ("weights and pool", format_bytes(result.weights + result.kv_memory)),
        ("share of weights", f"{result.weights / (result.weights + result.kv_memory):.0%}"),
    ]
    width, right = (max(len(row[column]) for row in rows) for column in (0, 1))
    title = f"{result.model}, {result.dtype}, on {devices}"
    return "\n".join([title, "-" * len(title), *(f"{name:<{width}}  {value:>{right}}" for name, value in rows)])


def load_config(model: str) -> ModelConfig:
    """The shape called ``model``, or that of a folder, the built-in model or a cached hub id."""
    shape = SHAPES.get(model.lower())
    if shape is not None and not Path(model).is_dir():
        return shape
    try:
        return read_model_config(local_folder(model))
    except ConfigError as error:
        raise ConfigError(f"{error}; known shapes: {', '.join(SHAPES)}") from error


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.capacity",
        description="How many blocks, tokens and sequences of the maximum length fit a KV pool.",
    )
    parser.add_argument("--model", required=True, help=f"a folder, or a shape: {', '.join(SHAPES)}")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--memory", help="memory of each device's KV pool, for example 40GiB")
    memory.add_argument("--device-memory", help="memory of each device, for weights and pool together")
    parser.add_argument("--memory-fraction", type=float, default=0.9, help="share of --device-memory (0.9)")
    parser.add_argument("--tp", type=int, default=1, help="devices that share the model's heads (1)")
    parser.add_argument(
        "--dtype",
        type=lambda name: DTYPE_ALIASES.get(name.lower(), name),
        choices=list(BYTES),
        default="bfloat16",
        help="of weights and KV",
    )
    parser.add_argument(
        "--weights", choices=["model", *_CODED_BYTES], default="model", help="quantized matrices, on a CPU"
    )
    parser.add_argument("--cpu", action="store_true", help="for a CPU, with its copies of the output head")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument("--max-model-len", type=int, help="longest sequence in tokens (the model's own)")
    parser.add_argument("--json", metavar="OUT", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        result = plan(
            options.model,
            load_config(options.model),
            kv_memory=parse_bytes(options.memory) if options.memory else None,
            device_memory=parse_bytes(options.device_memory) if options.device_memory else None,
            memory_fraction=options.memory_fraction,
            dtype=options.dtype,
            weights=options.weights,
            cpu=options.cpu,
            tp=options.tp,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
        )
        if options.json:
            options.json.write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
