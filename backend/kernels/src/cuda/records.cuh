// SPDX-License-Identifier: Apache-2.0
// A warp that encodes one vector: lane l holds elements [l E, (l + 1) E) of it, dim = 32 E.
#pragma once

#include "common.cuh"

namespace cedar::cuda {

constexpr int kMxGroup = 32, kNvfp4Group = 16, kBlockRows = 8;

// The largest magnitude of a group of `size` elements that this lane's belong to, for all of its lanes. size >= E.
template <int E>
__device__ inline float group_amax(const float (&x)[E], int size) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < E; ++i) amax = fmaxf(amax, fabsf(x[i]));
    return max_lanes(amax, size / E);
}

// dim E4M3 codes, then dim / 32 UE8M0 scales.
template <int E>
__device__ inline void encode_fp8_record(const float (&x)[E], uint8_t* record, int lane) {
    const float scale = power_of_two_scale(group_amax(x, kMxGroup), 1e-4f, float(1.0 / 448.0));
    Pack<uint8_t, E> codes;
#pragma unroll
    for (int i = 0; i < E; ++i) codes.v[i] = uint8_t(encode_e4m3(x[i] / scale));
    // records are 33 dim / 32 bytes apart: aligned to 16 only where dim is a multiple of 512
    uint8_t* to = record + lane * E;
#pragma unroll
    for (int i = 0; i < E; ++i)
        if constexpr (E != 16) to[i] = codes.v[i];
    if constexpr (E == 16) *reinterpret_cast<Pack<uint8_t, E>*>(to) = codes;
    if (lane % (kMxGroup / E) == 0) record[kWarp * E + lane * E / kMxGroup] = uint8_t(__float_as_uint(scale) >> 23);
}

template <int E>
__device__ inline void store_e2m1(const float (&x)[E], float scale, uint8_t* to) {
#pragma unroll
    for (int i = 0; i < E / 2; ++i) to[i] = uint8_t(encode_e2m1(x[2 * i] / scale) | encode_e2m1(x[2 * i + 1] / scale) << 4);
}

// dim / 2 bytes of E2M1 pairs, then dim / 16 E4M3 scales.
template <int E>
__device__ inline void encode_nvfp4_record(const float (&x)[E], uint8_t* record, int lane) {
    const float amax = fmaxf(group_amax(x, kNvfp4Group), 6.0f * 0x1p-9f) * float(1.0 / 6.0);
    const uint32_t scale = encode_e4m3(fminf(amax, 448.0f));
    store_e2m1(x, decode_e4m3(scale), record + lane * E / 2);
    if (lane % (kNvfp4Group / E) == 0) record[kWarp * E / 2 + lane * E / kNvfp4Group] = uint8_t(scale);
}

// Planar blocks of 8 rows: 8 x dim / 2 bytes of E2M1 pairs, then 8 x dim / 32 UE8M0 scales.
template <int E>
__device__ inline void encode_mxfp4_record(const float (&x)[E], uint8_t* pool, int64_t row, int lane) {
    constexpr int kDim = kWarp * E, kValues = kDim / 2, kScales = kDim / kMxGroup;
    const float scale = power_of_two_scale(group_amax(x, kMxGroup), 6.0f * 0x1p-126f, float(1.0 / 6.0));
    uint8_t* block = pool + row / kBlockRows * (kBlockRows * (kValues + kScales));
    const int place = int(row % kBlockRows);
    store_e2m1(x, scale, block + place * kValues + lane * E / 2);
    if (lane % (kMxGroup / E) == 0)
        block[kBlockRows * kValues + place * kScales + lane * E / kMxGroup] = uint8_t(__float_as_uint(scale) >> 23);
}

// Row `row` of a pool of any format but planar ones are byte ranges that start at row times their size.
template <class T, int E>
__device__ inline void encode_record(const float (&x)[E], int64_t record, void* pool, int64_t row, int lane) {
    constexpr int kDim = kWarp * E;
    switch (record) {
        case CEDAR_RECORD_FP8:
            encode_fp8_record(x, static_cast<uint8_t*>(pool) + row * (kDim + kDim / kMxGroup), lane);
            break;
        case CEDAR_RECORD_NVFP4:
            encode_nvfp4_record(x, static_cast<uint8_t*>(pool) + row * (kDim / 2 + kDim / kNvfp4Group), lane);
            break;
        case CEDAR_RECORD_MXFP4:
            encode_mxfp4_record(x, static_cast<uint8_t*>(pool), row, lane);
            break;
        default:
            store_pack(static_cast<T*>(pool) + row * kDim + lane * E, x);
    }
}

// RMSNorm, rounded to T.
template <class T, int E>
__device__ inline void norm_lanes(float (&x)[E], const float* weight, float eps, int lane) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < E; ++i) squares = fmaf(x[i], x[i], squares);
    const float factor = 1.0f / sqrtf(sum_lanes(squares) / float(kWarp * E) + eps);
#pragma unroll
    for (int i = 0; i < E; ++i) x[i] = rounded<T>(x[i] * factor * weight[lane * E + i]);
}

// The rotation of the last 2 pairs dimensions, rounded to T. E is even, so a pair never crosses lanes.
template <class T, int E>
__device__ inline void rotate_lanes(float (&x)[E], const float* cos, const float* sin, int pairs, int lane) {
    const int first = lane * E - (kWarp * E - 2 * pairs);
#pragma unroll
    for (int i = 0; i < E; i += 2) {
        if (first + i < 0) continue;
        const int pair = (first + i) / 2;
        const float c = cos[pair], s = sin[pair], even = x[i], odd = x[i + 1];
        x[i] = rounded<T>(__fsub_rn(__fmul_rn(even, c), __fmul_rn(odd, s)));
        x[i + 1] = rounded<T>(__fadd_rn(__fmul_rn(even, s), __fmul_rn(odd, c)));
    }
}

}  // namespace cedar::cuda
