// SPDX-License-Identifier: Apache-2.0
// Products of very many tokens on Hopper. A unit of work is 128 rows of the weight times 256 tokens in each of the two blocks of
// a cluster, which share the tokens; clusters take units by turns. One warp keeps a ring full, by the copy engine; each of two
// warp groups has 64 of the rows. Weights of E4M3 are widened in registers, from where the matrix instruction takes them; bf16
// weights it reads from shared memory. k is walked in rising order.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "linear_split.cuh"
#include "linear_tensor.cuh"
#include "wgmma.cuh"

namespace cedar::cuda {

constexpr int kWideRows = 128, kWideTokens = 256, kWideThreads = 384, kWideDepth = 64, kWideCluster = 2;
constexpr int kWideTogether = 8;  // blocks of tokens that take turns with the same rows of the weight, for the sake of L2

// 64 values of k: tokens in rows of 128 bytes and the weight's rows of 64 or 128, all as the copy engine swizzles them.
template <class Weight>
struct WideStage {
    static constexpr bool kFp8 = Weight::kSteps == 4;
    static constexpr int kRowBytes = kFp8 ? 64 : 128, kTokenBytes = kWideTokens * 128, kBytes = kTokenBytes + kWideRows * kRowBytes;
    static constexpr int kCount = kFp8 ? 4 : 3;
    static constexpr int kOutputBytes = kWideTokens * 128;  // of a warp group: 64 outputs of each token
    static constexpr size_t kShared = size_t(kCount) * kBytes + 2 * kOutputBytes + 1024;  // to begin at a multiple of 1024
    static_assert(kBytes % 1024 == 0);
};

struct WideUnits {
    int row_pairs, token_blocks, groups;
    struct Unit {
        int row, token, group;  // row: of the cluster's first block
    };
    __host__ __device__ int count() const { return row_pairs * token_blocks * groups; }
    __device__ Unit at(int number) const {
        const int of_group = row_pairs * token_blocks, group = number / of_group, rest = number % of_group;
        const int turn = rest / (kWideTogether * row_pairs), place = rest % (kWideTogether * row_pairs);
        const int width = min(token_blocks - turn * kWideTogether, kWideTogether);
        return {place / width * kWideCluster * kWideRows, (turn * kWideTogether + place % width) * kWideTokens, group};
    }
};

template <class Weight>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_product(const Product p, const Weight weight, const WideUnits units, const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap weight_map) {
    namespace cg = cooperative_groups;
    using Stage = WideStage<Weight>;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[Stage::kCount], empty[Stage::kCount];
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = int(cluster.block_rank()), first_unit = int(blockIdx.x) / kWideCluster, step = int(gridDim.x) / kWideCluster;
    const int depth = int(p.in_dim / kWideDepth), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Stage::kCount; ++slot)
            init_barrier(full + slot, 1), init_barrier(empty + slot, kWideCluster * 8);  // by the warps of both blocks
        publish_barriers();
    }
    cluster.sync();
    await_launch();
    release_launch();  // to a normalisation

    if (warp < 4) {  // the ring's
        shrink_registers<40>();
        if (threadIdx.x == 0) {
            int slot = 0;
            uint32_t round = 1;  // the first waits find the stages empty
            for (int number = first_unit; number < units.count(); number += step) {
                const WideUnits::Unit unit = units.at(number);
                const int row = unit.group * int(p.out_dim) + unit.row + rank * kWideRows;
                for (int block = 0; block < depth; ++block) {
                    await_barrier(empty + slot, round);
                    announce_bytes(full + slot, Stage::kBytes);
                    unsigned char* stage = stages + slot * Stage::kBytes;
                    copy_box(stage + Stage::kTokenBytes, &weight_map, block * kWideDepth, row, full + slot);
                    copy_box_to_all(stage + rank * (Stage::kTokenBytes / 2), &x_map, block * kWideDepth, unit.group,
                                    unit.token + rank * (kWideTokens / 2), full + slot, 3);
                    if (++slot == Stage::kCount) slot = 0, round ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        grow_registers<232>();
        const int group = warp / 4 - 1, quad = lane % 4, own = group * 64 + warp % 4 * 16;  // the warp's first row
        unsigned char* const outputs = stages + Stage::kCount * Stage::kBytes + group * Stage::kOutputBytes;
        // where a lane's codes of a step lie: the copy engine swizzles the 16-byte chunks of rows of 64 bytes by row / 2
        const int codes = Stage::kTokenBytes + (own + lane / 4) * Stage::kRowBytes + quad * 2, swizzle = lane / 8;
        int slot = 0;
        uint32_t round = 0;
        uint32_t ahead[2] = {};  // scales, a stage before they are used
        const auto scales_of = [&](int number) -> const uint8_t* {
            if constexpr (Stage::kFp8) {
                const WideUnits::Unit unit = units.at(number < units.count() ? number : first_unit);
                const int64_t row = unit.row + rank * kWideRows + own;
                return weight.scale_at(unit.group * p.out_dim + (row < p.out_dim ? row : p.out_dim - 1), 0);
            }
            return nullptr;
        };
        const auto load_scales = [&](const uint8_t* at) {
            if constexpr (Stage::kFp8) ahead[0] = __ldg(at), ahead[1] = __ldg(at + 1);
        };
        const auto release = [&](int stage) {
            __syncwarp();
            if (lane < kWideCluster) arrive_at(empty + stage, uint32_t(lane));
        };
        const uint8_t* scales = scales_of(first_unit);
        load_scales(scales);
        for (int number = first_unit; number < units.count(); number += step) {
            const uint8_t* const next_scales = scales_of(number + step);
            float c[128] = {};
            uint32_t a[2][4][4] = {};  // by turns, so that one stage's rows are widened while the last one's are multiplied
            const auto multiply_stage = [&](int block, auto turn, auto last) __attribute__((always_inline)) {
                [[maybe_unused]] constexpr int kTurn = decltype(turn)::value;
                uint32_t scale[2];
                scale[0] = lifted_scale(ahead[0]), scale[1] = lifted_scale(ahead[1]);
                load_scales(block + 1 < depth ? scales + (block + 1) * (kWideDepth / 32) : next_scales);
                await_barrier(full + slot, round);
                const unsigned char* stage = stages + slot * Stage::kBytes;
                if constexpr (Stage::kFp8) {
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const unsigned char* at = stage + codes + (s ^ swizzle) * 16;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {  // rows +0, +8, then the same 8 values of k on
                            const uint32_t two = *reinterpret_cast<const uint16_t*>(at + i % 2 * 8 * Stage::kRowBytes + i / 2 * 8);
                            a[kTurn][s][i] = widen_e4m3<0>(two, scale[s / 2]);
                        }
                    }
                }
                begin_group();
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    if constexpr (Stage::kFp8)
                        multiply_group(c, a[kTurn][s], matrix_of(stage + s * 32));
                    else
                        multiply_group(c, matrix_of(stage + Stage::kTokenBytes + group * 64 * 128 + s * 32), matrix_of(stage + s * 32));
                }
                close_group();
                if constexpr (decltype(last)::value)
                    await_groups<0>();
                else
                    await_groups<1>();  // the stage before has been read, and its registers are free
                if constexpr (Stage::kFp8) {
#pragma unroll
                    for (int s = 0; s < 4; ++s) settle(a[1 - kTurn][s]);
                }
                if (block > 0) release(slot == 0 ? Stage::kCount - 1 : slot - 1);
                if constexpr (decltype(last)::value) release(slot);
                if (++slot == Stage::kCount) slot = 0, round ^= 1;
            };
            using Even = std::integral_constant<int, 0>;
            using Odd = std::integral_constant<int, 1>;
            int block = 0;
            for (; block + 2 < depth; block += 2)
                multiply_stage(block, Even(), std::false_type()), multiply_stage(block + 1, Odd(), std::false_type());
            // The last wait stands right behind the instructions it is for: ptxas moves what reads c ahead of a wait that is in
            // another block of code than they are.
            if (block + 2 == depth) {
                multiply_stage(block, Even(), std::false_type());
                multiply_stage(block + 1, Odd(), std::true_type());
                settle(c);
            } else {
                multiply_stage(block, Even(), std::true_type());
                settle(c);
            }

            scales = next_scales;

            sync_group(1 + group);  // the last unit's outputs are on their way
#pragma unroll
            for (int n = 0; n < 32; n += 2) {
                uint32_t pair[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) pair[i] = pair_of(c[n * 4 + 2 * i], c[n * 4 + 2 * i + 1]);
                const int token = n * 8 + lane / 16 * 8 + lane % 8, chunk = warp % 4 * 2 + lane / 8 % 2;
                store_transposed(outputs + token * 128 + (chunk ^ token % 8) * 16, pair[0], pair[1], pair[2], pair[3]);
            }
            sync_group(1 + group);
            const WideUnits::Unit unit = units.at(number);
            const int chunk = int(threadIdx.x) % 8;
            const int64_t row = unit.row + rank * kWideRows + group * 64 + chunk * 8;
            Bf16* const y = static_cast<Bf16*>(p.y) + unit.group * p.out_dim + row;
            if (row < p.out_dim)
#pragma unroll 4
                for (int t = int(threadIdx.x) % 128 / 8; t < kWideTokens; t += 16)
                    if (unit.token + t < p.tokens)
                        *reinterpret_cast<uint4*>(y + (unit.token + t) * p.y_stride) =
                            *reinterpret_cast<const uint4*>(outputs + t * 128 + (chunk ^ t % 8) * 16);
        }
    }
    cluster.sync();  // nobody leaves while the other block's arrivals at its barriers are on their way
}

