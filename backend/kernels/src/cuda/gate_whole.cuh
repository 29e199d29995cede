// SPDX-License-Identifier: Apache-2.0
// mega_gate of some hundred tokens on Hopper, in one launch. A cluster of 16 blocks has all experts of a tile of tokens: by twos the
// blocks share k, one with each half of the experts. A block sends its logits to the blocks that choose for their tokens, without a
// barrier: nothing goes through device memory.
//
// Shared memory is a ring of steps of k. Logits come where steps were that no later one follows. The order of sums is that of
// gate_group.cuh.
#pragma once

#include "gate_group.cuh"

namespace cedar::cuda {

template <int kTokens>
struct WholeTile {
    static constexpr int kParts = 8, kBlocks = 2 * kParts, kGroups = 3, kExperts = kGroups * 64, kSteps = 2 * kGroupSlots;
    static constexpr int kMultiply = kGroups * 4, kThreads = (kMultiply + 4) * kWarp;  // the last four warps copy and add
    static constexpr int kPairs = (kTokens / 2 + kBlocks - 1) / kBlocks;  // of tokens, that a block chooses for at most
    static constexpr int kPairItems = kExperts, kItems = kPairs * kPairItems;  // 16 bytes: 2 experts of 2 tokens
    static constexpr int kTokensAt = kExperts * 128, kStageBytes = kTokensAt + kTokens * 128;
    static constexpr int kSlots = (kMostShared - 1024 - 512) / kStageBytes, kRefilled = kSteps - kSlots;
    static constexpr int kReceivedAt = kRefilled * kStageBytes, kReceivedEnd = kReceivedAt + kParts * kItems * 16;
    static constexpr int kShared = 1024 + (kReceivedEnd > kSlots * kStageBytes ? kReceivedEnd : kSlots * kStageBytes);
    static constexpr int kAhead = 3;  // steps whose weights do not wait for the launch before; no more, lest tokens wait behind them
    // Over the first steps, in the end: scores of the block's tokens, then what their warps choose with.
    static constexpr int kScoreBytes = kPairs * 4 * kExperts * int(sizeof(float)), kWordBytes = kPairs * 2 * kChoiceWords * int(sizeof(uint32_t));
    static_assert(kTokens % 8 == 0 && kRefilled > 0 && kRefilled < kSlots && kAhead <= kSlots && kShared + 4096 <= kMostShared);
    static_assert(kScoreBytes + kWordBytes <= kReceivedAt && kPairs * 2 <= kThreads / kWarp);  // a warp chooses for one token
};

template <int kTokens>
__global__ void __launch_bounds__(WholeTile<kTokens>::kThreads, 1)
    route_whole(const cedar_mega_gate_args a, const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map) {
    using T = WholeTile<kTokens>;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ __align__(16) float biases[2][2 * T::kExperts];
    __shared__ uint64_t full[T::kSteps], empty[T::kRefilled], received;
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int rank = int(blockIdx.x) % T::kBlocks, side = rank % 2, part = rank / 2, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int tiles = int(gridDim.x) / T::kBlocks, each = ((int(a.rows) + tiles - 1) / tiles + 1) / 2 * 2;  // tokens, at most kTokens
    const int first_token = int(blockIdx.x) / T::kBlocks * each, tokens = min(int(a.rows) - first_token, each), pairs = (tokens + 1) / 2;
    const int own_pairs = (pairs - rank + T::kBlocks - 1) / T::kBlocks;  // pairs rank, rank + kBlocks, ...; none where negative or 0
    const auto stage = [&](int step) { return stages + step % T::kSlots * T::kStageBytes; };
    const auto k_of = [&](int step) { return (part * T::kSteps + step) * kGroupDepth; };
    const auto fetch_weights = [&](int step) { copy_box(stage(step), &weight_map, k_of(step), side * T::kExperts, full + step); };
    const auto fetch_tokens = [&](int step) { copy_box(stage(step) + T::kTokensAt, &x_map, k_of(step), first_token, full + step); };
    release_launch();
    if (warp == T::kMultiply) {
        if (lane == 0) {
#pragma unroll
            for (int step = 0; step < T::kSteps; ++step) init_barrier(full + step, 1);
#pragma unroll
            for (int step = 0; step < T::kRefilled; ++step) init_barrier(empty + step, T::kMultiply);
            init_barrier(&received, 1);
            publish_barriers();
            release_shared();
            announce_bytes(&received, uint32_t(max(own_pairs, 0)) * T::kParts * T::kPairItems * 16);
#pragma unroll
            for (int step = 0; step < T::kSteps; ++step) announce_bytes(full + step, T::kStageBytes);
#pragma unroll
            for (int step = 0; step < T::kAhead; ++step) fetch_weights(step);
        }
    } else if (warp < T::kMultiply) {
        if (warp == 0 && lane == 0) prefetch_map(&x_map);
        copy_biases(biases, a);
    }
    __syncthreads();
    await_launch();
    if (warp == T::kMultiply && lane == 0)
#pragma unroll
        for (int step = 0; step < T::kSlots; ++step) {
            fetch_tokens(step);
            if (step + T::kAhead < T::kSlots) fetch_weights(step + T::kAhead);
        }
    __syncwarp();
    if (warp >= T::kMultiply) {
        arrive_at_cluster();
        if (warp == T::kMultiply && lane == 0)
#pragma unroll 1
            for (int step = T::kSlots; step < T::kSteps; ++step) {
                await_barrier(empty + (step - T::kSlots), 0);
                fetch_weights(step), fetch_tokens(step);
            }
        __syncwarp();
        await_cluster();
    } else {
        float c[2][kTokens / 2] = {};
        const uint64_t own_experts = matrix_of(stages + warp / 4 * 64 * 128), all_tokens = matrix_of(stages + T::kTokensAt);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int slot = 0; slot < kGroupSlots; ++slot) {
                const int step = half * kGroupSlots + slot;
                await_barrier(full + step, 0);
                begin_group();
#pragma unroll
                for (int s = 0; s < kGroupDepth / 16; ++s) {
                    const int further = (step % T::kSlots * T::kStageBytes >> 4) + s * kMatrixStep;
                    multiply_staged(c[half], own_experts + further, all_tokens + further);
                }
                close_group();
                if (step > 0 && step <= T::kSlots) {
                    await_groups<1>();  // the step before has been read
                    __syncwarp();
                    if (step <= T::kRefilled && lane == 0) arrive(empty + (step - 1));
                    if (step == T::kSlots) arrive_at_cluster();  // others may send
                }
            }
        await_groups<0>();
        settle(c[0]), settle(c[1]);
        await_copies<0>();
        await_cluster();

        // A lane's sums are rows lane / 4 and 8 further of the warp's experts, tokens by pairs: to owners in turn.
        constexpr int kOwners = T::kBlocks / 4;
        const int quad = lane % 4;
        const uint32_t place = shared_address(stages + T::kReceivedAt) + (part * T::kItems + (side * T::kMultiply + warp) * 8 + lane / 4) * 16;
        const uint32_t barrier = shared_address(&received) - place;  // further than the place, in any block
        uint32_t to[kOwners];
#pragma unroll
        for (int i = 0; i < kOwners; ++i) to[i] = address_in(place, i * 4 + quad);
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
            if (n * 4 + quad >= pairs) break;
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = c[0][n * 4 + i] + c[1][n * 4 + i];
            send(to[n % kOwners] + n / kOwners * T::kPairItems * 16, to[n % kOwners] + barrier, make_float4(sum[0], sum[1], sum[2], sum[3]));
        }
    }
    if (own_pairs <= 0) return;
    const auto token_of = [&](int i) { return 2 * (rank + i / 2 * T::kBlocks) + i % 2; };  // the block's own, by their number
    const int token = token_of(warp);
    const bool is_image = a.image != nullptr && warp < own_pairs * 2 && token < tokens && a.image[first_token + token] != 0;
    await_barrier(&received, 0);

    const float4* parts = reinterpret_cast<const float4*>(stages + T::kReceivedAt);
    float* const scores = reinterpret_cast<float*>(stages);  // [token][expert]
