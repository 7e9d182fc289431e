"""Engine replicas with a real prefix index and no model, one channel to them, and an index at its other end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine_client_setting import until
from loopback import LIMITS, LoopbackHandle, LoopbackReplica
from virtual_time import loop_time

from app.channel import wire
from app.channel.channel_hub import ChannelHub
from app.channel.ingress_channel import IngressChannel
from app.channel.kv_feed import KvFeed
from app.channel.wire_resume import AttemptClaim
from app.channel.wire_sections import KvSection, Section
from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, Route
from app.routing.load import LoadReport
from engine.engine_thread import StepOutputs
from engine.kv.block_keys import KeyScheme
from engine.kv.block_pool import BlockPool
from engine.kv.kv_events import KvEvents, KvSnapshot, root_key_of
from engine.kv.prefix_index import PrefixIndex
from engine.request import CacheNamespace, TokenDelta
from engine.scheduling.load_report import EngineLoad

SCHEME = KeyScheme("revision", "float32", LIMITS.block_size)
ROOT = (("revision", "float32", LIMITS.block_size), LIMITS.block_size, "", "", "")


class LossyHub(ChannelHub):
    """``change`` may replace each KV section on its way, or drop it."""

    change: Callable[[KvSection], KvSection | None] | None = None

    async def stream(
        self, cid: str, epoch: int, resumption: bytes = b"", connects: bool = False
    ) -> AsyncIterator[bytes]:
        frames = super().stream(cid, epoch, resumption, connects)
        try:
            async for data in frames:
                frame = wire.unpack_frame(data)
                if self.change is None or not frame.kv:
                    yield data
                    continue
                sections: list[Section] = [kv for kv in map(self.change, frame.kv) if kv is not None]
                if frame.load is not None:
                    sections.append(frame.load)
                yield wire.pack_records(epoch, frame.sequence, frame.records, sections)
        finally:
            await frames.aclose()  # type: ignore[attr-defined]


class KvReplica(LoopbackReplica):
    """Its prefix cache changes by ``hold``; ``step`` tells the hub, as an engine's thread does."""

    def __init__(self, name: str, blocks: int = 64, hello: wire.Hello | None = None) -> None:
        super().__init__(name)
        self.pool = BlockPool(blocks, LIMITS.block_size)
        self.events = KvEvents(LIMITS.block_size, root_key_of)
        self.index = PrefixIndex(self.pool, observer=self.events)
        self.snapshots = 0
        self.before_snapshot: Callable[[], None] | None = None
        self.after_snapshot: Callable[[], None] | None = None
        self.hub: LossyHub = LossyHub(
            hello or wire.Hello.of(LIMITS, SCHEME, None),
            self.engine.abort,
            clock=loop_time,
            snapshot=self.snapshot,
        )
        self.engine.hub = self.hub

    async def snapshot(self) -> KvSnapshot:
        """The engine's thread takes a while to answer, and goes on before its answer is read."""
        self.snapshots += 1
        await asyncio.sleep(0)
        if self.before_snapshot is not None:
            self.before_snapshot()
        assert not self.events.pending
        made = self.events.snapshot()
        if self.after_snapshot is not None:
            self.after_snapshot()
        await asyncio.sleep(0)
        return made

    def hold(self, *texts: int) -> None:
        """Compute texts of two blocks each, the first of which all have in common, and let them go."""
        for text in texts:
            tokens = [1] * LIMITS.block_size + [text] * LIMITS.block_size
            node = self.index.match(ROOT, tokens, len(tokens))
            table = self.index.blocks(node)
            self.pool.share(table)
            more = self.pool.allocate(2 - len(table))
            assert more is not None
            self.index.extend(ROOT, node, tokens, table + more, 2)
            self.pool.release(table + more)

    def step(self, *texts: int, taken: tuple[str, ...] = (), deltas: tuple[TokenDelta, ...] = ()) -> None:
        """Hold and tell."""
        self.hold(*texts)
        pool = self.pool
        load = EngineLoad(
            0, 0, 0, pool.num_referenced, pool.num_free, pool.num_cached, 100.0, 0.5, 0, 0, 0, 8, 0, 0, 0
        )
        self.hub.on_step(StepOutputs(list(deltas), list(taken), self.events.drain(), load))


class KvIngress:
    """The ingress's end of the channels to some replicas, with a real index."""

    def __init__(self, *replicas: KvReplica, cid: str = "ingress") -> None:
        self.handle = LoopbackHandle(0)
        self.handle.replicas.update({replica.name: replica for replica in replicas})
        self.index = KvIndex()
        self.ledger = Ledger(index=self.index)
        self.feed = KvFeed(self.ledger, self.index)
        self.loads: list[LoadReport] = []
        self.sections: list[KvSection] = []
        self.records: list[wire.Record] = []
        self.routes: list[Route] = []
        self.closed: list[str] = []
        epochs = itertools.count(1)
        self.channels = [
            IngressChannel(self.handle, cid, replica.name, lambda: next(epochs), self, loop_time)
            for replica in replicas
        ]

    def keys(self, text: int) -> list[int]:
        """What an ingress makes of a text of ``KvReplica.hold``."""
        assert self.feed.keys is not None
        tokens = [1] * LIMITS.block_size + [text] * LIMITS.block_size
        return self.feed.keys.keys(tokens, CacheNamespace())

    def holds(self, text: int) -> dict[str, int]:
        """How many blocks of a text each replica has."""
        return dict(self.index.longest(self.keys(text)))

    def in_step(self, replica: KvReplica) -> bool:
        """Whether the index knows exactly what the replica has."""
        made = replica.events.snapshot()
        return self.index.digest(replica.name) == (made.sequence, made.xor, made.count)

    async def stop(self) -> None:
        for channel in self.channels:
            channel.stop()
        for channel in self.channels:
            await channel.stopped()

    def on_broken(self, route: Route) -> list[AttemptClaim]:
        next(one for one in self.channels if one.replica == route.replica).resume(route.epoch, ())
        return []

    def on_open(self, route: Route, hello: wire.Hello, ended: Route | None) -> None:
        self.routes.append(route)
        self.ledger.open(route)
        self.feed.open(route, hello)

    def on_answer(self, route: Route, attempt: int, outcome: dict[str, Any]) -> None: ...

    def on_records(self, route: Route, records: list[wire.Record]) -> list[int]:
        self.records += records
        return []

    def on_kv(self, route: Route, section: KvSection) -> bool:
        self.sections.append(section)
        return self.feed.update(route, section)

    def on_frame_end(self, done: Callable[[], None]) -> None:
        done()

    def on_load(self, route: Route, load: LoadReport) -> None:
        self.loads.append(load)
        self.ledger.report(route, load)

    def on_suspect(self, route: Route, suspected: bool) -> None:
        self.ledger.suspect(route.replica, suspected)

    def on_closed(self, route: Route, reason: str, fault: bool) -> None:
        self.closed.append(reason)
        self.feed.close(route)
        self.ledger.close(route)


async def connected(*replicas: KvReplica) -> KvIngress:
    ingress = KvIngress(*replicas)
    await until(lambda: all(ingress.index.synced(replica.name) for replica in replicas))
    return ingress
