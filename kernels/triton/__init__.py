"""Kernels in Triton, for CUDA and ROCm devices."""

from __future__ import annotations

from kernels.triton.kernels import TritonKernels

__all__ = ["TritonKernels"]
