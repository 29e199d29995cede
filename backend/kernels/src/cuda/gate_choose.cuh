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

// A float's bits as an unsigned number in the same order, never 0; the NaN that a GPU's sums give is above all. x: a score and a bias, and so
// no -0.
__device__ inline uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

__device__ inline const float* bias_of(const cedar_mega_gate_args& a, int64_t token) {
    return a.image != nullptr && a.image[token] != 0 ? a.image_bias : a.bias;
}

// What a token's choice is made of: by falling key, and the weights from the scores.
struct Scored {
    uint32_t key;
    float score;
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

// Words of shared memory that a warp chooses with, at a multiple of 16 bytes.
constexpr int kChoiceWords = 3 * kWarp;

// A bound that the keys of top_k lanes at least reach, and few other keys do: the top_k-th best of the lanes' best keys, or of those of
// pairs of lanes. A lane counts the better ones, which takes less time than top_k rounds.
__device__ inline uint32_t bound_of(uint32_t key, int top_k, uint32_t* keys, int lane) {
    const int others = top_k <= kWarp / 2 ? kWarp / 2 : kWarp;
    if (others < kWarp) key = max(key, __shfl_xor_sync(kAllLanes, key, kWarp / 2));
    keys[lane] = key;
    __syncwarp();
    int x = 0, y = 0, z = 0, w = 0;  // better ones: four short chains
#pragma unroll 1
    for (int first = 0; first < others; first += kWarp / 2)
#pragma unroll
        for (int i = 0; i < kWarp / 8; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(keys + first)[i];
            x += four.x > key, y += four.y > key, z += four.z > key, w += four.w > key;
        }
    return max(__reduce_min_sync(kAllLanes, (x + y) + (z + w) < top_k ? key : ~0u), 1u);
}

// The top_k best of at most 32 N experts, ties to the lowest; where there is none, the key is the least. again(e): key and score of
// expert e, whichever lane has it. The keys that reach a bound are listed, and each is compared with the others.
template <int N, class Again>
__device__ inline void choose(const cedar_mega_gate_args& a, int64_t token, const float (&score)[N], uint32_t (&key)[N], const Again& again,
                              uint32_t* words, int lane) {
    const int top_k = int(a.top_k);
    uint32_t *const listed = words + kWarp, top = 0;
    float* const weights = reinterpret_cast<float*>(words + 2 * kWarp);  // of the chosen, then zeros
    weights[lane] = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) top = max(top, key[i]);
    const uint32_t bound = bound_of(top, top_k, words, lane);
    uint32_t own = 0;  // bit i: key i is listed
#pragma unroll
    for (int i = 0; i < N; ++i) own |= uint32_t(key[i] >= bound) << i;
    int before = 0, count = 0;  // listed of the lanes before this one, and of all
#pragma unroll 1
    for (int number = 0;; ++number) {  // most lanes have none, and few have two
        const uint32_t having = __ballot_sync(kAllLanes, __popc(own) > number);
        if (having == 0) break;
        before += __popc(having & ((1u << lane) - 1)), count += __popc(having);
    }
    if (count > kWarp) return choose_by_rounds(a, token, score, key, lane);
#pragma unroll 1
    for (; own != 0; own &= own - 1) listed[before++] = expert_of(__ffs(own) - 1, lane);
    __syncwarp();
    Scored mine = {};
    uint32_t expert = 0;
    if (lane < count) expert = listed[lane], mine = again(int(expert));
    int better[4] = {lane < count ? 0 : kWarp};  // four short chains
#pragma unroll 1
    for (int first = 0; first < count; first += 4)
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // of lanes without one the key is 0
            const uint32_t key_there = __shfl_sync(kAllLanes, mine.key, first + i), expert_there = __shfl_sync(kAllLanes, expert, first + i);
            better[i] += key_there > mine.key || (key_there == mine.key && expert_there < expert);
        }
    const int rank = (better[0] + better[1]) + (better[2] + better[3]);
    if (rank < top_k) weights[rank] = mine.score;
    __syncwarp();
    if (rank < top_k) {
        float total = 0.0f;
#pragma unroll 1
        for (int k = 0; k < top_k; k += 8) {
            const float4 x = reinterpret_cast<const float4*>(weights + k)[0], y = reinterpret_cast<const float4*>(weights + k)[1];
            total += x.x, total += x.y, total += x.z, total += x.w, total += y.x, total += y.y, total += y.z, total += y.w;
        }
        a.ids[token * a.top_k + rank] = expert;
        a.weights[token * a.top_k + rank] = mine.score / (total + 1e-20f) * float(a.scaling);
    }
    __syncwarp();  // before the next token's
}

