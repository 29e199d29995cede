// SPDX-License-Identifier: Apache-2.0
// mega_gate of the release's dimensions on Hopper, in one launch. A cluster shares k for a tile of experts and of tokens; one warp
// starts the copies of a block's share of both, each warp group multiplies 64 of the experts. A block sends its logits to those of
// the cluster that add them up, by pairs of tokens, without a barrier; they store the scores, and of the blocks with scores of the
// same tokens the last to come chooses.
//
// Shared memory has room for a block's whole share of the weight, and for the tokens of some steps. The weights of the first steps do
// not wait for the launch before, which may make x.
//
// A logit is the sum of 8 parts in their order, and a part the sum of the chains over its halves, whichever blocks have them: one
// order whatever the tiles, which depend on the number of rows.
#pragma once

#include "gate_choose.cuh"
#include "gate_multiply.cuh"
#include "linear_tensor.cuh"

namespace cedar::cuda {

constexpr int kRelease = 5120;                     // its hidden
constexpr int kGroupExperts = 384;                 // at most
constexpr int kGroupDepth = 64, kGroupSlots = 5;   // values of k of a stage: rows of 128 bytes; the stages are one chain
constexpr int kChains = kRelease / (kGroupDepth * kGroupSlots);
constexpr int kMostShared = 227 * 1024;            // of a block

struct Gate {
    cedar_mega_gate_args a;
    float* scores;       // [T, score_stride]
    unsigned* arrivals;  // [token tiles, blocks of a cluster], zero before and after
    int64_t score_stride;
    int blocks;          // of a cluster
};

// How many have arrived before. What the block's threads wrote before its barrier is visible to the block that is last.
__device__ inline unsigned count_arrival(unsigned* arrivals) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
    return before;
}

// kBlocks: of a cluster.
template <int kBlocks, int kGroups, int kTokens>
struct GroupTile {
    static constexpr int kExperts = kGroups * 64, kHalves = kChains / kBlocks, kSteps = kHalves * kGroupSlots;
    static constexpr int kPairs = (kTokens / 2 + kBlocks - 1) / kBlocks;  // of tokens, that a block adds up at most
    // Where tokens are many, there are more warps, as each chooses for one of the block's: some that only choose, or others' tokens.
    static constexpr int kSides = kTokens > 96 && kHalves > 1 ? 2 : 1, kColumns = kTokens / kSides, kMultiply = kGroups * kSides * 4;
    static constexpr int kThreads = (kMultiply + (kHalves > 1 && kSides == 1 ? 4 : 1)) * kWarp;
    static constexpr int kPairItems = kGroups * 32, kItems = kPairs * kPairItems;  // 16 bytes: 2 experts of 2 tokens
    static constexpr int kWeightBytes = kExperts * 128, kTokenBytes = kTokens * 128, kTokensAt = kSteps * kWeightBytes;  // of a step
    static constexpr int kReceivedBytes = kBlocks * kItems * 16, kRoom = kMostShared - 1024 - 512 - kTokensAt;
    static constexpr int kSlots = kHalves == 1 || kRoom / kTokenBytes > kSteps ? kSteps : kRoom / kTokenBytes;  // of tokens of a step
    static constexpr int kStaged = kTokensAt + kSlots * kTokenBytes;
    // Logits come where the first half's weights were, or behind all.
    static constexpr int kReceivedAt = kHalves > 1 ? 0 : kStaged;
    static constexpr int kShared = 1024 + (kHalves > 1 ? kStaged : kStaged + kReceivedBytes);
    static constexpr int kAhead = kGroupSlots;  // steps whose weights do not wait for the launch before
    static_assert(kColumns % 8 == 0 && (kHalves == 1 || kHalves == 2) && kShared + 512 <= kMostShared && kSlots >= 2);
    static_assert(kHalves == 1 || kReceivedBytes <= kGroupSlots * kWeightBytes);
};

