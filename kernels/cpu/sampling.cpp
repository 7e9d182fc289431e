// From logits to tokens: edits of a row, draws from it, and its log probabilities, one row a part.
//
// Edits and log probabilities are defined in kernels/interface.py. A draw is temperature, min-p, top-k, top-p, and the
// race of exponentials; its definition is engine/execution/sampler.py, and the steps are the same: weights relative to the likeliest
// token, one threshold from the three filters, sums over interleaved groups as an explicit tree, then the
// counter-based races. A row costs about the same whatever it asks for, and no row costs another anything.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "functions.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

constexpr int64_t GROUPS_OF = 64;             // tokens of a group
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
constexpr uint64_t GROUP_CANDIDATES = 1ull << 32;  // candidates of the group draws begin above every token id
constexpr float FIRST_CUT = 1.0f / 64, LAST_CUT = 1.0f / (1 << 30);
constexpr int64_t CHECKED = 4 * LANES;        // weights that are compared with a cut at once

// exp(x) for x <= 0, to about one unit in the last place; 0 where the result would not be a normal number.
static inline vf exp_negative(vf x) {
    const vi tiny = bit_cast<vi>(x < splat(-87.33f));
    x = max(x, splat(-87.33f));
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
    return bit_cast<vf>((bit_cast<vi>(y) + (bit_cast<vi>(shifted) << 23)) & ~tiny);
}

// A number between 0 and 1, of which -log is a standard exponential; engine/execution/random.py has the formula.
static double uniform(uint64_t key, uint64_t candidate) {
    uint64_t z = key + (candidate + 1) * GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (static_cast<double>(z >> 12) + 0.5) * 0x1p-52;
}

// A race of exponentials with weights: the first one wins.
struct Race {
    int64_t winner;
    double first = std::numeric_limits<double>::infinity();

    // Since -log(u) >= 1 - u, most that are too late are known without a logarithm.
    void enter(int64_t number, double u, double weight) {
        if ((1.0 - u) * (1.0 - 1e-9) > first * weight) return;
        const double time = -std::log(u) / weight;
        if (time < first) first = time, winner = number;
    }
};

struct Row {
    const float* logits;
    float best, temperature, min_p;
    int64_t top_k;  // 0: no such filter
    double top_p;   // 1: no such filter
};

typedef double vd __attribute__((vector_size(LANES * 8)));

// Lists of weights end with zeros up to a multiple of CHECKED, and no cut is 0.
using Weights = std::vector<float>;

// Work space of one thread.
struct Space {
    Weights weights, likely, sums;
    std::vector<float> highest;  // of each CHECKED of `weights`
};

// Weights to compare with cuts. Of a whole vocabulary most stretches lie below any cut that matters, and `highest`,
// the largest of each CHECKED weights, tells which: adding their zeros would change no sum. Null: not known.
struct Compared {
    const Weights& weights;
    const float* highest;

    bool below(size_t i, float cut) const { return highest && highest[i / CHECKED] < cut; }
};

static double sum_above(const Compared& some, float cut) {
    vd sums[4] = {};
    const vf least = splat(cut);
    for (size_t i = 0; i < some.weights.size(); i += CHECKED) {
        if (some.below(i, cut)) continue;
        for (int j = 0; j < 4; ++j) {
            const vf value = load(&some.weights[i + j * LANES]);
            sums[j] += __builtin_convertvector(value >= least ? value : splat(0.0f), vd);
        }
    }
    const vd sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = 0.0;
    for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
    return total;
}

static int64_t count_above(const Compared& some, float cut) {
    vi counts{};
    const vf least = splat(cut);
    for (size_t i = 0; i < some.weights.size(); i += CHECKED) {
        if (some.below(i, cut)) continue;
        for (int j = 0; j < 4; ++j) counts -= bit_cast<vi>(load(&some.weights[i + j * LANES]) >= least);
    }
    int64_t total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += counts[lane];
    return total;
}

