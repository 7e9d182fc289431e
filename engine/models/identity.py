"""What decides a model's answers: digests of weights, configuration and tokenizer, equal in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.models.weight_files import weight_files

OUTPUT_VERSION = 1
"""Raise it with each change to Quire after which the same model can answer the same request differently."""

_CONFIGURATION = ("config.json", "generation_config.json")
_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_WHOLE_BYTES = 1 << 20
"""Weight files up to this size are hashed whole."""
_SAMPLES = 4
"""Pieces of each tensor that are hashed otherwise, the first at its begin, the last at its end."""
_SAMPLE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Names of a model's parts; answers of replicas with equal identities agree, up to rounding.

    ``revision`` is that of :func:`model_revision`, ``tokenizer`` of :func:`tokenizer_digest`. ``dtype``
    also says which weights have fewer bits.
    """

    revision: str = ""
    dtype: str = ""
    tokenizer: str = ""
    output_version: int = OUTPUT_VERSION

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: changes with anything but the device that may change answers."""
        digest = hashlib.blake2b(digest_size=6)
        for part in astuple(self):
            _add(digest, str(part).encode())
        return f"fp_{digest.hexdigest()}"


def model_revision(folder: str | Path) -> str:
    """A short name of the weights and their configuration: 16 hexadecimal digits.

    Hashes the configuration and, of each weight file, name, size and content: all of a small file, otherwise
    its header and four samples of each tensor. It reads a few MB of the largest models, so nothing is cached.
    Unlike a path or a time it is equal on every node, and tells a fine-tuned model from its base: training
    changes whole tensors.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = Path(folder)
    digest = hashlib.blake2b(digest_size=8)
    try:
        _add_files(digest, folder, _CONFIGURATION)
        for path in weight_files(folder):
            size = path.stat().st_size
            _add(digest, path.name.encode())
            _add(digest, size.to_bytes(8, "little"))
            if size <= _WHOLE_BYTES:
                _add(digest, path.read_bytes())
            else:
                for piece in _samples(path):
                    _add(digest, piece)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the model in {folder}: {error}") from error
    return digest.hexdigest()


def tokenizer_digest(folder: str | Path) -> str:
    """A short name of the tokenizer and its chat template: 16 hexadecimal digits.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        _add_files(digest, Path(folder), _TOKENIZER)
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """A safetensors file's header, and samples of each tensor."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        yield header
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for name in sorted(tensors):
            begin, end = tensors[name]["data_offsets"]
            for sample in range(_SAMPLES):
                offset = max(end - begin - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1)
                file.seek(8 + len(header) + begin + offset)
                yield file.read(min(_SAMPLE_BYTES, end - begin))


def _add_files(digest: hashlib.blake2b, folder: Path, names: tuple[str, ...]) -> None:
    """Those of the files that there are."""
    for name in names:
        path = folder / name
        if path.is_file():
            _add(digest, name.encode())
            _add(digest, path.read_bytes())


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
