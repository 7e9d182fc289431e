// Powers and tanh of every size, compiled so that an overflow of signed numbers ends the program. Prints nothing, or what
// is wrong.
#include "sampling.cpp"

#include <cstdio>

namespace {

int wrong = 0;

// `found` is right where it differs from `expected` by rounding.
void compare(const char* name, vf x, vf found, double (*expected)(double), double limit) {
    for (int lane = 0; lane < LANES; ++lane) {
        const double right = expected(x[lane]), error = std::abs(found[lane] - right);
        if (found[lane] == static_cast<float>(right) || error <= limit * std::abs(right)) continue;
        std::printf("%s(%g) is %g, not %g\n", name, x[lane], found[lane], right);
        ++wrong;
    }
}

// All lanes are computed, also those whose result is then replaced.
double exp_or_zero(double x) { return x < -87.33 ? 0.0 : std::exp(x); }
double power_or_zero(double x) { return x < -126.0 ? 0.0 : std::exp2(x); }
double tanh_of(double x) { return std::tanh(x); }

}  // namespace

int main() {
    const float infinity = std::numeric_limits<float>::infinity();
    const float sizes[] = {0.0f, 1e-30f, 0.3f, 1.0f, 20.0f, 87.0f, 88.0f, 126.0f, 127.0f, 129.0f,
                           200.0f, 1e3f, 1e5f, 4e6f, 1e7f, 1e9f, 1e20f, 3e38f, infinity};
    for (float size : sizes) {
        for (float spread = 1.0f; spread < 1.8f; spread += 0.09f) {
            const vf x = splat(-size * spread);
            compare("exp", x, exp_negative(x), exp_or_zero, 3e-7);
            compare("exp2", x, quire::exp2(x), power_or_zero, 3e-7);
            compare("tanh", x, quire::tanh(x), tanh_of, 1e-6);
            compare("tanh", -x, quire::tanh(-x), tanh_of, 1e-6);
            if (size * spread < 128.0f) compare("exp2", -x, quire::exp2(-x), power_or_zero, 3e-7);
        }
    }
    return wrong ? 1 : 0;
}
