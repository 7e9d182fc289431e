from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer

from engine.errors import ConfigError
from engine.text import Detokenizer, OutputText, StopMatcher, TextDecoder, failure_table

SENTENCES = [
    "The quick brown fox, 1234567890 times.\n\n\tOK?",
    "Größe, naïveté, œuvre, Łódź, İstanbul, Ελληνικά, Кириллица",
    "中文字符，日本語のテキスト、한국어 텍스트",
    "नमस्ते दुनिया, สวัสดีชาวโลก, مرحبا بالعالم, שלום עולם, မြန်မာဘာသာ",
    "👋🌍 👨‍👩‍👧‍👦 🏳️‍🌈 𝕬𝖇𝖈 \U0010ffff e\u0301 \u200b\ufeff",
    "a\ufffdb\ufffd\ufffd",
]


@pytest.fixture(scope="module")
def backend(bundled_model: Path) -> Tokenizer:
    return AutoTokenizer.from_pretrained(bundled_model).backend_tokenizer


@pytest.fixture(scope="module")
def decoder(backend: Tokenizer) -> TextDecoder:
    return TextDecoder(backend)


def sentence_piece() -> Tokenizer:
    """A small tokenizer of the Llama 2 kind: words with ▁, and bytes for everything else."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁Hello", "▁world", "H", "e", "!", "é", "▁▁"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def deltas_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", SENTENCES)
def test_deltas_join_to_the_text_of_every_script(backend: Tokenizer, decoder: TextDecoder, text: str) -> None:
    ids = backend.encode(text, add_special_tokens=False).ids
    deltas = deltas_of(decoder.detokenizer(continues_text=True), ids)
    assert "".join(deltas) == text
    assert sum("\ufffd" in delta for delta in deltas) <= text.count("\ufffd")


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_deltas_join_to_the_decode_of_any_tokens(
    backend: Tokenizer, decoder: TextDecoder, data: st.DataObject
) -> None:
    # Half of the tokens are single bytes, so that broken UTF-8 of every kind comes up.
    single_bytes = [i for i in map(backend.token_to_id, _byte_chars()) if i is not None]
    assert len(single_bytes) > 200
    token = st.one_of(st.sampled_from(single_bytes), st.integers(0, backend.get_vocab_size() - 1))
    ids = data.draw(st.lists(token, max_size=40))
    deltas = deltas_of(decoder.detokenizer(continues_text=True), ids)
    assert "".join(deltas) == backend.decode(ids, skip_special_tokens=True)


def _byte_chars() -> list[str]:
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in kept] + [chr(0x100 + i) for i in range(256 - len(kept))]


def test_a_character_over_several_tokens_comes_whole(backend: Tokenizer, decoder: TextDecoder) -> None:
    ids = backend.encode("🏳", add_special_tokens=False).ids
    assert len(ids) > 1
    assert deltas_of(decoder.detokenizer(continues_text=True), ids) == [*[""] * (len(ids) - 1), "🏳", ""]


def test_the_end_of_a_prompts_character_is_not_completed_from_the_prompt(
    backend: Tokenizer, decoder: TextDecoder
) -> None:
    ids = backend.encode("🏳", add_special_tokens=False).ids
    deltas = deltas_of(decoder.detokenizer(continues_text=True), ids[1:])
    assert "".join(deltas) == backend.decode(ids[1:])
    assert "🏳" not in "".join(deltas)


def test_special_and_padded_tokens_show_nothing(backend: Tokenizer, decoder: TextDecoder) -> None:
    end = backend.token_to_id("<|im_end|>")
    beyond = backend.get_vocab_size() + 5
    assert "".join(deltas_of(decoder.detokenizer(continues_text=True), [end, beyond])) == ""


@settings(deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁Hello", "▁world", "H", "e", "!", "é", "▁▁", "</s>", "日", "👋"])))
def test_sentence_piece_deltas_join_to_the_decode(words: list[str]) -> None:
    tokenizer = sentence_piece()
    ids: list[int] = []
    for word in words:
        known = tokenizer.token_to_id(word)
        ids += [known] if known is not None else [3 + byte for byte in word.encode()]
    deltas = deltas_of(TextDecoder(tokenizer).detokenizer(continues_text=False), ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in delta for delta in deltas)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0xC3, 0xE4, 0xF0, 0xFF]), min_size=1, max_size=4))
def test_sentence_piece_bytes_that_are_no_character_are_replaced_one_by_one(values: list[int]) -> None:
    tokenizer = sentence_piece()
    ids = [tokenizer.token_to_id("H"), *(3 + byte for byte in values), tokenizer.token_to_id("!")]
    assert "".join(
        deltas_of(TextDecoder(tokenizer).detokenizer(continues_text=False), ids)
    ) == tokenizer.decode(ids)


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_what_stands_for_a_byte_is_what_the_tokenizer_takes_for_one(byte_fallback: bool) -> None:
    odd = ["ZZ", "_1", "1_", " 1", "1 ", "-1", "+1", "41", "4a", "4A", "\u0664\u0661", "\u00e9", "411"]
    vocabulary = {token: i for i, token in enumerate(["x", *(f"<0x{digits}>" for digits in odd)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=byte_fallback))
    steps: list[decoders.Decoder] = [decoders.ByteFallback()] if byte_fallback else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *steps, decoders.Fuse()])
    decoder = TextDecoder(tokenizer)
    for token_id in range(len(vocabulary)):
        ids = [0, token_id, 0]
        assert "".join(deltas_of(decoder.detokenizer(continues_text=False), ids)) == tokenizer.decode(ids)


def test_a_continued_prompt_keeps_the_space_before_its_next_word() -> None:
    tokenizer = sentence_piece()
    ids = [tokenizer.token_to_id("▁world"), tokenizer.token_to_id("!")]
    decoder = TextDecoder(tokenizer)
    assert "".join(deltas_of(decoder.detokenizer(continues_text=True), ids)) == " world!"
    assert "".join(deltas_of(decoder.detokenizer(continues_text=False), ids)) == "world!"


def test_an_unknown_kind_of_tokenizer_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="no decoder"):
        TextDecoder(tokenizer)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        TextDecoder(tokenizer)
    tokenizer.decoder = decoders.Replace("a", "b")
    with pytest.raises(ConfigError, match="Replace"):
        TextDecoder(tokenizer)


def first_stop(text: str, stops: list[str]) -> str:
    """The plain definition: the stop string complete first wins, the longest if several are at once."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@example(pieces=["aa", "ab"], stops=["aab"])  # begins again within its own beginning
