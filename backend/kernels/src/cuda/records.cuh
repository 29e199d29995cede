// SPDX-License-Identifier: Apache-2.0
// A warp that encodes one vector: lane l holds elements [l E, (l + 1) E) of it, dim = 32 E. Or several warps, kLanes lanes.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "common.cuh"

namespace cedar::cuda {

constexpr int kMxGroup = 32, kNvfp4Group = 16, kBlockRows = 8;

// The largest magnitude of a group of `size` elements that this lane's belong to, for all of its lanes; NaN if it has one.
// size >= E. As unsigned numbers: of non-negative floats the bits have the same order, and fmaxf would drop a NaN.
template <int E>
__device__ inline float group_amax(const float (&x)[E], int size) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7fffffff);
    for (int step = size / E / 2; step > 0; step /= 2) amax = max(amax, __shfl_xor_sync(kAllLanes, amax, step));
    return __uint_as_float(amax);
}

// The scale of a group; infinity for infinity and NaN, whose exponent is UE8M0's NaN.
__device__ inline float ue8m0_scale(float amax, float least, float inverse_limit) {
    return power_of_two_scale(__uint_as_float(min(__float_as_uint(amax), 0x7f800000u)), least, inverse_limit);
}

// What is encoded of a scaled value. That it is no number is for the group's scale to say, not for a NaN's sign.
__device__ inline float number(float x) { return x == x ? x : 0.0f; }

// dim E4M3 codes, then dim / 32 UE8M0 scales. copy: of the same record, or nullptr.
template <int E, int kLanes = kWarp>
__device__ inline void encode_fp8_record(const float (&x)[E], uint8_t* record, uint8_t* copy, int lane) {
    const float scale = ue8m0_scale(group_amax(x, kMxGroup), 1e-4f, float(1.0 / 448.0)), inverse = 1.0f / scale;  // exact
    Pack<uint16_t, E / 2> codes;
#pragma unroll
    for (int i = 0; i < E / 2; ++i)
        codes.v[i] = __nv_cvt_float2_to_fp8x2(make_float2(number(x[2 * i] * inverse), number(x[2 * i + 1] * inverse)), __NV_SATFINITE, __NV_E4M3);
    // records are 33 dim / 32 bytes apart: aligned to 16 only where dim is a multiple of 512
    using Piece = std::conditional_t<kLanes * E % 512 == 0, Pack<uint16_t, E / 2>, Pack<uint16_t, 1>>;
    const auto store = [&](uint8_t* to) {
#pragma unroll
        for (int i = 0; i < int(sizeof(codes) / sizeof(Piece)); ++i)
            reinterpret_cast<Piece*>(to + lane * E)[i] = reinterpret_cast<const Piece*>(&codes)[i];
        if (lane % (kMxGroup / E) == 0) to[kLanes * E + lane * E / kMxGroup] = uint8_t(__float_as_uint(scale) >> 23);
    };
    store(record);
    if (copy != nullptr) store(copy);
}

// to: aligned to E / 2 bytes.
template <int E>
__device__ inline void store_e2m1(const float (&x)[E], uint8_t* to) {
    Pack<uint8_t, E / 2> pairs;
#pragma unroll
    for (int i = 0; i < E / 2; ++i) pairs.v[i] = uint8_t(encode_e2m1(number(x[2 * i])) | encode_e2m1(number(x[2 * i + 1])) << 4);
    *reinterpret_cast<Pack<uint8_t, E / 2>*>(to) = pairs;
}

// dim / 2 bytes of E2M1 pairs, then dim / 16 E4M3 scales. copy: as above.
template <int E, int kLanes = kWarp>
__device__ inline void encode_nvfp4_record(const float (&x)[E], uint8_t* record, uint8_t* copy, int lane) {
    const float amax = group_amax(x, kNvfp4Group);
    const float wanted = fminf(fmaxf(amax, 6.0f * 0x1p-9f) * float(1.0 / 6.0), 448.0f);
    const uint32_t scale = amax == amax ? encode_e4m3(wanted) : 0x7f;
    const float divisor = decode_e4m3(scale);
    float y[E];
#pragma unroll
    for (int i = 0; i < E; ++i) y[i] = __fdiv_rn(x[i], divisor);
    const auto store = [&](uint8_t* to) {
        store_e2m1(y, to + lane * E / 2);
        if (lane % (kNvfp4Group / E) == 0) to[kLanes * E / 2 + lane * E / kNvfp4Group] = uint8_t(scale);
    };
    store(record);
    if (copy != nullptr) store(copy);
}

