"""Offline generation: equal to transformers on the bundled model, in order, with text, bar and clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import give_back
from prompts import PROMPTS

from engine import LLM, SamplingParams
from engine.errors import ConfigError, InvalidRequestError, QuireError
from engine.request import CacheNamespace, FinishReason

TOKENS = 64


@pytest.fixture(scope="module")
def bundled(bundled_model: Path) -> LLM:
    return LLM(bundled_model, dtype="float32", num_blocks=200, num_threads=1)


@pytest.fixture
def tiny(tiny_models: dict[str, Path]) -> LLM:
    return LLM(tiny_models["Llama"], dtype="float32", block_size=4, num_blocks=128, num_threads=1)


def transformers_greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What ``generate`` makes of ``prompts`` in one batch padded on the left, up to the end token."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # two threads that wait for each other on a busy machine take ten times as long
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    end = model.generation_config.eos_token_id
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=end, eos_token_id=end
    )
    rows = [row.tolist() for row in made[:, longest:]]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.fixture(scope="module")
def expected(bundled_model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of the prompts, and what transformers makes of them; its model is gone before ours comes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_model)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    made = transformers_greedy(bundled_model, ids)
    give_back()
    return ids, made


@pytest.mark.timeout(600)
def test_greedy_equals_transformers_token_for_token(
    expected: tuple[list[list[int]], list[list[int]]], bundled: LLM
) -> None:
    assert len(PROMPTS) == 20
    ids, made = expected
    results = bundled.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    assert [result.prompt_token_ids for result in results] == ids
    for prompt, result, tokens in zip(PROMPTS, results, made, strict=True):
        assert result.token_ids == tokens, prompt


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


def test_a_failure_raises_and_leaves_nothing_behind(tiny: LLM) -> None:
    forward = tiny.engine.runner.decoder.forward

    def fail(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if bool((token_ids == 96).any()):
            raise ValueError("poisoned")
        return forward(token_ids, *rest)

    tiny.engine.runner.decoder.forward = fail  # type: ignore[method-assign]
    with pytest.raises(QuireError, match="poisoned"):
        tiny.generate([[5, 6], [96], [7, 8]])
    assert not tiny.engine.has_work()
    assert tiny.engine.stats().scheduler.referenced_blocks == 0
    tiny.engine.runner.decoder.forward = forward  # type: ignore[method-assign]
    assert tiny.generate([[5, 6]])[0].token_ids


def test_names_go_through_the_resolver(tiny_models: dict[str, Path]) -> None:
    llm = LLM("mine", resolve=lambda name: tiny_models["Qwen3"] if name == "mine" else name, num_blocks=64)
    assert llm.folder == tiny_models["Qwen3"]
    with pytest.raises(ConfigError, match="nobody's"):
        LLM("nobody's")


def test_importing_the_package_is_light() -> None:
    code = "import sys, engine; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
