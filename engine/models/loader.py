"""Loads a folder of safetensors into a decoder. Loading is strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import WeightsOption
from engine.errors import ConfigError
from engine.models.config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.models.packer import Packer
from engine.models.weight_files import weight_files
from kernels.interface import SUPPORTED_DTYPES, Kernels

# Tables that older checkpoints store, although they follow from the configuration.
_IGNORABLE = (".rotary_emb.inv_freq", ".self_attn.masked_bias")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def load_model(
    folder: str | Path,
    kernels: Kernels,
    dtype: torch.dtype | str,
    device: torch.device | str,
    weights: WeightsOption = "model",
) -> Decoder:
    """Read the model in ``folder`` onto ``device``.

    Every tensor of the checkpoint must be used and every weight of the decoder filled, with equal shapes.
    Tensors are read through a memory map one at a time, so the peak stays near the size of the model.

    Args:
        dtype: a dtype or its name; ``"auto"`` takes the checkpoint's.
        weights: as the engine's option of that name.

    Raises:
        ConfigError: no such folder, no safetensors in it, or the checkpoint does not fit its configuration; the
            kernels take no weights in few bits; weights are not finite.
    """
    folder = Path(folder)
    config = read_model_config(folder)
    checkpoint = Checkpoint(folder, config)
    with checkpoint:
        chosen = resolve_dtype(dtype, config, checkpoint)
        packer = Packer(kernels, weights, chosen)
        decoder = Decoder(config, packer, chosen, torch.device(device), checkpoint)
        checkpoint.finish()
    return decoder


def resolve_dtype(
    dtype: torch.dtype | str, config: ModelConfig, checkpoint: Checkpoint | None = None
) -> torch.dtype:
    """The dtype to run in; ``"auto"`` is that of the configuration, else of the checkpoint's embedding."""
    if isinstance(dtype, torch.dtype):
        chosen: object = dtype
    elif dtype != "auto":
        chosen = getattr(torch, dtype, dtype)
    elif config.dtype is not None:
        chosen = getattr(torch, config.dtype, config.dtype)
    else:
        chosen = checkpoint.dtype(_EMBEDDING) if checkpoint is not None else torch.float32
    if chosen not in SUPPORTED_DTYPES or not isinstance(chosen, torch.dtype):
        names = ", ".join(str(known).removeprefix("torch.") for known in SUPPORTED_DTYPES)
        raise ConfigError(
            f"dtype {str(chosen).removeprefix('torch.')} is not supported; set dtype to one of {names}"
        )
    return chosen


class Checkpoint:
    """The tensors of one folder; :meth:`finish` reports those that were not used."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._tied = config.tie_word_embeddings
        self._files: dict[str, Any] = {}
        self._file_of = self._open(weight_files(folder))
        self._unused = set(self._file_of)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        """Unmap the files."""
        self._files.clear()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one tensor in the file."""
        return self._read(name).dtype

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor by its file's header, before memory is taken for it."""
        found = self._file(name).get_slice(name).get_shape()
        if tuple(found) != shape:
            raise ConfigError(
                f"{self._folder}: tensor {name} has shape {list(found)} in {self._file_of[name]} but "
                f"config.json asks for {list(shape)}"
            )

    def fill(self, name: str, out: Tensor) -> None:
        """Copy the tensor called ``name`` into ``out``."""
        self.expect(name, tuple(out.shape))
        tensor = self._read(name)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ConfigError(
                f"{self._folder}: tensor {name} is {tensor.dtype}; quantized weights are not supported"
            )
        out.copy_(tensor)
        self._unused.discard(name)

    def finish(self) -> None:
        """Check that nothing is left over.

        Raises:
            ConfigError: tensors that the decoder does not know, or a tied output head that differs from the
                embedding.
        """
        self._unused = {name for name in self._unused if not name.endswith(_IGNORABLE)}
        if self._tied and _HEAD in self._unused:
            if not torch.equal(self._read(_HEAD), self._read(_EMBEDDING)):
                raise ConfigError(
                    f"{self._folder}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}; "
                    "set tie_word_embeddings to false in config.json if both are meant"
                )
            self._unused.discard(_HEAD)
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"{self._folder}: the checkpoint has tensors that this architecture does not use: "
                f"{', '.join(names[:3])}{more}"
            )

    def _open(self, files: list[Path]) -> dict[str, str]:
        file_of: dict[str, str] = {}
        for path in files:
            try:
                handle = safe_open(str(path), framework="pt", device="cpu")
                self._files[path.name] = handle
                names = [str(name) for name in handle.keys()]  # type: ignore[no-untyped-call]  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read {path}: {error}") from error
            for name in names:
                if name in file_of:
                    raise ConfigError(
                        f"{self._folder}: tensor {name} is in both {file_of[name]} and {path.name}"
                    )
                file_of[name] = path.name
        return file_of

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConfigError(f"{self._folder}: tensor {name} is missing from the checkpoint")
        return self._files[self._file_of[name]]
