// SPDX-License-Identifier: Apache-2.0
// Elementwise functions that vectorise in a loop: no calls, no branches, the same bits in every lane and in the scalar tail.
#pragma once

#include "simd.h"

namespace cedar::CEDAR_ISA {

template <class T>
inline T smaller(T a, T b) { return b < a ? b : a; }
template <class T>
inline T larger(T a, T b) { return b > a ? b : a; }

// e^x within 1 ulp for finite results: 2^n e^r with |r| <= ln 2 / 2. 0 below the smallest normal number, NaN for NaN.
inline float exponential(float x) {
    const float capped = smaller(larger(-87.33654f, x), 88.72283f);  // a NaN becomes the lower bound, until the end
    const float n = (fused(capped, 1.44269504f, 12582912.0f)) - 12582912.0f;
    float r = fused(n, -0.693359375f, capped);
    r = fused(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fused(p, r, 1.3981999507e-3f);
    p = fused(p, r, 8.3334519073e-3f);
    p = fused(p, r, 4.1665795894e-2f);
    p = fused(p, r, 1.6666665459e-1f);
    p = fused(p, r, 5.0000001201e-1f);
    p = fused(p, r * r, r) + 1.0f;
    // 2^n in two factors: n may be 128
    const int whole = int(n), half = whole / 2;
    const float power = p * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(whole - half + 127) << 23);
    const float bounded = x < -87.33654f ? 0.0f : x > 88.72283f ? from_bits(0x7f800000) : power;
    return x == x ? bounded : x;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// silu(min(gate, limit)) * clamp(up, -limit, limit)
inline float swiglu(float gate, float up, float limit) {
    const float g = smaller(gate, limit);
    return g * sigmoid(g) * larger(smaller(up, limit), -limit);
}

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline float inverse_sqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

}  // namespace cedar::CEDAR_ISA
