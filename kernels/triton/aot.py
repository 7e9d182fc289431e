"""Compiles the kernels ahead of time, without a GPU, and reports the resources that each one needs.

``python -m kernels.triton.aot`` prints a table for every target and exits with 1 if a kernel spills registers
or needs more shared memory than the target has; ``--full`` compiles more variants.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.activation import Activation
from kernels.triton import activation, soft_cap
from kernels.triton.attention import SPLIT, tile_for
from kernels.triton.attention_kernels import merge_splits_kernel, paged_attention_kernel
from kernels.triton.jit import interpreting
from kernels.triton.kv_write import BLOCK_HEADS, rope_and_write_kv_kernel
from kernels.triton.linear import BLOCK_K, FEW, MANY, linear_kernel, options
from kernels.triton.norm import norm_warps, rms_norm_kernel

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory (LDS) one program may have."""
REGISTER_LIMIT = {"sm_80": 255, "sm_90": 255, "gfx942": 512}
"""32-bit registers one lane may have; on gfx942 vector and accumulation registers together."""

ELEMENT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ELEMENT_POINTERS = frozenset(
    ("out", "q", "kv", "x", "residual", "weight", "bias", "gate_up", "qkv", "q_out", "q_weight", "k_weight")
)
ARGUMENT_TYPES = {
    "partial_acc": "*fp32",
    "partial_stats": "*fp32",
    "cos_sin": "*fp32",
    "query_start": "*i32",
    "context_lens": "*i32",
    "block_tables": "*i32",
    "positions": "*i64",
    "slots": "*i64",
    "eps": "fp32",
    "scale": "fp32",
}


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time arguments, as a launch would choose them."""

    name: str
    kernel: Any
    dtype: torch.dtype
    constants: Mapping[str, object]
    options: Mapping[str, int]
    types: dict[str, str] = field(default_factory=dict)  # of arguments that differ from ARGUMENT_TYPES


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of a target that one compiled variant needs."""

    target: str
    name: str
    registers: int  # 32-bit registers a lane
    spilled: int  # bytes of stack and local memory a lane; on ROCm spilled registers plus bytes of scratch
    shared: int  # bytes a program

    @property
    def fits(self) -> bool:
        """No spills, and registers and shared memory within the target's limits."""
        return (
            self.spilled == 0
            and self.registers <= REGISTER_LIMIT[self.target]
            and self.shared <= SHARED_LIMIT[self.target]
        )

    def __str__(self) -> str:
        verdict = "ok" if self.fits else "DOES NOT FIT"
        return (
            f"{self.target:7} {self.name:48} {self.registers:4} registers {self.spilled:4} spilled "
            f"{self.shared / 1024:6.1f} KiB shared  {verdict}"
        )


