"""What the live fleet is asked: chats behind a few system prompts of about a length, at Poisson arrivals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from app.api.openai_types import ChatMessage
from app.api.prompt_tokenizer import PromptTokenizer
from loadtests.arrivals import poisson
from loadtests.workloads import question, sentences, system_prompt

GROUPS = 8
SYSTEM_WORDS = 315  # some 400 tokens
ANSWER = (8, 24)  # tokens, bounds included


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be sent ``t`` seconds after the open loop began, for ``output`` tokens."""

    t: float
    group: int
    question: str
    output: int


class Traffic:
    """``GROUPS`` system prompts, and requests about them, all equally popular; the same for the same seed.

    ``systems`` are the tokens that prompts of each group share, template included; ``longest_question`` those
    that a question and the opening of its answer add, at most.
    """

    def __init__(self, systems: Sequence[int], longest_question: int) -> None:
        self.systems = systems
        self.longest_question = longest_question

    @classmethod
    async def make(cls, tokenizer: PromptTokenizer) -> Traffic:
        """Count the tokens."""
        systems = []
        for group in range(GROUPS):
            one, other = [await _encode(tokenizer, group, user) for user in ("A", "0")]
            systems.append(next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b))
        probes = [await _encode(tokenizer, 0, _question(random.Random(seed))) for seed in range(256)]
        # A few more than the longest of many.
        return cls(systems, max(map(len, probes)) - systems[0] + 8)

    @staticmethod
    def messages(ask: Ask) -> list[dict[str, str]]:
        """What ``POST /v1/chat/completions`` takes."""
        return _messages(ask.group, ask.question)

    @staticmethod
    def lap(seed: int) -> list[Ask]:
        """One request for each system prompt, in random order."""
        rng = random.Random(f"lap {seed}")
        return [_ask(rng, 0.0, group) for group in rng.sample(range(GROUPS), GROUPS)]

    @staticmethod
    def poisson(rate: float, seconds: float, seed: int) -> list[Ask]:
        """Requests of a Poisson process of ``rate`` per second."""
        rng = random.Random(f"arrivals {seed}")
        return [_ask(rng, t, rng.randrange(GROUPS)) for t in poisson(rate, seconds, rng)]

    @staticmethod
    def few_groups(count: int, groups: int) -> list[Ask]:
        """Requests about any of the first ``groups`` system prompts."""
        rng = random.Random("any")
        return [_ask(rng, 0.0, rng.randrange(groups)) for _ in range(count)]


def _ask(rng: random.Random, t: float, group: int) -> Ask:
    return Ask(t, group, _question(rng), rng.randint(*ANSWER))


def _question(rng: random.Random) -> str:
    # A number, so that hardly two questions begin alike.
    return f"{rng.randrange(10**4)}: {sentences(rng, 1)} {question(rng)}"


def _messages(group: int, user: str) -> list[dict[str, str]]:
    system = system_prompt(group, SYSTEM_WORDS)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


async def _encode(tokenizer: PromptTokenizer, group: int, user: str) -> list[int]:
    return await tokenizer.encode_chat([ChatMessage(**one) for one in _messages(group, user)], 1 << 20)
