// Everything in a decoder that is neither a product nor attention: RMS norms, activations, RoPE, the KV write, the
// cap on logits.
//
// Each rounds where the reference does: a norm to its weight's type before the weight, an activation before its
// product, a rotation once at its end.

#include <cmath>
#include <cstdlib>
#include <type_traits>

#include "functions.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t WORTH_THREADS = 1 << 14;
constexpr int64_t SHARES = 4;  // parts of the work a thread takes

static int threads_for(int64_t elements, int num_threads) {
    return elements >= WORTH_THREADS ? num_threads : 1;
}

template <class Body>
static void for_rows(int64_t rows, int num_threads, const Body& body) {
    parallel_for(rows, num_threads * SHARES, num_threads, body);
}

// 1 / sqrt(mean(x ** 2) + eps), summed in one fixed order.
template <class T>
static float inverse_rms(const T* x, int64_t size, float eps) {
    vf even{}, odd{};
    int64_t i = 0;
    for (; i + UNIT <= size; i += UNIT) {
        const vf a = load_part<0>(x + i), b = load_part<1>(x + i);
        even = fma(a, a, even);
        odd = fma(b, b, odd);
    }
    for (; i < size; i += LANES) {
        const vf a = load_some(x + i, static_cast<int>(size - i));
        even = fma(a, a, even);
    }
    return 1.0f / std::sqrt(sum(even + odd) / static_cast<float>(size) + eps);
}

// `W` is the type of the weight: that of the row, or float.
template <class T, class W>
static void norm_row(const T* x, const W* weight, T* y, int64_t size, float eps) {
    const vf inverse = splat(inverse_rms(x, size, eps));
    int64_t i = 0;
    if constexpr (std::is_same_v<T, W>) {
        for (; i + UNIT <= size; i += UNIT)
            store_unit(y + i, rounded<W>(load_part<0>(x + i) * inverse) * load_part<0>(weight + i),
                       rounded<W>(load_part<1>(x + i) * inverse) * load_part<1>(weight + i));
    }
    for (; i + LANES <= size; i += LANES) store(y + i, rounded<W>(load(x + i) * inverse) * load(weight + i));
    if (i < size) {
        const int rest = static_cast<int>(size - i);
        store_some(y + i, rounded<W>(load_some(x + i, rest) * inverse) * load_some(weight + i, rest), rest);
    }
}

template <class T, class W>
static void rms_norm(const T* x, int64_t x_stride, const W* weight, T* y, int64_t y_stride, int64_t rows, int64_t size,
                     float eps, int num_threads) {
    for_rows(rows, threads_for(rows * size, num_threads),
             [=](int64_t r) { norm_row(x + r * x_stride, weight, y + r * y_stride, size, eps); });
}

// onto += from
template <class T>
static void add_row(const T* from, T* onto, int64_t size) {
    int64_t i = 0;
    for (; i + UNIT <= size; i += UNIT)
        store_unit(onto + i, load_part<0>(onto + i) + load_part<0>(from + i),
                   load_part<1>(onto + i) + load_part<1>(from + i));
    for (; i < size; i += LANES) {
        const int n = size - i < LANES ? static_cast<int>(size - i) : LANES;
        store_some(onto + i, load_some(onto + i, n) + load_some(from + i, n), n);
    }
}

template <class T>
static void add(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, int64_t rows, int64_t size,
                int num_threads) {
    for_rows(rows, threads_for(rows * size, num_threads),
             [=](int64_t r) { add_row(x + r * x_stride, residual + r * residual_stride, size); });
}

template <class T>
static void take_rows(const T* x, int64_t x_stride, const int64_t* rows, T* y, int64_t count, int64_t size, float scale,
                      int num_threads) {
    for_rows(count, threads_for(count * size, num_threads), [=](int64_t r) {
        const T* from = x + rows[r] * x_stride;
        if (scale == 1.0f) {
            std::memcpy(y + r * size, from, size * sizeof(T));
            return;
        }
        for (int64_t i = 0; i < size; i += LANES) {
            const int n = size - i < LANES ? static_cast<int>(size - i) : LANES;
            store_some(y + r * size + i, load_some(from + i, n) * splat(scale), n);
        }
    });
}

template <class T, class W>
static void add_rms_norm(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const W* weight, T* y,
                         int64_t rows, int64_t size, float eps, int num_threads) {
    for_rows(rows, threads_for(rows * size, num_threads), [=](int64_t r) {
        const T* from = x + r * x_stride;
        T* onto = residual + r * residual_stride;
        add_row(from, onto, size);
        norm_row(onto, weight, y + r * size, size, eps);
    });
}

