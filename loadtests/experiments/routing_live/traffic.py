"""What the live fleet is asked: chats behind a few system prompts of equal length, at Poisson arrivals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from app.api.openai_types import ChatMessage
from app.api.prompt_tokenizer import PromptTokenizer
from loadtests.arrivals import poisson
from loadtests.workloads import Zipf, question, sentences, system_prompt

_LONGEST = 1 << 20
_FILLER = "and"  # one token in every tokenizer that has ever met English


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, bounds included.

    ``system`` is all that the prompts of one group share, template included. Popularity is Zipf's; 0 makes all
    groups equally popular, as in the published measurements.
    """

    groups: int = 8
    system: int = 400
    output: tuple[int, int] = (8, 24)
    zipf: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be sent ``t`` seconds after the open loop began."""

    t: float
    group: int
    question: str
    output: int


class Traffic:
    """System prompts of exactly ``shape.system`` tokens, and requests about them; same for the same seed."""

    def __init__(self, shape: Shape, systems: Sequence[str], longest_question: int) -> None:
        self.shape = shape
        self.systems = systems
        self.longest_question = longest_question
        """Tokens that a question and the opening of its answer add to a prompt, at most."""

    @classmethod
    async def make(cls, shape: Shape, tokenizer: PromptTokenizer) -> Traffic:
        """Write the system prompts.

        Raises:
            ValueError: the chat template alone takes more than ``shape.system`` tokens.
        """
        systems = [await _system(tokenizer, group, shape.system) for group in range(shape.groups)]
        probes = [
            len(await _encode(tokenizer, systems[0], _question(random.Random(seed)))) for seed in range(256)
        ]
        # A few more than the longest of many.
        return cls(shape, systems, max(probes) - shape.system + 8)

    def messages(self, ask: Ask) -> list[dict[str, str]]:
        """What ``POST /v1/chat/completions`` takes."""
        return [
            {"role": "system", "content": self.systems[ask.group]},
            {"role": "user", "content": ask.question},
        ]

    def lap(self, seed: int) -> list[Ask]:
        """One request for each system prompt, in random order."""
        rng = random.Random(f"lap {seed}")
        groups = rng.sample(range(self.shape.groups), self.shape.groups)
        return [self._ask(rng, 0.0, group) for group in groups]

    def poisson(self, rate: float, seconds: float, seed: int) -> list[Ask]:
        """Requests of a Poisson process of ``rate`` per second."""
        rng = random.Random(f"arrivals {seed}")
        zipf = Zipf(self.shape.groups, self.shape.zipf)
        return [self._ask(rng, t, zipf.draw(rng)) for t in poisson(rate, seconds, rng)]

    def any(self, count: int, groups: int) -> list[Ask]:
        """Requests about any of the first ``groups`` system prompts, all equally likely."""
        rng = random.Random("any")
        return [self._ask(rng, 0.0, rng.randrange(min(groups, self.shape.groups))) for _ in range(count)]

    def _ask(self, rng: random.Random, t: float, group: int) -> Ask:
        return Ask(t, group, _question(rng), rng.randint(*self.shape.output))


def blocks_of(tokens: int, block_size: int) -> int:
    """KV blocks that hold so many tokens."""
    return -(-tokens // block_size)


def _question(rng: random.Random) -> str:
    # A number, so that hardly two questions begin alike.
    return f"{rng.randrange(10**4)}: {sentences(rng, 1)} {question(rng)}"


async def _system(tokenizer: PromptTokenizer, group: int, tokens: int) -> str:
    """Text of a system prompt for which prompts share exactly ``tokens`` tokens: words, then fillers."""
    words = system_prompt(group, tokens).split()
    while words and await _shared(tokenizer, " ".join(words)) > tokens:
        surplus = await _shared(tokenizer, " ".join(words)) - tokens
        del words[-max(1, surplus // 2) :]
    text = " ".join(words)
    while words and (shared := await _shared(tokenizer, text)) < tokens:
        text += f" {_FILLER}" * (tokens - shared)
    if not words or shared > tokens:
        raise ValueError(f"system prompts of {tokens} tokens are too short for this model's chat template")
    return text


async def _shared(tokenizer: PromptTokenizer, system: str) -> int:
    """Leading tokens that prompts with this system prompt have in common."""
    one, other = [await _encode(tokenizer, system, user) for user in ("A", "0")]
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


async def _encode(tokenizer: PromptTokenizer, system: str, user: str) -> list[int]:
    messages = [ChatMessage(role="system", content=system), ChatMessage(role="user", content=user)]
    return await tokenizer.encode_chat(messages, _LONGEST)
