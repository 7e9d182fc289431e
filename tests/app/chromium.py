"""Headless Chromium, driven through two pipes by its own debugging protocol: it needs no other package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

PATH = shutil.which("chromium")


class Tab:
    """One page; see https://chromedevtools.github.io/devtools-protocol."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._read = b""
        self._number = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call and wait for the answer; events are skipped."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def look(self, width: int, height: int, dark: bool) -> None:
        """Take on a size in CSS pixels and a color scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.send("Emulation.setScrollbarsHidden", hidden=True)  # a picture of the whole page has none
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        self.run(
            "new Promise((done) => { const look = () => "
            f"{{ ({condition}) ? done() : setTimeout(look, 20); }}; look(); }})"
        )

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and let go of a key, by its name and its virtual key code."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def picture(self, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._writer, data) :]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            piece = os.read(self._reader, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """A page of a new browser, which ends with the block."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    options = f"--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$0" {options} 3</dev/fd/{theirs_in} 4>/dev/fd/{theirs_out}', str(PATH)],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_in, ours_out)
    finally:
        # All of it: the process that holds its connections would outlive the first one for a while.
        browser = psutil.Process(process.pid)
        for one in [*browser.children(recursive=True), browser]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
