"""Device code of paged attention: one kernel for prefill and decode, and the merge of its splits.

A program owns a tile of ``BLOCK_M`` rows of one KV head: ``BLOCK_M // GROUP`` consecutive query tokens of one
request times the ``GROUP`` query heads that share the KV head, so each key and value is read once for all of
them. It walks the keys in tiles of ``BLOCK_N``, looks each key's block up by itself (so any block size goes
with any tile), and keeps the online softmax of Milakov and Gimelshein (arXiv:1805.02867) in float32, as
FlashAttention does (Dao et al., arXiv:2205.14135), with powers of two instead of e.

A short query over a long context would leave most of a GPU idle, so its keys are cut into splits of a fixed
``SPLIT`` tokens (flash-decoding, but with a fixed length where that fixes the number), whose results a second
kernel merges in ascending order. How many programs share the splits changes no bit.
"""

from __future__ import annotations

import triton.language as tl

from kernels.triton.jit import jit
from kernels.triton.soft_cap import capped


@jit()
def attend(
    q: tl.tensor,
    rows_at: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    needed_from: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tuple:
    """Online softmax of the tile ``q [M, D]`` over the keys at ``start..end - 1``.

    No row needs a key before ``needed_from``; its block may be gone from a sliding window's table.
    ``rows_at [M]`` are the positions of the rows. Returns ``acc [M, D]`` (weighted sum of values), ``top [M]``
    (largest score) and ``total [M]`` (sum of weights, each relative to ``top``); 0, -inf and 0 for a row that
    sees no key.
    """
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for first in range(start, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        exists = at < end
        if WINDOW > 0:
            exists = exists & (at >= needed_from)
        block = tl.load(table + at // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = block * block_stride + (at % BLOCK_SIZE) * token_stride
        k_mask = exists[None, :]
        v_mask = exists[:, None]
        if BLOCK_D != HEAD_DIM:
            k_mask = k_mask & (d < HEAD_DIM)[:, None]
            v_mask = v_mask & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + slot[None, :] + d[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFT_CAP > 0:
            scores = capped(scores, SOFT_CAP)
        behind = rows_at[:, None] - at[None, :]
        # As an unsigned number a key ahead of its row is far behind it: one comparison for both ends.
        seen = behind.to(tl.uint32, bitcast=True) < WINDOW if WINDOW > 0 else behind >= 0
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        anchor = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - anchor[:, None])
        keep = tl.exp2(top - anchor)
        total = total * keep + tl.sum(weights, axis=1)
        v = tl.load(values + slot[:, None] + d[None, :], mask=v_mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = new
    return acc, top, total


@jit()
def find_request(
    program: tl.tensor, query_start: tl.tensor, num_requests: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """The request that owns query tile ``program``, by bisection.

    Request ``r`` starts at tile ``query_start[r] // BLOCK_Q + r``: its tiles always fit before the next one's,
    and no table of tiles has to be built on the host.
    """
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit()
def locate_tile(
    query_start: tl.tensor,
    context_lens: tl.tensor,
    num_requests: tl.tensor,
    BLOCK_Q: tl.constexpr,
    SHORT: tl.constexpr,
    SHORT_QUERY: tl.constexpr,
) -> tl.tuple:
    """``(request, row, position, tokens)`` of this program's tile, the middle two of its first token.

    ``tokens`` is 0 where there is nothing to do. Requests with at most ``SHORT_QUERY`` new tokens belong to the
    launch with ``SHORT``, one tile each, and the others to the launch without.
    """
    program = tl.program_id(0)
    if SHORT:
        request = program
        offset = 0
    else:
        request = find_request(program, query_start, num_requests, BLOCK_Q)
        offset = (program - tl.load(query_start + request) // BLOCK_Q - request) * BLOCK_Q
    begin = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - begin
    tokens = tl.maximum(tl.minimum(length - offset, BLOCK_Q), 0)
    tokens = tl.where((length <= SHORT_QUERY) == SHORT, tokens, 0)
    return request, begin + offset, tl.load(context_lens + request) - length + offset, tokens


@jit()
def merge(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, acc_s: tl.tensor, top_s: tl.tensor, total_s: tl.tensor
) -> tl.tuple:
    """Add the results of a further split to those of the splits before it; both as :func:`attend` returns them.

    ``acc`` is ``[M, D]`` and the others ``[M, 1]``. Which product is fused with the sum is said here: left to
    the compiler, it might differ between the kernels that merge.
    """
    new = tl.maximum(top, top_s)
    anchor = tl.where(new == float("-inf"), 0.0, new)
    keep = tl.exp2(top - anchor)
    take = tl.exp2(top_s - anchor)
    return tl.fma(acc, keep, acc_s * take), new, tl.fma(total, keep, total_s * take)


@jit(varying=("num_requests", "table_stride", "partial_rows", "num_splits"))
def paged_attention_kernel(
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_stats: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    query_start: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    partial_rows: tl.tensor,
    num_splits: tl.tensor,
    q_stride: tl.tensor,
    kv_block_stride: tl.tensor,
    kv_value_offset: tl.tensor,
    kv_token_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    ORDERED: tl.constexpr,
    SHORT: tl.constexpr,
    SHORT_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid ``(tiles, kv_heads, sharers)``.

    ``scale`` and ``SOFT_CAP`` include ``log2(e)``; 0 is no ``WINDOW``, and no ``SOFT_CAP``.

    With ``PARTIAL`` the ``sharers`` take turns at the splits and leave ``acc`` of each in ``partial_acc``
    ``[tiles, kv_heads, num_splits, partial_rows, HEAD_DIM]`` and ``top`` and ``total`` in ``partial_stats``
    ``[tiles, kv_heads, num_splits, 2, partial_rows]``, both float32. Without it there is one sharer, which
    walks all keys and writes ``out``; where the context fits one split both ways give the same bits, and with
    ``ORDERED``, which cuts and merges here, too, always.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    request, first, base, tokens = locate_tile(
        query_start, context_lens, num_requests, BLOCK_Q, SHORT, SHORT_QUERY
    )
    if tokens == 0:
        return
    kv_head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = token < tokens
    rows_at = tl.where(live, base + token, -1)
    tile_mask = live[:, None] & (d < HEAD_DIM)[None, :]
    q_row = (first + token).to(tl.int64) * q_stride + head * HEAD_DIM
    q_tile = tl.load(q + q_row[:, None] + d[None, :], mask=tile_mask, other=0.0)
    keys = kv + kv_head * HEAD_DIM
    values = keys + kv_value_offset
    table = block_tables + request.to(tl.int64) * table_stride

    stop = base + tokens
    start = 0
    needed_from = 0
    if WINDOW > 0:
        needed_from = tl.maximum(base - WINDOW + 1, 0)
        # Aligned: where a row's tiles of keys begin must not depend on which rows share its tile.
        start = needed_from // BLOCK_N * BLOCK_N
    if PARTIAL:
        tile = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits
        for split in range(start // SPLIT + tl.program_id(2), (stop - 1) // SPLIT + 1, tl.num_programs(2)):
            lower = tl.maximum(split * SPLIT, start)
            upper = tl.minimum((split + 1) * SPLIT, stop)
            acc, top, total = attend(
                q_tile, rows_at, keys, values, table, lower, upper, needed_from,
                kv_block_stride, kv_token_stride, scale,
                HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            partial_at = ((tile + split) * partial_rows + m)[:, None] * HEAD_DIM + d[None, :]
            tl.store(partial_acc + partial_at, acc, mask=tile_mask)
            stats = partial_stats + (tile + split) * 2 * partial_rows + m
            tl.store(stats, top, mask=live)
            tl.store(stats + partial_rows, total, mask=live)
    else:
        if ORDERED:
            acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)[:, None]
            total = tl.zeros([BLOCK_M], dtype=tl.float32)[:, None]
            for split in range(start // SPLIT, (stop - 1) // SPLIT + 1):
                lower = tl.maximum(split * SPLIT, start)
                upper = tl.minimum((split + 1) * SPLIT, stop)
                acc_s, top_s, total_s = attend(
                    q_tile, rows_at, keys, values, table, lower, upper, needed_from,
                    kv_block_stride, kv_token_stride, scale,
                    HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                acc, top, total = merge(acc, top, total, acc_s, top_s[:, None], total_s[:, None])
            divisor = total
        else:
            acc, top, total = attend(
                q_tile, rows_at, keys, values, table, start, stop, needed_from,
                kv_block_stride, kv_token_stride, scale,
                HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            divisor = total[:, None]
        out_row = ((first + token).to(tl.int64) * tl.num_programs(1) * GROUP + head) * HEAD_DIM
        result = acc / tl.where(live[:, None], divisor, 1.0)
        tl.store(out + out_row[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=tile_mask)


@jit(varying=("partial_rows", "num_splits"))
def merge_splits_kernel(
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_stats: tl.tensor,
    query_start: tl.tensor,
    context_lens: tl.tensor,
    partial_rows: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SHORT_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid ``(requests, kv_heads, partial_rows)``: merge one row's splits in ascending order.

    From the first split in which the row sees a key to its own, so it reads neither an empty one nor one that
    was never written.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    _, first, base, tokens = locate_tile(query_start, context_lens, 0, BLOCK_Q, True, SHORT_QUERY)
    row = tl.program_id(2)
    if row // GROUP >= tokens:
        return
    kv_head = tl.program_id(1)
    at = base + row // GROUP
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(at - WINDOW + 1, 0) // SPLIT

    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    top = tl.full([1, 1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1, 1], dtype=tl.float32)
    tile = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits
    for split in range(first_split, at // SPLIT + 1):
        stats = partial_stats + (tile + split) * 2 * partial_rows + row
        acc_at = ((tile + split) * partial_rows + row) * HEAD_DIM + d
        acc_s = tl.load(partial_acc + acc_at, mask=d < HEAD_DIM, other=0.0)[None, :]
        top_s = tl.full([1, 1], 0.0, dtype=tl.float32) + tl.load(stats)
        total_s = tl.full([1, 1], 0.0, dtype=tl.float32) + tl.load(stats + partial_rows)
        acc, top, total = merge(acc, top, total, acc_s, top_s, total_s)

    head = kv_head * GROUP + row % GROUP
    out_at = ((first + row // GROUP).to(tl.int64) * tl.num_programs(1) * GROUP + head) * HEAD_DIM + d
    tl.store(out + out_at[None, :], (acc / total).to(out.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])
