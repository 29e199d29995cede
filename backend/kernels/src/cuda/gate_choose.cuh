// SPDX-License-Identifier: Apache-2.0
// From a token's scores to its experts and their weights, by one warp.
#pragma once

#include "ptx.cuh"

namespace cedar::cuda {

constexpr int kMostExperts = 512, kMostK = 32;

// sqrt(softplus): softplus(x) = max(x, 0) + log(1 + u), u = exp(-|x|); of a small u the series, as 1 + u would lose its digits.
__device__ inline float score_of(float logit) {
    float u, log2, root;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(u) : "f"(fabsf(logit) * -1.44269504f));
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(1.0f + u));
    const float series = u * (1.0f + u * (-0.5f + u * (0.333333333f + u * (-0.25f + u * 0.2f))));
    const float softplus = fmaxf(logit, 0.0f) + (u < 0.0625f ? series : log2 * 0.693147181f);
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(softplus));
    return root;
}

// A float's bits as an unsigned number in the same order, never 0; equal zeros, and an order for NaNs.
__device__ inline uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return max(bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u), 1u);
}

__device__ inline const float* bias_of(const cedar_mega_gate_args& a, int64_t token) {
    return a.image != nullptr && a.image[token] != 0 ? a.image_bias : a.bias;
}

// A candidate for a token's choice, in shared memory; weight: the k-th best's, of candidate k.
struct Candidate {
    uint32_t key, expert;
    float score, weight;
};

// Expert i of a lane: a lane has four neighbours, the next four lanes' experts further.
__device__ inline int expert_of(int i, int lane) { return i / 4 * (4 * kWarp) + lane * 4 + i % 4; }

// top_k rounds of the best key of all lanes.
template <int N>
__device__ inline void choose_by_rounds(const cedar_mega_gate_args& a, int64_t token, const float (&score)[N], uint32_t (&key)[N], int lane) {
    float chosen = 0.0f, total = 0.0f;  // lane k holds the k-th weight
    int64_t id = 0;
#pragma unroll 1
    for (int k = 0; k < a.top_k; ++k) {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) top = max(top, key[i]);
        const uint32_t best = __reduce_max_sync(kAllLanes, top);
        uint32_t mine = ~0u;
#pragma unroll
        for (int i = N - 1; i >= 0; --i) mine = key[i] == best ? expert_of(i, lane) : mine;
        const uint32_t expert = __reduce_min_sync(kAllLanes, mine);
        float weight = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (expert_of(i, lane) == expert) weight = score[i], key[i] = 0;
        weight = __shfl_sync(kAllLanes, weight, int(expert) / 4 % kWarp);
        total += weight;
        if (lane == k) chosen = weight, id = expert;
    }
    if (lane < a.top_k) {
        a.ids[token * a.top_k + lane] = id;
        a.weights[token * a.top_k + lane] = chosen / (total + 1e-20f) * float(a.scaling);
    }
}

// The top_k-th best of the lanes' keys. keys: place for 32 of the warp. A lane counts the better ones, which takes less time than
// top_k rounds.
__device__ inline uint32_t bound_of(uint32_t key, int64_t top_k, uint32_t* keys, int lane) {
    keys[lane] = key;
    __syncwarp();
    int better = 0;
#pragma unroll 2
    for (int i = 0; i < kWarp / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(keys)[i];
        better += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
    }
    return __reduce_min_sync(kAllLanes, better < top_k ? key : ~0u);
}

// The top_k best of at most 32 N experts, ties to the lowest. bias_at(e): of expert e; scores_at(e): of the four from e on.
// candidates: 32 of the warp, at a multiple of 16 bytes. Of the lanes' best keys the top_k-th is a bound that top_k keys at least
// reach, and few others do.
template <int N, class BiasAt, class ScoresAt>
__device__ inline void choose(const cedar_mega_gate_args& a, int64_t token, const BiasAt& bias_at, const ScoresAt& scores_at, Candidate* candidates,
                              int lane) {
    float score[N];
    uint32_t key[N];  // 0: no such expert
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const int e = expert_of(i, lane);
        const float4 four = e < a.experts ? scores_at(e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        score[i] = four.x, score[i + 1] = four.y, score[i + 2] = four.z, score[i + 3] = four.w;
    }
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int e = expert_of(i, lane);
        key[i] = e < a.experts ? ordered(score[i] + bias_at(e)) : 0u;
        top = max(top, key[i]);
    }
    const uint32_t bound = max(bound_of(top, a.top_k, reinterpret_cast<uint32_t*>(candidates), lane), 1u);
    int own = 0, before = 0, count = 0;  // candidates of this lane, of those before it, of all
#pragma unroll
    for (int i = 0; i < N; ++i) own += key[i] >= bound;
#pragma unroll 1
    for (int number = 1;; ++number) {  // most lanes have none, and few have two
        const uint32_t having = __ballot_sync(kAllLanes, own >= number);
        if (having == 0) break;
        before += __popc(having & ((1u << lane) - 1)), count += __popc(having);
    }
    __syncwarp();  // over the keys
    if (count > kWarp) return choose_by_rounds(a, token, score, key, lane);
    Candidate* next = candidates + before;
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (key[i] >= bound) *next++ = {key[i], uint32_t(expert_of(i, lane)), score[i], 0.0f};
    __syncwarp();
    Candidate mine = {};
    int rank = kWarp;
    if (lane < count) {
        mine = candidates[lane], rank = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const uint32_t key_there = candidates[i].key, expert_there = candidates[i].expert;
            rank += key_there > mine.key || (key_there == mine.key && expert_there < mine.expert);
        }
    }
    if (rank < a.top_k) candidates[rank].weight = mine.score;
    __syncwarp();
    if (rank < a.top_k) {
        float total = 0.0f;
#pragma unroll 2
        for (int k = 0; k < a.top_k; ++k) total += candidates[k].weight;
        a.ids[token * a.top_k + rank] = mine.expert;
        a.weights[token * a.top_k + rank] = mine.score / (total + 1e-20f) * float(a.scaling);
    }
    __syncwarp();  // before the next token's
}

template <class BiasAt, class ScoresAt>
__device__ inline void choose_any(const cedar_mega_gate_args& a, int64_t token, const BiasAt& bias_at, const ScoresAt& scores_at,
                                  Candidate* candidates, int lane) {
    if (a.experts <= 384)
        choose<12>(a, token, bias_at, scores_at, candidates, lane);
    else
        choose<kMostExperts / kWarp>(a, token, bias_at, scores_at, candidates, lane);
}

// What the choice reads comes to L2: the biases and, of the tokens, which are images. By one warp.
__device__ inline void prefetch_biases(const cedar_mega_gate_args& a, int64_t first_token, int tokens, int lane) {
    constexpr int kLine = 128;
    const auto prefetch = [&](const void* first, int64_t bytes) {
#pragma unroll 1
        for (int64_t i = lane * kLine; i < bytes; i += kWarp * kLine)
            prefetch_line(static_cast<const char*>(first) + i);
    };
    prefetch(a.bias, a.experts * sizeof(float));
    if (a.image != nullptr) prefetch(a.image_bias, a.experts * sizeof(float)), prefetch(a.image + first_token, tokens);
}

}  // namespace cedar::cuda