// An activation is gate * sigmoid(z) with z a function of the gate, computed as gate / (1 + 2 ** power).
struct Silu {  // z = gate
    static vf power(vf gate) { return gate * splat(-1.4426950408889634f); }
};
struct GeluTanh {  // 1 + tanh(u) = 2 sigmoid(2 u), u = sqrt(2 / pi) * (gate + 0.044715 gate ** 3)
    static vf power(vf gate) { return fma(gate * gate * gate, splat(0.044715f), gate) * splat(-2.302208198f); }
};

template <class Activation, class T>
static inline vf activated(vf gate, vf up) {
    const vf power = Activation::power(gate), most = splat(128.0f);
    return rounded<T>(gate / one_plus_exp2(power > most ? most : power)) * up;
}

template <class Activation, class T>
static void activate_mul(const T* gate_up, int64_t stride, T* y, int64_t rows, int64_t size, int num_threads) {
    for_rows(rows, threads_for(rows * size, num_threads), [=](int64_t r) {
        const T* gate = gate_up + r * stride;
        const T* up = gate + size;
        T* to = y + r * size;
        int64_t i = 0;
        for (; i + UNIT <= size; i += UNIT)
            store_unit(to + i, activated<Activation, T>(load_part<0>(gate + i), load_part<0>(up + i)),
                       activated<Activation, T>(load_part<1>(gate + i), load_part<1>(up + i)));
        for (; i < size; i += LANES) {
            const int n = size - i < LANES ? static_cast<int>(size - i) : LANES;
            store_some(to + i, activated<Activation, T>(load_some(gate + i, n), load_some(up + i, n)), n);
        }
    });
}

// body(i, n) for vectors of n elements from i on that cover 0 .. size.
template <class Body>
static void for_vectors(int64_t size, int num_threads, const Body& body) {
    constexpr int64_t PART = 1 << 14;
    for_rows((size + PART - 1) / PART, threads_for(size, num_threads), [=](int64_t part) {
        const int64_t end = size < (part + 1) * PART ? size : (part + 1) * PART;
        for (int64_t i = part * PART; i < end; i += LANES)
            body(i, end - i < LANES ? static_cast<int>(end - i) : LANES);
    });
}

static void cap_all(float* x, int64_t size, float cap, int num_threads) {
    for_vectors(size, num_threads, [=](int64_t i, int n) { store_some(x + i, soft_cap(load_some(x + i, n), cap), n); });
}

struct Rope {
    int64_t rows, num_heads, num_kv_heads, head_dim, half;  // half of the rotated part of a head
    const int64_t* positions;
    const int64_t* slots;
    const float* cos_sin;  // [max_positions, 2, half]
    int64_t block_size, block_stride, value_offset;
};

template <class T>
static void rotate(const T* x, T* y, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int n = half - i < LANES ? static_cast<int>(half - i) : LANES;
        const vf a = load_some(x + i, n), b = load_some(x + half + i, n);
        const vf c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(y + i, fma(-b, s, a * c), n);
        store_some(y + half + i, fma(a, s, b * c), n);
    }
}

