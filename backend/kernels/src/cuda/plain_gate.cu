// SPDX-License-Identifier: Apache-2.0
// mega_gate of float32 rows in one launch. A block takes a few rows, which share what it reads of the weight; then one warp a row
// chooses.
#include "bodies.h"
#include "plain.cuh"

namespace cedar::cuda::plain {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kRows = 4, kMostExperts = 1024;

// The scores of a block's rows, and what orders them: 0 for an expert that has been chosen.
struct Scores {
    float score[kRows][kMostExperts];
    uint32_t key[kRows][kMostExperts];
};

// A float's bits as an unsigned number in the same order; equal zeros, and an order for NaNs.
__device__ inline uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

// The best keys of a row in falling order, ties to the lowest expert.
__device__ void choose(const cedar_mega_gate_args& a, int64_t row, const float* score, uint32_t* key, int lane) {
    int64_t* ids = a.ids + row * a.top_k;
    float total = 0.0f;
    for (int64_t k = 0; k < a.top_k; ++k) {
        uint64_t best = 0;  // the key, then the lower expert
        for (int e = lane; e < a.experts; e += kWarp) {
            const uint64_t mine = uint64_t(key[e]) << 32 | uint32_t(~e);
            best = mine > best ? mine : best;
        }
        for (int step = kWarp / 2; step > 0; step /= 2) {
            const uint64_t other = __shfl_xor_sync(kAllLanes, best, step);
            best = other > best ? other : best;
        }
        const int expert = int(~uint32_t(best));
        total += score[expert];
        if (lane == expert % kWarp) {  // whose lane alone looks at it
            key[expert] = 0;
            ids[k] = expert;
        }
    }
    __syncwarp();
    for (int64_t k = lane; k < a.top_k; k += kWarp) a.weights[row * a.top_k + k] = score[ids[k]] / (total + 1e-20f) * float(a.scaling);
}

template <class W>
__global__ void __launch_bounds__(kThreads) route(const cedar_mega_gate_args a) {
    __shared__ Scores scores;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int64_t first = int64_t(blockIdx.x) * kRows;
    const int rows = int(a.rows - first < kRows ? a.rows - first : kRows);
    const float* x = static_cast<const float*>(a.x) + first * a.hidden;
    for (int e = warp; e < a.experts; e += kWarps) {
        const W* weight = static_cast<const W*>(a.weight) + e * a.hidden;
        float products[kRows] = {};
        for (int64_t k = 4 * lane; k < a.hidden; k += 4 * kWarp) {
            const float4 w = load_four(weight + k);
#pragma unroll
            for (int r = 0; r < kRows; ++r) products[r] = dot(load_four(x + min(r, rows - 1) * a.hidden + k), w, products[r]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float logit = sum_lanes(products[r]);
            if (lane != r || r >= rows) continue;
            const float* bias = a.image != nullptr && a.image[first + r] != 0 ? a.image_bias : a.bias;
            const float score = sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
            scores.score[r][e] = score;
            scores.key[r][e] = max(ordered(score + bias[e]), 1u);
        }
    }
    __syncthreads();
    if (warp < rows) choose(a, first + warp, scores.score[warp], scores.key[warp], lane);
}

}  // namespace

int64_t mega_gate_workspace(const cedar_mega_gate_args&) { return 0; }

int mega_gate(const cedar_mega_gate_args& a, void* stream) {
    if (a.hidden % 4 != 0 || a.experts > kMostExperts)
        return fail(CEDAR_UNSUPPORTED, "mega_gate: float32 on a GPU with hidden a multiple of 4 and at most %d experts; got %lld, %lld",
                    kMostExperts, (long long)a.hidden, (long long)a.experts);
    const dim3 grid(unsigned((a.rows + kRows - 1) / kRows));
    const auto kernel = a.weight_type == CEDAR_F32 ? route<float> : route<Bf16>;
    return finish("mega_gate", launch(kernel, grid, kThreads, 0, 1, false, stream, a));
}

}  // namespace cedar::cuda::plain
