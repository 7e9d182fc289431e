"""The memory planner against hand-made figures and against a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_checkpoints import FAMILIES, save_tiny

from engine.capacity import kv_bytes_per_token, main, plan, weight_bytes
from engine.config import WeightsOption
from engine.errors import ConfigError
from engine.models.config import FAMILIES as ARCHITECTURES
from engine.models.config import read_model_config
from engine.models.packer import Packer
from engine.models.registry import SHAPES
from kernels.cpu import CpuKernels
from kernels.interface import kv_pool_shape

GIB = 2**30


def test_llama_3_70b_over_8_devices() -> None:
    result = plan("llama-3-70b", SHAPES["llama-3-70b"], kv_memory=40 * GIB, tp=8)
    assert result.bytes_per_token == 40 * 1024
    assert result.max_model_len == 131_072
    assert result.bytes_per_sequence == 5 * GIB
    assert result.num_blocks == 65_536
    assert result.num_tokens == 1_048_576
    assert result.max_length_sequences == 8.0
    assert result.weights == pytest.approx(70.55e9 * 2 / 8, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_token_are_those_of_the_pool(dtype: torch.dtype) -> None:
    config = SHAPES["qwen3-0.6b"]
    shape = kv_pool_shape(10, config.num_layers, 16, config.num_kv_heads, config.head_dim)
    pool = torch.empty(shape, dtype=dtype, device="meta")
    assert kv_bytes_per_token(config, dtype.itemsize) * 160 == pool.numel() * pool.element_size()
    assert kv_bytes_per_token(config, dtype.itemsize, tp=4) * 4 == kv_bytes_per_token(config, dtype.itemsize)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_exactly(family: str, tmp_path: Path) -> None:
    bias = {"attention_bias": True} if ARCHITECTURES[f"{family}ForCausalLM"].qkv_bias is None else {}
    model = save_tiny(tmp_path, family, tie_word_embeddings=family == "Qwen2", **bias)
    assert read_model_config(tmp_path).num_parameters == sum(p.numel() for p in model.parameters())


def test_shapes_are_what_their_names_say() -> None:
    billions = {"smollm2-135m": 0.1345, "llama-3-8b": 8.03, "llama-3-405b": 405.9, "mistral-7b": 7.25}
    billions |= {"qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62, "qwen3-0.6b": 0.596, "qwen3-32b": 32.8}
    billions |= {"gemma-2b": 2.506, "gemma-7b": 8.538}
    billions |= {"gemma-2-2b": 2.614, "gemma-2-9b": 9.242, "gemma-2-27b": 27.23}
    billions |= {"olmo-2-1b": 1.485, "olmo-2-7b": 7.299, "olmo-2-13b": 13.716, "olmo-2-32b": 32.234}
    for name, size in billions.items():
        assert SHAPES[name].num_parameters == pytest.approx(size * 1e9, rel=2e-3)
    for config in SHAPES.values():
        assert config.architecture in ARCHITECTURES
        assert config.num_heads % config.num_kv_heads == 0


def test_device_memory_holds_weights_and_pool() -> None:
    config = SHAPES["llama-3-8b"]
    result = plan("llama-3-8b", config, device_memory=24 * GIB, memory_fraction=0.9)
    assert result.weights == config.num_parameters * 2
    assert result.kv_memory + result.weights == int(24 * GIB * 0.9)
    assert result.num_blocks == result.kv_memory // (16 * 131_072)
    with pytest.raises(ConfigError, match=r"weights take 14\.96 GiB of each device, more than 90% of 16 GiB"):
        plan("llama-3-8b", config, device_memory=16 * GIB)


def test_sequences_are_counted_in_whole_blocks() -> None:
    result = plan("x", SHAPES["llama-3-8b"], kv_memory=GIB, max_model_len=100, block_size=64)
    assert result.bytes_per_sequence == 128 * result.bytes_per_token
    assert result.max_length_sequences == result.num_blocks / 2


def test_refusals() -> None:
    config = SHAPES["llama-3-8b"]
    with pytest.raises(
        ConfigError, match=r"tp is 3, which does not divide the model's 8 KV heads; .* 1, 2, 4, 8"
    ):
        plan("x", config, kv_memory=GIB, tp=3)
    with pytest.raises(ConfigError, match="tp is 0"):
        plan("x", config, kv_memory=GIB, tp=0)
    with pytest.raises(ConfigError, match=r"hold no block of 16 tokens \(2 MiB\)"):
        plan("x", config, kv_memory=2**20)
    with pytest.raises(
        ConfigError, match="max_model_len is 200000 but must be from 1 to the model's context of 131072"
    ):
        plan("x", config, kv_memory=GIB, max_model_len=200_000)
    with pytest.raises(ConfigError, match="block_size is 0"):
        plan("x", config, kv_memory=GIB, block_size=0)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["--model", "Llama-3-70B", "--memory", "40GiB", "--tp", "8", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "40 KiB" in printed
    assert "5 GiB" in printed
    figures = json.loads(out.read_text())
    assert figures["bytes_per_token"] == 40960
    assert figures["num_blocks"] == 65_536


def test_command_with_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, "Llama")
    assert main(["--model", str(tmp_path), "--memory", "1MiB", "--dtype", "fp32"]) == 0
    assert "sequence of 128 tokens" in capsys.readouterr().out


def test_command_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-3-70b", "--memory", "40GiB", "--tp", "5"]) == 1
    assert main(["--model", "no/such/folder", "--memory", "40GiB"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: tp is 5")
    assert lines[1].startswith("error: ")
    assert "known shapes: smollm2-135m" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize("more", ["--memory-fraction=nan", "--memory-fraction=7", "--json=/dev/null/plan.json"])
def test_command_refuses_what_cannot_be(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-3-8b", "--device-memory", "24GiB", more]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1


def test_command_with_weights_in_few_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    command = ["--model", "smollm2-135m", "--device-memory", "1GiB", "--weights", "int4", "--json", str(out)]
    assert main(command) == 0
    assert "smollm2-135m, bfloat16, int4, on one device" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["weights"] == weight_bytes(SHAPES["smollm2-135m"], 2, "int4")
    assert figures["kv_memory"] == int(GIB * 0.9) - figures["weights"]


@pytest.mark.parametrize(("weights", "bytes_of_32"), [("int8", 34), ("int4", 20)])
@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3-8b"])
def test_weights_in_few_bits(name: str, weights: WeightsOption, bytes_of_32: int) -> None:
    config = SHAPES[name]
    table = config.vocab_size * config.hidden_size
    layers = config.num_parameters - table * (1 if config.tie_word_embeddings else 2)
    expected = table * 2 + table * 34 // 32 + layers * bytes_of_32 // 32
    assert weight_bytes(config, 2, weights) == pytest.approx(expected, abs=1)
    for other in ("auto", "model"):
        assert weight_bytes(config, 2, other) == 2 * config.num_parameters > expected


@pytest.mark.parametrize("weights", ["auto", "model"])
def test_a_cpu_keeps_copies_of_the_output_head(weights: WeightsOption, tmp_path: Path) -> None:
    """One that is the embedding table is packed; a large one is there in 8 bits, too."""
    small, large = SHAPES["smollm2-135m"], SHAPES["llama-3-8b"]
    table = small.vocab_size * small.hidden_size
    assert small.tie_word_embeddings
    expected = 2 * (small.num_parameters + table) + table * 34 // 32
    assert weight_bytes(small, 2, weights, cpu=True) == expected
    assert weight_bytes(large, 2, weights, cpu=True) == 2 * large.num_parameters
    out = tmp_path / "plan.json"
    command = ["--model", "smollm2-135m", "--device-memory", "1GiB", "--weights", "model", "--json", str(out)]
    for more, size in (([], 2 * small.num_parameters), (["--cpu"], expected)):
        assert main([*command, *more]) == 0
        assert json.loads(out.read_text())["weights"] == size


def test_the_copies_of_a_cpus_output_head_are_no_more_than_planned(tmp_path: Path) -> None:
    """What the kernels have set aside for a head, of a whole number of panels."""
    kernels = CpuKernels(num_threads=1)
    weight = torch.randn(1024, 256).to(torch.bfloat16)
    packer = Packer(kernels, "model", torch.bfloat16, num_parameters=2 * weight.numel())
    packer.pack(torch.randn(32, 64).to(torch.bfloat16), None)  # takes an arena
    before = kernels._calls.weight_arena.free
    packer.pack(weight, None, head=True)
    taken = kernels._calls.weight_arena.free - before
    assert taken in (
        pytest.approx(weight.numel() * 2, abs=256),
        pytest.approx(weight.numel() * 98 / 32, abs=256),
    )
