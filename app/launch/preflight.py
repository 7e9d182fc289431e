"""Checks before anything starts: the port, and memory for weights and KV."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from app.config import AppConfig
from engine.capacity import kv_bytes_per_token, weight_bytes
from engine.devices import on_cpu
from engine.errors import ConfigError
from engine.kv.pool_size import PoolSize, free_ram, plan_pool
from engine.models.config import context_length, read_model_config
from engine.models.dtypes import BYTES, dtype_name
from engine.models.tensor_files import TensorFiles
from engine.sizes import format_bytes

PROCESS_BYTES = 600 * 2**20
"""Memory of an engine replica's process before weights and KV: interpreter, torch, Ray."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What one engine replica will hold."""

    dtype: str
    pool: PoolSize | None  # as planned before the start; None on a GPU, which is not asked yet
    context_length: int  # tokens


def check_port(host: str, port: int, option: str = "port=") -> None:
    """Check that the server can listen.

    Raises:
        ConfigError: another process listens there, or this machine has no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; choose another host") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop the process that uses the port, or "
                f"choose another with {option}"
            ) from None


def check_memory(
    options: AppConfig, folder: Path, available: int | None = None, replicas: int | None = None
) -> Fit:
    """Check that the weights and KV pools of ``replicas``, by default all, fit in ``available`` bytes.

    By default that is what the system has free. On a GPU weights and pools are elsewhere, and each replica
    checks for itself.

    Raises:
        ConfigError: they do not fit, or the model cannot be read.
    """
    model = read_model_config(folder)
    with TensorFiles(folder) as files:
        dtype = dtype_name(options.engine.dtype, model, files)
    length = context_length(options.engine.max_model_len, model)
    gpu = not on_cpu(options.engine.device)
    each = PROCESS_BYTES + (0 if gpu else weight_bytes(model, BYTES[dtype], options.engine.weights))
    if available is None:
        available = free_ram()
    most = replicas or options.scaling.upper_limit
    left = available - each * most
    if left <= 0:
        raise ConfigError(
            f"{most} engine replicas need about {format_bytes(each * most)} ({format_bytes(each)} each) in "
            f"addition to their KV pools, but {format_bytes(available)} are available; lower "
            f"{options.scaling.limiting_option}, or choose a smaller model"
        )
    if gpu:
        return Fit(dtype, None, length)
    engine = options.engine_config(str(folder), 1, most)
    token_bytes = kv_bytes_per_token(model, BYTES[dtype])
    return Fit(dtype, plan_pool(engine, "cpu", token_bytes, length, left), length)
