"""API keys: found by digest only, reread when the file changes, wrong files named in one line."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest
import yaml

from app.api.keys import ENVIRONMENT, MAX_FILE_BYTES, ApiKey, KeyFile, KeyRing, digest_of, main
from engine.errors import ConfigError


def write(path: Path, *keys: dict[str, object]) -> None:
    path.write_text(json.dumps({"keys": list(keys)}))


def test_a_key_is_found_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - id: alice\n    sha256: {digest_of('secret')}\n    requests_per_minute: 5\n")
    keys = KeyFile(str(path), {})
    assert keys.required
    found = keys.ring().find("secret")
    assert found == ApiKey(id="alice", sha256=digest_of("secret"), requests_per_minute=5)
    assert keys.ring().find("Secret") is None
    assert keys.ring().find("") is None
    assert keys.ring().find(digest_of("secret")) is None
    assert keys.ring().find("half of a surrogate pair \udce9") is None


def test_the_environment_names_keys_by_digest() -> None:
    keys = KeyFile(None, {ENVIRONMENT: f"a:{digest_of('1')}, b:{digest_of('2')},"})
    assert keys.required
    assert [getattr(keys.ring().find(key), "id", None) for key in ("1", "2", "3")] == ["a", "b", None]
    assert not KeyFile(None, {}).required
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT} must have id:sha256 pairs"):
        KeyFile(None, {ENVIRONMENT: "a:secret"})


def test_a_changed_file_takes_effect_and_a_wrong_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    write(path, {"id": "a", "sha256": digest_of("1")})
    keys = KeyFile(str(path), {})
    write(path, {"id": "a", "sha256": digest_of("1")}, {"id": "b", "sha256": digest_of("2")})
    assert keys.ring().find("2") is None  # the file system is not asked yet
    keys.reread()
    assert keys.ring().find("2") is not None
    path.write_text("keys: [")
    keys.reread()
    assert keys.ring().find("2") is not None
    assert "the changed key file has no effect" in caplog.text
    path.unlink()
    keys.reread()
    assert keys.ring().find("2") is not None
    write(path)
    keys.reread()
    assert keys.ring().find("2") is None
    assert keys.required  # an empty file lets nobody in


def test_the_file_is_reread_in_a_thread_while_the_keys_before_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.keys.REREAD_S", 0.0)
    path = tmp_path / "keys.json"
    write(path, {"id": "a", "sha256": digest_of("1")})
    keys = KeyFile(str(path), {})
    reading, go_on = threading.Event(), threading.Event()
    threads, read = [], keys._read

    def slowly() -> KeyRing:
        threads.append(threading.get_ident())
        reading.set()
        assert go_on.wait(60)
        return read()

    monkeypatch.setattr(keys, "_read", slowly)

    async def test() -> None:
        watching = asyncio.create_task(keys.watch())
        write(path, {"id": "bob", "sha256": digest_of("2")})
        while not reading.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert keys.ring().find("1") is not None
        assert keys.ring().find("2") is None
        go_on.set()
        while keys.ring().find("2") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert keys.ring().find("1") is None
        watching.cancel()

    asyncio.run(asyncio.wait_for(test(), 60))
    assert threading.get_ident() not in threads


def test_without_a_file_there_is_nothing_to_watch() -> None:
    asyncio.run(asyncio.wait_for(KeyFile(None, {}).watch(), 60))


def entry(digit: int, **more: object) -> str:
    """A file with one entry."""
    return json.dumps({"keys": [{"id": "a", "sha256": f"{digit}" * 64, **more}]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("keys: [", "cannot be read"),
        ("keys: [a b: c}", "cannot be read: in line 1: did not find expected ',' or ']'"),
        (f"keys: [{{id: 2026-01-01, sha256: '{'0' * 64}'}}]", "entry 1: id must be text, in quotes: 1 to 64"),
        ("\xff", "cannot be read: it is not UTF-8"),
        (
            "- a",
            "keys.yaml is wrong: it must be a mapping with only keys, a list of entries with",
        ),
        ("keys: 3", "it must be a mapping with only keys, a list"),
        ("key: []", "it must be a mapping with only keys, a list"),
        ("keys: [a]", "entry 1 must be a mapping with id and sha256"),
        ("keys: [{id: a}]", "entry 1 (a) has no sha256; it must be 64 hexadecimal digits"),
        ("keys: [{id: 'a b', sha256: x}]", "entry 1: id must be 1 to 64 letters, digits, and . _ -"),
        (
            f"keys: [{{id: a, sha256: '{'A' * 64}'}}]",
            "entry 1 (a): sha256 must be 64 hexadecimal digits in",
        ),
        (
            f"keys: [{{id: a, sha256: {'1' * 64}}}]",
            "entry 1 (a): sha256 must be text, in quotes: 64 hexadecimal",
        ),
        (entry(0, rpm=3), "entry 1 (a) has rpm, which is not a known field; fields: id, sha256, requests_per"),
        (entry(0, conc_requests=3), "did you mean concurrent_requests?"),
        (entry(0, tokens_per_minute=0), "entry 1 (a): tokens_per_minute=0 must be at least 1"),
        (entry(0, tokens_per_minute="many"), "entry 1 (a): tokens_per_minute must be an integer"),
        (entry(0, models="m"), "entry 1 (a): models must be a list"),
        (entry(0, models=[5]), "entry 1 (a): models=5 must be text, in quotes"),
        (entry(0, admin="perhaps"), "entry 1 (a): admin must be true or false"),
        (f"keys: [{{id: a, sha256: '{'0' * 64}'}}, {{id: a, sha256: '{'1' * 64}'}}]", "the same id, a"),
        (f"keys: [{{id: a, sha256: '{'0' * 64}'}}, {{id: b, sha256: '{'0' * 64}'}}]", "the same sha256"),
        ("[" * 5000, "cannot be read: it is nested too deeply"),
        ("keys: [{id: 2026-13-45}]", "cannot be read: one of its dates, numbers or tagged values is not valid"),
        ("keys: !!set {a, b}", "it must be a mapping with only keys, a list"),
        (
            entry(0, tokens_per_minute=-(10**400)),
            "tokens_per_minute=an integer of 1329 bits must be at least 1",
        ),
        ("keys: [{id: !a b}]", "in line 1: could not determine a constructor for the tag"),
        (json.dumps({"keys": [{"id": "a\n", "sha256": "0" * 64}]}), "entry 1: id must be 1 to 64 letters"),
        ("keys: !!timestamp x", "cannot be read"),
        ("keys: !!bool x", "cannot be read"),
        ('{"keys": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        KeyFile(str(path), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "keys: [{id: a, sha256: KEY}]",
        "keys: [{id: KEY, sha256: 1}]",
        f"keys: [{{id: KEY, sha256: '{'0' * 64}'}}]",
        f"keys: [{{id: KEY, sha256: '{'0' * 64}'}}, {{id: KEY, sha256: '{'1' * 64}'}}]",
        "keys: [{id: a, sha256: !KEY }]",
        "keys: [{id: a, sha256: !!KEY x}]",
        "keys: [{id: a, sha256: !it's-KEY x}]",
        "keys: [{id: a, sha256: *KEY }]",
        "keys: [&KEY {id: a}, &KEY {id: b}]",
        "keys: [{id: a, sha256: !!int KEY}]",
        "keys: [{id: a, sha256: !!float KEY}]",
        "keys: [{id: a, sha256: !!bool KEY}]",
        "keys: !!set {KEY}",
        "keys: [{id: a, key: KEY}]",
        "keys: [{id: a, KEY: 1}]",
        "keys: [KEY]",
        "keys: KEY",
        "KEY",
        "KEY: 1",
        "keys: [{id: a, sha256: KEY, requests_per_minute: x}]",
        "keys: [{id: a, requests_per_minute: KEY}]",
        "keys:\n  - id: a\n    sha256: 'KEY\n",
        "keys:\n  - id: a\n   sha256: KEY\n",
        "keys:\n  - id: a\n    sha256: [KEY\n",
    ],
)
def test_no_error_of_a_wrong_file_shows_a_key(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"qk_{'k' * 43}"
    path = tmp_path / "keys.yaml"
    path.write_text(content.replace("KEY", key))
    with pytest.raises(ConfigError) as caught:
        KeyFile(str(path), {})
    assert str(path) in str(caught.value)
    assert key not in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("app.api.keys._Loader", yaml.SafeLoader)  # its own errors quote the line
    with pytest.raises(ConfigError) as caught:
        KeyFile(str(path), {})
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ("a", "but in entry 1 sha256 must be 64 hexadecimal digits"),
        (f"a:{'0' * 64}, b c:{'1' * 64}", "but in entry 2 id must be 1 to 64 letters"),
        (f"a:qk_{'k' * 43}", "but in entry 1 sha256 must be"),
        (f"qk_{'k' * 43}:{'0' * 64}", "but in entry 1 id must be"),
    ],
)
def test_wrong_pairs_of_the_environment_are_told_without_a_key(pairs: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        KeyFile(None, {"QUIRE_KEYS": pairs})
    assert "kkk" not in str(caught.value)


def test_files_that_are_missing_or_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        KeyFile(str(tmp_path / "none"), {})
    (tmp_path / "large").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match=f"exceeds {MAX_FILE_BYTES} bytes"):
        KeyFile(str(tmp_path / "large"), {})


def test_the_command_shows_a_key_and_prints_a_file_that_admits_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "alice"]) == 0
    file, said = capsys.readouterr()
    first, how = said.splitlines()
    assert "api_keys_file" in how
    (tmp_path / "keys.yaml").write_text(file)
    found = KeyFile(str(tmp_path / "keys.yaml"), {}).ring().find(first.rpartition(" ")[2])
    assert found is not None
    assert found.id == "alice"
    assert main(["new", "not an id"]) == 1
