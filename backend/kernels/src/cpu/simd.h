// SPDX-License-Identifier: Apache-2.0
// Sixteen float lanes on whatever the translation unit is compiled for. The lanes, and so the order of every sum, are the same
// for all instruction sets; only the fused multiply-add, which the baseline lacks, makes its bits differ from the others'.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace cedar::CEDAR_ISA {

constexpr int kLanes = 16;

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float decode_e4m3(uint8_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float normal = from_bits((magnitude << 20) + (120u << 23));
    const float subnormal = float(magnitude) * 0x1p-9f;
    const float value = magnitude >= 8 ? normal : subnormal;
    return from_bits(to_bits(magnitude == 0x7f ? from_bits(0x7fc00000) : value) | uint32_t(code & 0x80) << 24);
}

inline float fused(float a, float b, float c) {
#ifdef __FMA__
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline float widen(uint16_t bf16) { return from_bits(uint32_t(bf16) << 16); }

// Magnitudes of the E2M1 codes; bit 3 of a code is the sign.
alignas(32) constexpr float kE2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

inline float decode_e2m1(uint32_t code) { return from_bits(to_bits(kE2m1[code & 7]) | (code & 8) << 28); }

// Round to nearest even; a NaN stays one.
inline uint16_t narrow(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t(value == value ? rounded : (bits >> 16) | 0x40);
}

#if defined(__AVX2__)
// The sixteen codes of 8 bytes of E2M1 pairs, the low nibble first, one a byte.
inline __m128i nibbles(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
}
#endif

// Vectors: load, load_e4m3 (16 codes) and load_e2m1 (8 bytes of pairs), both without scale, store, and arithmetic.

#if defined(__AVX512F__)

struct V {
    __m512 v;
};
inline V zero() { return {_mm512_setzero_ps()}; }
inline V broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V load_e4m3(const uint8_t* p) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
    // normal codes get the exponent's other bias; subnormal ones are multiples of 2^-9; 0x7f is NaN
    const __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
    const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
    const __mmask16 is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
    __m512 value = _mm512_mask_blend_ps(is_small, _mm512_castsi512_ps(normal), small);
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    value = _mm512_mask_blend_ps(is_nan, value, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    return {_mm512_or_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(0x7f), code), 24)))};
}
inline V load_e2m1(const uint8_t* p) {
    const __m512i code = _mm512_cvtepu8_epi32(nibbles(p));
    const __m512 magnitude = _mm512_permutexvar_ps(_mm512_and_si512(code, _mm512_set1_epi32(7)), _mm512_castps256_ps512(_mm256_load_ps(kE2m1)));
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(8)), 28);
    return {_mm512_or_ps(magnitude, _mm512_castsi512_ps(sign))};
}
inline V load(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline __m256 fold(V a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }

#elif defined(__AVX2__)

struct V {
    __m256 a, b;
};
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V load(const uint16_t* p) { return {widen8(p), widen8(p + 8)}; }
inline __m256 e4m3_values8(const uint8_t* p) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
    const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    __m256 value = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(is_small));
    const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    value = _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_castsi256_ps(is_nan));
    return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7f), code), 24)));
}
inline V load_e4m3(const uint8_t* p) { return {e4m3_values8(p), e4m3_values8(p + 8)}; }
inline __m256 e2m1_values8(__m128i codes) {
    const __m256i code = _mm256_cvtepu8_epi32(codes);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    return _mm256_or_ps(_mm256_permutevar8x32_ps(_mm256_load_ps(kE2m1), code), _mm256_castsi256_ps(sign));
}
inline V load_e2m1(const uint8_t* p) {
    const __m128i codes = nibbles(p);
    return {e2m1_values8(codes), e2m1_values8(_mm_srli_si128(codes, 8))};
}
inline void store(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline __m256 fold(V x) { return _mm256_add_ps(x.a, x.b); }

#else

typedef float Quad __attribute__((vector_size(16)));
struct V {
    Quad a, b, c, d;
};
inline Quad quad(const float* p) {
    Quad q;
    std::memcpy(&q, p, 16);
    return q;
}
inline V broadcast(float x) { return {Quad{x, x, x, x}, Quad{x, x, x, x}, Quad{x, x, x, x}, Quad{x, x, x, x}}; }
inline V zero() { return broadcast(0.0f); }
inline V load(const float* p) { return {quad(p), quad(p + 4), quad(p + 8), quad(p + 12)}; }
inline V load(const uint16_t* p) {
    float values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = widen(p[i]);
    return load(values);
}
inline V load_e4m3(const uint8_t* p) {
    float values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = decode_e4m3(p[i]);
    return load(values);
}
inline V load_e2m1(const uint8_t* p) {
    float values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = decode_e2m1(p[i / 2] >> i % 2 * 4);
    return load(values);
}
inline void store(float* p, V x) { std::memcpy(p, &x, sizeof x); }
inline V add(V x, V y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline V mul(V x, V y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline V fma(V x, V y, V z) { return {x.a * y.a + z.a, x.b * y.b + z.b, x.c * y.c + z.c, x.d * y.d + z.d}; }

#endif

// The first n lanes from memory, zeros behind them.
template <class T>
inline V load_first(const T* p, int n) {
    T values[kLanes] = {};
    std::memcpy(values, p, n * sizeof(T));
    return load(values);
}

#if defined(__AVX2__)

// Sums of the lanes of four vectors. Lane i is added to lane i + 8, then 4, 2, 1 apart: `sum` adds in the same order.
inline void sum4(const V* a, float* out) {
    __m128 q[4];
    for (int i = 0; i < 4; ++i) {
        const __m256 half = fold(a[i]);
        q[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    const __m128 ab = _mm_add_ps(_mm_movelh_ps(q[0], q[1]), _mm_movehl_ps(q[1], q[0]));
    const __m128 cd = _mm_add_ps(_mm_movelh_ps(q[2], q[3]), _mm_movehl_ps(q[3], q[2]));
    _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
}

inline float sum(V a) {
    const __m256 half = fold(a);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

#else

inline float sum(V x) {
    const Quad q = (x.a + x.c) + (x.b + x.d);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

inline void sum4(const V* a, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(a[i]);
}

#endif

}  // namespace cedar::CEDAR_ISA
