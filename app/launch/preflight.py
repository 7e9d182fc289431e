"""Checks before anything starts: the port, and memory for weights and KV."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from app.config import AppConfig, ServedModel
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


class Need(NamedTuple):
    """Engine replicas, and the bytes that they take together before their KV pools."""

    engines: int = 0
    bytes: int = 0


def check_memory_of_models(
    models: Sequence[ServedModel], folders: Sequence[Path], available: int | None = None
) -> list[Fit]:
    """:func:`check_memory` for all models together, each with its folder and the maximum number of engines.

    Raises:
        ConfigError: they do not fit, or a model cannot be read.
    """
    needs = []
    for model, folder in zip(models, folders, strict=True):
        with naming(model):
            most = model.options.scaling.upper_limit
            needs.append(Need(most, most * engine_bytes(model.options, folder)))
    fits = []
    for index, (model, folder) in enumerate(zip(models, folders, strict=True)):
        with naming(model):
            fits.append(
                check_memory(model.options, folder, available, None, [*needs[:index], *needs[index + 1 :]])
            )
    return fits


@contextmanager
def naming(model: ServedModel) -> Iterator[None]:
    """Errors say of which of several models they are."""
    try:
        yield
    except ConfigError as error:
        if not model.one_of_several:
            raise
        raise ConfigError(f"models: {model.name}: {error}") from error


def engine_bytes(options: AppConfig, folder: Path) -> int:
    """Memory of one engine replica before its KV pool; on a GPU without the weights, which are there.

    Raises:
        ConfigError: the model cannot be read.
    """
    if not on_cpu(options.engine.device):
        return PROCESS_BYTES
    model = read_model_config(folder)
    with TensorFiles(folder) as files:
        dtype = dtype_name(options.engine.dtype, model, files)
    return PROCESS_BYTES + weight_bytes(model, BYTES[dtype], options.engine.weights, cpu=True)


def check_memory(
    options: AppConfig,
    folder: Path,
    available: int | None = None,
    replicas: int | None = None,
    others: Iterable[Need] = (),
) -> Fit:
    """Check that the weights and KV pools of ``replicas``, by default all, fit in ``available`` bytes.

    By default that is what the system has free. On a GPU weights and pools are elsewhere, and each replica
    checks for itself. ``others`` are engines of other models on the same machine.

    Raises:
        ConfigError: they do not fit, or the model cannot be read.
    """
    model = read_model_config(folder)
    with TensorFiles(folder) as files:
        dtype = dtype_name(options.engine.dtype, model, files)
    length = context_length(options.engine.max_model_len, model)
    gpu = not on_cpu(options.engine.device)
    each = engine_bytes(options, folder)
    if available is None:
        available = free_ram()
    most = replicas or options.scaling.upper_limit
    beside = Need(*(sum(numbers) for numbers in zip(Need(), *others, strict=True)))
    left = available - each * most - beside.bytes
    if left <= 0:
        neighbors = (
            f", {beside.engines} of other models another {format_bytes(beside.bytes)}" if beside.engines else ""
        )
        need = (
            f"{most} engine replicas need about {format_bytes(each * most)} ({format_bytes(each)} each) in "
            f"addition to their KV pools"
            if most > 1
            else f"an engine replica needs about {format_bytes(each)} in addition to its KV pool"
        )
        fewer = f"lower {options.scaling.limiting_option}, or " if most > 1 else ""
        raise ConfigError(
            f"{need}{neighbors}, but {format_bytes(available)} are available; {fewer}choose a smaller model"
        )
    if gpu:
        return Fit(dtype, None, length)
    engine = options.engine_config(str(folder), 1, most + beside.engines)
    token_bytes = kv_bytes_per_token(model, BYTES[dtype])
    return Fit(dtype, plan_pool(engine, "cpu", token_bytes, length, left), length)
