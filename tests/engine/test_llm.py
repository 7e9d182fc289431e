"""Offline generation: equal to transformers on the bundled model, in order, with text, bar and clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leftovers import give_back
from prompts import PROMPTS

from engine import LLM, SamplingParams
from engine.errors import ConfigError, InvalidRequestError
from engine.request import CacheNamespace, FinishReason

TOKENS = 64


@pytest.fixture(scope="module")
def bundled(bundled_model: Path) -> LLM:
    return LLM(bundled_model, dtype="float32", num_blocks=200, num_threads=1)


@pytest.fixture
def tiny(tiny_models: dict[str, Path]) -> LLM:
    return LLM(tiny_models["Llama"], dtype="float32", block_size=4, num_blocks=128, num_threads=1)


class Transformers:
    """The model and the tokenizer in ``folder``, as ``transformers`` has them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # two that wait for each other on a busy machine take ten times as long
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.end: int = self.model.generation_config.eos_token_id

    def greedy(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """The most probable token in each place of ``tokens``, after those before it.

        As long as these are its own tokens, that is what ``generate`` makes, in a third of the time.
        """
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        return [int(token) for token in logits.argmax(-1)]


@pytest.mark.timeout(600)
def test_greedy_equals_transformers_token_for_token(bundled: LLM, bundled_model: Path) -> None:
    assert len(PROMPTS) == 20
    results = bundled.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    theirs = Transformers(bundled_model)
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids, tokens = theirs.tokenizer.encode(prompt), result.token_ids
        assert result.prompt_token_ids == ids
        assert tokens == theirs.greedy(ids, tokens), prompt
        assert theirs.end not in tokens[:-1]
        assert len(tokens) == TOKENS or tokens[-1] == theirs.end
    del theirs
    give_back()


def test_text_is_decoded_without_the_end_token(bundled: LLM) -> None:
    prompt = bundled.tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(prompt, str)
    (result,) = bundled.generate(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason is FinishReason.STOP


def test_results_come_in_the_order_of_the_prompts(tiny: LLM) -> None:
    prompts = [[5, 6, 7], [8] * 20, [9, 10], [11] * 7]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (20, 1, 9, 4)]
    results = tiny.generate(prompts, params)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [len(result.token_ids) for result in results] == [20, 1, 9, 4]
    assert all(result.text is None for result in results)  # the folder has no tokenizer
    alone = [tiny.generate([prompt], each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    assert [result.token_ids for result in results] == alone


def test_a_second_run_finds_the_first_one_s_blocks_unless_salted(tiny: LLM) -> None:
    prompt = list(range(2, 20))
    assert tiny.generate([prompt])[0].cached_tokens == 0
    assert tiny.generate([prompt])[0].cached_tokens == 16
    assert tiny.generate([prompt], namespace=CacheNamespace(salt="other"))[0].cached_tokens == 0


def test_long_lists_show_a_bar(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=2)
    tiny.generate([[5, 6]] * 8, params)
    assert capsys.readouterr().err == ""
    tiny.generate([[5, 6]] * 9, params)
    bar = capsys.readouterr().err
    assert "9/9" in bar
    assert "tokens/s" in bar
    tiny.generate([[5, 6]] * 9, params, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_as_long_as_the_context_is_scored(tiny: LLM, n: int) -> None:
    prompt = [2 + i % 90 for i in range(tiny.engine.limits.max_model_len)]
    (result,) = tiny.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1, n=n))
    assert len(result.prompt_logprobs or ()) == len(prompt) - 1
    assert [sequence.token_ids for sequence in result.sequences] == [[]] * n
    with pytest.raises(InvalidRequestError, match="exceeds the context length"):
        tiny.generate([[*prompt, 2]], SamplingParams(max_tokens=0, prompt_logprobs=1, n=n))


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("context", [2, 4, 7])
def test_a_context_may_be_short(tiny_models: dict[str, Path], kernels: str, context: int) -> None:
    """What is measured at the start stays within it."""
    llm = LLM(tiny_models["Llama"], kernels=kernels, max_model_len=context, num_blocks=64, num_threads=1)
    params = SamplingParams(max_tokens=context - 1, ignore_eos=True)
    assert len(llm.generate([[5]], params)[0].token_ids) == context - 1


def test_one_wrong_prompt_stops_the_call_before_it_runs(tiny: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="97"):
        tiny.generate([[5, 6], [97]])
    with pytest.raises(InvalidRequestError, match="empty"):
        tiny.generate([[]])
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1"):
        tiny.generate([[5], [6]], [SamplingParams()])
    with pytest.raises(ConfigError, match="token ids"):
        tiny.generate("text, but no tokenizer")
    assert not tiny.engine.has_work()
    assert tiny.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([5, 6, 7], ["prompts[0] is 5", "[[5, 6, 7]]"]),
        (5, ["prompts is 5"]),
        (None, ["prompts is None"]),
        (b"text", ["text"]),
        ({"a": 1}, ["a dict of 1"]),
        ([[5, 6], [5.0]], ["prompts[1]", "5.0", "float"]),
        ([[5, True]], ["True", "bool"]),
        ([["a"]], ["'a'", "str"]),
        ([[-1]], ["-1", "0 to 96"]),
        ([{5: 6}], ["prompts[0] is a dict of 1"]),
    ],
)
def test_prompts_of_other_types_are_refused_with_words(tiny: LLM, prompts: Any, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tiny.generate(prompts)
    for word in words:
        assert word in caught.value.message
    assert not tiny.engine.has_work()


@pytest.mark.parametrize(
    "arguments",
    [
        {"params": "greedy"},
        {"params": [None]},
        {"params": {"max_tokens": 5}},
        {"namespace": "salt"},
        {"namespace": CacheNamespace(salt=["x"])},  # type: ignore[arg-type]
    ],
)
def test_arguments_of_other_types_are_refused(tiny: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(arguments))):
        tiny.generate([[5]], **arguments)


