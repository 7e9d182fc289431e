// A list of calls of the other functions, carried out by one call.

#include <cstring>
#include <type_traits>
#include <utility>

#include "functions.h"

namespace {

template <class T>
T argument(int64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(static_cast<intptr_t>(word));
    } else if constexpr (std::is_same_v<T, float>) {
        float value;
        const uint32_t bits = static_cast<uint32_t>(word);
        std::memcpy(&value, &bits, sizeof(value));
        return value;
    } else {
        return static_cast<T>(word);
    }
}

template <class Result, class... Args, size_t... I>
int call(Result (*function)(Args...), const int64_t* words, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
        function(argument<Args>(words[I])...);
        return 0;
    } else {
        return static_cast<int>(function(argument<Args>(words[I])...));
    }
}

struct Function {
    int (*run)(const int64_t* words);
    int64_t arguments;
};

template <auto F>
struct Replayed;

template <class Result, class... Args, Result (*F)(Args...)>
struct Replayed<F> {
    static constexpr Function function{
        [](const int64_t* words) { return call(F, words, std::index_sequence_for<Args...>()); }, sizeof...(Args)};
};

// In the order of REPLAYED in calls.py.
constexpr Function FUNCTIONS[] = {
    Replayed<quire_linear>::function,      Replayed<quire_rms_norm>::function,
    Replayed<quire_add_rms_norm>::function, Replayed<quire_add>::function,
    Replayed<quire_take_rows>::function,   Replayed<quire_widen>::function,
    Replayed<quire_activate_mul>::function, Replayed<quire_soft_cap>::function,
    Replayed<quire_rope_and_write_kv>::function, Replayed<quire_attention>::function,
    Replayed<quire_codes_linear>::function, Replayed<quire_deciding_logits>::function,
};

}  // namespace

// `words` are calls one after the other: a function's number, then its arguments, a word each (a float in the lower
// half). Returns the number of calls that ran out of memory: the results are then garbage.
extern "C" int64_t quire_replay(const int64_t* words, int64_t count) {
    int64_t failed = 0;
    for (const int64_t* end = words + count; words < end;) {
        const Function& function = FUNCTIONS[*words];
        failed += function.run(words + 1) != 0;
        words += 1 + function.arguments;
    }
    return failed;
}
