"""One request for several sequences, streamed side by side."""

from __future__ import annotations

from loadtests.client import Client
from loadtests.cluster import LocalCluster

SEVERAL = 4


async def texts_of_several(cluster: LocalCluster, tokens: int) -> list[str]:
    """The texts of all sequences of one request; each ends well, once."""
    how = {"n": SEVERAL, "temperature": 1.0, "seed": 42}
    async with Client(cluster.url, cluster.instance) as client:
        outcome = await client.complete("Once upon a time", tokens, **how)
    assert outcome.errors == []
    assert outcome.done
    texts = [""] * SEVERAL
    ended: list[int] = []
    for choice in outcome.choices:
        assert choice["index"] not in ended, "nothing comes after the end"
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] == "length"
            ended.append(choice["index"])
    assert sorted(ended) == list(range(SEVERAL))
    return texts
