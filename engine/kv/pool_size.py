"""How many KV blocks to allocate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.config import EngineConfig
from engine.control_groups import ROOT, groups
from engine.errors import ConfigError
from engine.sizes import format_bytes

if TYPE_CHECKING:
    import torch

_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: limit, usage, and the name of what can be reclaimed."""

CPU_SHARE = 0.25
"""Share of the free memory that the pool takes by default on a CPU ..."""

CPU_SHARE_OF_ALL = 0.5
"""... the share of all pools on the machine together ..."""

CPU_CEILING = 4 << 30
"""... and the maximum for one pool, in bytes."""

CPU_LIMIT = 0.8
"""Largest share of the free memory that explicit sizes, or one sequence of the maximum length for each engine,
may take on a machine."""

SWAP_SHARE = 0.25
"""Share of the free RAM that all engines with GPUs together take by default as swap space ..."""

SWAP_CEILING = 4 << 30
"""... and the maximum for one engine, in bytes."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of the KV pool, and of the host pool that its blocks are swapped to."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    host_blocks: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def bytes(self) -> int:
        """Bytes of the pool."""
        return self.tokens * self.bytes_per_token

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self.host_blocks * self.block_size * self.bytes_per_token


def plan_pool(
    config: EngineConfig,
    device_type: str,
    bytes_per_token: int,
    max_model_len: int,
    available: int,
    host_available: int = 0,
) -> PoolSize:
    """Size the pool for ``available`` free bytes of the device (``cpu`` or ``cuda``).

    ``num_blocks`` or ``kv_memory`` decides if given. Otherwise the pool takes a bounded share of the free
    memory on a CPU, and all of it on a GPU (``available`` is what ``memory_fraction`` leaves). A pool's pages
    are allocated when they are first written, so engines that share a machine's memory all see the same bytes
    free, and each may use its part. On a CPU, the host pool takes its bytes from the same part; on a GPU, from
    ``host_available``.

    Raises:
        ConfigError: too little memory; names the figures and the option that changes them.
    """
    block_bytes = config.block_size * bytes_per_token
    gpu = device_type != "cpu"
    host_blocks = _plan_host_pool(config, gpu, block_bytes, host_available if gpu else available)
    engines = 1 if gpu else config.memory_sharers
    limit = available if gpu else _part(config, available) - host_blocks * block_bytes
    who, fewer = _sharing(engines)
    if host_blocks and not gpu:
        who += f" beside {format_bytes(host_blocks * block_bytes)} of swap_space"
        fewer = f" or swap_space{fewer}"
    one_sequence = -(-max_model_len // config.block_size) * block_bytes
    if config.num_blocks is not None:
        option, wanted = "num_blocks", config.num_blocks * block_bytes
    elif config.kv_memory is not None:
        option, wanted = "kv_memory", config.kv_memory
    else:
        option = "memory_fraction" if gpu else "kv_memory"
        share = min(CPU_SHARE, CPU_SHARE_OF_ALL / engines)
        wanted = limit if gpu else min(max(min(int(available * share), CPU_CEILING), one_sequence), limit)
        if one_sequence > limit:
            raise ConfigError(
                f"one sequence of max_model_len={max_model_len} tokens needs {format_bytes(one_sequence)} of "
                f"KV memory but only {format_bytes(limit)} may be used{who}; lower max_model_len{fewer}, "
                f"or set {option}"
            )
    if wanted > limit:
        raise ConfigError(
            f"{option} asks for {format_bytes(wanted)} of KV memory but only {format_bytes(limit)} may be "
            f"used{who}; lower {option}{fewer}"
        )
    if wanted < block_bytes:
        raise ConfigError(
            f"{option} gives {wanted} bytes of KV memory but one block of {config.block_size} tokens needs "
            f"{block_bytes}; raise {option}"
        )
    return PoolSize(wanted // block_bytes, config.block_size, bytes_per_token, host_blocks)


def _plan_host_pool(config: EngineConfig, gpu: bool, block_bytes: int, available: int) -> int:
    """Blocks to swap to, in ``available`` bytes of RAM; 0 where nothing would ever be swapped."""
    if config.recovery == "recompute":
        return 0
    if config.swap_space is None:
        share = int(available * SWAP_SHARE) // config.memory_sharers
        blocks = min(SWAP_CEILING, share) // block_bytes if gpu else 0
        if not blocks and config.recovery == "swap":
            found = f"{format_bytes(available)} of RAM are free" if gpu else "a CPU takes none by itself"
            raise ConfigError(f"recovery=swap needs memory to swap to but {found}; set swap_space")
        return blocks
    limit = _part(config, available)
    who, fewer = _sharing(config.memory_sharers)
    if config.swap_space > limit:
        raise ConfigError(
            f"swap_space asks for {format_bytes(config.swap_space)} of RAM but only {format_bytes(limit)} may "
            f"be used{who}; lower swap_space{fewer}"
        )
    if 0 < config.swap_space < block_bytes:
        raise ConfigError(
            f"swap_space gives {config.swap_space} bytes but one block of {config.block_size} tokens needs "
            f"{block_bytes}; raise swap_space, or set it to 0"
        )
    return config.swap_space // block_bytes


def _part(config: EngineConfig, available: int) -> int:
    """Bytes of the machine's free RAM that one engine may use."""
    return int(available * CPU_LIMIT / config.memory_sharers)


def _sharing(engines: int) -> tuple[str, str]:
    """Words for error messages about engines on the same machine: whose limit it is, and what else helps."""
    return (f" by each of {engines} engines", ", or run fewer engines here") if engines > 1 else ("", "")


def available_memory(device: torch.device, memory_fraction: float, reserve: int = 0) -> int:
    """Bytes that this process may still take on ``device``, less ``reserve`` for one step's activations.

    On a GPU: what ``memory_fraction`` of the whole leaves beside everything allocated now.
    """
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return max(int(total * memory_fraction) - (total - free) - reserve, 0)
    return max(free_ram() - reserve, 0)


def free_ram() -> int:
    """Bytes of RAM that this process may still take."""
    return max(min(psutil.virtual_memory().available, cgroup_available()), 0)


def cgroup_available(root: Path = ROOT) -> int:
    """Bytes left below the memory limits of this process's control groups; very large where there are none."""
    left = 1 << 62
    for version, group in groups("memory", root):
        left = min(left, _left_in(group, *_MEMORY_FILES[version]))
    return left


def _left_in(group: Path, limit: str, usage: str, reclaimable: str) -> int:
    try:
        maximum = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return 1 << 62
    if maximum == "max" or int(maximum) >= 1 << 60:
        return 1 << 62
    cache = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{reclaimable} ")), 0)
    return max(int(maximum) - used + cache, 0)
