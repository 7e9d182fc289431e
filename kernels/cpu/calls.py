"""Calls of the C functions, as they come or recorded as one list."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.build import load_library
from kernels.interface import Recording

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""How the C functions name a dtype."""

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

# Argument types by C function, in groups: tensor or shape, ..., threads. The sources say what each one means.
REPLAYED: dict[str, list[type]] = {
    "quire_linear": [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT, _POINTER],
    "quire_rms_norm": [
        *(_INT, _POINTER, _LONG, _INT, _POINTER, _POINTER, _LONG),
        *(_LONG, _LONG, _FLOAT, _INT),
    ],
    "quire_add_rms_norm": [
        *(_INT, _POINTER, _LONG, _POINTER, _LONG, _INT, _POINTER, _POINTER),
        *(_LONG, _LONG, _FLOAT, _INT),
    ],
    "quire_add": [_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _INT],
    "quire_take_rows": [_INT, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _FLOAT, _INT],
    "quire_widen": [_INT, _POINTER, _POINTER, _LONG, _INT],
    "quire_activate_mul": [_INT, _INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT],
    "quire_soft_cap": [_POINTER, _LONG, _FLOAT, _INT],
    "quire_rope_and_write_kv": [
        *(_INT, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),
        *(_POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _LONG, _LONG, _LONG, _INT, _POINTER, _POINTER, _FLOAT, _INT),
    ],
    "quire_attention": [
        *(_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER),
        *(_POINTER, _POINTER, _POINTER, _LONG, _LONG),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _FLOAT, _INT),
    ],
    "quire_codes_linear": [_POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER, _INT],
    "quire_deciding_logits": [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT],
}
"""What a recording may hold, in the order of ``FUNCTIONS`` in ``replay.cpp``."""

_OTHERS: dict[str, tuple[list[type], type | None]] = {
    "quire_linear_width": ([], _LONG),
    "quire_linear_bf16_in_pairs": ([], _INT),
    "quire_linear_pack": ([_POINTER, _POINTER, _LONG, _INT], None),
    "quire_codes_in_hardware": ([], _INT),
    "quire_codes_bytes": ([_POINTER], _LONG),
    "quire_codes_pack": ([_POINTER, _INT, _POINTER, _LONG, _INT], _INT),
    "quire_codes_errors": ([_POINTER, _INT, _POINTER, _LONG, _POINTER, _INT], None),
    "quire_replay": ([_POINTER, _LONG], _LONG),
    "quire_draw": ([_POINTER, _LONG, _LONG, _LONG, *[_POINTER] * 9, _INT], _INT),
    "quire_edit_logits": ([_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT], None),
    "quire_logprobs": ([_POINTER, _LONG, _LONG, _LONG, *[_POINTER] * 4, _LONG, *[_POINTER] * 5, _INT], _INT),
}
_RETURN_STATUS = ("quire_linear", "quire_codes_linear", "quire_deciding_logits", "quire_attention")


