"""Loads a folder of safetensors into a decoder. Loading is strict."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.config import WeightsOption
from engine.errors import ConfigError
from engine.models.config import ModelConfig, context_length, read_model_config
from engine.models.decoder import Decoder
from engine.models.dtypes import EMBEDDING, FILE_TYPES, dtype_name
from engine.models.packer import Packer
from engine.models.tensor_files import TensorFiles
from kernels.interface import Kernels

# Tables that older checkpoints store, although they follow from the configuration.
_IGNORABLE = (".rotary_emb.inv_freq", ".self_attn.masked_bias")
_HEAD = "lm_head.weight"


def load_model(
    folder: str | Path,
    kernels: Kernels,
    dtype: torch.dtype | str,
    device: torch.device | str,
    weights: WeightsOption = "model",
    max_model_len: int | None = None,
) -> Decoder:
    """Read the model in ``folder`` onto ``device``.

    Every tensor of the checkpoint must be used and every weight of the decoder filled, with equal shapes.
    Tensors are read through a memory map one at a time, so the peak stays near the size of the model.

    Args:
        dtype: a dtype or its name; ``"auto"`` takes the checkpoint's.
        weights: as the engine's option of that name.
        max_model_len: likewise; no sequence may be longer.

    Raises:
        ConfigError: no such folder, no safetensors in it, or the checkpoint does not fit its configuration; the
            kernels take no weights in few bits; weights are not finite; ``max_model_len`` is above its context.
    """
    folder = Path(folder)
    config = read_model_config(folder)
    longest = context_length(max_model_len, config)
    checkpoint = Checkpoint(folder, config)
    with checkpoint:
        name = str(dtype).removeprefix("torch.")
        chosen: torch.dtype = getattr(torch, dtype_name(name, config, checkpoint))
        packer = Packer(kernels, weights, chosen, config.num_parameters)
        decoder = Decoder(config, packer, chosen, torch.device(device), checkpoint, longest)
        checkpoint.finish()
    return decoder


class Checkpoint(TensorFiles):
    """The tensors of one folder; :meth:`finish` reports those that were not used."""

    framework = "pt"

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        super().__init__(folder)
        self._tied = config.tie_word_embeddings
        self._unused = set(self._file_of)

    def fill(self, name: str, out: Tensor) -> None:
        """Copy the tensor called ``name`` into ``out``."""
        self.expect(name, tuple(out.shape))
        out.copy_(self._read(name))
        self._unused.discard(name)

    def finish(self) -> None:
        """Check that nothing is left over.

        Raises:
            ConfigError: tensors that the decoder does not know, or a tied output head that differs from the
                embedding.
        """
        self._unused = {name for name in self._unused if not name.endswith(_IGNORABLE)}
        if self._tied and _HEAD in self._unused:
            if not torch.equal(self._read(_HEAD), self._read(EMBEDDING)):
                raise ConfigError(
                    f"{self.folder}: tie_word_embeddings is true, but {_HEAD} differs from {EMBEDDING}; "
                    "set tie_word_embeddings to false in config.json if both are intended"
                )
            self._unused.discard(_HEAD)
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"{self.folder}: the checkpoint has tensors that this architecture does not use: "
                f"{', '.join(names[:3])}{more}"
            )

    def _read(self, name: str) -> Tensor:
        stored = self.stored_as(name)  # torch has not all of a file's types
        if stored not in FILE_TYPES:
            raise ConfigError(f"{self.folder}: tensor {name} is {stored}; quantized weights are not supported")
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor
