// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_runtime.h"

using __nv_fp8x2_storage_t = uint16_t;
enum __nv_fp8_interpretation_t { __NV_E4M3 };
enum __nv_saturation_t { __NV_SATFINITE };
struct __half2_raw { unsigned short x, y; };
struct __half2 {
    __half2_raw raw;
    __half2(__half2_raw r) : raw(r) {}
};

namespace emulated {

inline unsigned short half_of_e4m3(unsigned code) {
    const unsigned sign = (code & 0x80) << 8, exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return 0x7fff;
    if (exponent > 0) return static_cast<unsigned short>(sign | (exponent + 8) << 10 | mantissa << 7);
    if (mantissa == 0) return static_cast<unsigned short>(sign);
    const unsigned lift = unsigned(__builtin_clz(mantissa)) - 28;  // to a leading one at bit 3
    return static_cast<unsigned short>(sign | (9 - lift) << 10 | (mantissa << lift & 7) << 7);
}

// Rounded to the nearest, to even ones, and at most 448.
inline unsigned e4m3_of_float(float x) {
    const unsigned sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7f;
    const double magnitude = std::fabs(x);
    if (magnitude >= 448.0) return sign | 0x7e;
    const int exponent = magnitude < 0x1p-6 ? -6 : std::ilogb(magnitude);
    const unsigned eighths = unsigned(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // 16: the next exponent's first
    return sign | (unsigned(exponent + 6) * 8 + eighths);
}

}  // namespace emulated

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t) {
    return __nv_fp8x2_storage_t(::emulated::e4m3_of_float(x.x) | ::emulated::e4m3_of_float(x.y) << 8);
}

inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t) {
    return {::emulated::half_of_e4m3(x & 0xff), ::emulated::half_of_e4m3(x >> 8)};
}
inline float2 __half22float2(__half2 x) { return {::emulated::float_of_half(x.raw.x), ::emulated::float_of_half(x.raw.y)}; }
