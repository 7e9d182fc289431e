// From logits to tokens: edits of a row, draws from it, and its log probabilities, one row a part.
//
// Edits and log probabilities are defined in kernels/interface.py. A draw is temperature, min-p, top-k, top-p, and the
// race of exponentials. engine/execution/sampler.py defines it, and the steps are the same: weights relative to the
// likeliest token, one threshold from the three filters, sums over interleaved groups as an explicit tree, then the
// counter-based races. A row that draws costs about the same whatever it asks for, and no row costs another anything.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "draws.h"
#include "functions.h"
#include "pool.h"
#include "scratch.h"
#include "vec.h"

namespace quire {
namespace {

constexpr float FIRST_CUT = 1.0f / (1 << 10), SMALL_CUT = 1.0f / (1 << 30);
constexpr float LAST_CUT = std::numeric_limits<float>::min();  // no weight but 0 is less
constexpr float NOTHING = -std::numeric_limits<float>::infinity();  // as a logit: never chosen
constexpr int64_t CHECKED = 4 * LANES;        // tokens of a stretch, which are looked at together

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

// Work space of one thread.
struct Space {
    Scratch weights, highest, stretches, likely, sums;
};

// Weights, with zeros up to a whole number of stretches.
struct Weights {
    float* each;
    int64_t count;
};

// The weights of a row, and the largest of each stretch: most stretches of a vocabulary lie below any cut that matters.
struct RowWeights : Weights {
    float* highest;
};

// The sum of stretches.
struct Sums {
    vd each[8] = {};

    void add(const float* stretch) {
        for (int j = 0; j < 8; ++j) each[j] += load_doubles(stretch + j * (LANES / 2));
    }

    // Always the same additions.
    double total() const {
        const vd sum = ((each[0] + each[2]) + (each[4] + each[6])) + ((each[1] + each[3]) + (each[5] + each[7]));
        double lanes[LANES / 2];
        std::memcpy(lanes, &sum, sizeof(sum));
        for (int half = LANES / 4; half > 0; half /= 2)
            for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        return lanes[0];
    }
};

static double sum_of(const Weights& some) {
    Sums sums;
    for (int64_t i = 0; i < some.count; i += CHECKED) sums.add(some.each + i);
    return sums.total();
}

// The sum of `amount(w)` over the weights w >= `cut`.
template <class Amount>
static double amount_above(const Weights& some, float cut, const Amount& amount) {
    Sums sums;
    const vf least = splat(cut);
    for (int64_t i = 0; i < some.count; i += CHECKED) {
        float stretch[CHECKED];
        for (int64_t j = 0; j < CHECKED; j += LANES) {
            const vf weight = load(some.each + i + j);
            store(stretch + j, weight >= least ? amount(weight) : splat(0.0f));
        }
        sums.add(stretch);
    }
    return sums.total();
}

// body(stretch, i) for the logits of stretches that begin at i = 0 .. count - 1; after `vocab` there is nothing.
template <class Body>
static void for_stretches(const float* logits, int64_t vocab, int64_t count, const Body& body) {
    int64_t i = 0;
    for (; i + CHECKED <= vocab; i += CHECKED) body(logits + i, i);
    for (; i < count; i += CHECKED) {
        float rest[CHECKED];
        std::fill_n(rest, CHECKED, NOTHING);
        if (i < vocab) std::copy(logits + i, logits + vocab, rest);
        body(rest, i);
    }
}

// The largest logit, NaN if one is, and the first token that has it.
struct Largest {
    float logit;
    int64_t token;
};

static Largest largest_of(const float* logits, int64_t vocab) {
    Largest largest{NOTHING, 0};
    vi nan{};
    for_stretches(logits, vocab, vocab, [&](const float* stretch, int64_t first) {
        vf most = splat(NOTHING);
        for (int64_t j = 0; j < CHECKED; j += LANES) {
            const vf some = load(stretch + j);
            nan |= some != some;
            most = max(most, some);
        }
        const float here = max(most);
        if (here > largest.logit) largest = {here, first};
    });
    for (int lane = 0; lane < LANES; ++lane)
        if (nan[lane]) return {std::numeric_limits<float>::quiet_NaN(), 0};
    while (logits[largest.token] != largest.logit) ++largest.token;
    return largest;
}

// The weights of a row, `count` with the zeros; `scaled` has the temperature change the logits.
template <class Scaled>
static RowWeights weights_of(const Row& row, int64_t vocab, int64_t count, Space& space, const Scaled& scaled) {
    float* weights = space.weights.room<float>(count);
    float* highest = space.highest.room<float>(count / CHECKED);
    const vf best = splat(row.best);
    for_stretches(row.logits, vocab, count, [&](const float* stretch, int64_t first) {
        constexpr int VECTORS = CHECKED / LANES;
        vf each[VECTORS], most = splat(0.0f);
        for (int j = 0; j < VECTORS; ++j) each[j] = scaled(load(stretch + j * LANES) - best);
        exp_negative(each);
        for (int j = 0; j < VECTORS; ++j) {
            store(weights + first + j * LANES, each[j]);
            most = max(most, each[j]);
        }
        highest[first / CHECKED] = max(most);
    });
    return {{weights, count}, highest};
}

static RowWeights weights_of(const Row& row, int64_t vocab, int64_t count, Space& space) {
    const vf temperature = splat(row.temperature);
    if (row.temperature == 1.0f)  // the division would change nothing
        return weights_of(row, vocab, count, space, [](vf logits) { return logits; });
    return weights_of(row, vocab, count, space, [=](vf logits) { return logits / temperature; });
}

// Collects weights of at least `least` and below `end` at `found`, which has room for all and CHECKED more.
class Collector {
  public:
    Collector(float* found, float least, float end) : found_(found), least_(least), end_(end) {}

