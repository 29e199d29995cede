// SPDX-License-Identifier: Apache-2.0
// What the bodies for float32 activations share: four floats at a time, records as such, rotations. They use no matrix instructions:
// every product and sum is float32.
#pragma once

#include "records.cuh"

namespace cedar::cuda::plain {

__device__ inline float4 load_four(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ inline float4 load_four(const Bf16* p) {
    float v[4];
    load_pack(p, v);
    return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ inline void store_four(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

__device__ inline float4 scaled(float s, float4 x) { return make_float4(s * x.x, s * x.y, s * x.z, s * x.w); }

// s x + y
__device__ inline float4 fused(float s, float4 x, float4 y) {
    return make_float4(fmaf(s, x.x, y.x), fmaf(s, x.y, y.y), fmaf(s, x.z, y.z), fmaf(s, x.w, y.w));
}

// sum + the dot product, first component first
__device__ inline float dot(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

// ---- four neighbours of a record; its bytes may lie anywhere ----

__device__ inline float decode_e2m1(uint32_t code) {
    const uint32_t magnitude = code & 7;
    const float value = magnitude >= 2 ? __uint_as_float((magnitude << 22) + (126u << 23)) : float(magnitude) * 0.5f;
    return __uint_as_float(__float_as_uint(value) | (code & 8) << 28);
}

__device__ inline float decode_e8m0(uint32_t byte) {
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

// Four values as they are stored: floats' bits, pairs of bf16, E4M3 codes or pairs of E2M1 codes, and the scale's code.
struct Chunk {
    uint32_t words[4], scale;
};

// Elements [4 chunk, 4 chunk + 4) of a pool row. Record kinds as in src/cpu/records.h.
__device__ inline Chunk load_chunk(int64_t record, const void* pool, int64_t row, int dim, int chunk) {
    const uint8_t* bytes = static_cast<const uint8_t*>(pool);
    const int first = 4 * chunk;
    switch (record) {
        case CEDAR_RECORD_F32: {
            const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const float*>(pool) + row * dim + first);
            return {{x.x, x.y, x.z, x.w}, 0};
        }
        case CEDAR_RECORD_BF16: {
            const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const Bf16*>(pool) + row * dim + first);
            return {{x.x, x.y, 0, 0}, 0};
        }
        case CEDAR_RECORD_FP8: {
            bytes += row * (dim + dim / kMxGroup);
            const uint8_t* codes = bytes + first;
            return {{codes[0], codes[1], codes[2], codes[3]}, bytes[dim + first / kMxGroup]};
        }
        case CEDAR_RECORD_NVFP4: {
            bytes += row * (dim / 2 + dim / kNvfp4Group);
            const uint8_t* pairs = bytes + first / 2;
            return {{pairs[0], pairs[1], 0, 0}, bytes[dim / 2 + first / kNvfp4Group]};
        }
        default: {  // CEDAR_RECORD_MXFP4
            const int values = dim / 2, scales = dim / kMxGroup, place = int(row % kBlockRows);
            bytes += row / kBlockRows * (kBlockRows * (values + scales));
            const uint8_t* pairs = bytes + place * values + first / 2;
            return {{pairs[0], pairs[1], 0, 0}, bytes[kBlockRows * values + place * scales + first / kMxGroup]};
        }
    }
}

__device__ inline float4 decode_chunk(int64_t record, const Chunk& chunk) {
    const uint32_t(&w)[4] = chunk.words;
    switch (record) {
        case CEDAR_RECORD_F32:
            return make_float4(__uint_as_float(w[0]), __uint_as_float(w[1]), __uint_as_float(w[2]), __uint_as_float(w[3]));
        case CEDAR_RECORD_BF16: {
            const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
            const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
            return make_float4(low(w[0]), high(w[0]), low(w[1]), high(w[1]));
        }
        case CEDAR_RECORD_FP8: {
            const float4 values = make_float4(decode_e4m3(w[0]), decode_e4m3(w[1]), decode_e4m3(w[2]), decode_e4m3(w[3]));
            return scaled(decode_e8m0(chunk.scale), values);
        }
        default: {
            const float4 values = make_float4(decode_e2m1(w[0]), decode_e2m1(w[0] >> 4), decode_e2m1(w[1]), decode_e2m1(w[1] >> 4));
            return scaled(record == CEDAR_RECORD_NVFP4 ? decode_e4m3(chunk.scale) : decode_e8m0(chunk.scale), values);
        }
    }
}

// Elements [4 chunk, 4 chunk + 4) of a vector, those of the last 2 pairs dimensions rotated; direction -1 undoes it. cos, sin: of
// the vector's position.
__device__ inline float4 rotate_chunk(float4 x, const float* cos, const float* sin, float direction, int dim, int pairs, int chunk) {
    const int pair = (4 * chunk - (dim - 2 * pairs)) / 2;  // of x and y; only the next one may be rotary
    const auto rotate = [&](int n, float& even, float& odd) {
        const float c = cos[n], s = direction * sin[n], real = even, imaginary = odd;
        even = __fsub_rn(__fmul_rn(real, c), __fmul_rn(imaginary, s));
        odd = __fadd_rn(__fmul_rn(real, s), __fmul_rn(imaginary, c));
    };
    if (4 * chunk >= dim - 2 * pairs) rotate(pair, x.x, x.y);
    if (4 * chunk + 2 >= dim - 2 * pairs) rotate(pair + 1, x.z, x.w);
    return x;
}

}  // namespace cedar::cuda::plain
