"""``/`` in a browser, where there is one: a chat, its stream, errors in words, a key in the address."""

from __future__ import annotations

import json
from pathlib import Path

import chromium
import httpx
import pytest
from local_server import MODEL, LocalServer

from app.api.authentication import Gate
from app.api.keys import ENVIRONMENT, KeyFile, digest_of
from app.api.routes import GENERATING

WATCH = """
window.asked = [];
const really = window.fetch;
window.fetch = (url, how) => {
  if (how && how.body) window.asked.push(JSON.parse(how.body));
  return really(url, how);
};
window.lengths = [];
new MutationObserver(() => {
  const answers = document.querySelectorAll(".assistant");
  if (answers.length) window.lengths.push(answers[answers.length - 1].textContent.length);
}).observe(document.getElementById("talk"), { childList: true, subtree: true, characterData: true });
0
"""
IDLE = "document.getElementById('send').textContent === 'Send'"


def send(tab: chromium.Tab, text: str) -> None:
    """Write a message, send it with Enter, and wait until it has been answered."""
    tab.run("document.getElementById('text').focus(); document.getElementById('text').select()")
    tab.send("Input.insertText", text=text)
    tab.press("Enter", 13, "\r")
    tab.until(f"document.querySelectorAll('.user').length && {IDLE}")


def alerts(tab: chromium.Tab) -> list[str]:
    found: list[str] = tab.run("[...document.querySelectorAll('[role=alert]')].map((e) => e.textContent)")
    return found


@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_a_chat_arrives_piece_by_piece_and_errors_say_what_is_wrong(
    server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chromium.tab(tmp_path) as tab:
        tab.look(1280, 900, dark=False)
        tab.open(server.url)
        tab.until(f"document.getElementById('model').textContent === {json.dumps(MODEL)}")
        tab.run(WATCH)
        tab.until("!document.getElementById('instructions').hidden")
        send(tab, "What is the capital of France?")
        lengths = tab.run("window.lengths")
        assert len(set(lengths)) >= 3
        assert lengths == sorted(lengths)
        assert alerts(tab) == []
        (asked,) = tab.run("window.asked")
        assert (asked["temperature"], asked["max_tokens"]) == (0, 256), "no more than half of the context"
        assert "Temperature 0, at most 256 tokens" in tab.run("document.querySelector('main').textContent")
        assert asked["messages"] == [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France?"},
        ]
        assert "first token after" in tab.run("document.getElementById('pace').textContent")

        tab.run("document.getElementById('system').value = ' '")
        send(tab, "word " * 600)
        assert [message["role"] for message in tab.run("window.asked[1].messages")] == [
            "user",
            "assistant",
            "user",
        ]
        assert len(alerts(tab)) == 1
        assert "exceeds the context length of 512 tokens; reload the page to begin a new chat" in alerts(tab)[0]
        assert tab.run("document.getElementById('text').value.length") == len("word " * 600) - 1
        for width in (390, 1280):
            tab.look(width, 900, dark=False)
            assert tab.run("document.documentElement.scrollWidth") <= width

        monkeypatch.setattr(
            server.api, "gate", Gate(KeyFile(None, {ENVIRONMENT: f"alice:{digest_of('key-a')}"}))
        )
        send(tab, "And of Italy?")
        assert "API key" in alerts(tab)[1]
        tab.run("refresh()")
        tab.until("document.getElementById('state').textContent.includes('API key')")


@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_what_becomes_of_an_answer_is_told(server: LocalServer, tmp_path: Path) -> None:
    """One that is long, is stopped, has no words, or ends with its connection."""
    with chromium.tab(tmp_path) as tab:
        tab.look(390, 600, dark=False)
        tab.open(server.url)
        tab.until("document.getElementById('model').textContent !== '…'")
        pace = "document.getElementById('pace').textContent"
        bottom = "Math.round(document.getElementById('form').getBoundingClientRect().bottom - innerHeight)"
        # Answers whose pieces the test hands out.
        tab.run("""
            window.fetch = async (url, how) => new Response(new ReadableStream({ start(stream) {
              window.piece = (text) => stream.enqueue(new TextEncoder().encode(`data: ${text}\\n\\n`));
              window.end = () => stream.close();
              window.break_off = () => stream.error(new TypeError("network error"));
              how.signal.addEventListener("abort", () => stream.error(how.signal.reason));
            } }));
            window.word = (content) => piece(JSON.stringify({ choices: [{ delta: { content } }] }));
            0""")

        def ask(then: str) -> None:
            tab.run("window.piece = null; document.getElementById('text').value = 'Go on.'; 0")
            tab.run("document.getElementById('form').requestSubmit()")
            tab.until("window.piece")
            tab.run(f"{then}; 0")

        ask("for (let i = 0; i < 400; i++) word('many words ')")
        tab.until("document.querySelector('.assistant').textContent.length === 4400")
        assert tab.run(bottom) <= 0, "the reader sees the end of the answer"
        tab.run("scrollTo(0, 0)")
        tab.run("word('x'.repeat(4000)); piece('[DONE]'); end(); 0")
        tab.until(IDLE)
        assert "first token after" in tab.run(pace)

        ask("document.getElementById('send').click()")
        tab.until(IDLE)
        assert (tab.run(pace), alerts(tab)) == ("", []), "not the pace of the answer before"
        assert tab.run(bottom) <= 0

        ask("piece('[DONE]'); end()")
        tab.until(IDLE)
        assert tab.run(pace) == "The model ended its answer before the first word."

        ask("word('Half'); break_off()")
        tab.until(IDLE)
        assert alerts(tab) == ["the connection closed before the answer was complete"]
        assert tab.run("document.getElementById('text').value") == ""

        tab.run("window.fetch = async () => { throw new TypeError('Failed to fetch'); }; 0")
        send(tab, "Hello?")
        assert alerts(tab)[1:] == ["the server does not answer"]
        assert tab.run("document.getElementById('text').value") == "Hello?"


def test_an_answer_has_a_limit_and_is_the_likeliest(server: LocalServer) -> None:
    """The built-in model is small: otherwise it may ramble to the end of its context."""
    page = httpx.get(server.url).text
    assert 'Temperature 0, at most <span id="most">400</span> tokens' in page
    assert "temperature: 0, max_tokens: mostTokens, stream: true" in page
    assert "const MOST_TOKENS = 400;" in page


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
