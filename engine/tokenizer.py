"""Load the tokenizer of a model folder, and turn what its library fails on into errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError, InvalidRequestError, one_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether ``folder`` holds a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``; runs no code from there and downloads nothing.

    Importing ``transformers`` takes seconds, so that happens here and not with the module.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder} has no tokenizer ({', '.join(_FILES)}), without which only the offline engine works, "
            "with prompts as token ids"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error
    return tokenizer


@contextmanager
def reading_text(what: str) -> Iterator[None]:
    """Around a call of the library with ``what`` a client sent: a text or tokens.

    Some tokenizers have no token for some texts. On others, the library runs into a defect, or into the limit
    of steps of a regular expression.

    Raises:
        InvalidRequestError: the library failed.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):  # its errors have no class of their own
            raise
        reason = shown(one_line(error))
        raise InvalidRequestError(f"the model's tokenizer fails on the {what}: {reason}") from error


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up: its error is no ``Exception``, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"
