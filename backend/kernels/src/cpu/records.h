// SPDX-License-Identifier: Apache-2.0
// The formats of the release: E4M3 and E2M1 codes, UE8M0 and E4M3 scales, and the records that pools are made of.
#pragma once

#include "values.h"

namespace cedar::CEDAR_ISA {

constexpr int kBlockRows = 8;  // of a CEDAR_RECORD_MXFP4 pool

// ---- codes ----

// To nearest even; NaN from 465 on, as converting does.
inline uint8_t encode_e4m3(float value) {
    const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1) - (120u << 23)) >> 20;
    const uint32_t subnormal = to_bits(from_bits(magnitude) + 16384.0f) - to_bits(16384.0f);
    const uint32_t code = magnitude < 0x3c800000 ? subnormal : normal;  // 2^-6
    return uint8_t((magnitude > 0x43e80000 ? 0x7f : code) | bits >> 31 << 7);  // 464
}

// To nearest even, saturating; the sign of zero is kept.
inline uint32_t encode_e2m1(float value) {
    const float m = from_bits(to_bits(value) & 0x7fffffff);
    const uint32_t code = uint32_t(m > 0.25f) + uint32_t(m >= 0.75f) + uint32_t(m > 1.25f) + uint32_t(m >= 1.75f) +
                          uint32_t(m > 2.5f) + uint32_t(m >= 3.5f) + uint32_t(m > 5.0f);
    return code | (to_bits(value) >> 31) << 3;
}

inline float decode_e8m0(uint8_t byte) {
    const uint32_t bits = byte == 0 ? 0x00400000 : byte == 255 ? 0x7fc00000 : uint32_t(byte) << 23;
    return from_bits(bits);
}

// ---- scales of a group ----

inline float largest_magnitude(const float* x, int n) {
    uint32_t largest = 0;  // of non-negative floats the bits have the same order
    for (int i = 0; i < n; ++i) largest = larger(largest, to_bits(x[i]) & 0x7fffffff);
    return from_bits(largest);
}

// The smallest power of two not below amax / limit; infinity for infinity and NaN, whose exponent is UE8M0's NaN.
inline float power_of_two_scale(float amax, float least, float inverse_limit) {
    const float scale = (amax < least ? least : amax) * inverse_limit;
    return from_bits((smaller(to_bits(scale), 0x7f800000u) + 0x7fffff) & 0x7f800000);
}

inline float fp8_scale(const float* x) {
    return power_of_two_scale(largest_magnitude(x, kMxGroup), 1e-4f, float(1.0 / 448.0));
}

inline float mxfp4_scale(const float* x) {
    return power_of_two_scale(largest_magnitude(x, kMxGroup), 6.0f * 0x1p-126f, float(1.0 / 6.0));
}

inline uint8_t nvfp4_scale(const float* x) {
    const float amax = largest_magnitude(x, kNvfp4Group), least = 6.0f * 0x1p-9f;
    const float scale = (amax < least ? least : amax) * float(1.0 / 6.0);  // a NaN stays one: E2M1 has none to tell of it
    return encode_e4m3(scale > 448.0f ? 448.0f : scale);
}

inline bool is_finite(float scale) { return scale < from_bits(0x7f800000); }

// ---- groups; that a value is no number is for the scale to say, not for a NaN's sign: its code is 0 ----

inline void encode_fp8(const float* x, uint8_t* codes, uint8_t* scale) {
    const float s = fp8_scale(x);
    for (int i = 0; i < kMxGroup; ++i) codes[i] = encode_e4m3(x[i] / s);
    if (!is_finite(s))
        for (int i = 0; i < kMxGroup; ++i) codes[i] = x[i] / s == x[i] / s ? codes[i] : 0;
    *scale = uint8_t(to_bits(s) >> 23);
}

inline void decode_fp8(const uint8_t* codes, uint8_t scale, float* out) {
    const V s = broadcast(decode_e8m0(scale));
    for (int i = 0; i < kMxGroup; i += kLanes) store(out + i, mul(load_e4m3(codes + i), s));
}

template <int N>
inline void encode_e2m1_pairs(const float* x, float scale, uint8_t* packed) {
    float y[N];
    for (int i = 0; i < N; ++i) y[i] = x[i] / scale;
    if (!is_finite(scale))
        for (int i = 0; i < N; ++i) y[i] = y[i] == y[i] ? y[i] : 0.0f;
    for (int i = 0; i < N / 2; ++i) packed[i] = uint8_t(encode_e2m1(y[2 * i]) | encode_e2m1(y[2 * i + 1]) << 4);
}

// n: 16 or 32.
inline void decode_e2m1_pairs(const uint8_t* packed, float scale, int n, float* out) {
    const V s = broadcast(scale);
    for (int i = 0; i < n; i += kLanes) store(out + i, mul(load_e2m1(packed + i / 2), s));
}