class CallRecording(Recording):
    """Calls as words for ``quire_replay``, and the buffers that they write to."""

    def __init__(self, functions: dict[str, Any], calls: _Calls, sized: list[_Sized], kept: list[Any]) -> None:
        self._replay = functions["quire_replay"]
        self._words = calls.as_array()
        self._address = self._words.ctypes.data
        self._begins = calls.begins
        self._sized = sized
        self._sizes: Sequence[int] = ()
        self._kept = kept

    def replay(self, sizes: Sequence[int], parts: int = 1) -> Iterator[None]:
        self._resize(sizes)
        count, address = len(self._begins), self._address
        bounds = [self._begins[part * count // parts] for part in range(parts)] + [len(self._words)]
        for begin, end in pairwise(bounds):
            if self._replay(address + begin * self._words.itemsize, end - begin):
                raise MemoryError("no memory for a step")
            yield

    def makes(self, calls: _Calls, sizes: Sequence[int]) -> bool:
        """Whether a replay of these ``sizes`` makes these ``calls``."""
        self._resize(sizes)
        return np.array_equal(self._words, calls.as_array())

    def _resize(self, sizes: Sequence[int]) -> None:
        if sizes != self._sizes:
            for size, sized in zip(sizes, self._sized, strict=True):
                self._words[sized.places] = sized.factors * size
            self._sizes = sizes


@dataclass(frozen=True, slots=True)
class _Sized:
    """Words that are multiples of one of a run's sizes."""

    places: NDArray[np.int64]
    factors: NDArray[np.int64]


@dataclass(slots=True)
class _Calls:
    """What a run calls: ``words`` for ``quire_replay``, and where each call's begin."""

    words: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)

    def link_products(self, number: int) -> None:
        """Tell each product, a call of function ``number``, which weight the product after it takes."""
        products = [begin for begin in self.begins if self.words[begin] == number]
        for begin, after in pairwise(products):
            self.words[begin + len(REPLAYED["quire_linear"])] = self.words[after + 1]

    def as_array(self) -> NDArray[np.int64]:
        return np.array(self.words, dtype=np.uint64).view(np.int64)

    def sized(self, larger: _Calls) -> _Sized:
        """The words that depend on a size of which a run that makes the ``larger`` calls has one more."""
        if larger.begins != self.begins:
            raise _CannotRecord
        words, others = self.as_array(), larger.as_array()
        places = np.flatnonzero(words != others)
        return _Sized(places, others[places] - words[places])


class _CannotRecord(Exception):
    """What a run does is no list of calls, or depends on its sizes in another way."""


@dataclass(slots=True)
class Arena:
    """An allocation that is handed out from its beginning: addresses ``free`` to ``end`` are left."""

    memory: Tensor
    free: int
    end: int


class Calls:
    """The library's functions by name. Used by one thread at a time while a run is recorded.

    Raises :class:`kernels.cpu.build.BuildError` where the kernels cannot be compiled.
    """

    def __init__(self) -> None:
        library = load_library()
        self._functions: dict[str, Any] = {}
        signatures: dict[str, tuple[list[type], type | None]] = {
            name: (types, _INT if name in _RETURN_STATUS else None) for name, types in REPLAYED.items()
        }
        for name, (types, result) in {**signatures, **_OTHERS}.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, result
            self._functions[name] = function
        self._numbers = {name: number for number, name in enumerate(REPLAYED)}
        self.weight_arena = Arena(torch.empty(0, dtype=torch.uint8), 0, 0)
        self._buffers: dict[str, Tensor] = {}
        self._buffered = False  # a run is going on whose results lie in the buffers
        self._taken: dict[str, int] = {}  # results of a use that it keeps
        self._noted: _Calls | None = None  # if it is being recorded
        self._kept: list[Any] = []

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call ``name`` and return what it returns; or note the call, if the run is recorded, and return 0."""
        noted = self._noted
        if noted is None:
            return self._functions[name](*arguments)
        noted.begins.append(len(noted.words))
        words = [_word(type_, value) for type_, value in zip(REPLAYED[name], arguments, strict=True)]
        noted.words += [self._numbers[name], *words]
        return 0

    def empty(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, kept_for_all: bool = False) -> Tensor:
        """An uninitialized tensor for a result.

        In a run with buffers it lies in that of its ``use`` and holds until the next result of that use, or
        with ``kept_for_all`` to the end of the run.
        """
        if not self._buffered:
            return torch.empty(shape, dtype=dtype)
        if kept_for_all:
            self._taken[use] = self._taken.get(use, 0) + 1
            use = f"{use} {self._taken[use]}"
        size = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < size:
            room = max(size, 64, 2 * buffer.numel() if buffer is not None else 0)
            buffer = self._buffers[use] = torch.empty(room, dtype=torch.uint8)
        if self._noted is not None:
            self._kept.append(buffer)
        return buffer[:size].view(dtype).view(shape)

    def give_up(self) -> None:
        """Something happens that cannot be recorded."""
        if self._noted is not None:
            raise _CannotRecord

    def in_buffers(self, run: Callable[[], Tensor]) -> Tensor:
        """See :meth:`kernels.interface.Kernels.in_buffers`."""
        if self._buffered:
            raise RuntimeError("a run that uses the buffers is going on already")
        self._buffered, self._taken = True, {}
        try:
            return run()
        finally:
            self._buffered = False

    def record(
        self, run: Callable[[Sequence[int]], Tensor], most: Sequence[int]
    ) -> tuple[Tensor, Recording] | None:
        """See :meth:`kernels.interface.Kernels.record`."""
        try:
            self._note(run, [size + 1 for size in most])  # makes all buffers as large as they need be
            calls, result, kept = self._note(run, most)
            sized = []
            for place in range(len(most)):
                larger = [*most]
                larger[place] += 1
                sized.append(calls.sized(self._note(run, larger)[0]))
            recording = CallRecording(self._functions, calls, sized, [*kept, result])
            # Bounds and products of two sizes pass for multiples among large sizes, rounded quotients at 1.
            least = [1] * len(most)
            known = ((calls, most), (self._note(run, least)[0], least))
            if not all(recording.makes(made, sizes) for made, sizes in known):
                return None
        except _CannotRecord:
            return None
        return result, recording

    def _note(
        self, run: Callable[[Sequence[int]], Tensor], sizes: Sequence[int]
    ) -> tuple[_Calls, Tensor, list[Any]]:
        """The calls of ``run(sizes)``, none of which is carried out, its result and its buffers."""
        calls = self._noted = _Calls()
        self._kept = []
        try:
            result = self.in_buffers(lambda: run(sizes))
            calls.link_products(self._numbers["quire_linear"])
            return calls, result, self._kept
        finally:
            self._noted, self._kept = None, []


def _word(type_: type, value: Any) -> int:
    """An argument in 64 bits, as ``replay.cpp`` reads it."""
    if type_ is _FLOAT:
        return int.from_bytes(struct.pack("<f", value), "little")
    return (value or 0) & 0xFFFFFFFFFFFFFFFF