def test_arrays_of_token_ids_are_prompts(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    (wanted,) = tiny.generate([[5, 6, 7]], params)
    for prompts in (
        [(5, 6, 7)],
        [range(5, 8)],
        [np.array([5, 6, 7])],
        [[np.int32(5), np.int64(6), 7]],
        torch.tensor([[5, 6, 7]]),
    ):
        (result,) = tiny.generate(prompts, params)  # type: ignore[arg-type]
        assert (result.token_ids, result.prompt_token_ids) == (wanted.token_ids, [5, 6, 7])


def test_a_failure_is_in_its_result_and_leaves_nothing_behind(
    tiny: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    wanted = [tiny.generate([prompt], params)[0].token_ids for prompt in ([5, 6], [7, 8])]
    forward = tiny.engine.runner.decoder.forward

    def fail(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if bool((token_ids == 96).any()):
            raise ValueError("poisoned")
        return forward(token_ids, *rest)

    tiny.engine.runner.decoder.forward = fail  # type: ignore[method-assign]
    first, failed, last = tiny.generate([[5, 6], [96], [7, 8]], params)
    assert (failed.finish_reason, failed.token_ids) == (FinishReason.ERROR, [])
    assert "poisoned" in str(failed.error)
    assert (first.error, last.error) == (None, None)
    assert [first.token_ids, last.token_ids] == wanted
    assert "1 of 3 requests failed" in caplog.text
    assert not tiny.engine.has_work()
    assert tiny.engine.stats().scheduler.referenced_blocks == 0
    tiny.engine.runner.decoder.forward = forward  # type: ignore[method-assign]
    assert tiny.generate([[5, 6]])[0].token_ids


def test_the_pool_is_mapped_before_the_first_prompt(tiny: LLM) -> None:
    cache = tiny.engine.runner.kv_cache
    assert cache._prefaulter is not None
    assert cache._prefaulter.prefaulted == cache.pool.nbytes or cache._prefaulter._advise is None


def test_wrong_options_are_named(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"unknown options blocks, size; options: block_size, .*num_blocks"):
        LLM(tiny_models["Llama"], size=1, blocks=5)
    with pytest.raises(ConfigError, match="num_blocks='5'"):
        LLM(tiny_models["Llama"], num_blocks="5")


def test_names_go_through_the_resolver(tiny_models: dict[str, Path]) -> None:
    llm = LLM("mine", resolve=lambda name: tiny_models["Qwen3"] if name == "mine" else name, num_blocks=64)
    assert llm.folder == tiny_models["Qwen3"]
    with pytest.raises(ConfigError, match="nobody's"):
        LLM("nobody's")


def test_importing_the_package_is_light() -> None:
    code = "import sys, engine; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
