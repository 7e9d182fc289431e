// What draws are made of: weights, and random numbers that depend on a key and a candidate alone.
#pragma once

#include <cstdint>

#include "vec.h"

namespace quire {

constexpr int64_t GROUPS_OF = 64;  // tokens of a group
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
constexpr uint64_t GROUP_CANDIDATES = 1ull << 32;  // candidates of the group draws begin above every token id

// Replaces each x <= 0 by exp(x), to about one unit in the last place; by 0 where that would not be a normal number.
// All N take each step together, because one alone is a chain of operations that wait for each other.
template <int N>
static inline void exp_negative(vf (&x)[N]) {
    const auto each = [](const auto& step) {
        for (int j = 0; j < N; ++j) step(j);
    };
    const vf shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, in the lowest bits
    vf shifted[N], part[N], y[N];
    each([&](int j) { shifted[j] = fma(x[j], splat(1.442695040888963f), shift); });
    each([&](int j) { y[j] = shifted[j] - shift; });
    each([&](int j) { part[j] = fma(y[j], splat(-0.693145751953125f), x[j]); });
    each([&](int j) { part[j] = fma(y[j], splat(-1.42860682e-6f), part[j]); });
    each([&](int j) { y[j] = splat(1.98527617612853646e-4f); });
    for (float next : {1.39304355252534151e-3f, 8.33336077630519867e-3f, 4.16664853692054749e-2f,
                       1.66666671633720398e-1f, 0.5f})
        each([&](int j) { y[j] = fma(y[j], part[j], splat(next)); });
    each([&](int j) { y[j] = fma(part[j] * part[j], y[j], part[j]) + splat(1.0f); });
    each([&](int j) {
        const vf power = bit_cast<vf>(bit_cast<vu>(y[j]) + (bit_cast<vu>(shifted[j]) << 23));
        x[j] = x[j] < splat(-87.33f) ? vf{} : power;  // there the bits of `power` mean nothing
    });
}
static inline vf exp_negative(vf x) {
    vf one[] = {x};
    exp_negative(one);
    return one[0];
}

static inline uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// The key of a draw at `position`, where `seed` is what seed_bits() in engine/execution/random.py makes of the seed.
static inline uint64_t draw_key(int64_t seed, int64_t position) {
    return mixed(static_cast<uint64_t>(seed) ^ (static_cast<uint64_t>(position) + 1) * GOLDEN);
}

// A number between 0 and 1, of which -log is a standard exponential; engine/execution/random.py has the formula.
static inline double uniform(uint64_t key, uint64_t candidate) {
    const uint64_t bits = mixed(key + (candidate + 1) * GOLDEN);
    return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

}  // namespace quire
