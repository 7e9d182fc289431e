"""Activations of an MLP; apart from the interface, so that who reads a configuration loads no torch."""

from __future__ import annotations

import enum


class Activation(enum.StrEnum):
    """Activation of an MLP's gate; a value is the name in ``config.json``."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"  # GELU in its tanh approximation
