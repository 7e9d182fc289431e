"""The built-in model as it comes out of the conversion: its tokenizer, its settings, its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from app.launch import convert_gguf
from app.launch.model_store import pull
from engine.models.config import ModelConfig, read_model_config
from engine.models.loader import load_model
from kernels.interface import AttentionMetadata, kv_pool_shape
from kernels.registry import get_kernels

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.mark.parametrize("arguments", [[], ["nowhere.gguf"], ["nowhere.gguf", "folder"]])
def test_the_conversion_says_what_it_needs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        convert_gguf.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m app.launch.convert_gguf" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull(progress=False)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return read_model_config(folder)


def test_sizes(config: ModelConfig) -> None:
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert config.rope.theta == 100_000.0
    assert config.max_position_embeddings == 8192
    assert config.dtype == "bfloat16"


def test_end_token_is_that_of_the_chat_format(config: ModelConfig, tokenizer: Any) -> None:
    assert config.eos_token_ids == (2,)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    assert len(tokenizer) == config.vocab_size


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("in 2024", ["in", " ", "2", "0", "2", "4"]),  # GPT-2's rules would keep the digits together
        ("It's 3.14", ["It", "'s", " ", "3", ".", "1", "4"]),
        ("  two  spaces", [" ", " two", " ", " spaces"]),
        ("<|im_start|>user\nhi<|im_end|>", ["<|im_start|>", "user", "\n", "hi", "<|im_end|>"]),
        ("x<|endoftext|><repo_name>y", ["x", "<|endoftext|>", "<repo_name>", "y"]),
    ],
)
def test_pieces(tokenizer: Any, text: str, pieces: list[str]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert [tokenizer.decode([token]) for token in ids] == pieces


@pytest.mark.parametrize(
    "text", ["día 😀 日本語\r\n\t½²Ⅷ १२", " lead and trail ", "don't  stop\n\n\n", "a,b;c {d}"]
)
def test_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template(tokenizer: Any) -> None:
    user = [{"role": "user", "content": "hi"}]
    own = [{"role": "system", "content": "Be brief."}, *user, {"role": "assistant", "content": "Hello."}]
    render = tokenizer.apply_chat_template
    assert render(user, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(own, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
    )
    # The published tokenizer's own ids for this conversation.
    prompt = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
    ]
    prompt += [8182, 2, 198, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    assert render(user, tokenize=True, add_generation_prompt=True)["input_ids"] == prompt


def test_it_knows_the_capital_of_france(folder: Path, config: ModelConfig, tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")
    # Greedy generation in one step: each token of the answer must be the likeliest after those before it.
    tokens = torch.tensor(prompt + answer)
    num_tokens, num_blocks = len(tokens), -(-len(tokens) // 16)
    decoder = load_model(folder, get_kernels("auto"), torch.float32, "cpu")
    pool = torch.zeros(kv_pool_shape(num_blocks, config.num_layers, 16, config.num_kv_heads, config.head_dim))
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        positions=torch.arange(num_tokens),
        slot_mapping=torch.arange(num_tokens),
        max_query_len=num_tokens,
        max_context_len=num_tokens,
    )
    rows = torch.arange(len(prompt) - 1, num_tokens - 1)
    assert decoder.forward(tokens, pool, metadata, rows).argmax(-1).tolist() == answer