template <int kBlocks, int kGroups, int kTokens>
__global__ void __launch_bounds__(GroupTile<kBlocks, kGroups, kTokens>::kThreads, 1)
    route_group(const Gate gate, const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map) {
    using T = GroupTile<kBlocks, kGroups, kTokens>;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[T::kSteps], empty[kGroupSlots * 2], received;  // empty: of the tokens of a step whose place another gets
    __shared__ bool is_last;
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const cedar_mega_gate_args& a = gate.a;
    const int rank = int(blockIdx.x) % kBlocks, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int first_expert = int(blockIdx.x) / kBlocks * T::kExperts, first_token = int(blockIdx.y) * kTokens;
    const int tokens = min(int(a.rows) - first_token, kTokens), pairs = (tokens + 1) / 2;
    const int own_pairs = (pairs - rank + kBlocks - 1) / kBlocks;  // pairs rank, rank + kBlocks, ...; none where negative or 0
    const bool is_copier = warp == T::kMultiply;
    const auto k_of = [&](int step) { return (rank * T::kSteps + step) * kGroupDepth; };
    const auto weights_at = [&](int step) { return stages + step * T::kWeightBytes; };
    const auto tokens_at = [&](int step) { return stages + T::kTokensAt + step % T::kSlots * T::kTokenBytes; };
    const auto fetch_weights = [&](int step) { copy_box(weights_at(step), &weight_map, k_of(step), first_expert, full + step); };
    const auto fetch_tokens = [&](int step) { copy_box(tokens_at(step), &x_map, k_of(step), first_token, full + step); };
    release_launch();
    if (warp == 0) prefetch_biases(a, lane), prefetch_images(a, first_token, tokens, lane);
    if (warp == 1 && lane == 0) prefetch_map(&x_map);
    if (is_copier && lane == 0) {
#pragma unroll
        for (int step = 0; step < T::kSteps; ++step) init_barrier(full + step, 1);
#pragma unroll
        for (int step = 0; step + T::kSlots < T::kSteps; ++step) init_barrier(empty + step, T::kMultiply);
        init_barrier(&received, 1);
        publish_barriers();
        release_shared();
        announce_bytes(&received, uint32_t(max(own_pairs, 0)) * kBlocks * T::kPairItems * 16);
#pragma unroll
        for (int step = 0; step < T::kSteps; ++step) announce_bytes(full + step, T::kWeightBytes + T::kTokenBytes);
#pragma unroll
        for (int step = 0; step < T::kAhead; ++step) fetch_weights(step);
        await_launch();
#pragma unroll
        for (int step = 0; step < T::kSteps; ++step) {
            if (step < T::kSlots) fetch_tokens(step);
            if (step + T::kAhead < T::kSteps) fetch_weights(step + T::kAhead);
        }
    }
    __syncthreads();
    await_launch();
    if (T::kHalves == 1 || warp >= T::kMultiply) arrive_at_cluster();
    if (warp >= T::kMultiply) {
        if (is_copier && lane == 0)
#pragma unroll 1
            for (int step = T::kSlots; step < T::kSteps; ++step) await_barrier(empty + (step - T::kSlots), 0), fetch_tokens(step);
        __syncwarp();
        await_cluster();
    } else {
        const int group = warp / 4 % kGroups, side = warp / (kGroups * 4);
        float c[T::kHalves][T::kColumns / 2] = {};
#pragma unroll
        for (int half = 0; half < T::kHalves; ++half)
#pragma unroll
            for (int slot = 0; slot < kGroupSlots; ++slot) {
                const int step = half * kGroupSlots + slot;
                await_barrier(full + step, 0);
                begin_group();
#pragma unroll
                for (int s = 0; s < kGroupDepth / 16; ++s)
                    multiply_staged(c[half], matrix_of(weights_at(step) + group * 64 * 128 + s * 32),
                                    matrix_of(tokens_at(step) + side * T::kColumns * 128 + s * 32));
                close_group();
                const bool refills = step > 0 && step - 1 + T::kSlots < T::kSteps;
                if (refills || (T::kHalves > 1 && step == kGroupSlots)) {
                    await_groups<1>();  // the step before has been read
                    __syncwarp();
                    if (refills && lane == 0) arrive(empty + (step - 1));
                    if (step == kGroupSlots) arrive_at_cluster();  // others may send
                }
            }
        await_groups<0>();
#pragma unroll
        for (int half = 0; half < T::kHalves; ++half) settle(c[half]);
        await_cluster();

        // A lane's sums are rows lane / 4 and 8 further of the warp's experts, tokens by pairs: to owners in turn.
        constexpr int kOwners = kBlocks / 4;
        const int quad = lane % 4, first = side * (T::kColumns / 8);  // four pairs further, as are an instruction's columns
        const int in_pair = (group * 32 + warp % 4 * 8 + lane / 4) * 16;
        const uint32_t place = shared_address(stages + T::kReceivedAt) + rank * T::kItems * 16;
        uint32_t to[kOwners], barrier[kOwners];
#pragma unroll
        for (int i = 0; i < kOwners; ++i) {
            const int owner = (first + i) % kOwners * 4 + quad;
            to[i] = address_in(place + in_pair, owner), barrier[i] = address_in(shared_address(&received), owner);
        }
#pragma unroll
        for (int n = 0; n < T::kColumns / 8; ++n) {
            if ((first + n) * 4 + quad >= pairs) break;
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i] = c[0][n * 4 + i];
                if constexpr (T::kHalves > 1) sum[i] += c[1][n * 4 + i];
            }
            const int of_owner = (first + n) / kOwners * T::kPairItems * 16;
            send(to[n % kOwners] + of_owner, barrier[n % kOwners], make_float4(sum[0], sum[1], sum[2], sum[3]));
        }
    }
    if (own_pairs <= 0) return;
    const auto token_of = [&](int i) { return 2 * (rank + i / 2 * kBlocks) + i % 2; };  // the block's own, by their number
    float bias[kGroupExperts / kWarp];  // of the warp's first token, if any, should the block choose
    if (token_of(warp) < tokens) load_bias(bias, bias_of(a, first_token + token_of(warp)), int(a.experts), lane);
    await_barrier(&received, 0);

    const float4* parts = reinterpret_cast<const float4*>(stages + T::kReceivedAt);
