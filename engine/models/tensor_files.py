"""The tensors of a model folder's safetensors files, by name."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.errors import ConfigError
from engine.models.weight_files import weight_files

_POINTER = b"version https://git-lfs"


class TensorFiles:
    """The files of one folder, mapped and their headers checked. Tensors are read by :class:`Checkpoint`.

    Raises:
        ConfigError: there are none, one cannot be read, or two have a tensor of the same name.
    """

    framework = "numpy"
    """What tensors are read as. To read them as torch's loads torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._open(weight_files(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmap the files."""
        self._files.clear()

    def stored_as(self, name: str) -> str:
        """The type of a tensor as its file calls it, such as ``BF16``."""
        return str(self._file(name).get_slice(name).get_dtype())

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor from its file's header, before memory is allocated for it."""
        found = self._file(name).get_slice(name).get_shape()
        if tuple(found) != shape:
            raise ConfigError(
                f"{self.folder}: tensor {name} has shape {list(found)} in {self._file_of[name]} but "
                f"config.json asks for {list(shape)}"
            )

    def _open(self, files: list[Path]) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        file_of: dict[str, str] = {}
        for path in files:
            try:
                handle = safe_open(str(path), framework=self.framework, device="cpu")
                self._files[path.name] = handle
                names = [str(name) for name in handle.keys()]  # type: ignore[no-untyped-call]  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                why = "it is a pointer of Git LFS; run 'git lfs pull'" if _is_pointer(path) else error
                raise ConfigError(f"cannot read {path}: {why}") from error
            for name in names:
                if name in file_of:
                    raise ConfigError(
                        f"{self.folder}: tensor {name} is in both {file_of[name]} and {path.name}"
                    )
                file_of[name] = path.name
        return file_of

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConfigError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return self._files[self._file_of[name]]


def _is_pointer(path: Path) -> bool:
    """Whether Git LFS would replace the file, which is what a clone without LFS has."""
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False
