// SPDX-License-Identifier: Apache-2.0
// From a token's scores to its experts and their weights, by one warp.
#pragma once

#include "common.cuh"

namespace cedar::cuda {

constexpr int kMostExperts = 512, kMostK = 32;

__device__ inline float score_of(float logit) { return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit))); }

// A float's bits as an unsigned number in the same order, never 0; equal zeros, and an order for NaNs.
__device__ inline uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return max(bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u), 1u);
}

__device__ inline const float* bias_of(const cedar_mega_gate_args& a, int64_t token) {
    return a.image != nullptr && a.image[token] != 0 ? a.image_bias : a.bias;
}

// top_k rounds of the best key of all lanes, ties to the lowest expert. score_at(e): of expert e. Lane l has experts l, l + 32, ...;
// for at most 32 N experts.
template <int N, class ScoreAt>
__device__ inline void choose(const cedar_mega_gate_args& a, int64_t token, const float* bias, const ScoreAt& score_at, int lane) {
    float score[N];
    uint32_t key[N];  // 0: chosen, or no such expert
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int e = i * kWarp + lane;
        score[i] = e < a.experts ? score_at(e) : 0.0f;
        key[i] = e < a.experts ? ordered(score[i] + __ldg(bias + e)) : 0u;
    }
    float chosen = 0.0f, total = 0.0f;  // lane k holds the k-th weight
    int64_t id = 0;
#pragma unroll 1
    for (int k = 0; k < a.top_k; ++k) {
        uint32_t level[N];
#pragma unroll
        for (int i = 0; i < N; ++i) level[i] = key[i];
#pragma unroll
        for (int step = 1; step < N; step *= 2)
#pragma unroll
            for (int i = 0; i + step < N; i += 2 * step) level[i] = max(level[i], level[i + step]);
        const uint32_t best = __reduce_max_sync(kAllLanes, level[0]);
        uint32_t mine = ~0u;
#pragma unroll
        for (int i = N - 1; i >= 0; --i) mine = key[i] == best ? i * kWarp + lane : mine;
        const uint32_t expert = __reduce_min_sync(kAllLanes, mine);
        float weight = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i * kWarp + lane == expert) weight = score[i], key[i] = 0;
        weight = __shfl_sync(kAllLanes, weight, int(expert) % kWarp);
        total += weight;
        if (lane == k) chosen = weight, id = expert;
    }
    if (lane < a.top_k) {
        a.ids[token * a.top_k + lane] = id;
        a.weights[token * a.top_k + lane] = chosen / (total + 1e-20f) * float(a.scaling);
    }
}

}  // namespace cedar::cuda
