// SPDX-License-Identifier: Apache-2.0
// mega_gate in one launch. A cluster shares k for a tile of experts and 64 tokens; its blocks add each other's products and store
// scores. Of the clusters that hold parts of a token's scores, the block that comes last chooses the token's experts.
#include <cooperative_groups.h>

#include "bodies.h"
#include "skinny.cuh"

namespace cedar::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kMostExperts = 512, kScoresPerLane = kMostExperts / kWarp, kMostK = 32;
constexpr int kTileExperts = 16 * kRowWarps;  // one row tile a warp: as many blocks as there are SMs

struct Gate {
    cedar_mega_gate_args a;
    Bf16Weight weight;
    float* scores;       // [T, experts]
    unsigned* arrivals;  // [token tiles, blocks of a cluster], zero before and after
};

// A float's bits as an unsigned number in the same order; equal zeros, and an order for NaNs.
__device__ inline uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

// One warp chooses the experts of one token: top_k rounds of the best key of all lanes, ties to the lowest expert.
__device__ void choose(const Gate& gate, int64_t token, int lane) {
    const cedar_mega_gate_args& a = gate.a;
    const float* bias = a.image != nullptr && a.image[token] != 0 ? a.image_bias : a.bias;
    float score[kScoresPerLane];
    uint32_t key[kScoresPerLane];  // 0: taken, or no such expert
#pragma unroll
    for (int i = 0; i < kScoresPerLane; ++i) {
        const int e = i * kWarp + lane;
        score[i] = e < a.experts ? __ldcg(gate.scores + token * a.experts + e) : 0.0f;
        key[i] = e < a.experts ? max(ordered(score[i] + bias[e]), 1u) : 0u;
    }
    float chosen = 0.0f, total = 0.0f;  // lane k holds the k-th weight
    for (int k = 0; k < a.top_k; ++k) {
        uint64_t best = 0;  // the key, then the lower expert
#pragma unroll
        for (int i = 0; i < kScoresPerLane; ++i) {
            const uint64_t mine = uint64_t(key[i]) << 32 | uint32_t(~(i * kWarp + lane));
            best = key[i] != 0 && mine > best ? mine : best;
        }
        for (int step = kWarp / 2; step > 0; step /= 2) {
            const uint64_t other = __shfl_xor_sync(kAllLanes, best, step);
            best = other > best ? other : best;
        }
        const int expert = int(~uint32_t(best));
        float weight = 0.0f;
#pragma unroll
        for (int i = 0; i < kScoresPerLane; ++i)
            if (i * kWarp + lane == expert) {
                weight = score[i];
                key[i] = 0;
            }
        weight = __shfl_sync(kAllLanes, weight, expert % kWarp);
        total += weight;
        if (lane == k) chosen = weight;
        if (lane == 0) a.ids[token * a.top_k + k] = expert;
    }
    if (lane < a.top_k) a.weights[token * a.top_k + lane] = chosen / (total + 1e-20f) * float(a.scaling);
}