def variants(hip: bool, *, full: bool = False) -> list[Variant]:
    """What to compile; ``full`` adds group sizes, head sizes and dtypes."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cases = [  # dtype, group, head size, window, soft cap
        *((bf16, 8, 128, 0, 0.0), (bf16, 1, 64, 0, 0.0), (bf16, 7, 128, 0, 0.0), (fp16, 4, 128, 4096, 0.0)),
        *((fp32, 1, 128, 0, 0.0), (bf16, 2, 256, 4096, 50.0), (bf16, 2, 128, 0, 50.0), (fp32, 2, 256, 0, 50.0)),
    ]
    if full:
        cases = [(bf16, group, head_dim, 0, 0.0) for group in (1, 3, 4, 7, 8, 16) for head_dim in (64, 128)]
        cases += [
            (dtype, 4, head_dim, window, cap)
            for dtype in ELEMENT
            for head_dim in (64, 256)
            for window in (0, 512)
            for cap in (0.0, 50.0)
        ]
        cases += [(dtype, 2, 128, window, 50.0) for dtype in ELEMENT for window in (0, 4096)]
        cases += [(bf16, group, 128, 0, 50.0) for group in (1, 7, 8)]
        cases += [(fp32, group, 128, 0, 0.0) for group in (4, 8)]
    found = []
    for dtype, group, head_dim, window, cap in cases:
        found.append(_attention(dtype, group, head_dim, window, hip, cap=cap, short=True, partial=True))
        found.append(_attention(dtype, group, head_dim, window, hip, cap=cap, short=False, partial=False))
    for dtype in (bf16, fp32) if full else (bf16,):
        found.append(_attention(dtype, 4, 128, 0, hip, short=True, partial=False))
        found.append(_merge(dtype, 4, 128))
    found += [_rope(bf16, 128, True), _rope(fp32, 64, False), _rope(bf16, 256, False)]
    found += [_norm(bf16, 4096), _norm(fp32, 8192), _norm(bf16, 4608, float32_weight=True)]
    found += [_activation(bf16, kind) for kind in Activation]
    found += [_soft_cap(), _linear("few", *FEW, hip), _linear("many", *MANY, hip)]
    return found


def compile_each(target: str, wanted: Iterable[Variant]) -> Iterator[KernelResources]:
    """Compile variants for ``target``, a key of :data:`TARGETS`, each when it is asked for.

    Triton caches by source and target; set ``TRITON_CACHE_DIR`` to keep that out of the user's cache. Raises
    ``RuntimeError`` under ``TRITON_INTERPRET=1``, where nothing is compiled.
    """
    if interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 interprets kernels; unset it to compile them")
    for variant in wanted:
        yield _compile(variant, target)


def _attention(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    window: int,
    hip: bool,
    *,
    cap: float = 0.0,
    short: bool,
    partial: bool,
) -> Variant:
    tile = tile_for(group, head_dim, dtype, short=short, hip=hip)
    short_query = tile_for(group, head_dim, dtype, short=True, hip=hip).block_m // group
    kind = "short" if short else "long"
    name = f"attention {kind}{' split' if partial else ''} group={group} dim={head_dim}"
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "WINDOW": window,
        "SOFT_CAP": cap,
        "SPLIT": SPLIT,
        "PARTIAL": partial,
        "ORDERED": dtype == torch.float32,
        "SHORT": short,
        "SHORT_QUERY": short_query,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": tile.block_d,
    }
    name += (" window" if window else "") + (" cap" if cap else "")
    return Variant(name, paged_attention_kernel, dtype, constants, tile.options)


def _merge(dtype: torch.dtype, group: int, head_dim: int) -> Variant:
    wanted = set(merge_splits_kernel.arg_names)
    attention = _attention(dtype, group, head_dim, 0, False, short=True, partial=True)
    constants = {name: value for name, value in attention.constants.items() if name in wanted}
    return Variant(f"merge splits dim={head_dim}", merge_splits_kernel, dtype, constants, {"num_warps": 1})


def _rope(dtype: torch.dtype, head_dim: int, norm: bool) -> Variant:
    constants = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "NORM": norm,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_D": head_dim,
    }
    name = f"rope and KV write dim={head_dim}{' norm' if norm else ''}"
    return Variant(name, rope_and_write_kv_kernel, dtype, constants, {"num_warps": 4})


def _norm(dtype: torch.dtype, width: int, *, float32_weight: bool = False) -> Variant:
    constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "ADD": True}
    name = f"add rms norm {width}{' by fp32' if float32_weight else ''}"
    types = {"weight": "*fp32"} if float32_weight else {}
    return Variant(name, rms_norm_kernel, dtype, constants, {"num_warps": norm_warps(width)}, types)


def _activation(dtype: torch.dtype, kind: Activation) -> Variant:
    gelu = activation.GELU_TANH[kind]
    constants = {"WIDTH": 14336, "GELU_TANH": gelu, "BLOCK": activation.BLOCK}
    name = f"{'gelu' if gelu else 'silu'} mul"
    return Variant(name, activation.activate_mul_kernel, dtype, constants, {"num_warps": 4})


def _soft_cap() -> Variant:
    constants = {"CAP": 30.0, "BLOCK": soft_cap.BLOCK}
    return Variant("soft cap", soft_cap.soft_cap_kernel, torch.float32, constants, {"num_warps": 4})


def _linear(kind: str, block_m: int, block_n: int, num_warps: int, hip: bool) -> Variant:
    constants: dict[str, object] = {"IN": 4096, "OUT": 14336, "BIAS": True}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K}
    return Variant(f"linear {kind} rows", linear_kernel, torch.float32, constants, options(num_warps, hip=hip))


def _compile(variant: Variant, target: str) -> KernelResources:
    compiled = compile_variant(variant, target)
    usage = _rocm_usage if TARGETS[target].backend == "hip" else _cuda_usage
    registers, spilled = usage(compiled)
    name = f"{variant.name} {ELEMENT[variant.dtype]}"
    return KernelResources(target, name, registers, spilled, compiled.metadata.shared)


def compile_variant(variant: Variant, target: str) -> Any:
    """What Triton makes of ``variant`` for ``target``; ``asm`` has every stage by name."""
    element = ELEMENT[variant.dtype]
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], list[list[object]]] = {}
    for parameter in variant.kernel.params:
        name = parameter.name
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        types = ARGUMENT_TYPES | variant.types
        signature[name] = types.get(name, f"*{element}" if name in ELEMENT_POINTERS else "i32")
        # What a launch finds out: torch's memory and a model's strides are multiples of 16.
        if not parameter.do_not_specialize and signature[name] != "fp32":
            aligned[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    return triton.compile(source, target=TARGETS[target], options=variant.options)


def _cuda_usage(compiled: Any) -> tuple[int, int]:
    """``(registers, bytes of stack and local memory)`` as the disassembler in Triton's package reports."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (_number(rf"\b{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _rocm_usage(compiled: Any) -> tuple[int, int]:
    """``(vector registers, spilled registers plus bytes of scratch)`` from the metadata in the assembly."""
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    registers, *spilled = (_number(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]) for name in names)
    return registers, sum(spilled)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"{pattern!r} is not in the compiler's report; has its format changed? {text[:500]}")
    return int(match[1])


def main() -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.aot", description="Compile without a GPU.")
    parser.add_argument("--full", action="store_true", help="compile more variants; takes minutes")
    full = parser.parse_args().full
    all_fit = True
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        for target in TARGETS:
            hip = TARGETS[target].backend == "hip"
            for resources in compile_each(target, variants(hip, full=full)):
                sys.stdout.write(f"{resources}\n")
                sys.stdout.flush()
                all_fit = all_fit and resources.fits
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