template <class T, class W>
static void rope_and_write_kv(const Rope& rope, T* qkv, int64_t qkv_stride, T* kv, const W* q_weight,
                              const W* k_weight, float eps, int num_threads) {
    const int64_t dim = rope.head_dim, q_dim = rope.num_heads * dim, kv_dim = rope.num_kv_heads * dim;
    const int64_t work = rope.rows * (q_dim + 2 * kv_dim);
    for_rows(rope.rows, threads_for(work, num_threads), [=](int64_t r) {
        T* row = qkv + r * qkv_stride;
        const float* cos = rope.cos_sin + rope.positions[r] * 2 * rope.half;
        for (int64_t h = 0; h < rope.num_heads + rope.num_kv_heads; ++h) {
            T* head = row + h * dim;
            const W* weight = h < rope.num_heads ? q_weight : k_weight;
            if (weight) norm_row(head, weight, head, dim, eps);
            rotate(head, head, cos, cos + rope.half, rope.half);
        }
        const int64_t slot = rope.slots[r];
        T* key = kv + slot / rope.block_size * rope.block_stride + slot % rope.block_size * kv_dim;
        std::memcpy(key, row + q_dim, kv_dim * sizeof(T));
        std::memcpy(key + rope.value_offset, row + q_dim + kv_dim, kv_dim * sizeof(T));
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// One C function for each kernel; `dtype` is 0 for bfloat16, 1 for float16, 2 for float32. `weight_dtype` is that of a
// norm's weight: `dtype` or float32.
#define QUIRE_FOR_DTYPE(dtype, CALL) \
    switch (dtype) {                 \
        case 0: {                    \
            using T = bf16;          \
            CALL;                    \
            break;                   \
        }                            \
        case 1: {                    \
            using T = fp16;          \
            CALL;                    \
            break;                   \
        }                            \
        default: {                   \
            using T = float;         \
            CALL;                    \
        }                            \
    }

#define QUIRE_FOR_DTYPE_AND_WEIGHT(dtype, weight_dtype, CALL)    \
    QUIRE_FOR_DTYPE(dtype, if (weight_dtype == 2) {              \
        using W = float;                                         \
        CALL;                                                    \
    } else {                                                     \
        using W = T;                                             \
        CALL;                                                    \
    })

extern "C" {

// y may be x.
void quire_rms_norm(int dtype, const void* x, int64_t x_stride, int weight_dtype, const void* weight, void* y,
                    int64_t y_stride, int64_t rows, int64_t size, float eps, int num_threads) {
    QUIRE_FOR_DTYPE_AND_WEIGHT(dtype, weight_dtype,
                               rms_norm(static_cast<const T*>(x), x_stride, static_cast<const W*>(weight),
                                        static_cast<T*>(y), y_stride, rows, size, eps, num_threads))
}

void quire_add_rms_norm(int dtype, const void* x, int64_t x_stride, void* residual, int64_t residual_stride,
                        int weight_dtype, const void* weight, void* y, int64_t rows, int64_t size, float eps,
                        int num_threads) {
    QUIRE_FOR_DTYPE_AND_WEIGHT(dtype, weight_dtype,
                               add_rms_norm(static_cast<const T*>(x), x_stride, static_cast<T*>(residual),
                                            residual_stride, static_cast<const W*>(weight), static_cast<T*>(y),
                                            rows, size, eps, num_threads))
}

// `activation` is 0 for SiLU, 1 for GELU in its tanh approximation.
void quire_activate_mul(int dtype, int activation, const void* gate_up, int64_t stride, void* y, int64_t rows,
                        int64_t size, int num_threads) {
    const auto run = [=](auto kind) {
        using Kind = decltype(kind);
        QUIRE_FOR_DTYPE(dtype, activate_mul<Kind>(static_cast<const T*>(gate_up), stride, static_cast<T*>(y), rows,
                                                  size, num_threads))
    };
    switch (activation) {
        case 0: return run(Silu{});
        case 1: return run(GeluTanh{});
        default: std::abort();  // no caller has another one; wrong numbers would be worse
    }
}

// residual += x
void quire_add(int dtype, const void* x, int64_t x_stride, void* residual, int64_t residual_stride, int64_t rows,
               int64_t size, int num_threads) {
    QUIRE_FOR_DTYPE(dtype, add(static_cast<const T*>(x), x_stride, static_cast<T*>(residual), residual_stride, rows,
                               size, num_threads))
}

// y [count, size] (dense) = the rows of x called `rows`, times `scale`, which is exact if it is 1.
void quire_take_rows(int dtype, const void* x, int64_t x_stride, const int64_t* rows, void* y, int64_t count,
                     int64_t size, float scale, int num_threads) {
    QUIRE_FOR_DTYPE(dtype, take_rows(static_cast<const T*>(x), x_stride, rows, static_cast<T*>(y), count, size,
                                     scale, num_threads))
}

void quire_widen(int dtype, const void* x, float* y, int64_t size, int num_threads) {
    QUIRE_FOR_DTYPE(dtype, {
        const T* from = static_cast<const T*>(x);
        for_vectors(size, num_threads, [=](int64_t i, int n) { store_some(y + i, load_some(from + i, n), n); });
    })
}

void quire_soft_cap(float* x, int64_t size, float cap, int num_threads) { cap_all(x, size, cap, num_threads); }

// `value_offset` is the distance in elements from a token's keys to its values.
void quire_rope_and_write_kv(int dtype, void* qkv, int64_t qkv_stride, int64_t rows, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, const int64_t* positions,
                             const int64_t* slots, const float* cos_sin, int64_t half, void* kv,
                             int64_t block_size, int64_t block_stride, int64_t value_offset, int weight_dtype,
                             const void* q_weight, const void* k_weight, float eps, int num_threads) {
    const Rope rope{rows,  num_heads, num_kv_heads, head_dim,   half,         positions,
                    slots, cos_sin,   block_size,   block_stride, value_offset};
    QUIRE_FOR_DTYPE_AND_WEIGHT(dtype, weight_dtype,
                               rope_and_write_kv(rope, static_cast<T*>(qkv), qkv_stride, static_cast<T*>(kv),
                                                 static_cast<const W*>(q_weight), static_cast<const W*>(k_weight),
                                                 eps, num_threads))
}
}
