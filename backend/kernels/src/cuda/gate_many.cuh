// SPDX-License-Identifier: Apache-2.0
// mega_gate of very many tokens on Hopper, in one launch. A cluster of 8 blocks has two tiles of tokens and all experts: a block
// multiplies half of the experts by one tile over half of k. One warp keeps a ring full: a block fetches half of its tokens for the
// block with the other experts too, and half of its experts for the block with the other tokens. Then a warp takes a token's logits
// from the blocks, adds the halves and chooses: nothing goes through device memory.
#pragma once

#include "gate_group.cuh"

namespace cedar::cuda {

constexpr int kManyBlocks = 8, kManyGroups = 3, kManyExperts = kManyGroups * 64, kManyThreads = kManyGroups * 128 + kWarp;
constexpr int kManyWords = kChoiceWords + 2 * kManyExperts;  // that a warp chooses with: its token's scores too
constexpr int kManyDepth = kGroupDepth;        // values of k of a stage: rows of 128 bytes
constexpr int kManyStride = kManyExperts + 4;  // floats of a token's logits: 2 tokens further is 8 banks further

template <int kTokens>
struct ManyTile {
    static constexpr int kTokensAt = kManyExperts * 128, kStageBytes = kTokensAt + kTokens * 128, kStages = 5;
    static constexpr int kLogits = kTokens * kManyStride * int(sizeof(float));
    static constexpr int kShared = 1024 + kStages * kStageBytes;
    static_assert(kTokens % 16 == 0 && kLogits + kManyWords * kManyThreads / kWarp * int(sizeof(uint32_t)) <= kStages * kStageBytes);
    static_assert(kShared + 4096 <= kMostShared);
};

// A block's place in its cluster: bit 0 of the rank chooses the experts, bit 1 the tokens, bit 2 the half of k.
template <int kTokens>
__global__ void __launch_bounds__(kManyThreads, 1)
    route_many(const cedar_mega_gate_args a, const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map) {
    using T = ManyTile<kTokens>;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ __align__(16) float biases[2][2 * kManyExperts];
    __shared__ uint64_t full[T::kStages], empty[T::kStages];
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = int(blockIdx.x) % kManyBlocks;
    const int side = rank % 2, tile = rank / 2 % 2, half = rank / 4;
    const int64_t first_token = (int64_t(blockIdx.x) / kManyBlocks * 2 + tile) * kTokens;
    const int tokens = int(min(a.rows - first_token, int64_t(kTokens)));  // may be none, or fewer
    const int steps = int(a.hidden) / (2 * kManyDepth);
    release_launch();
    if (threadIdx.x < 2 * kManyExperts) copy_biases(biases, a);
    if (warp == 1 && lane == 0) prefetch_map(&x_map);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int slot = 0; slot < T::kStages; ++slot)
            init_barrier(full + slot, 1), init_barrier(empty + slot, 3 * kManyGroups * 4);  // by the warps of three blocks
        publish_barriers();
    }
    __syncwarp();
    publish_to_cluster();
    await_cluster();

    float c[kTokens / 2] = {};
    if (warp == kManyGroups * 4) {
        prefetch_images(a, first_token, tokens, lane);
        if (lane == 0) {
            const auto fetch_weights = [&](int step, int slot) {
                announce_bytes(full + slot, T::kStageBytes);
                copy_box_to_all(stages + slot * T::kStageBytes + tile * (T::kTokensAt / 2), &weight_map, (half * steps + step) * kManyDepth, 0,
                                (side * 2 + tile) * (kManyExperts / 2), full + slot, uint16_t(1 << rank | 1 << (rank ^ 2)));
            };
            const int ahead = min(steps, T::kStages);  // the weight does not wait for the launch before
            for (int step = 0; step < ahead; ++step) fetch_weights(step, step);
            await_launch();
            int slot = 0;
            uint32_t round = 1;
            for (int step = 0; step < steps; ++step) {
                if (step >= ahead) {
                    await_barrier(empty + slot, round);  // here and in the blocks that get a part from this one
                    fetch_weights(step, slot);
                }
                copy_box_to_all(stages + slot * T::kStageBytes + T::kTokensAt + side * (kTokens * 64), &x_map, (half * steps + step) * kManyDepth, 0,
                                int(first_token) + side * (kTokens / 2), full + slot, uint16_t(1 << rank | 1 << (rank ^ 1)));
                if (++slot == T::kStages) slot = 0, round ^= 1;
            }
        }
        __syncwarp();
    } else {
        const int own = warp / 4 * 64 * 128;  // where the group's experts are in a stage
        const auto release = [&](int slot) {
            __syncwarp();
            if (lane < 3) arrive_at(empty + slot, uint32_t(rank ^ lane));
        };
        int slot = 0;
        uint32_t round = 0;
        const auto multiply = [&]() __attribute__((always_inline)) {
            await_barrier(full + slot, round);
            const unsigned char* stage = stages + slot * T::kStageBytes;
            begin_group();
#pragma unroll
            for (int s = 0; s < kManyDepth / 16; ++s) multiply_staged(c, matrix_of(stage + own + s * 32), matrix_of(stage + T::kTokensAt + s * 32));
            close_group();
        };
        for (int step = 0; step + 1 < steps; ++step) {
            multiply();
            await_groups<1>();  // the stage before has been read
            if (step > 0) release(slot == 0 ? T::kStages - 1 : slot - 1);
            if (++slot == T::kStages) slot = 0, round ^= 1;
        }
        multiply();
        await_groups<0>();
        settle(c);
    }
    await_launch();
    await_copies<0>();
    __syncthreads();  // over what was staged

    float* logits = reinterpret_cast<float*>(stages);  // [token][expert]
    if (warp < kManyGroups * 4) {
        const int expert = warp * 16 + lane / 4, quad = lane % 4;
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) logits[(n * 8 + quad * 2 + i % 2) * kManyStride + expert + i / 2 * 8] = c[n * 4 + i];
    }
    __syncwarp();
    publish_to_cluster();
    await_cluster();
    constexpr int kEach = 2 * kManyExperts / kWarp;
    uint32_t* const words = reinterpret_cast<uint32_t*>(stages + T::kLogits) + warp * kManyWords;
    float* const own_scores = reinterpret_cast<float*>(words + kChoiceWords);
    for (int t = half * 2 + side + warp * 4; t < tokens; t += kManyThreads / kWarp * 4) {
        const float* bias = biases[a.image != nullptr && a.image[first_token + t] != 0];
        const auto scores = [&](int e) {
            const int of_side = e / kManyExperts;
            const uint32_t mine = shared_address(logits + t * kManyStride + e - of_side * kManyExperts);
            const float4 x = load_from(address_in(mine, tile * 2 + of_side)), y = load_from(address_in(mine, 4 + tile * 2 + of_side));
            const float4 four = make_float4(score_of(x.x + y.x), score_of(x.y + y.y), score_of(x.z + y.z), score_of(x.w + y.w));
            *reinterpret_cast<float4*>(own_scores + e) = four;
            return four;
        };
        float score[kEach];
        uint32_t key[kEach];
        load_scored(score, key, scores, bias, lane);
        choose(a, first_token + t, score, key, [&](int e) { return Scored{ordered(own_scores[e] + bias[e]), own_scores[e]}; }, words, lane);
    }
    __syncwarp();
    arrive_at_cluster();  // nobody leaves while the others read its memory, or arrive at its barriers
    await_cluster();
}

