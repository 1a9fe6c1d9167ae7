// exp and tanh of vectors, to about one unit in the last place of float32; NaN stays NaN.
//
// After S. Moshier's Cephes library (expf.c, tanhf.c), whose polynomials these are.
#pragma once

namespace {

using V = Simd::V;
using I = Simd::I;
constexpr int kLanes = Simd::lanes;

inline V all(float value) { return V{} + value; }

inline V exponential(V x) {
    const V least = all(-87.3f), most = all(88.3f);
    const V inside = x < least ? least : x > most ? most : x;
    // A large sum's last bits are the nearest integer, also as an integer.
    const V shifted = inside * 1.44269504088896341f + 12582912.0f;
    const V n = shifted - 12582912.0f;
    const V r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
    V y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = (y * r) * r + r + 1.0f;
    y = (V)((I)y + ((I)shifted << 23));
    return x < least ? V{} : x > most ? all(__builtin_inff()) : inside == inside ? y : x;
}

inline V tangent(V x) {  // hyperbolic
    const V size = x < 0.0f ? -x : x;
    const V z = x * x;
    V small = z * -5.70498872745e-3f + 2.06390887954e-2f;
    small = small * z - 5.37397155531e-2f;
    small = small * z + 1.33314422036e-1f;
    small = small * z - 3.33332819422e-1f;
    small = small * z * x + x;
    const V large = 1.0f - 2.0f / (exponential(size * 2.0f) + 1.0f);
    return size < 0.625f ? small : x < 0.0f ? -large : large;
}

// The bits of the larger magnitudes, NaN being larger than any; and the largest of them.
inline I larger(I sizes, V v) {
    const I others = (I)v & 0x7fffffff;
    return others > sizes ? others : sizes;
}
inline float largest_of(I sizes) {
    int32_t largest = 0;
    for (int i = 0; i < kLanes; i++) largest = sizes[i] > largest ? sizes[i] : largest;
    float value;
    __builtin_memcpy(&value, &largest, sizeof value);
    return value;
}

inline float exponential_of(float x) { return exponential(all(x))[0]; }

}  // namespace
