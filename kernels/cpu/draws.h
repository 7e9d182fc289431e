// What draws are made of: weights, and random numbers that depend on a key and a candidate alone.
#pragma once

#include <cstdint>

#include "vec.h"

namespace quire {

constexpr int64_t GROUPS_OF = 64;  // tokens of a group
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
constexpr uint64_t GROUP_CANDIDATES = 1ull << 32;  // candidates of the group draws begin above every token id

// exp(x) for x <= 0, to about one unit in the last place; 0 where the result would not be a normal number.
static inline vf exp_negative(vf x) {
    const vu normal = ~bit_cast<vu>(x < splat(-87.33f));  // elsewhere the bits below mean nothing
    const vf shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, in the lowest bits
    const vf shifted = fma(x, splat(1.442695040888963f), shift), n = shifted - shift;
    const vf part = fma(n, splat(-1.42860682e-6f), fma(n, splat(-0.693145751953125f), x));
    vf y = splat(1.98527617612853646e-4f);
    y = fma(y, part, splat(1.39304355252534151e-3f));
    y = fma(y, part, splat(8.33336077630519867e-3f));
    y = fma(y, part, splat(4.16664853692054749e-2f));
    y = fma(y, part, splat(1.66666671633720398e-1f));
    y = fma(y, part, splat(0.5f));
    y = fma(part * part, y, part) + splat(1.0f);
    return bit_cast<vf>((bit_cast<vu>(y) + (bit_cast<vu>(shifted) << 23)) & normal);
}

// A number between 0 and 1, of which -log is a standard exponential; engine/execution/random.py has the formula.
static inline double uniform(uint64_t key, uint64_t candidate) {
    uint64_t z = key + (candidate + 1) * GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (static_cast<double>(z >> 12) + 0.5) * 0x1p-52;
}

}  // namespace quire
