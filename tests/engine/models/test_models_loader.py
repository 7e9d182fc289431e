"""Strict loading: every tensor used, every weight filled, nothing pickled."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import PagedRun, save_tiny, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.folders import name_of
from engine.models.identity import model_revision
from engine.models.loader import load_model
from kernels.reference import ReferenceKernels


def load(folder: Path, dtype: torch.dtype | str = "auto") -> Decoder:
    return load_model(folder, ReferenceKernels(), dtype, "cpu")


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(decoder: Decoder) -> Tensor:
    return PagedRun(decoder, [torch.arange(12)]).step([12])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "Llama", attention_bias=True)
    return tmp_path


def test_an_extra_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.ones(4)}))
    with pytest.raises(ConfigError, match=r"does not use: model\.layers\.0\.self_attn\.sinks"):
        load(folder)


def test_a_layer_too_many_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"does not use: model\.layers\.1.* and \d+ more"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "lm_head.weight"]
)
def test_a_missing_tensor_is_refused(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=f"tensor {name} is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        ("Gemma2", "pre_feedforward_layernorm"),
        ("Gemma2", "post_attention_layernorm"),
        ("Gemma2", "post_feedforward_layernorm"),
        ("Olmo2", "self_attn.q_norm"),
        ("Olmo2", "post_attention_layernorm"),
        ("Olmo2", "post_feedforward_layernorm"),
    ],
)
def test_a_missing_norm_is_refused(family: str, norm: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    name = f"model.layers.1.{norm}.weight"
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=f"tensor {name} is missing"):
        load(tmp_path)


def test_a_wrong_shape_is_refused(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(80, 47)}))
    with pytest.raises(ConfigError, match=r"up_proj\.weight has shape \[80, 47\] .* asks for \[80, 48\]"):
        load(folder)


def test_sizes_that_the_file_does_not_have_take_no_memory(folder: Path) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    for changes, words in (
        ({"vocab_size": 2**24}, r"embed_tokens\.weight has shape .* asks for \[16777216, "),
        ({"head_dim": 4096}, r"q_proj\.weight has shape"),
        ({"intermediate_size": 2**20}, r"proj\.weight has shape"),
        ({"hidden_size": 2**20, "head_dim": 12}, r"embed_tokens\.weight has shape"),
    ):
        path.write_text(json.dumps({**raw, **changes}))
        with Largest() as largest, pytest.raises(ConfigError, match=words):
            load(folder)
        assert largest.numel <= stored


class Largest(TorchFunctionMode):
    """How many elements the largest tensor has that is made within the context."""

    numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(80, 48).to(dtype)}))
    with pytest.raises(ConfigError, match="quantized weights are not supported"):
        load(folder)


@pytest.mark.parametrize(("stored", "bits"), [("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4), ("U16", 16)])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_types_of_files_that_are_not_of_weights_are_refused(
    tmp_path: Path, name: str, stored: str, bits: int
) -> None:
    """Torch has not all of them. A tied head is not filled, but compared with the embedding."""
    save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    header: dict[str, Any] = {}
    data = b""
    for each, tensor in tensors.items():
        raw = tensor.numpy().tobytes() if each != name else bytes(tensor.numel() * bits // 8)
        kind = stored if each == name else "F32"
        offsets = [len(data), len(data) + len(raw)]
        header[each] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    head = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    with pytest.raises(ConfigError, match=f"tensor {name} is {stored}; quantized weights are not supported"):
        load(tmp_path)


def test_tables_of_older_checkpoints_are_ignored(folder: Path) -> None:
    before = logits(load(folder))
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    rewrite(folder, lambda tensors: tensors.update(table))
    assert torch.equal(logits(load(folder)), before)


def test_only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors file"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load(folder)


def test_formats_that_are_not_read_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n")
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: it is a pointer of Git LFS; run 'git lfs pull'$"
    ):
        load(folder)
    weights.rename(folder / "model.gguf")
    with pytest.raises(ConfigError, match=r"no weights to load; GGUF is not read$"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"not a model folder; weights must be in safetensors, not GGUF$"):
        load(folder)


def test_the_folder_of_a_model_in_the_hubs_cache_is_pointed_to(folder: Path) -> None:
    inner = folder / "models--org--name" / "snapshots" / "0a1b"
    inner.mkdir(parents=True)
    shutil.copy(folder / "config.json", inner)
    with pytest.raises(ConfigError, match=f"not a model folder; did you mean {inner}\\?$"):
        load(inner.parents[1])
    assert name_of(inner) == "org/name"
    assert name_of(Path("/models/my--model")) == "my--model"


def test_a_damaged_file_is_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("names", [[3], [3, "model.safetensors"], [["model.safetensors"]], [None]])
def test_an_index_names_files(folder: Path, names: list[object]) -> None:
    weight_map = {f"tensor {number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"cannot read .*index\.json.*which is not a file name"):
        load(folder)


def test_an_index_may_name_what_no_file_can_be_called(folder: Path) -> None:
    for name in ("x" * 5000, "\x00", "\ud800"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError, match=r"is named in .*index\.json but missing") as caught:
            load(folder)
        assert len(str(caught.value)) < 400


def test_an_index_that_nests_too_deeply_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"cannot read .*index\.json.*[Rr]ecursion"):
        load(folder)


def test_shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = logits(load(folder))
    other = tmp_path_factory.mktemp("sharded")
    shutil.copy(folder / "config.json", other)
    tensors = sorted(load_file(folder / "model.safetensors").items())
    parts = {"model-1.safetensors": dict(tensors[::2]), "model-2.safetensors": dict(tensors[1::2])}
    for name, part in parts.items():
        save_file(part, other / name)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(load(other)), whole)
    (other / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"'model-2\.safetensors' is named in .* but missing"):
        load(other)


def test_a_tied_head_that_is_stored_as_well(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    before = logits(load(tmp_path))
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert torch.equal(logits(load(tmp_path)), before)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head + 1}))
    with pytest.raises(ConfigError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load(tmp_path)


def test_auto_takes_the_dtype_of_the_checkpoint(folder: Path) -> None:
    assert load(folder).dtype == torch.float32
    assert load(folder, "bfloat16").dtype == torch.bfloat16
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))
    assert load(folder).dtype == torch.float16
    del settings["dtype"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert load(folder).dtype == torch.float32
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float64"}))
    with pytest.raises(ConfigError, match="dtype float64 is not supported; set dtype to one of bfloat16"):
        load(folder)


def test_revision_names_the_contents(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    revision = model_revision(folder)
    assert len(revision) == 16
    copy = tmp_path_factory.mktemp("copy") / "elsewhere"
    shutil.copytree(folder, copy)
    assert model_revision(copy) == revision

    # A fine-tuned model has the same configuration, names and shapes.
    rewrite(copy, lambda tensors: [tensor.add_(0.01) for tensor in tensors.values()])
    assert model_revision(copy) != revision
    tiny_config("Llama", vocab_size=98).save_pretrained(folder)
    assert model_revision(folder) != revision