    // `stretch` may lie where it is collected, but not before.
    void add(const float* stretch) {
        for (int64_t j = 0; j < CHECKED; j += LANES) {
            const vf weight = load(stretch + j);
            count_ += store_from(found_ + count_, weight < splat(end_) ? weight : splat(0.0f), least_);
        }
    }

    Weights weights() const {
        const int64_t padded = (count_ + CHECKED - 1) / CHECKED * CHECKED;
        std::fill(found_ + count_, found_ + padded, 0.0f);
        return {found_, padded};
    }

  private:
    float* found_;
    float least_, end_;
    int64_t count_ = 0;
};

// The weights of at least `cut`.
static Weights likely_of(const RowWeights& all, float cut, Space& space) {
    const int64_t stretches = all.count / CHECKED;
    int64_t* wanted = space.stretches.room<int64_t>(stretches);
    int64_t num_wanted = 0;
    for (int64_t s = 0; s < stretches; ++s) {  // no branch: it would be guessed wrong often
        wanted[num_wanted] = s;
        num_wanted += all.highest[s] >= cut;
    }
    Collector likely(space.likely.room<float>(all.count + CHECKED), cut, std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < num_wanted; ++i) likely.add(all.each + wanted[i] * CHECKED);
    return likely.weights();
}

// The largest cut, at least `least`, such that the sum of `amount(w)` over the weights w >= cut is at least `wanted`;
// if there is none, a cut that keeps all of them. Few weights are looked at often: most of a vocabulary is far below
// any cut that matters, and the search puts aside what is above its interval, or below.
template <class Amount>
static float largest_cut(const RowWeights& all, float least, double wanted, Space& space, const Amount& amount) {
    float low = std::max(FIRST_CUT, least);
    Weights likely = likely_of(all, low, space);
    while (low > least && low > LAST_CUT && amount_above(likely, low, amount) < wanted) {
        low = std::max(low / 16 > SMALL_CUT ? low / 16 : LAST_CUT, least);
        likely = likely_of(all, low, space);
    }
    // Numbers above 0 are in the order of their bits.
    uint32_t enough_bits = bit_cast<uint32_t>(low), few_bits = bit_cast<uint32_t>(1.0f) + 1;
    double above = 0.0, few = 0.0;  // what is no longer in `likely`, and what there is from few_bits on
    for (int halvings = 1; few_bits - enough_bits > 1; ++halvings) {
        const uint32_t middle = enough_bits + (few_bits - enough_bits) / 2;
        const double found = above + amount_above(likely, bit_cast<float>(middle), amount);
        if (found >= wanted) {
            enough_bits = middle;
        } else {
            few_bits = middle;
            few = found;
        }
        if (halvings % 4) continue;
        Collector rest(likely.each, bit_cast<float>(enough_bits), bit_cast<float>(few_bits));
        for (int64_t i = 0; i < likely.count; i += CHECKED) rest.add(likely.each + i);
        likely = rest.weights();
        above = few;
    }
    return bit_cast<float>(enough_bits);
}

// The least weight that the filters of `row` keep; 0 keeps all.
static float threshold_of(const Row& row, int64_t vocab, const RowWeights& all, Space& space) {
    float threshold = row.min_p;
    if (row.top_k > 0 && row.top_k < vocab) {
        const auto one = [](vf) { return splat(1.0f); };
        const double wanted = static_cast<double>(row.top_k);
        threshold = std::max(threshold, largest_cut(all, threshold, wanted, space, one));
    }
    if (row.top_p < 1.0) {
        const auto itself = [](vf weight) { return weight; };
        const double wanted = row.top_p * sum_of(threshold > 0.0f ? likely_of(all, threshold, space) : Weights(all));
        threshold = std::max(threshold, largest_cut(all, threshold, wanted, space, itself));
    }
    return threshold;
}

// Sums of LANES groups from `weights` on, of each STEP-th token alone, without what lies below `least`.
template <int64_t STEP>
static vf tree_sum(const float* weights, int64_t groups, vf least) {
    if constexpr (STEP == GROUPS_OF) {
        const vf value = load(weights);
        return value < least ? splat(0.0f) : value;
    } else {
        return tree_sum<2 * STEP>(weights, groups, least) + tree_sum<2 * STEP>(weights + STEP * groups, groups, least);
    }
}

// Sums of the groups, without what lies below `threshold`: group = id % groups, always the same additions.
static const float* group_sums(const RowWeights& all, int64_t groups, float threshold, Space& space) {
    float* sums = space.sums.room<float>(groups + LANES);
    for (int64_t g = 0; g < groups; g += LANES) store(sums + g, tree_sum<1>(all.each + g, groups, splat(threshold)));
    return sums;
}

static int64_t draw(uint64_t key, int64_t groups, float threshold, const float* weights, const float* sums) {
    Race among_groups{0};
    for (int64_t g = 0; g < groups; ++g)
        if (sums[g] != 0.0f) among_groups.enter(g, uniform(key, g + GROUP_CANDIDATES), sums[g]);
    const int64_t group = among_groups.winner;
    Race within_group{group};
    for (int64_t id = group; id < GROUPS_OF * groups; id += groups) {
        const float weight = weights[id];
        if (weight >= threshold && weight != 0.0f) within_group.enter(id, uniform(key, id), weight);
    }
    return within_group.winner;
}

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
    typedef double Lanes __attribute__((vector_size(LANES * 8)));
    Lanes sums[2] = {};
    const vf shift = splat(most);
    for (i = 0; i + 2 * LANES <= vocab; i += 2 * LANES)
        for (int j = 0; j < 2; ++j)
            sums[j] += __builtin_convertvector(exp_negative(load(row + i + j * LANES) - shift), Lanes);
    const Lanes sum = sums[0] + sums[1];
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

// Chooses num_draws[r] tokens for each of `rows` rows of logits [rows, vocab], which start `stride` apart: draws them
// at `positions`, or with temperature 0 takes the likeliest one. `seeds` are those of all draws, row after row;
// `tokens` takes their tokens, and `largest` each row's largest logit, NaN if one is. If that is not finite, the
// tokens mean nothing. Returns 1 if there is no memory.
int quire_draw(const float* logits, int64_t stride, int64_t rows, int64_t vocab, const float* temperature,
               const float* min_p, const int64_t* top_k, const double* top_p, const int64_t* num_draws,
               const int64_t* seeds, const int64_t* positions, int64_t* tokens, float* largest, int num_threads) {
    return status_of([=] {
        std::vector<int64_t> first(rows + 1);
        for (int64_t r = 0; r < rows; ++r) first[r + 1] = first[r] + num_draws[r];
        const int64_t groups = (vocab + GROUPS_OF - 1) / GROUPS_OF;
        const int64_t count = (GROUPS_OF * groups + LANES + CHECKED - 1) / CHECKED * CHECKED;
        parallel_for(rows, rows, num_threads, [&](int64_t r) {
            thread_local Space space;
            const Largest best = largest_of(logits + r * stride, vocab);
            largest[r] = best.logit;
            if (temperature[r] == 0.0f || !std::isfinite(best.logit)) {
                std::fill(tokens + first[r], tokens + first[r + 1], best.token);
                return;
            }
            const Row row{logits + r * stride, best.logit, temperature[r], min_p[r], top_k[r], top_p[r]};
            const RowWeights weights = weights_of(row, vocab, count, space);
            const float threshold = threshold_of(row, vocab, weights, space);
            const float* sums = group_sums(weights, groups, threshold, space);
            for (int64_t d = first[r]; d < first[r + 1]; ++d)
                tokens[d] = draw(draw_key(seeds[d], positions[r]), groups, threshold, weights.each, sums);
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
