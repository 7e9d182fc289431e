// The kernels' threads: one pool a process, made for machines whose cores have other work, too.
//
// A barrier waits for every thread, so one that the system has put aside for a neighbor holds up all others, at
// each of hundreds of parallel regions of a step. Here the parts of a job are claimed one by one, the caller claims
// along, and it waits only for parts that a worker has begun: a worker that does not get to run costs nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

namespace quire {

using Part = void (*)(const void* context, int64_t begin, int64_t end);

// Runs `part` for each of `parts` ranges of nearly equal length that cover 0 .. count, on up to `threads` threads
// with the calling one, and returns when all have ended. While another thread of the process is in here, the
// caller runs alone. Throws std::bad_alloc if a part did; the others still run.
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