// Starts copies of both lists of biases to shared memory, of an expert each of the first N threads: where there is none, one that makes
// any score the least.
template <int N>
__device__ inline void copy_biases(float (&biases)[2][N], const cedar_mega_gate_args& a) {
    const int e = int(threadIdx.x);
    if (e < a.experts) {
        copy_4(&biases[0][e], a.bias + e);
        if (a.image != nullptr) copy_4(&biases[1][e], a.image_bias + e);
    } else {
        biases[0][e] = biases[1][e] = -INFINITY;
    }
    close_copies();
}

// Scores and keys of the lane's experts. scores_at(e): of the four from e on. bias: of 32 N experts, as copy_biases has them.
template <int N, class ScoresAt>
__device__ inline void load_scored(float (&score)[N], uint32_t (&key)[N], const ScoresAt& scores_at, const float* bias, int lane) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const int e = expert_of(i, lane);
        const float4 x = scores_at(e), y = *reinterpret_cast<const float4*>(bias + e);
        score[i] = x.x, score[i + 1] = x.y, score[i + 2] = x.z, score[i + 3] = x.w;
        key[i] = ordered(x.x + y.x), key[i + 1] = ordered(x.y + y.y), key[i + 2] = ordered(x.z + y.z), key[i + 3] = ordered(x.w + y.w);
    }
}

// With keys and scores of 32 n experts behind them.
__host__ __device__ constexpr int choice_words(int n) { return kChoiceWords + 2 * n * kWarp; }

// Of the lane's experts; where there is none, one that makes any score the least.
template <int N>
__device__ inline void load_bias(float (&bias)[N], const float* from, int experts, int lane) {
    const float* of_lane = from + lane * 4;
#pragma unroll
    for (int i = 0; i < N; ++i) bias[i] = expert_of(i, lane) < experts ? __ldg(of_lane + expert_of(i, 0)) : -INFINITY;
}

// Of scores_at(e), those of the four experts from e on. bias: of the lane's experts. words: choice_words(N).
template <int N, class ScoresAt>
__device__ inline void choose(const cedar_mega_gate_args& a, int64_t token, const float (&bias)[N], const ScoresAt& scores_at, uint32_t* words,
                              int lane) {
    const int experts = int(a.experts);
    float score[N];
    uint32_t key[N];
    uint32_t* const keys = words + kChoiceWords;
    float* const scores = reinterpret_cast<float*>(keys + N * kWarp);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const int e = expert_of(i, lane);
        const float4 four = e < experts ? scores_at(e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        score[i] = four.x, score[i + 1] = four.y, score[i + 2] = four.z, score[i + 3] = four.w;
        *reinterpret_cast<float4*>(scores + e) = four;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) key[i] = ordered(score[i] + bias[i]);
#pragma unroll
    for (int i = 0; i < N; i += 4) *reinterpret_cast<uint4*>(keys + expert_of(i, lane)) = make_uint4(key[i], key[i + 1], key[i + 2], key[i + 3]);
    choose(a, token, score, key, [&](int e) { return Scored{keys[e], scores[e]}; }, words, lane);
}

// Brings bytes to L2, by one warp.
__device__ inline void prefetch_lines(const void* first, int64_t bytes, int lane) {
    constexpr int kLine = 128;
#pragma unroll 1
    for (int64_t i = lane * kLine; i < bytes; i += kWarp * kLine)
        prefetch_line(static_cast<const char*>(first) + i);
}

__device__ inline void prefetch_images(const cedar_mega_gate_args& a, int64_t first_token, int tokens, int lane) {
    if (a.image != nullptr) prefetch_lines(a.image + first_token, tokens, lane);
}

__device__ inline void prefetch_biases(const cedar_mega_gate_args& a, int lane) {
    prefetch_lines(a.bias, a.experts * int64_t(sizeof(float)), lane);
    if (a.image != nullptr) prefetch_lines(a.image_bias, a.experts * int64_t(sizeof(float)), lane);
}

}  // namespace cedar::cuda