// Round a row to MXFP8, as the FP8 kernels round their input; the values go back to `type`.
inline void quantise_fp8(float* x, int64_t type, int64_t n) {
    for (int64_t g = 0; g < n; g += kMxGroup) {
        const float s = fp8_scale(x + g);
        for (int i = 0; i < kMxGroup; ++i) x[g + i] = decode_e4m3(encode_e4m3(x[g + i] / s)) * s;
    }
    round_to(type, n, x);
}

inline void quantise_mxfp4(float* x, int64_t type, int64_t n) {
    for (int64_t g = 0; g < n; g += kMxGroup) {
        const float s = mxfp4_scale(x + g);
        for (int i = 0; i < kMxGroup; ++i) x[g + i] = decode_e2m1(encode_e2m1(x[g + i] / s)) * s;
    }
    round_to(type, n, x);
}

// ---- records ----

inline int64_t record_bytes(int64_t record, int64_t dim) {
    switch (record) {
        case CEDAR_RECORD_F32: return dim * 4;
        case CEDAR_RECORD_BF16: return dim * 2;
        case CEDAR_RECORD_FP8: return dim + dim / kMxGroup;
        case CEDAR_RECORD_NVFP4: return dim / 2 + dim / kNvfp4Group;
        default: return dim / 2 + dim / kMxGroup;
    }
}

// Where the values and the scales of a pool row lie. The caller keeps the constness of the pool.
struct Place {
    int64_t values, scales;
};

inline Place place_of(int64_t record, int64_t dim, int64_t row) {
    if (record == CEDAR_RECORD_MXFP4) {
        const int64_t block = row / kBlockRows, lane = row % kBlockRows, at = block * kBlockRows * record_bytes(record, dim);
        return {at + lane * (dim / 2), at + kBlockRows * (dim / 2) + lane * (dim / kMxGroup)};
    }
    const int64_t at = row * record_bytes(record, dim);
    return {at, at + (record == CEDAR_RECORD_FP8 ? dim : dim / 2)};
}

inline void decode_record(int64_t record, const void* pool, int64_t row, int64_t dim, float* out) {
    if (record == CEDAR_RECORD_F32 || record == CEDAR_RECORD_BF16) {
        read_values(pool, record == CEDAR_RECORD_F32 ? CEDAR_F32 : CEDAR_BF16, row * dim, dim, out);
        return;
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(pool);
    const Place place = place_of(record, dim, row);
    const uint8_t *values = bytes + place.values, *scales = bytes + place.scales;
    if (record == CEDAR_RECORD_FP8) {
        for (int64_t g = 0; g < dim / kMxGroup; ++g) decode_fp8(values + g * kMxGroup, scales[g], out + g * kMxGroup);
    } else if (record == CEDAR_RECORD_NVFP4) {
        for (int64_t g = 0; g < dim / kNvfp4Group; ++g)
            decode_e2m1_pairs(values + g * kNvfp4Group / 2, decode_e4m3(scales[g]), kNvfp4Group, out + g * kNvfp4Group);
    } else {
        for (int64_t g = 0; g < dim / kMxGroup; ++g)
            decode_e2m1_pairs(values + g * kMxGroup / 2, decode_e8m0(scales[g]), kMxGroup, out + g * kMxGroup);
    }
}

inline void encode_record(int64_t record, void* pool, int64_t row, int64_t dim, const float* x) {
    if (record == CEDAR_RECORD_F32 || record == CEDAR_RECORD_BF16) {
        write_values(pool, record == CEDAR_RECORD_F32 ? CEDAR_F32 : CEDAR_BF16, row * dim, dim, x);
        return;
    }
    uint8_t* bytes = static_cast<uint8_t*>(pool);
    const Place place = place_of(record, dim, row);
    uint8_t *values = bytes + place.values, *scales = bytes + place.scales;
    if (record == CEDAR_RECORD_FP8) {
        for (int64_t g = 0; g < dim / kMxGroup; ++g) encode_fp8(x + g * kMxGroup, values + g * kMxGroup, scales + g);
    } else if (record == CEDAR_RECORD_NVFP4) {
        for (int64_t g = 0; g < dim / kNvfp4Group; ++g) {
            scales[g] = nvfp4_scale(x + g * kNvfp4Group);
            encode_e2m1_pairs<kNvfp4Group>(x + g * kNvfp4Group, decode_e4m3(scales[g]), values + g * kNvfp4Group / 2);
        }
    } else {
        for (int64_t g = 0; g < dim / kMxGroup; ++g) {
            const float s = mxfp4_scale(x + g * kMxGroup);
            scales[g] = uint8_t(to_bits(s) >> 23);
            encode_e2m1_pairs<kMxGroup>(x + g * kMxGroup, s, values + g * kMxGroup / 2);
        }
    }
}

}  // namespace cedar::CEDAR_ISA