@example(pieces=["bab"], stops=["ab", "b"])  # end together: the longest wins, in any order
@settings(max_examples=200)
@given(
    pieces=st.lists(st.text("ab👋", max_size=4), max_size=12),
    stops=st.lists(st.text("ab👋", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_strings_cut_alike_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    wanted = first_stop(text, stops)
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert wanted.startswith(shown)  # nothing of a stop string, or past it, ever shows
    shown += matcher.flush()
    assert shown == wanted
    assert matcher.stopped == any(stop in text for stop in stops)


def test_what_many_choices_look_for_is_prepared_once() -> None:
    """For each of 256 prompts with 16 long stop strings, it held up the ingress's loop for 0.1 s."""
    before = failure_table.cache_info().misses
    matchers = [StopMatcher(["prepared once", "once prepared"]) for _ in range(256)]
    assert failure_table.cache_info().misses == before + 2
    matchers[0].push("prepared")
    assert matchers[1].push(" once") == " "


def test_text_that_may_begin_a_stop_string_is_held_and_then_released() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a S") == "a "
    assert matcher.push("T") == ""
    assert matcher.push("x") == "STx"
    assert matcher.push("STO") == ""
    assert matcher.flush() == "STO"
    assert not matcher.stopped


def test_output_counts_tokens_up_to_the_one_that_completes_the_stop(
    backend: Tokenizer, decoder: TextDecoder
) -> None:
    ids = backend.encode("one two three four", add_special_tokens=False).ids
    output = OutputText(decoder.detokenizer(continues_text=True), ["o thr"])
    assert output.push(ids, "length") == "one tw"
    assert output.stopped
    assert output.num_tokens == 3


def test_output_hides_the_token_that_ended_it_but_counts_it(backend: Tokenizer, decoder: TextDecoder) -> None:
    ids = backend.encode("one two", add_special_tokens=False).ids
    output = OutputText(decoder.detokenizer(continues_text=True))
    assert output.push(ids, "stop") == "one"
    assert output.num_tokens == len(ids)
    assert not output.stopped


def test_output_hides_a_single_token_that_ends_it(backend: Tokenizer, decoder: TextDecoder) -> None:
    one, two = backend.encode("one two", add_special_tokens=False).ids
    output = OutputText(decoder.detokenizer(continues_text=True))
    assert [output.push((one,), None), output.push((two,), "stop")] == ["one", ""]
    assert output.num_tokens == 2


def test_output_releases_what_was_held_when_it_ends(backend: Tokenizer, decoder: TextDecoder) -> None:
    ids = backend.encode("one two", add_special_tokens=False).ids
    output = OutputText(decoder.detokenizer(continues_text=True), ["two three"])
    assert output.push(ids, None) == "one "
    assert output.push((), "length") == "two"


def test_a_stop_string_within_the_first_min_tokens_is_text(backend: Tokenizer, decoder: TextDecoder) -> None:
    ids = backend.encode("one two one two", add_special_tokens=False).ids
    output = OutputText(decoder.detokenizer(continues_text=True), ["two"], min_tokens=2)
    assert "".join(output.push((token,), None) for token in ids) == "one two one "
    assert output.stopped
    assert output.num_tokens == 4
