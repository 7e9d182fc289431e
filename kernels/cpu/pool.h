// The kernels' threads: one pool a process, made for machines whose cores have other work, too.
//
// A barrier waits for every thread, so one that the system has put aside for a neighbor holds up all others, at
// each of hundreds of parallel regions of a step. Here the parts of a job are claimed one by one, the caller claims
// along, and it waits only for parts that a worker has begun: a worker that does not get to run costs nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace quire {

using Part = void (*)(const void* context, int64_t begin, int64_t end);

// Runs `part` for each of `parts` ranges of nearly equal length that cover 0 .. count, on up to `threads` threads
// with the calling one, and returns when all have ended. While another thread of the process is in here, the
// caller runs alone, and so does a part that comes in here. Throws std::bad_alloc if a part did; the others still run.
void run_parts(int64_t count, int64_t parts, int threads, Part part, const void* context);

// body(begin, end) for ranges that cover 0 .. count.
template <class Body>
void parallel_ranges(int64_t count, int64_t parts, int threads, const Body& body) {
    parts = std::min(parts, count);
    if (threads <= 1 || parts <= 1) {
        if (count > 0) body(int64_t(0), count);
        return;
    }
    const Part part = [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
    };
    run_parts(count, parts, threads, part, &body);
}

// body(i) for i = 0 .. count - 1, each i a part of its own unless there are more than `parts`.
template <class Body>
void parallel_for(int64_t count, int64_t parts, int threads, const Body& body) {
    parallel_ranges(count, parts, threads, [&body](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) body(i);
    });
}

// body(begin, end) for ranges that cover 0 .. count and get shorter: half of what is left for all threads, then half of
// the rest, and so on. So most of the work runs in long ranges, and still the threads end together.
template <class Body>
void shrinking_ranges(int64_t count, int threads, const Body& body) {
    int64_t rounds = 1;
    while (rounds < 6 && (count >> rounds) >= threads) ++rounds;
    const auto start_of = [=](int64_t part) {
        const int64_t round = part / threads, place = part % threads;
        if (round == rounds) return count;
        const int64_t begin = count - (round == 0 ? count : count >> round);
        const int64_t end = round + 1 == rounds ? count : count - (count >> (round + 1));
        return begin + place * (end - begin) / threads;
    };
    if (threads <= 1) return parallel_ranges(count, 1, 1, body);
    parallel_for(rounds * threads, rounds * threads, threads, [&](int64_t part) {
        const int64_t begin = start_of(part), end = start_of(part + 1);
        if (begin < end) body(begin, end);
    });
}

constexpr int MOST_SHARES = 256;

// Where the share of a thread begins in run_shares().
inline int64_t share_start(int64_t share, int threads, int64_t count) { return share * count / threads; }

// body(i, next, share) for i = 0 .. count - 1. Each thread takes a share of neighbors in ascending order, and then from
// the ends of the others' shares. `next` is what it will probably take next, or -1 at the end of a share.
template <class Body>
void run_shares(int64_t count, int threads, const Body& body) {
    threads = static_cast<int>(std::min<int64_t>({threads, MOST_SHARES, count}));
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) body(i, i + 1 < count ? i + 1 : -1, int64_t(0));
        return;
    }
    struct alignas(64) Share {
        std::atomic<uint64_t> left;  // its first << 32 | its end
    };
    Share shares[MOST_SHARES];
    for (int64_t share = 0; share < threads; ++share)
        shares[share].left = static_cast<uint64_t>(share_start(share, threads, count)) << 32 |
                             static_cast<uint64_t>(share_start(share + 1, threads, count));
    // Takes the first or the last of a share: true unless none was left. `rest` are left then.
    const auto take = [&shares](int64_t share, bool first, int64_t& taken, int64_t& rest) {
        uint64_t left = shares[share].left;
        for (;;) {
            const int64_t begin = static_cast<int64_t>(left >> 32), end = static_cast<int64_t>(left & 0xffffffff);
            if (begin >= end) return false;
            taken = first ? begin : end - 1, rest = end - begin - 1;
            const uint64_t then = first ? left + (uint64_t(1) << 32) : left - 1;
            if (shares[share].left.compare_exchange_weak(left, then)) return true;
        }
    };
    parallel_for(threads, threads, threads, [&](int64_t share) {
        int64_t i, rest;
        while (take(share, true, i, rest)) body(i, rest > 0 ? i + 1 : -1, share);
        for (int64_t other = share + 1; other < share + threads; ++other)
            while (take(other % threads, false, i, rest)) body(i, rest > 0 ? i - 1 : -1, share);
    });
}

// What a C function that may need memory returns: 0, or 1 if there was none.
template <class Body>
int status_of(const Body& body) {
    try {
        body();
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

}  // namespace quire