// Planar blocks of 8 rows: 8 x dim / 2 bytes of E2M1 pairs, then 8 x dim / 32 UE8M0 scales.
template <int E, int kLanes = kWarp>
__device__ inline void encode_mxfp4_record(const float (&x)[E], uint8_t* pool, int64_t row, int lane) {
    constexpr int kDim = kLanes * E, kValues = kDim / 2, kScales = kDim / kMxGroup;
    const float scale = ue8m0_scale(group_amax(x, kMxGroup), 6.0f * 0x1p-126f, float(1.0 / 6.0));
    uint8_t* block = pool + row / kBlockRows * (kBlockRows * (kValues + kScales));
    const int place = int(row % kBlockRows);
    const float inverse = 1.0f / scale;  // exact
    float y[E];
#pragma unroll
    for (int i = 0; i < E; ++i) y[i] = x[i] * inverse;
    store_e2m1(y, block + place * kValues + lane * E / 2);
    if (lane % (kMxGroup / E) == 0)
        block[kBlockRows * kValues + place * kScales + lane * E / kMxGroup] = uint8_t(__float_as_uint(scale) >> 23);
}

// Has a pool of these records bodies for activations of a type?
inline bool matches_type(int64_t record, int64_t type) {
    return record > CEDAR_RECORD_BF16 || record == (type == CEDAR_F32 ? CEDAR_RECORD_F32 : CEDAR_RECORD_BF16);
}

// Row `row` of a pool of any format but planar ones are byte ranges that start at row times their size. other: a pool that gets the
// same record as its row `other_row`, or nullptr.
template <class T, int kLanes = kWarp, int E>
__device__ inline void encode_record(const float (&x)[E], int64_t record, void* pool, int64_t row, int lane, void* other = nullptr,
                                     int64_t other_row = 0) {
    constexpr int kDim = kLanes * E;
    const auto copy = [&](int64_t bytes) { return other == nullptr ? nullptr : static_cast<uint8_t*>(other) + other_row * bytes; };
    switch (record) {
        case CEDAR_RECORD_FP8: {
            constexpr int kBytes = kDim + kDim / kMxGroup;
            encode_fp8_record<E, kLanes>(x, static_cast<uint8_t*>(pool) + row * kBytes, copy(kBytes), lane);
            break;
        }
        case CEDAR_RECORD_NVFP4: {
            constexpr int kBytes = kDim / 2 + kDim / kNvfp4Group;
            encode_nvfp4_record<E, kLanes>(x, static_cast<uint8_t*>(pool) + row * kBytes, copy(kBytes), lane);
            break;
        }
        case CEDAR_RECORD_MXFP4:
            encode_mxfp4_record<E, kLanes>(x, static_cast<uint8_t*>(pool), row, lane);
            if (other != nullptr) encode_mxfp4_record<E, kLanes>(x, static_cast<uint8_t*>(other), other_row, lane);
            break;
        default:
            store_pack(static_cast<T*>(pool) + row * kDim + lane * E, x);
            if (other != nullptr) store_pack(static_cast<T*>(other) + other_row * kDim + lane * E, x);
    }
}

// The sum of a warp's squares.
template <int E>
__device__ inline float sum_squares(const float (&x)[E]) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < E; ++i) squares = fmaf(x[i], x[i], squares);
    return sum_lanes(squares);
}

// RMSNorm of a vector with this sum of squares, rounded to T. weight: of this lane's elements, which the caller loads with x: what
// follows x costs another trip.
template <class T, int kLanes = kWarp, int E>
__device__ inline void norm_lanes(float (&x)[E], float squares, const float (&weight)[E], float eps) {
    const float factor = 1.0f / sqrtf(squares / float(kLanes * E) + eps);
#pragma unroll
    for (int i = 0; i < E; ++i) x[i] = rounded<T>(x[i] * factor * weight[i]);
}

template <class T, int E>
__device__ inline void norm_lanes(float (&x)[E], const float (&weight)[E], float eps) {
    norm_lanes<T>(x, sum_squares(x), weight, eps);
}

// The rotation of the last 2 pairs dimensions, rounded to T. E is even, so a pair never crosses lanes.
template <int E, int kLanes = kWarp>
struct Rotation {
    float cos[E / 2], sin[E / 2];
    int first;  // rotated dimension of this lane's first element

    __device__ void load(const float* all_cos, const float* all_sin, int pairs, int lane) {
        first = lane * E - (kLanes * E - 2 * pairs);
#pragma unroll
        for (int i = 0; i < E / 2; ++i) {
            const bool rotated = first + 2 * i >= 0;
            cos[i] = rotated ? all_cos[unsigned(first) / 2 + i] : 1.0f;
            sin[i] = rotated ? all_sin[unsigned(first) / 2 + i] : 0.0f;
        }
    }

    template <class T>
    __device__ void apply(float (&x)[E]) const {
#pragma unroll
        for (int i = 0; i < E / 2; ++i) {
            if (first + 2 * i < 0) continue;
            const float even = x[2 * i], odd = x[2 * i + 1];
            x[2 * i] = rounded<T>(__fsub_rn(__fmul_rn(even, cos[i]), __fmul_rn(odd, sin[i])));
            x[2 * i + 1] = rounded<T>(__fadd_rn(__fmul_rn(even, sin[i]), __fmul_rn(odd, cos[i])));
        }
    }
};

}  // namespace cedar::cuda