// The weights that `weigh` gives `logits`, followed by zeros up to a multiple of CHECKED, and the highest of each
// CHECKED; one that is no number counts as 0 there, and as below any cut.
template <class Weigh>
static void fill_weights(const float* logits, int64_t vocab, Space& space, const Weigh& weigh) {
    const int64_t padded = (vocab + CHECKED - 1) / CHECKED * CHECKED;
    space.weights.resize(padded);
    space.highest.resize(padded / CHECKED);
    float* out = space.weights.data();
    for (int64_t i = 0; i < padded; i += CHECKED) {
        vf highest = splat(0.0f);
        for (int64_t at = i; at < i + CHECKED; at += LANES) {
            if (at + LANES <= vocab) {
                store(out + at, weigh(load(logits + at)));
            } else {
                store(out + at, splat(0.0f));
                const int rest = static_cast<int>(std::max<int64_t>(vocab - at, 0));
                if (rest) store_some(out + at, weigh(load_some(logits + at, rest)), rest);
            }
            highest = max(highest, load(out + at));
        }
        space.highest[i / CHECKED] = max(highest);
    }
}

static void fill_weights(const Row& row, int64_t vocab, Space& space) {
    const vf best = splat(row.best), temperature = splat(row.temperature);
    if (row.temperature == 1.0f)  // the division, a third of the time, would change nothing
        fill_weights(row.logits, vocab, space, [=](vf logits) { return exp_negative(logits - best); });
    else
        fill_weights(row.logits, vocab, space,
                     [=](vf logits) { return exp_negative((logits - best) / temperature); });
}

// The weights of at least `cut`.
static void collect(const Compared& all, float cut, Weights& found) {
    found.resize(all.weights.size() + CHECKED);
    int64_t count = 0;
    for (size_t i = 0; i < all.weights.size(); i += CHECKED) {
        if (all.below(i, cut)) continue;
        for (int j = 0; j < 4; ++j) count += store_from(&found[count], load(&all.weights[i + j * LANES]), cut);
    }
    const int64_t padded = (count + CHECKED - 1) / CHECKED * CHECKED;
    std::fill(found.begin() + count, found.begin() + padded, 0.0f);
    found.resize(padded);
}

// The largest number with which enough(all, number) holds; `least`, or the least normal number, if none does.
// Few weights are looked at closely, because most of a vocabulary is far below any cut that matters.
template <class Enough>
static float largest_cut(const Compared& all, float least, Weights& likely, const Enough& enough) {
    float low = FIRST_CUT;
    while (low >= LAST_CUT && !enough(all, low)) low /= 4;
    low = std::max(low >= LAST_CUT ? low : std::numeric_limits<float>::min(), least);
    collect(all, low, likely);
    const Compared close{likely, nullptr};
    // Numbers above 0 are in the order of their bits.
    uint32_t enough_bits = bit_cast<uint32_t>(low), few_bits = bit_cast<uint32_t>(1.0f) + 1;
    while (few_bits - enough_bits > 1) {
        const uint32_t middle = enough_bits + (few_bits - enough_bits) / 2;
        (enough(close, bit_cast<float>(middle)) ? enough_bits : few_bits) = middle;
    }
    return bit_cast<float>(enough_bits);
}

// The least weight that the filters of `row` keep; 0 keeps all.
static float threshold_of(const Row& row, int64_t vocab, Space& space) {
    const Compared all{space.weights, space.highest.data()};
    float threshold = row.min_p;
    if (row.top_k > 0 && row.top_k < vocab) {
        const auto enough = [&](const Compared& some, float cut) { return count_above(some, cut) >= row.top_k; };
        threshold = std::max(threshold, largest_cut(all, threshold, space.likely, enough));
    }
    if (row.top_p < 1.0) {
        const double wanted = row.top_p * sum_above(all, threshold);
        const auto enough = [&](const Compared& some, float cut) { return sum_above(some, cut) >= wanted; };
        threshold = std::max(threshold, largest_cut(all, threshold, space.likely, enough));
    }
    return threshold;
}

// Sums up the groups, without what lies below `threshold`: group = id % groups, always the same additions.
static void group_sums(int64_t groups, float threshold, Space& space) {
    auto& w = space.weights;
    const vf least = splat(threshold);
    w.resize(GROUPS_OF * groups + LANES, 0.0f);  // what lies past the vocabulary is zero
    space.sums.resize(groups + LANES);
    for (int64_t g = 0; g < groups; g += LANES) {
        vf sum[GROUPS_OF];
        for (int64_t j = 0; j < GROUPS_OF; ++j) {
            const vf value = load(&w[g + j * groups]);
            sum[j] = value < least ? splat(0.0f) : value;
        }
        for (int64_t half = GROUPS_OF / 2; half > 0; half /= 2)
            for (int64_t j = 0; j < half; ++j) sum[j] = sum[j] + sum[j + half];
        store(&space.sums[g], sum[0]);
    }
}

