"""Offline: chats, stop strings and log probabilities, with the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_checkpoints import VOCAB, save_tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import LLM, SamplingParams
from engine.errors import ConfigError, InvalidRequestError
from engine.request import FinishReason
from engine.text import TextDecoder

COUNT = "one, two, three, four,"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def llm(bundled_model: Path) -> LLM:
    return LLM(bundled_model, dtype="float32", num_blocks=64, num_threads=1)


def test_a_chat_is_answered_and_the_last_message_continued(llm: LLM) -> None:
    answer, continued = (
        llm.chat(ASK, GREEDY)[0],
        llm.chat(
            [ASK, [*ASK, {"role": "assistant", "content": "The capital of France is"}]],
            GREEDY,
            continue_final_message=True,
        )[1],
    )
    assert answer.text is not None
    assert answer.text.startswith("The capital of France is")
    assert continued.text == answer.text.removeprefix("The capital of France is")


def test_stop_strings_end_text_and_tokens(llm: LLM) -> None:
    free = llm.generate([COUNT], GREEDY)[0]
    assert free.text is not None
    word = free.text.split(",")[2].strip()
    (stopped,) = llm.generate([COUNT], SamplingParams(max_tokens=24, temperature=0, logprobs=0), stop=[word])
    assert stopped.text == free.text[: free.text.index(word)]
    assert stopped.finish_reason is FinishReason.STOP
    count = len(stopped.token_ids)
    assert count < 24
    assert stopped.token_ids == free.token_ids[:count]
    assert llm.tokenizer.decode(stopped.token_ids).startswith(stopped.text + word)
    assert len(stopped.sequences[0].logprobs or ()) == count
    assert not llm.engine.has_work()


def test_a_sequence_that_has_stopped_is_computed_no_further(llm: LLM) -> None:
    before = llm.engine.stats().scheduler.generated_tokens
    several = SamplingParams(max_tokens=16, seed=3, n=4)
    (result,) = llm.generate([COUNT], several, stop="e")
    lengths = [len(sequence.token_ids) for sequence in result.sequences]
    assert len(set(lengths)) > 1
    assert llm.engine.stats().scheduler.generated_tokens - before == sum(lengths)
    assert not llm.engine.has_work()


def test_the_best_to_a_stop_string_are_returned(llm: LLM) -> None:
    every = SamplingParams(max_tokens=16, seed=3, n=4, logprobs=0)
    sequences = llm.generate([COUNT], every, stop="e")[0].sequences
    means = [sum(s.logprob for s in q.logprobs or ()) / len(q.token_ids) for q in sequences]
    order = sorted(range(4), key=lambda i: -means[i])[:2]
    best = llm.generate([COUNT], SamplingParams(max_tokens=16, seed=3, n=2, best_of=4), stop="e")[0].sequences
    assert [q.token_ids for q in best] == [sequences[i].token_ids for i in order]
    assert [q.score for q in best] == pytest.approx([means[i] for i in order])
    assert all(q.logprobs is None for q in best)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        llm.generate([COUNT], SamplingParams(temperature=0, use_beam_search=True, n=2), stop="e")
    with pytest.raises(InvalidRequestError, match="stop has 5 but its entries must be strings"):
        llm.generate([COUNT], stop=["e", 5])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="stop is 5 but must be a string"):
        llm.generate([COUNT], stop=5)  # type: ignore[arg-type]
    for messages in (5, None, {"role": "user"}):
        with pytest.raises(InvalidRequestError, match=r"messages is .* but must be a list of messages"):
            llm.chat(messages)  # type: ignore[arg-type]


def test_log_probabilities_come_with_the_results(llm: LLM) -> None:
    (scored,) = llm.generate([COUNT], SamplingParams(max_tokens=0, prompt_logprobs=1))
    (made,) = llm.generate([COUNT], SamplingParams(max_tokens=4, temperature=0, logprobs=2))
    assert scored.token_ids == []
    assert len(scored.prompt_logprobs or ()) == len(scored.prompt_token_ids) - 1
    assert made.prompt_logprobs is None
    found = made.sequences[0].logprobs or []
    assert [score.top_ids[0] for score in found] == made.token_ids
    (again,) = llm.generate(
        [[*made.prompt_token_ids, *made.token_ids]], SamplingParams(max_tokens=0, prompt_logprobs=0)
    )
    tail = [score.logprob for score in (again.prompt_logprobs or [])[-4:]]
    assert tail == [score.logprob for score in found]  # computed in another batch: the same bits


def test_text_that_no_tokenizer_takes_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\] is .* without lone surrogates"):
        llm.generate(["fine", "half \ud800"], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"messages is .* without lone surrogates"):
        llm.chat([{"role": "user", "content": "half \ud800"}], GREEDY)


def test_what_a_chat_template_raises_is_a_refusal(llm: LLM) -> None:
    endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    for template in ("{{ 1 / 0 }}", "{% for _ in range(10 ** 9) %}{% endfor %}", endless):
        with pytest.raises(InvalidRequestError, match="the chat template rejects"):
            llm.chat(ASK, GREEDY, chat_template_kwargs={"chat_template": template})


def test_text_that_the_tokenizers_library_fails_on_is_refused(llm: LLM) -> None:
    """Its panic is no ``Exception``, and would end a program that catches those."""
    backend = llm.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    before, backend.pre_tokenizer = backend.pre_tokenizer, pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    try:
        for ask in (
            lambda text: llm.generate([text], GREEDY),
            lambda text: llm.chat([{**ASK[0], "content": text}]),
        ):
            with pytest.raises(InvalidRequestError, match="the model's tokenizer fails on the text: 'Onig"):
                ask("a" * 40 + "b")
    finally:
        backend.pre_tokenizer = before


def save_words(folder: Path, decoder: decoders.Decoder) -> None:
    """A model whose tokens are words with a space before them, as SentencePiece writes them."""
    save_tiny(folder, "Llama", eos_token_id=1, bos_token_id=0)
    tokenizer = Tokenizer(models.BPE({f"\u2581w{i}" if i else "x": i for i in range(VOCAB)}, []))
    tokenizer.decoder = decoder
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    hf.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    hf.save_pretrained(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("words")
    parts = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    save_words(folder, decoders.Sequence(parts))
    return LLM(folder, dtype="float32", num_blocks=64, num_threads=1)


def test_stop_strings_in_text_of_an_unknown_kind_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, the tokenizer itself makes the text. That the kind is unknown is found out once."""
    tried: list[Tokenizer] = []

    def try_decoder(backend: Tokenizer) -> TextDecoder:
        tried.append(backend)
        return TextDecoder(backend)

    monkeypatch.setattr("engine.llm.TextDecoder", try_decoder)
    save_words(tmp_path, decoders.WordPiece())
    llm = LLM(tmp_path, dtype="float32", num_blocks=64, num_threads=1)
    only = SamplingParams(max_tokens=2, temperature=0, allowed_token_ids=(5,))
    with pytest.raises(ConfigError, match="WordPiece"):
        llm.generate([[3]], only, stop="never there")
    assert llm.engine.stats().scheduler.generated_tokens == 0
    for _ in range(2):
        assert [result.text for result in llm.generate([[3], [4]], only)] == ["\u2581w5 \u2581w5"] * 2
    (stopped,) = llm.generate([[3]], SamplingParams(temperature=0, stop_token_ids=(5,), allowed_token_ids=(5,)))
    assert (stopped.token_ids, stopped.finish_reason, stopped.text) == ([5], FinishReason.STOP, "")
    assert len(tried) == 1


def test_a_tokenizer_that_cannot_be_read_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    (tmp_path / "tokenizer.json").write_text("{")
    llm = LLM(tmp_path, dtype="float32", num_blocks=64, num_threads=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        llm.generate([[3]], GREEDY)
    assert llm.engine.stats().scheduler.generated_tokens == 0


@pytest.mark.parametrize("stop", [(), "never there"])
def test_a_text_does_not_depend_on_what_is_looked_for_in_it(words: LLM, stop: str) -> None:
    """It continues the prompt, space included, and has no stop token: as the server answers."""
    only = SamplingParams(max_tokens=2, temperature=0, allowed_token_ids=(5,))
    (continued,) = words.generate([[3]], only, stop=stop)
    assert (continued.token_ids, continued.text) == ([5, 5], " w5 w5")
    (stopped,) = words.generate(
        [[3]], SamplingParams(temperature=0, allowed_token_ids=(5,), stop_token_ids=(5,)), stop=stop
    )
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ([5], "", FinishReason.STOP)

    messages = [{"role": "user", "content": "x"}]
    assert words.chat(messages, only, stop=stop)[0].text == "w5 w5"
    assert words.chat(messages, only, stop=stop, continue_final_message=True)[0].text == " w5 w5"
