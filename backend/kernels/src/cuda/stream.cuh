// SPDX-License-Identifier: Apache-2.0
// Products of few tokens whose weight is on its way from the first instruction on: a warp has 16 rows, and a ring in shared
// memory into which each lane copies what it will itself widen, so that warps wait for nobody. Tokens come through L1. k is
// walked in the order of linear_split.cuh (with parts) or of tiles.cuh (without).
#pragma once

#include "tiles.cuh"

namespace cedar::cuda {

template <class Weight>
__host__ __device__ constexpr int stream_stage_bytes() {
    return 1024 + Weight::kScaleBytes / 4 * 256;  // codes, and each lane's own copy of its rows' scales
}

// c[n][i]: row group + 8 (i / 2) of a tile times token 8 n + 2 quad + i % 2, over every kParts-th block of k of the
// `blocks` from `part` on. tokens[n]: where the lane's own token of the column group begins. ring: of the warp.
template <int NT, int kStages, int kParts, class Weight>
__device__ inline void stream_tile(const Weight& weight, int64_t tile, int part, int blocks, const Bf16* const (&tokens)[NT], unsigned char* ring,
                                   float (&c)[NT][4]) {
    constexpr int kStageBytes = stream_stage_bytes<Weight>();
    const int lane = threadIdx.x % kWarp, quad = lane % 4;
    const uint8_t* const codes[2] = {weight.codes_of(tile, 0, lane), weight.codes_of(tile, 1, lane)};
    const uint8_t* const scales[2] = {weight.scales_of(tile, 0, lane), weight.scales_of(tile, 1, lane)};
    const int count = (blocks - part + kParts - 1) / kParts;
    const auto fetch = [&](int number) {
        if (number < count) {
            const int64_t block = part + number * kParts;
            unsigned char* stage = ring + number % kStages * kStageBytes;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                copy_16(stage + half * 512 + lane * 16, codes[half] + block * Weight::kCodeStep);
                if constexpr (Weight::kScaleBytes == 4)
                    copy_4(stage + 1024 + half * 128 + lane * 4, scales[half] + block * Weight::kScaleStep);
            }
        }
        close_copies();
    };
    for (int number = 0; number < kStages - 1; ++number) fetch(number);
    uint32_t scale[2] = {}, next[2] = {};
    if constexpr (Weight::kScaleBytes == 1)
        for (int half = 0; half < 2 && count > 0; ++half) next[half] = byte_scale(scales[half] + part * Weight::kScaleStep);
    const Bf16* from[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) from[n] = tokens[n] + part * Weight::kBlock + Weight::chunk(0, quad) * 8;
#pragma unroll 2
    for (int number = 0; number < count; ++number) {
        uint4 b[NT][Weight::kUnits];
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int unit = 0; unit < Weight::kUnits; ++unit)
                b[n][unit] = *reinterpret_cast<const uint4*>(from[n] + Weight::chunk(unit, 0) * 8);
#pragma unroll
        for (int n = 0; n < NT; ++n) from[n] += kParts * Weight::kBlock;
        await_copies<kStages - 2>();
        const unsigned char* stage = ring + number % kStages * kStageBytes;
        const uint4 low = *reinterpret_cast<const uint4*>(stage + lane * 16);
        const uint4 high = *reinterpret_cast<const uint4*>(stage + 512 + lane * 16);
        if constexpr (Weight::kScaleBytes == 4) {
            scale[0] = *reinterpret_cast<const uint32_t*>(stage + 1024 + lane * 4);
            scale[1] = *reinterpret_cast<const uint32_t*>(stage + 1024 + 128 + lane * 4);
        } else if constexpr (Weight::kScaleBytes == 1) {
            const int after = part + (number + 1 < count ? number + 1 : number) * kParts;
#pragma unroll
            for (int half = 0; half < 2; ++half) scale[half] = next[half], next[half] = byte_scale(scales[half] + after * Weight::kScaleStep);
        }
        fetch(number + kStages - 1);  // into the stage that was read a block ago
#pragma unroll
        for (int unit = 0; unit < Weight::kUnits; ++unit) {
            uint32_t l[4], h[4];
            Weight::widen(low, scale[0], unit, l);
            Weight::widen(high, scale[1], unit, h);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                multiply_bf16(c[n], l[0], h[0], l[1], h[1], b[n][unit].x, b[n][unit].y);
                multiply_bf16(c[n], l[2], h[2], l[3], h[3], b[n][unit].z, b[n][unit].w);
            }
        }
    }
}

}  // namespace cedar::cuda
