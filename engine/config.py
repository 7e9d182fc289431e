"""Options of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
RECOVERIES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run one model on one device.

    Attributes:
        model: folder with ``config.json`` and ``*.safetensors``.
        dtype: of weights and KV; ``auto`` takes the checkpoint's.
        device: ``auto`` takes CUDA where there is one, else ``cpu``.
        kernels: ``auto``, ``cpu``, ``triton`` or ``reference``.
        block_size: tokens of one KV block.
        kv_memory: bytes of the KV pool; ``None`` takes ``memory_fraction`` of a GPU's memory, or on a CPU
            a share of what the machine or its cgroup has free.
        num_blocks: exact pool size in blocks; overrides ``kv_memory``.
        swap_space: bytes of host memory to copy the KV of preempted requests to; ``None`` takes up to 4 GiB
            beside a GPU, and none on a CPU, where the same memory does more in the pool itself.
        recovery: of preempted requests: ``swap`` copies their KV to ``swap_space`` and back, ``recompute``
            computes it again (and takes no ``swap_space``), ``auto`` does what it expects to take less time.
        priority_ageing: seconds of waiting that make up for one level of ``priority``; ``None`` for none: a
            request then never runs before one of a better priority.
        memory_sharers: engines on this machine, this one included; on a CPU each takes its part of the memory.
        memory_fraction: share of a GPU's memory for weights and KV together.
        max_model_len: longest sequence in tokens; ``None`` takes the model's own.
        max_num_seqs: most requests in one step.
        token_budget: most tokens in one step; ``None`` calibrates it so that a step stays near 100 ms on a CPU.
        prefix_caching: share blocks between requests with equal prefixes.
        num_threads: CPU threads; ``None`` takes all cores.
        seed: draws the seeds of requests that bring none.
        check_invariants: verify the pool after every step (slow; for tests).
        check_at_idle: verify all bookkeeping whenever the last request has ended (for debugging).
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    block_size: int = 16
    kv_memory: int | None = None
    num_blocks: int | None = None
    swap_space: int | None = None
    recovery: str = "auto"
    priority_ageing: float | None = None
    memory_sharers: int = 1
    memory_fraction: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    token_budget: int | None = None
    prefix_caching: bool = True
    num_threads: int | None = None
    seed: int = 0
    check_invariants: bool = False
    check_at_idle: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
        if self.recovery not in RECOVERIES:
            raise ConfigError(f"recovery={self.recovery!r} is unknown; choose one of {', '.join(RECOVERIES)}")
        if self.swap_space is not None and self.swap_space < 0:
            raise ConfigError(f"swap_space is {self.swap_space} but must be at least 0")
        if self.recovery == "swap" and self.swap_space == 0:
            raise ConfigError("recovery=swap needs a swap_space above 0; set swap_space")
        if self.priority_ageing is not None and not self.priority_ageing > 0.0:
            raise ConfigError(
                f"priority_ageing is {self.priority_ageing} but must be above 0 seconds; leave it out for none"
            )
        for name in ("block_size", "memory_sharers", "max_num_seqs"):
            _at_least_one(name, getattr(self, name))
        for name in ("kv_memory", "num_blocks", "max_model_len", "token_budget", "num_threads"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction is {self.memory_fraction} but must be above 0 and at most 1")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value} but must be at least 1")