#pragma unroll 1
    for (int item = threadIdx.x; item < own_pairs * T::kPairItems; item += T::kThreads) {
        float4 of_part[T::kParts], sum = {};
#pragma unroll
        for (int i = 0; i < T::kParts; ++i) of_part[i] = parts[i * T::kItems + item];
#pragma unroll
        for (int i = 0; i < T::kParts; ++i) sum.x += of_part[i].x, sum.y += of_part[i].y, sum.z += of_part[i].z, sum.w += of_part[i].w;
        const int of_pair = item % T::kPairItems;
        float* to = scores + item / T::kPairItems * (4 * T::kExperts) + of_pair / 8 * 16 + of_pair % 8;
        to[0] = score_of(sum.x), to[2 * T::kExperts] = score_of(sum.y), to[8] = score_of(sum.z), to[2 * T::kExperts + 8] = score_of(sum.w);
    }
    __syncthreads();
    if (warp >= own_pairs * 2 || token >= tokens) return;
    constexpr int kEach = 2 * T::kExperts / kWarp;
    const float *own_scores = scores + warp * (2 * T::kExperts), *bias = biases[is_image];
    float score[kEach];
    uint32_t key[kEach];
    load_scored(score, key, [&](int e) { return *reinterpret_cast<const float4*>(own_scores + e); }, bias, lane);
    choose(a, first_token + token, score, key, [&](int e) { return Scored{ordered(own_scores[e] + bias[e]), own_scores[e]}; },
           reinterpret_cast<uint32_t*>(stages + T::kScoreBytes) + warp * kChoiceWords, lane);
}

template <int kTokens>
int places_of_wholes() {
    using T = WholeTile<kTokens>;
    cudaFuncSetAttribute(route_whole<kTokens>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return places_of(route_whole<kTokens>, T::kThreads, size_t(T::kShared), T::kBlocks);
}

template <int kTokens>
cudaError_t run_whole(const cedar_mega_gate_args& a, void* stream) {
    using T = WholeTile<kTokens>;
    CUtensorMap weight_map, x_map;
    if (!describe_rows(weight_map, a.weight, a.experts, a.hidden, T::kExperts) || !describe_rows(x_map, a.x, a.rows, a.hidden, kTokens))
        return cudaErrorNotSupported;
    const cudaError_t error = cudaFuncSetAttribute(route_whole<kTokens>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    const dim3 grid(unsigned((a.rows + kTokens - 1) / kTokens * T::kBlocks));
    return launch(route_whole<kTokens>, grid, T::kThreads, size_t(T::kShared), T::kBlocks, true, stream, a, weight_map, x_map);
}

}  // namespace cedar::cuda