template <int NT>
__global__ void __launch_bounds__(kSkinnyThreads) route(const Gate gate) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ bool is_last;
    const cedar_mega_gate_args& a = gate.a;
    const cg::cluster_group cluster = cg::this_cluster();
    const int blocks = int(cluster.num_blocks()), rank = int(cluster.block_rank());
    const int length = int(a.hidden) / blocks, chunk = skinny_chunk<NT>(length);
    Bf16* staged = reinterpret_cast<Bf16*>(memory);
    float* partials = reinterpret_cast<float*>(memory + size_t(NT) * 8 * (chunk + kTokenPadding) * sizeof(Bf16));
    const int64_t first_expert = int64_t(blockIdx.x) / blocks * kTileExperts, first_token = int64_t(blockIdx.y) * NT * 8;
    const int tokens = int(a.rows - first_token < NT * 8 ? a.rows - first_token : NT * 8);
    skinny_block<1, NT>(gate.weight, first_expert, a.experts, static_cast<const Bf16*>(a.x) + first_token * a.hidden, a.hidden, tokens,
                        int64_t(rank) * length, length, chunk, staged, partials);
    // fold this block's partial sums, then every block adds up the tokens that are its own
    float* sums = reinterpret_cast<float*>(memory);  // [tile][8 NT], over the staged tokens
    for (int i = threadIdx.x; i < kTileExperts * NT * 8; i += kSkinnyThreads)
        sums[i] = skinny_sum<1, NT>(partials, i / (NT * 8), i % (NT * 8));
    cluster.sync();
    for (int i = threadIdx.x; i < kTileExperts * NT * 8; i += kSkinnyThreads) {
        const int e = i % kTileExperts, token = i / kTileExperts;
        if (token % blocks != rank || token >= tokens || first_expert + e >= a.experts) continue;
        float logit = 0.0f;
        for (int block = 0; block < blocks; ++block) logit += cluster.map_shared_rank(sums, block)[e * NT * 8 + token];
        const float softplus = logit > 20.0f ? logit : log1pf(expf(logit));
        __stcg(gate.scores + (first_token + token) * a.experts + first_expert + e, sqrtf(softplus));
    }
    __threadfence();
    cluster.sync();
    if (threadIdx.x == 0) {
        unsigned* arrivals = gate.arrivals + int64_t(blockIdx.y) * blocks + rank;
        const unsigned clusters = gridDim.x / unsigned(blocks);
        is_last = atomicAdd(arrivals, 1u) == clusters - 1;
        if (is_last) *arrivals = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int token = rank + warp * blocks; token < tokens; token += kSkinnyThreads / kWarp * blocks) choose(gate, first_token + token, lane);
}

// As many blocks as share k evenly in whole blocks of the weight.
int cluster_of(int64_t hidden) {
    int blocks = 8;
    while (blocks > 1 && hidden % (int64_t(blocks) * Bf16Weight::kBlock) != 0) blocks /= 2;
    return blocks;
}

template <int NT>
cudaError_t run(const Gate& gate, void* stream) {
    const cedar_mega_gate_args& a = gate.a;
    const int blocks = cluster_of(a.hidden);
    const dim3 grid(unsigned((a.experts + kTileExperts - 1) / kTileExperts * blocks), unsigned((a.rows + NT * 8 - 1) / (NT * 8)));
    size_t shared = skinny_shared<1, NT>(a.hidden / blocks);
    const size_t folded = size_t(kTileExperts) * NT * 8 * sizeof(float);
    shared = shared > folded ? shared : folded;
    return launch(route<NT>, grid, kSkinnyThreads, shared, blocks, stream, gate);
}

int64_t scores_bytes(const cedar_mega_gate_args& a) { return a.rows * a.experts * int64_t(sizeof(float)); }

}  // namespace

int64_t mega_gate_workspace(const cedar_mega_gate_args& a) { return CEDAR_COUNTER_BYTES + scores_bytes(a); }

int mega_gate(const cedar_mega_gate_args& a, void* stream) {
    if (a.type != CEDAR_BF16 || a.weight_type != CEDAR_BF16 || a.hidden % Bf16Weight::kBlock != 0 || a.experts > kMostExperts || a.top_k > kMostK)
        return fail(CEDAR_UNSUPPORTED, "mega_gate: on a GPU bf16, hidden a multiple of 32, at most %d experts and %d chosen", kMostExperts, kMostK);
    const int64_t tiles = (a.rows + kMostTokens - 1) / kMostTokens;
    if (tiles * 8 * int64_t(sizeof(unsigned)) > CEDAR_COUNTER_BYTES)
        return fail(CEDAR_UNSUPPORTED, "mega_gate: %lld rows on a GPU", (long long)a.rows);
    if (a.workspace_bytes < mega_gate_workspace(a)) return fail(CEDAR_WORKSPACE, "mega_gate: workspace has %lld bytes", (long long)a.workspace_bytes);
    char* workspace = static_cast<char*>(a.workspace);
    const Gate gate{a, {static_cast<const Bf16*>(a.weight), a.hidden}, reinterpret_cast<float*>(workspace + CEDAR_COUNTER_BYTES),
                    reinterpret_cast<unsigned*>(workspace)};
    if (a.rows <= 8) return finish("mega_gate", run<1>(gate, stream));
    if (a.rows <= 16) return finish("mega_gate", run<2>(gate, stream));
    if (a.rows <= 32) return finish("mega_gate", run<4>(gate, stream));
    return finish("mega_gate", run<8>(gate, stream));
}

}  // namespace cedar::cuda
