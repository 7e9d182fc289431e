"""One request on one replica."""

from __future__ import annotations

from engine.kv.block_keys import block_keys
from engine.kv.prefix_node import PrefixNode
from loadtests.experiments.routing.constants import BLOCK_SIZE
from loadtests.experiments.routing.workloads import ROOT, Job

_FIRST_GENERATED = 2**31
"""Generated token ids begin here: prompts never get so far."""


class Row:
    """A request, its blocks and how far it has come.

    ``tokens`` are those that have a KV or will get one in the next steps; of these ``computed`` have one.
    ``left`` is how many are still to be generated.
    """

    __slots__ = (
        "attempt",
        "cached",
        "channel",
        "computed",
        "findable",
        "first",
        "generated_from",
        "job",
        "keys",
        "last",
        "left",
        "node",
        "overtakes",
        "owed",
        "promises",
        "prompt_length",
        "table",
        "tokens",
    )

    def __init__(self, job: Job, channel: int, attempt: int, generated_from: int) -> None:
        self.job = job
        self.channel = channel
        self.attempt = attempt
        self.generated_from = _FIRST_GENERATED + generated_from
        self.tokens = job.prompt.tokens  # copied when the first token is generated
        self.keys = job.prompt.keys
        self.prompt_length = len(self.tokens)
        self.left = job.output
        self.computed = 0
        self.findable = 0
        self.table: list[int] = []
        self.node: PrefixNode | None = None
        self.overtakes = 0
        self.owed = 0
        """Tokens that the replica counts as to be computed for it."""
        self.promises: list[int] = []
        """Keys of the blocks that it is the first to want here."""
        self.cached: int | None = None
        """Prompt tokens found at its first admission."""
        self.first = 0.0
        self.last = 0.0

    @property
    def missing(self) -> int:
        """Tokens to be computed before the next one can be generated."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def most(self) -> int:
        """Tokens at its end."""
        return self.prompt_length + self.job.output

    def generate(self, count: int) -> None:
        """Append ``count`` new tokens."""
        done = len(self.tokens) - self.prompt_length
        if not done:
            self.tokens = list(self.tokens)
        start = self.generated_from + done
        self.tokens.extend(range(start, start + count))
        self.left -= count

    def keys_up_to(self, blocks: int) -> list[int]:
        """Keys of at least the first ``blocks`` full blocks."""
        known = len(self.keys)
        if known < blocks:
            last = self.keys[-1] if known else ROOT
            new = block_keys(last, self.tokens[known * BLOCK_SIZE : blocks * BLOCK_SIZE], BLOCK_SIZE)
            self.keys = self.keys + new
        return self.keys
