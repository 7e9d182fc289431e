"""How a decoder keeps the matrices of its products: in its dtype, or in fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import WeightsOption
from engine.errors import ConfigError
from engine.models.config import SCREENED_SHARE
from kernels.codes import are_codes
from kernels.interface import Kernels, PackedLinear


class Packer:
    """Packs matrices as the option ``weights`` says, and counts those in few bits.

    With ``int4`` the output head has 8 bits, as in GGUF files: it is most sensitive, and read once a step.
    ``num_parameters`` are the model's.

    Raises:
        ConfigError: these kernels take no weights in few bits.
    """

    def __init__(
        self, kernels: Kernels, weights: WeightsOption, dtype: torch.dtype, num_parameters: int
    ) -> None:
        self._chosen = weights in ("int8", "int4")
        if self._chosen and not kernels.takes_codes:
            raise ConfigError(
                f"weights={weights} needs kernels=cpu or kernels=reference, but the kernels are "
                f"{kernels.name}; set weights to model"
            )
        self.kernels = kernels
        self._weights = weights
        self._num_parameters = num_parameters
        self._looks = weights == "auto" and kernels.prefers_codes and dtype.itemsize == 2
        self._matrices = self._coded = 0

    @property
    def form(self) -> str:
        """What was packed, for an identity: empty if all is in the model's dtype."""
        if not self._coded:
            return ""
        name = "int8" if self._weights == "int8" else "int4"
        return name if self._coded == self._matrices else f"{name} {self._coded}/{self._matrices}"

    def pack(self, weight: Tensor, bias: Tensor | None, head: bool = False) -> PackedLinear:
        """Pack ``weight`` ``[N, K]`` and ``bias`` ``[N]``; ``weight`` stays as it is."""
        self._matrices += 1
        coded = self._in_codes(weight, bias, 8 if head or self._weights == "int8" else 4)
        if coded is None:
            if head and bias is None and weight.numel() >= SCREENED_SHARE * self._num_parameters:
                return self.kernels.pack_head(weight)
            return self.kernels.pack_linear(weight, bias)
        self._coded += 1
        return coded

    def _in_codes(self, weight: Tensor, bias: Tensor | None, bits: int) -> PackedLinear | None:
        """``None`` if it is to stay in the model's dtype: not all of it was decoded from such codes."""
        if not (self._chosen or (self._looks and are_codes(weight, bits))):
            return None
        try:
            return self.kernels.pack_codes(weight, bits, bias, exact=not self._chosen)
        except ValueError as error:
            if not self._chosen:
                return None
            raise ConfigError(f"weights={self._weights}: {error}; set weights to model") from error
