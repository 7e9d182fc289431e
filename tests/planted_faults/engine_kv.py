"""Faults in the KV memory: blocks, prefixes, swaps."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_POOL = ("engine/kv/test_block_pool.py",)
_INDEX = ("engine/kv/test_prefix_index.py", "engine/kv/test_window_index.py")
_HOST = ("engine/kv/test_host_pool.py",)
_CACHE = ("engine/kv/test_kv_cache.py",)
_EVENTS = ("engine/kv/test_kv_events.py",)
_KEYS = ("engine/kv/test_block_keys.py",)
_SIZE = ("engine/kv/test_pool_size.py",)

KV: list[Fault] = [
    Fault(
        "engine/kv/block_pool.py",
        "return -(-tokens // self.block_size)",
        "return tokens // self.block_size + 1",
        _POOL,
        "a full last block counts as one block more",
    ),
    Fault(
        "engine/kv/block_pool.py",
        "        for block in reversed(table):\n            references[block] -= 1",
        "        for block in table:\n            references[block] -= 1",
        _POOL,
        "the beginning of a sequence is evicted before its end",
    ),
    Fault(
        "engine/kv/block_pool.py",
        "            self._generations[block] += 1\n",
        "",
        _POOL,
        "a block that was handed out again passes for what it was",
    ),
    Fault(
        "engine/kv/block_pool.py",
        "                if self.on_evict is not None:\n                    self.on_evict(block)\n",
        "",
        _POOL,
        "nobody hears of an eviction",
    ),
    Fault(
        "engine/kv/block_pool.py",
        "        last = num_blocks if after is None else after\n",
        "        last = num_blocks\n",
        _POOL,
        "adjacent blocks are not preferred",
    ),
    Fault(
        "engine/kv/block_pool.py",
        "            wrong = next((block for block in counts if references[block] < counts[block]), None)",
        "            wrong = next((block for block in counts if references[block] < 1), None)",
        _POOL,
        "a table that names a block twice releases it more often than it is held",
    ),
    Fault(
        "engine/kv/block_pool.py",
        "            after = self._previous[self._cached_end]\n",
        "            after = self._cached_end\n",
        _POOL,
        "the most recently used block is evicted first",
    ),
    Fault(
        "engine/kv/prefix_index.py",
        "        while child is not None and child.tokens != tokens:\n            child = child.sibling\n        return child",
        "        return child",
        _INDEX,
        "a colliding hash gives one prompt another's KV",
    ),
    Fault(
        "engine/kv/prefix_index.py",
        "max_tokens - size + 1, size)",
        "max_tokens + 1, size)",
        _INDEX,
        "a hit covers more tokens than were allowed",
    ),
    Fault(
        "engine/kv/prefix_index.py",
        "            if node.block != block and not self._pool.references(node.block):",
        "            if node.block != block:",
        _INDEX,
        "a node leaves a block that is in use",
    ),
    Fault(
        "engine/kv/prefix_index.py",
        "            if hollow < self.visible_from((depth + 1) * size):",
        "            if hollow < self.visible_from(depth * size):",
        _INDEX,
        "the window of a hit is that of the block before",
    ),
    Fault(
        "engine/kv/prefix_index.py",
        "max(0, position - self.window + 1) // self._pool.block_size",
        "max(0, position - self.window) // self._pool.block_size",
        _INDEX,
        "a window sees one token more",
    ),
    Fault(
        "engine/kv/prefix_index.py",
        "            doomed.extend(node.all_children())\n",
        "",
        _INDEX,
        "blocks below an evicted one stay findable",
    ),
    Fault(
        "engine/kv/prefix_index.py",
        "        node = hint if hint is not None and hint.alive else self._roots.get(root)",
        "        node = hint if hint is not None else self._roots.get(root)",
        _INDEX,
        "a walk goes on from a node that has been forgotten",
    ),
    Fault(
        "engine/kv/host_pool.py",
        "return len({content for content in blocks if content not in self._places})",
        "return len([content for content in blocks if content not in self._places])",
        _HOST,
        "a content that occurs twice is counted twice",
    ),
    Fault(
        "engine/kv/host_pool.py",
        "            if content is not None:\n                del self._places[content]\n",
        "",
        _HOST,
        "contents are found in a host block that was given away",
    ),
    Fault(
        "engine/kv/host_pool.py",
        "        if self.num_to_copy(blocks) > self._num_free:",
        "        if self.num_to_copy(blocks) >= self._num_free:",
        _HOST,
        "the last free host block is never used",
    ),
    Fault(
        "engine/kv/kv_cache.py",
        "            rows[destinations] = rows[sources]",
        "            for source, destination in pairs:\n                rows[destination] = rows[source]",
        _CACHE,
        "a chain of copies carries the first block on to all others",
    ),
    Fault(
        "engine/kv/kv_cache.py",
        "high_water_mark * block_bytes + PREFAULT_AHEAD",
        "PREFAULT_AHEAD",
        _CACHE,
        "only the first gigabyte is prefaulted",
    ),
    Fault(
        "engine/kv/prefaulter.py",
        "        size = min(size, self._size)\n",
        "        size = self._size\n",
        _CACHE,
        "an idle engine prefaults its whole pool",
    ),
    Fault(
        "engine/kv/block_pool.py",
        "            self._high_water_mark = max(self._high_water_mark, blocks[-1] + 1)",
        "            self._high_water_mark = blocks[-1] + 1",
        _POOL,
        "the high-water mark falls when a low block is allocated",
    ),
    Fault(
        "engine/kv/kv_cache.py",
        "ordered[end] != (source + 1, destination + 1)",
        "ordered[end][0] != source + 1",
        _CACHE,
        "a run of copies ignores where the blocks go",
    ),
    Fault(
        "engine/kv/kv_events.py",
        "        if nodes > 1:\n            self._nodes[key] = nodes - 1\n            return\n",
        "",
        _EVENTS,
        "of two nodes with one key, the first that goes takes the other along",
    ),
    Fault(
        "engine/kv/kv_events.py",
        "        if key in self._stored:\n            del self._stored[key]\n        else:\n            self._removed[key] = None",
        "        self._stored.pop(key, None)\n        self._removed[key] = None",
        _EVENTS,
        "a block that came and went between two batches is reported as removed",
    ),
    Fault(
        "engine/kv/kv_events.py",
        "        self._xor = 0\n        self._cleared = True",
        "        self._cleared = True",
        _EVENTS,
        "the digest survives a reset of the cache",
    ),
    Fault(
        "engine/kv/block_keys.py",
        'digest.update(tag + struct.pack("<Q", len(value)) + value)',
        "digest.update(tag + value)",
        _KEYS,
        "the parts of a root's name are not framed by their lengths",
    ),
    Fault(
        "engine/kv/pool_size.py",
        "    limit = available if gpu else _part(config, available) - host_blocks * block_bytes",
        "    limit = available if gpu else _part(config, available)",
        _SIZE,
        "KV pool and swap space take the same memory",
    ),
    Fault(
        "engine/kv/pool_size.py",
        "    return max(int(maximum) - used + cache, 0)",
        "    return max(int(maximum) - used, 0)",
        _SIZE,
        "page cache that can be reclaimed counts as used",
    ),
    Fault(
        "engine/control_groups.py",
        "            if group == base:\n                break",
        "            break",
        _SIZE,
        "the limits of the groups above do not count",
    ),
]
