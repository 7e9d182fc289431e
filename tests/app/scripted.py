"""An engine that answers what a test says, behind the real HTTP surface."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest
from local_server import LocalServer

from app.fleet.generation import Delta, GenerateRequest


@dataclass
class Script:
    """What each sequence answers, one token in a delta; ``requests`` are those that it got."""

    server: LocalServer
    text: str
    reason: str = "stop"
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        (tokens,) = await self.server.tokenizer.encode_texts([self.text], 10_000)
        end = [2] if self.reason == "stop" else []  # <|im_end|>
        n = request.params.n
        for i, token in enumerate([*tokens, *end]):
            last = i + 1 == len(tokens) + len(end)
            for sequence in range(n):
                final = last and sequence == n - 1
                reason = self.reason if last else None
                yield Delta((token,), reason, 16, i, sequence, final, "fp_script")


def scripted(monkeypatch: pytest.MonkeyPatch, server: LocalServer, text: str, reason: str = "stop") -> Script:
    """Let ``server`` answer every request with ``text`` until the test ends."""
    script = Script(server, text, reason)
    monkeypatch.setattr(server.client, "generate", script.generate)
    return script