static int64_t draw(uint64_t key, int64_t groups, float threshold, const Space& space) {
    Race among_groups{0};
    for (int64_t g = 0; g < groups; ++g)
        if (space.sums[g] != 0.0f) among_groups.enter(g, uniform(key, g + GROUP_CANDIDATES), space.sums[g]);
    const int64_t group = among_groups.winner;
    Race within_group{group};
    for (int64_t id = group; id < GROUPS_OF * groups; id += groups) {
        const float weight = space.weights[id];
        if (weight >= threshold && weight != 0.0f) within_group.enter(id, uniform(key, id), weight);
    }
    return within_group.winner;
}

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// One edit as kernels/cpu/kernels.py packs it: a row, then lengths and addresses.
struct Edit {
    int64_t row;
    const uint32_t* allowed;  // null: all tokens are
    int64_t num_forbidden;
    const int64_t* forbidden;
    int64_t num_bias;
    const int64_t* bias_ids;
    const float* bias;
    int64_t num_seen;
    const int64_t* seen;
    const int32_t* counts;
};
static_assert(sizeof(Edit) == 10 * sizeof(int64_t));

constexpr int FEW_OUT = 26;  // of 32 tokens so many stay: the others are written one by one

static void keep_allowed(float* row, int64_t vocab, const uint32_t* allowed) {
    for (int64_t first = 0; first < vocab; first += 32) {
        const uint32_t bits = allowed[first / 32];
        if (bits == ~0u) continue;
        const int64_t end = std::min(first + 32, vocab);
        if (end == first + 32 && __builtin_popcount(bits) >= FEW_OUT) {
            for (uint32_t out = ~bits; out; out &= out - 1) row[first + __builtin_ctz(out)] = NOTHING;
            continue;
        }
        for (int64_t t = first; t < end; ++t) row[t] = bits >> (t - first) & 1 ? row[t] : NOTHING;
    }
}

static void edit_row(float* row, int64_t vocab, const Edit& edit, const float* factors) {
    if (edit.allowed) keep_allowed(row, vocab, edit.allowed);
    for (int64_t i = 0; i < edit.num_forbidden; ++i) row[edit.forbidden[i]] = NOTHING;
    for (int64_t i = 0; i < edit.num_bias; ++i) row[edit.bias_ids[i]] += edit.bias[i];
    const float repetition = factors[0], frequency = factors[1], presence = factors[2];
    for (int64_t i = 0; i < edit.num_seen; ++i) {
        float& value = row[edit.seen[i]];
        const float count = static_cast<float>(edit.counts[i]);
        value = value > 0.0f ? value / repetition : value * repetition;
        value = value - frequency * count - (count > 0.0f ? presence : 0.0f);
    }
}

// Log of the summed exponentials of a row, always the same additions.
static double log_normalizer(const float* row, int64_t vocab) {
    vf highest = splat(NOTHING);
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) highest = max(highest, load(row + i));
    float most = max(highest);
    for (; i < vocab; ++i) most = std::max(most, row[i]);
    vd sums[2] = {};
    const vf shift = splat(most);
    for (i = 0; i + 2 * LANES <= vocab; i += 2 * LANES)
        for (int j = 0; j < 2; ++j)
            sums[j] += __builtin_convertvector(exp_negative(load(row + i + j * LANES) - shift), vd);
    const vd sum = sums[0] + sums[1];
    double total = 0.0;
    for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
    for (; i < vocab; ++i) total += std::exp(static_cast<double>(row[i] - most));
    return most + std::log(total);
}