#pragma unroll 1
    for (int item = threadIdx.x; item < own_pairs * T::kPairItems; item += T::kThreads) {
        float4 part[kBlocks];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) part[block] = parts[block * T::kItems + item];
        const auto total = [&](float float4::*x) {
            float sum = 0.0f;
#pragma unroll
            for (int block = 0; block < kBlocks; block += 3 - T::kHalves)
                sum += T::kHalves > 1 ? part[block].*x : part[block].*x + part[block + 1].*x;
            return score_of(sum);
        };
        const int of_pair = item % T::kPairItems, expert = first_expert + of_pair / 8 * 16 + of_pair % 8;
        const int token = 2 * (rank + item / T::kPairItems * kBlocks);
        float* to = gate.scores + (first_token + token) * gate.score_stride + expert;
        const auto store = [&](int further, int rows_further, float score) {
            if (expert + further < gate.score_stride && token + rows_further < tokens) __stcg(to + rows_further * gate.score_stride + further, score);
        };
        store(0, 0, total(&float4::x)), store(0, 1, total(&float4::y)), store(8, 0, total(&float4::z)), store(8, 1, total(&float4::w));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* arrivals = gate.arrivals + int64_t(blockIdx.y) * kBlocks + rank;
        is_last = count_arrival(arrivals) == gridDim.x / kBlocks - 1;
        if (is_last) *arrivals = 0;
    }
    __syncthreads();
    if (!is_last) return;
    constexpr int kWords = choice_words(kGroupExperts / kWarp);
    static_assert(T::kThreads / kWarp * kWords * int(sizeof(uint32_t)) <= T::kStaged);
#pragma unroll 1
    for (int i = warp; i < own_pairs * 2; i += T::kThreads / kWarp) {
        const int token = token_of(i);
        if (token >= tokens) break;
        if (i != warp) load_bias(bias, bias_of(a, first_token + token), int(a.experts), lane);
        const uint32_t first = uint32_t(first_token + token) * uint32_t(gate.score_stride);
        const auto scores_at = [&](int e) { return __ldcg(reinterpret_cast<const float4*>(gate.scores + (first + e))); };
        choose(a, first_token + token, bias, scores_at, reinterpret_cast<uint32_t*>(stages) + warp * kWords, lane);
    }
}

template <int kBlocks, int kGroups, int kTokens>
int places_of_groups() {
    using T = GroupTile<kBlocks, kGroups, kTokens>;
    return places_of(route_group<kBlocks, kGroups, kTokens>, T::kThreads, size_t(T::kShared), kBlocks);
}

inline bool describe_rows(CUtensorMap& map, const void* data, int64_t rows, int64_t width, int box_rows) {
    const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(rows)}, stride[] = {cuuint64_t(width) * sizeof(Bf16)};
    const cuuint32_t box[] = {kGroupDepth, cuuint32_t(box_rows)};
    return describe(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, sizes, stride, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int kBlocks, int kGroups, int kTokens>
cudaError_t run_group(const Gate& gate, void* stream) {
    using T = GroupTile<kBlocks, kGroups, kTokens>;
    const auto kernel = route_group<kBlocks, kGroups, kTokens>;
    const cedar_mega_gate_args& a = gate.a;
    CUtensorMap weight_map, x_map;
    if (!describe_rows(weight_map, a.weight, a.experts, a.hidden, T::kExperts) || !describe_rows(x_map, a.x, a.rows, a.hidden, kTokens))
        return cudaErrorNotSupported;
    if constexpr (kBlocks > 8) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    const dim3 grid(unsigned((a.experts + T::kExperts - 1) / T::kExperts * kBlocks), unsigned((a.rows + kTokens - 1) / kTokens));
    return launch(kernel, grid, T::kThreads, size_t(T::kShared), kBlocks, true, stream, gate, weight_map, x_map);
}

}  // namespace cedar::cuda