inline bool fits_many(const cedar_mega_gate_args& a) {
    return a.experts <= 2 * kManyExperts && a.hidden % (2 * kManyDepth) == 0 && a.hidden >= 4 * kManyDepth && a.rows < int64_t(1) << 30;
}

// rows of 128 bytes of a matrix, as copy_box_to_all takes them.
inline bool describe_shared(CUtensorMap& map, const void* data, int64_t rows, int64_t width, int box_rows) {
    const cuuint64_t sizes[] = {cuuint64_t(width), 1, cuuint64_t(rows)}, stride = cuuint64_t(width) * sizeof(Bf16), strides[] = {stride, stride};
    const cuuint32_t box[] = {kGroupDepth, 1, cuuint32_t(box_rows)};
    return describe(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int kTokens>
cudaError_t run_many(const cedar_mega_gate_args& a, void* stream) {
    CUtensorMap weight_map, x_map;
    if (!describe_shared(weight_map, a.weight, a.experts, a.hidden, kManyExperts / 2) || !describe_shared(x_map, a.x, a.rows, a.hidden, kTokens / 2))
        return cudaErrorNotSupported;
    const dim3 grid(unsigned((a.rows + 2 * kTokens - 1) / (2 * kTokens) * kManyBlocks));
    return launch(route_many<kTokens>, grid, kManyThreads, size_t(ManyTile<kTokens>::kShared), kManyBlocks, true, stream, a, weight_map, x_map);
}

}  // namespace cedar::cuda