// The `count` likeliest tokens of a row, best first, ties by lower id.
static void find_top(const float* row, int64_t vocab, int64_t count, int64_t* ids, float* values) {
    if (count == 0) return;
    int64_t found = 0;
    const auto offer = [&](int64_t id) {
        const float value = row[id];
        if (found == count && !(value > values[count - 1])) return;
        int64_t place = found < count ? found++ : count - 1;
        for (; place > 0 && value > values[place - 1]; --place) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = value;
        ids[place] = id;
    };
    int64_t id = 0;
    for (; id + CHECKED <= vocab; id += CHECKED) {
        const float* w = row + id;
        const vf most = max(max(load(w), load(w + LANES)), max(load(w + 2 * LANES), load(w + 3 * LANES)));
        if (found == count && !(max(most) > values[count - 1])) continue;
        for (int64_t j = 0; j < CHECKED; ++j) offer(id + j);
    }
    for (; id < vocab; ++id) offer(id);
}

static int64_t rank_of(const float* row, int64_t vocab, float value) {
    vi larger{};
    const vf least = splat(value);
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) larger -= bit_cast<vi>(load(row + i) > least);
    int64_t rank = 1;
    for (int lane = 0; lane < LANES; ++lane) rank += larger[lane];
    for (; i < vocab; ++i) rank += row[i] > value;
    return rank;
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {

// Draws num_draws[r] tokens for each of `rows` rows of logits [rows, vocab], which start `stride` apart. `best` has
// each row's largest logit, `keys` the keys of all draws, row after row; `tokens` takes their tokens. Returns 1 if
// there is no memory.
int quire_draw(const float* logits, int64_t stride, int64_t rows, int64_t vocab, const float* best,
               const float* temperature, const float* min_p, const int64_t* top_k, const double* top_p,
               const int64_t* num_draws, const int64_t* keys, int64_t* tokens, int num_threads) {
    return status_of([=] {
        std::vector<int64_t> first(rows + 1);
        for (int64_t r = 0; r < rows; ++r) first[r + 1] = first[r] + num_draws[r];
        const int64_t groups = (vocab + GROUPS_OF - 1) / GROUPS_OF;
        parallel_for(rows, rows, num_threads, [&](int64_t r) {
            thread_local Space space;
            const Row row{logits + r * stride, best[r], temperature[r], min_p[r], top_k[r], top_p[r]};
            fill_weights(row, vocab, space);
            const float threshold = threshold_of(row, vocab, space);
            group_sums(groups, threshold, space);
            for (int64_t d = first[r]; d < first[r + 1]; ++d)
                tokens[d] = draw(static_cast<uint64_t>(keys[d]), groups, threshold, space);
        });
    });
}

// Changes rows of logits [rows, vocab], which start `stride` apart, in place: `count` edits of ten words each, and
// three factors of each: of repetition, frequency and presence.
void quire_edit_logits(float* logits, int64_t stride, int64_t vocab, int64_t count, const int64_t* edits,
                       const float* factors, int num_threads) {
    const Edit* each = reinterpret_cast<const Edit*>(edits);
    parallel_for(count, count, num_threads, [=](int64_t i) {
        edit_row(logits + each[i].row * stride, vocab, each[i], factors + 3 * i);
    });
}

// Log probabilities of `count` rows of logits, which start `stride` apart: the normalizer of each, its num_top[i]
// likeliest tokens in `top_ids` and `top_logits` [count, most_top], and the logits and ranks of its num_tokens[i]
// `tokens`. Returns 1 if there is no memory.
int quire_logprobs(const float* logits, int64_t stride, int64_t vocab, int64_t count, const int64_t* rows,
                   const int64_t* num_top, const int64_t* num_tokens, const int64_t* tokens, int64_t most_top,
                   double* normalizers, int64_t* top_ids, float* top_logits, float* token_logits, int64_t* ranks,
                   int num_threads) {
    return status_of([=] {
        std::vector<int64_t> first(count + 1);
        for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + num_tokens[i];
        parallel_for(count, count, num_threads, [&](int64_t i) {
            const float* row = logits + rows[i] * stride;
            normalizers[i] = log_normalizer(row, vocab);
            find_top(row, vocab, num_top[i], top_ids + i * most_top, top_logits + i * most_top);
            for (int64_t t = first[i]; t < first[i + 1]; ++t) {
                token_logits[t] = row[tokens[t]];
                ranks[t] = rank_of(row, vocab, token_logits[t]);
            }
        });
    });
}
}