template <class Weight>
const void* values_of(const Weight& weight) {
    if constexpr (WideStage<Weight>::kFp8)
        return weight.codes;
    else
        return weight.values;
}

inline WideUnits units_of(const Product& p, int64_t groups) {
    return {int((p.out_dim + kWideCluster * kWideRows - 1) / (kWideCluster * kWideRows)), int((p.tokens + kWideTokens - 1) / kWideTokens),
            int(groups)};
}

// Does the product have units for half of the multiprocessors, and dimensions that suit these tiles and the copy engine?
template <class Weight>
bool fits_wide(const Product& p, const Weight& weight, int64_t groups) {
    if (units_of(p, groups).count() * kWideCluster < kSms / 2) return false;
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.y) | reinterpret_cast<uintptr_t>(values_of(weight));
    return !p.wide && p.in_dim % kWideDepth == 0 && p.out_dim % 32 == 0 && p.y_stride % 8 == 0 && p.x_stride % 8 == 0 && addresses % 16 == 0;
}

template <class Weight>
cudaError_t run_wide(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    using Stage = WideStage<Weight>;
    CUtensorMap x_map, weight_map;
    const cuuint64_t x_sizes[] = {cuuint64_t(p.in_dim), cuuint64_t(groups), cuuint64_t(p.tokens)};
    const cuuint64_t x_strides[] = {cuuint64_t(p.in_dim) * sizeof(Bf16), cuuint64_t(p.x_stride) * sizeof(Bf16)};
    const cuuint32_t x_box[] = {kWideDepth, 1, kWideTokens / 2};
    const cuuint64_t sizes[] = {cuuint64_t(p.in_dim), cuuint64_t(groups * p.out_dim)};
    const cuuint64_t stride[] = {cuuint64_t(p.in_dim) * (Stage::kRowBytes / kWideDepth)};
    const cuuint32_t box[] = {kWideDepth, kWideRows};
    const bool described =
        describe(x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, p.x, x_sizes, x_strides, x_box, CU_TENSOR_MAP_SWIZZLE_128B) &&
        describe(weight_map, Stage::kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, values_of(weight), sizes, stride, box,
                 Stage::kFp8 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
    if (!described) return cudaErrorNotSupported;
    const WideUnits units = units_of(p, groups);
    const int clusters = units.count() < kSms / kWideCluster ? units.count() : int(kSms / kWideCluster);
    return launch_cluster(wide_product<Weight>, dim3(unsigned(clusters * kWideCluster)), kWideThreads, Stage::kShared, kWideCluster, p.early, stream,
                          p, weight, units, x_map, weight_map);
}

}  // namespace cedar::cuda
