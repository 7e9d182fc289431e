"""How matrices are kept: by option, by what they were made from, and what an identity says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_checkpoints import save_tiny
from safetensors.torch import load_file, save_file
from tiny_engines import make_request, run_to_end, tiny_engine_config

from engine.config import WeightsOption
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.model_runner import ModelRunner
from engine.models.loader import load_model
from engine.models.packer import Packer
from kernels.codes import GROUP
from kernels.cpu import CpuKernels
from kernels.interface import Kernels, PackedLinear
from kernels.reference import ReferenceKernels


class Coders(ReferenceKernels):
    """As kernels that are faster with codes, on every machine."""

    prefers_codes = True


class Plain(ReferenceKernels):
    """As kernels that take no codes."""

    name = "plain"
    takes_codes = False


def form(folder: Path, weights: WeightsOption, kernels: Kernels | None = None, dtype: str = "bfloat16") -> str:
    return load_model(folder, kernels or Coders(), dtype, "cpu", weights).weight_form


def from_file(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """As a GGUF file's quantizer makes it of ``weight`` (Q4_1, Q8_0), then in bfloat16."""
    decoded = []
    for group in weight.float().split(GROUP, dim=1):
        low = group.amin(1, keepdim=True) if bits == 4 else torch.zeros(1)
        span = group.amax(1, keepdim=True) - low if bits == 4 else group.abs().amax(1, keepdim=True)
        step = span / (15 if bits == 4 else 127)
        decoded.append(((group - low) / step).round() * step.half().float() + low.half().float())
    return torch.cat(decoded, dim=1).to(torch.bfloat16)


def code(folder: Path, *parts: str) -> None:
    """Replace the matrices whose names have one of ``parts`` by what their codes stand for, in bfloat16."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and any(part in name for part in parts):
            bits = 8 if "embed" in name or "lm_head" in name else 4
            tensors[name] = from_file(tensor, bits)
    save_file(tensors, path, {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    return tmp_path


def test_a_model_of_codes_is_kept_as_codes(folder: Path) -> None:
    assert form(folder, "auto") == ""
    code(folder, "proj", "embed")
    assert form(folder, "auto") == form(folder, "int4") == "int4"
    assert form(folder, "int8") == "int8"
    assert form(folder, "model") == ""
    assert form(folder, "auto", dtype="float32") == ""
    assert form(folder, "auto", ReferenceKernels()) == ""
    assert form(folder, "auto", Plain()) == ""


def test_matrices_of_other_origin_stay_as_they_are(folder: Path) -> None:
    code(folder, "proj")
    assert form(folder, "auto").startswith("int4 ")
    assert form(folder, "auto") != form(folder, "int4")


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("change", ["v_proj", "up_proj", "one row", "not finite"])
def test_a_matrix_stays_as_it_is_if_a_part_is_of_other_origin(
    tmp_path: Path, kernels: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query, key and value are one matrix here, gate and up another; rows are those of new tokens, say."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "num_key_value_heads": 1}
    save_tiny(tmp_path, "Llama", tie_word_embeddings=True, **sizes)
    code(tmp_path, "proj", "embed")
    coders = Coders() if kernels == "reference" else CpuKernels(1)
    monkeypatch.setattr(coders, "prefers_codes", True)
    assert form(tmp_path, "auto", coders) == "int4"
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.1"
    name = {"v_proj": f"{layer}.self_attn.v_proj.weight", "up_proj": f"{layer}.mlp.up_proj.weight"}.get(
        change, f"{layer}.self_attn.o_proj.weight"
    )
    changed = slice(7, 8) if change in ("one row", "not finite") else slice(None)
    tensors[name][changed] += 0.02 * torch.randn(tensors[name][changed].shape).bfloat16()
    if change == "not finite":
        tensors[name][changed] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    assert form(tmp_path, "auto", coders) == "int4 8/9"
    if change != "not finite":
        assert form(tmp_path, "int4", coders) == "int4"


def test_refusals_say_what_to_set(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights=int8 needs kernels=cpu .* are plain; set weights to model"):
        form(folder, "int8", Plain())
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = float("inf")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match="weights=int4: a weight is not finite; set weights to model"):
        form(folder, "int4")


def test_identities_and_keys_differ(folder: Path) -> None:
    runners = {
        weights: ModelRunner(tiny_engine_config(folder, kernels="reference", weights=weights))
        for weights in ("auto", "model", "int8", "int4")
    }
    assert runners["auto"].identity == runners["model"].identity
    assert len({runner.identity.dtype for runner in runners.values()}) == 3
    assert len({runner.identity.fingerprint for runner in runners.values()}) == 3
    assert len({runner.model_key for runner in runners.values()}) == 3


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_stay_near_the_models(weights: str, folder: Path) -> None:
    code(folder, "proj", "embed")
    seen = {}
    for name in ("model", weights):
        for kernels in ("auto", "reference"):
            engine = Engine(tiny_engine_config(folder, weights=name, kernels=kernels))
            logits: list[torch.Tensor] = []
            engine.runner.on_logits = lambda _, rows, logits=logits: logits.append(rows.clone())
            run_to_end(engine, make_request("one", list(range(2, 40)), max_tokens=1))
            seen[name, kernels] = logits[0]
    exact = seen["model", "reference"]
    for kernels in ("auto", "reference"):
        error = (seen[weights, kernels] - exact).norm() / exact.norm()
        assert 0 < float(error) < 0.06


class Screening(ReferenceKernels):
    """Notes the heads that it is asked to screen."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, ...]] = []

    def pack_head(self, weight: torch.Tensor) -> PackedLinear:
        self.heads.append(tuple(weight.shape))
        return super().pack_head(weight)


def test_heads_with_a_share_of_the_parameters_are_screened() -> None:
    """From a twelfth on; with a bias, or in few bits, never."""
    weight, bias = torch.ones(32, 32), torch.ones(32)
    for parameters, screened in ((12 * 1024, True), (12 * 1024 + 1, False)):
        kernels = Screening()
        packer = Packer(kernels, "model", torch.float32, parameters)
        packer.pack(weight, None)
        packer.pack(weight, bias, head=True)
        assert kernels.heads == []
        packer.pack(weight, None, head=True)
        assert kernels.heads == [(32, 32)] * screened
    kernels = Screening()
    Packer(kernels, "int8", torch.float32, 1024).pack(weight, None, head=True)
    assert kernels.heads == []
