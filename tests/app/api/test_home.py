"""``/`` in a browser: all that it says can be read, and it works behind a key that stands in the address."""

from __future__ import annotations

from pathlib import Path

import chromium
import pytest
from local_server import LocalServer

from app.api.authentication import Gate
from app.api.keys import KeyFile, digest_of
from app.api.routes import GENERATING


@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_a_browser_chats_with_the_key_in_the_address(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - {{id: a, sha256: {digest_of('k3y')}}}\n")
    monkeypatch.setattr(server.api, "gate", Gate(KeyFile(str(path), {})))
    with chromium.tab(tmp_path / "profile") as tab:
        tab.look(1280, 900, dark=False)
        tab.open(server.url.replace("://", "://any:k3y@") + "/")
        tab.until("document.getElementById('state').textContent.startsWith('ready')")
        tab.until("document.getElementById('example').textContent.includes('Bearer KEY')")
        for width in (390, 1280):
            tab.look(width, 900, dark=False)
            assert tab.run("document.getElementById('example').scrollWidth") <= tab.run(
                "document.getElementById('example').clientWidth"
            )
            assert tab.run("document.documentElement.scrollWidth") <= width
        said = tab.run("document.querySelector('main').textContent")
        assert [route for route in GENERATING if route not in said] == []
        tab.run("document.getElementById('text').value = 'Say one word.'; 0")
        tab.run("document.getElementById('form').requestSubmit(); 0")
        tab.until("document.getElementById('pace').textContent || document.querySelector('.error')")
        assert tab.run("[...document.querySelectorAll('.turn')].map((turn) => turn.className)") == [
            "turn user",
            "turn assistant",
        ]
