"""What serving needs of a model's tokenizer, without ``transformers`` in its process.

That takes seconds to import and loads torch, but only it knows how the files of each model family make a
tokenizer. So it reads a folder once, in a process of its own (``python -m app.api.tokenizer_parts FOLDER``),
and what it finds is kept in Quire's cache by the content of the files.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from engine.errors import ConfigError
from engine.models.identity import tokenizer_digest
from engine.tokenizer import has_tokenizer, load_tokenizer
from kernels.cache_dir import cache_root

_FORMAT = 1
"""Raise it with each change to ``TokenizerParts`` or to how they are made."""

_OTHER_FILES = ("config.json", "tekken.json", "additional_chat_templates/*.jinja")
"""Files that decide the tokenizer, too, besides those of ``tokenizer_digest``."""

_DEFAULT = "default"  # of several chat templates
_FAILED = 3  # exit status: standard error has one line for users

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """One model's tokenizer."""

    backend: str  # the JSON of a tokenizers.Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]  # such as bos_token

    @classmethod
    def of(cls, tokenizer: Any, folder: Path) -> TokenizerParts:
        """The parts of a tokenizer of ``transformers`` that was read from ``folder``.

        Raises:
            ConfigError: it has no fast form.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer in {folder} has no fast form (tokenizer.json), which serving needs"
            )
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get(_DEFAULT)
        return cls(backend.to_str(), template, dict(tokenizer.special_tokens_map))

    @classmethod
    def read(cls, folder: Path) -> TokenizerParts:
        """The parts of the tokenizer in ``folder``, from the cache if they are there.

        Raises:
            ConfigError: there is no usable tokenizer; one line.
        """
        if not has_tokenizer(folder):
            load_tokenizer(folder)  # says what is missing
        kept = cache_root() / "tokenizers" / f"{_key(folder)}.json"
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(kept.read_text(encoding="utf-8")))
        text = _read_apart(folder)
        _keep(kept, text)
        return cls(**json.loads(text))


def _key(folder: Path) -> str:
    """Names everything that decides the parts."""
    digest = hashlib.blake2b(digest_size=16)
    made_by = [_FORMAT, version("transformers"), version("tokenizers"), tokenizer_digest(folder)]
    digest.update(json.dumps(made_by).encode())
    for pattern in _OTHER_FILES:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _read_apart(folder: Path) -> str:
    """The parts as JSON, made by a process that ends with the memory that it took.

    Raises:
        ConfigError: see ``TokenizerParts.read``.
    """
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "app.api.tokenizer_parts", str(folder)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        known = done.returncode == _FAILED
        raise ConfigError(lines[-1] if known else f"the tokenizer in {folder} cannot be read: {lines[-1]}")
    return done.stdout


def _keep(path: Path, text: str) -> None:
    """Write the file whole or not at all; without room or permission the next process reads the folder, too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            whole = Path(scratch) / path.name
            whole.write_text(text, encoding="utf-8")
            whole.replace(path)
    except OSError as error:
        logger.warning(
            "the tokenizer cannot be cached, so each start takes seconds longer: %s; QUIRE_CACHE names another "
            "folder",
            error,
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the parts of a folder's tokenizer as JSON; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m app.api.tokenizer_parts", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        parts = TokenizerParts.of(load_tokenizer(folder), folder)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _FAILED
    sys.stdout.write(json.dumps(asdict(parts)))
    return 0


if __name__ == "__main__":
    # Then transformers finds no torch. No tokenizer needs it, and importing it takes most of the time.
    sys.modules["torch"] = cast(Any, None)
    sys.exit(main())
