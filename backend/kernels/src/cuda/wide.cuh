// SPDX-License-Identifier: Apache-2.0
// Products on Hopper of many tokens, and for wo_a of all numbers that others do not take. A unit of work is 64 G rows of the weight
// times N tokens in each of the two blocks of a cluster, which share the tokens; clusters take units by turns. One warp keeps a ring
// full, by the copy engine; each of G warp groups has 64 of the rows. Weights of E4M3 are widened in registers, from where the
// matrix instruction takes them; bf16 weights it reads from shared memory. k is walked in rising order, so sums do not depend on the
// size of a unit: whole, or in parts whose sums are added in their order, so that with the parts of linear_group.cuh the bits are
// its own.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "linear_split.cuh"
#include "linear_tensor.cuh"
#include "wgmma.cuh"

namespace cedar::cuda {

constexpr int kWideDepth = 64, kWideCluster = 2, kWideClusters = int(kSms) / kWideCluster;
constexpr int kWideShared = 226 * 1024;  // static shared memory is besides
constexpr int kWideTogether = 8;  // blocks of tokens that take turns with the same rows of the weight, for the sake of L2

// A stage has blocks of 64 values of k: of the tokens, in rows of 128 bytes, then of the weight's rows, of 64 or 128, all as the copy
// engine swizzles them. Two blocks, of small tiles, so that there is less to wait for.
template <int N, int G, bool Parts, class Weight>
struct WideStage {
    static constexpr bool kFp8 = Weight::kSteps == 4;
    static constexpr int kBlocks = kFp8 && !Parts && N <= 128 && G <= 2 ? 2 : 1, kDepth = kBlocks * kWideDepth;
    static constexpr int kRows = G * 64, kThreads = (G + 1) * 128;
    static constexpr int kRowBytes = kFp8 ? kDepth : 128, kTokenBytes = N * 128, kWeights = kBlocks * kTokenBytes;
    static constexpr int kBytes = kWeights + kRows * kRowBytes;
    static constexpr int kOutputBytes = N * (Parts ? 256 : 128);  // of a warp group: 64 outputs of each token; before that, sums of parts
    static constexpr int kFew = 40, kMany = 232;    // registers of the ring's threads and of the others
    static constexpr int kCount = (kWideShared - 1024 - G * kOutputBytes) / kBytes;
    static constexpr int kAhead = stages_ahead(kRows * kRowBytes, kCount);
    static constexpr size_t kShared = size_t(kCount) * kBytes + G * kOutputBytes + 1024;  // to begin at a multiple of 1024
    static_assert(N % 16 == 0 && kBytes % 1024 == 0 && kWeights % 1024 == 0 && kCount >= 3);
};

struct WideUnits {
    int row_pairs, token_blocks, groups, rows, tokens;  // rows, tokens: of a block
    struct Unit {
        int row, token, group;  // row: of the cluster's first block
    };
    __host__ __device__ int count() const { return row_pairs * token_blocks * groups; }
    __device__ Unit at(int number) const {
        if (token_blocks == 1) return {number % row_pairs * kWideCluster * rows, 0, number / row_pairs};  // less to do
        const int of_group = row_pairs * token_blocks, group = number / of_group, rest = number % of_group;
        const int turn = rest / (kWideTogether * row_pairs), place = rest % (kWideTogether * row_pairs);
        const int width = min(token_blocks - turn * kWideTogether, kWideTogether);
        return {place / width * kWideCluster * rows, (turn * kWideTogether + place % width) * tokens, group};
    }
};

// The sums of a warp group go by way of shared memory, so that 16 bytes of a token are stored at a time: there,
template <int N>
__device__ __forceinline__ void gather_sums(const float (&c)[N / 2], unsigned char* outputs, int warp) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = pair_of(c[n * 4 + 2 * i], c[n * 4 + 2 * i + 1]);
        const int token = n * 8 + lane / 16 * 8 + lane % 8, chunk = warp % 4 * 2 + lane / 8 % 2;
        store_transposed(outputs + token * 128 + (chunk ^ token % 8) * 16, pair[0], pair[1], pair[2], pair[3]);
    }
}
// and, once all of the group have done so, to y. unit.row: of the group's first row.
template <int N>
__device__ __forceinline__ void store_sums(const Product& p, const unsigned char* outputs, const WideUnits::Unit& unit) {
    const int chunk = int(threadIdx.x) % 8;
    const int64_t row = unit.row + chunk * 8;
    Bf16* const y = static_cast<Bf16*>(p.y) + unit.group * p.out_dim + row;
    if (row < p.out_dim)
#pragma unroll 4
        for (int t = int(threadIdx.x) % 128 / 8; t < N; t += 16)
            if (unit.token + t < p.tokens)
                *reinterpret_cast<uint4*>(y + (unit.token + t) * p.y_stride) =
                    *reinterpret_cast<const uint4*>(outputs + t * 128 + (chunk ^ t % 8) * 16);
}

// length: blocks of k of a part.
template <int N, int G, bool Parts, class Weight>
__global__ void __launch_bounds__((G + 1) * 128, 1)
    wide_product(const Product p, const Weight weight, const WideUnits units, int length, const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap weight_map) {
    using Stage = WideStage<N, G, Parts, Weight>;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[Stage::kCount], empty[Stage::kCount];
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int rank = int(blockIdx.x) % kWideCluster, first_unit = int(blockIdx.x) / kWideCluster, step = int(gridDim.x) / kWideCluster;
    const int depth = int(p.in_dim / kWideDepth), steps = depth / Stage::kBlocks, lane = threadIdx.x % kWarp;
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / kWarp, 0);  // known to be the same in all lanes
    const int begun = min(steps, Stage::kAhead);                     // stages of the first unit whose rows are ordered at once
    const auto fetch_rows = [&](const WideUnits::Unit& unit, int at, int slot) {  // and announce the tokens
        announce_bytes(full + slot, Stage::kBytes);
        unsigned char* const to = stages + slot * Stage::kBytes + Stage::kWeights;
        const int row = unit.group * int(p.out_dim) + unit.row + rank * Stage::kRows;
        if (units.token_blocks == 1)  // nobody else has these rows
            copy_box(to, &weight_map, at * Stage::kDepth, row, full + slot, read_once_policy());
        else
            copy_box(to, &weight_map, at * Stage::kDepth, row, full + slot);
    };
    release_launch();  // the next launch awaits this one
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Stage::kCount; ++slot)
            init_barrier(full + slot, 1), init_barrier(empty + slot, kWideCluster * G * 4);  // by the warps of both blocks
        publish_barriers();
        const WideUnits::Unit unit = units.at(first_unit);
        for (int at = 0; at < begun; ++at) fetch_rows(unit, at, at);  // the weight waits neither for x nor for the other block
    }
    prefetch_tokens(p);
    leave_together();  // the barriers are there

    if (warp < 4) {  // the ring's
        if constexpr (G > 1) shrink_registers<Stage::kFew>();
        if (threadIdx.x == 0) {
            await_launch();
            int slot = 0;
            uint32_t round = 1;  // the first waits find the stages empty
            for (int number = first_unit; number < units.count(); number += step) {
                const WideUnits::Unit unit = units.at(number);
                for (int at = 0; at < steps; ++at) {
                    if (number != first_unit || at >= begun) {
                        await_barrier(empty + slot, round);
                        fetch_rows(unit, at, slot);
                    }
                    unsigned char* const own = stages + slot * Stage::kBytes + rank * (Stage::kTokenBytes / 2);
#pragma unroll
                    for (int block = 0; block < Stage::kBlocks; ++block)
                        copy_box_to_all(own + block * Stage::kTokenBytes, &x_map, at * Stage::kDepth + block * kWideDepth, unit.group,
                                        unit.token + rank * (N / 2), full + slot, 3);
                    if (++slot == Stage::kCount) slot = 0, round ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        if constexpr (G > 1) grow_registers<Stage::kMany>();
        const int group = warp / 4 - 1, quad = lane % 4, own = group * 64 + warp % 4 * 16;  // the warp's first row
        unsigned char* const outputs = stages + Stage::kCount * Stage::kBytes + group * Stage::kOutputBytes;
        // where a lane's codes of a step lie: the copy engine swizzles the 16-byte chunks of a row by the row, of 64 bytes by row / 2
        const int codes = Stage::kWeights + (own + lane / 4) * Stage::kRowBytes + quad * 2;
        const int swizzle = Stage::kRowBytes == 64 ? lane / 8 : lane / 4;
        int slot = 0;
        uint32_t round = 0;
        uint32_t ahead[2] = {};  // scales, a block of k before they are used
        const auto scales_of = [&](int number) -> const uint8_t* {
            if constexpr (Stage::kFp8) {
                const WideUnits::Unit unit = units.at(number < units.count() ? number : first_unit);
                const int64_t row = unit.row + rank * Stage::kRows + own;
                const uint8_t* const at = weight.scale_at(unit.group * p.out_dim + (row < p.out_dim ? row : p.out_dim - 1), 0);
#pragma unroll 1
                for (int i = lane * 32; i < depth * 2; i += kWarp * 32) prefetch_line(at + i);
                return at;
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
        await_launch();
        for (int number = first_unit; number < units.count(); number += step) {
            const uint8_t* const next_scales = scales_of(number + step);
            float c[N / 2] = {};
            uint32_t a[2][4][4] = {};  // by turns, so that one block's rows are widened while the last one's are multiplied
            [[maybe_unused]] uint32_t two[Stage::kBlocks][4][4] = {};  // codes of a stage
            const auto multiply_block = [&](int first, int block, auto turn, auto last) __attribute__((always_inline)) {
                [[maybe_unused]] constexpr int kTurn = decltype(turn)::value;
                constexpr bool kLast = decltype(last)::value;
                constexpr int kOwn = Stage::kBlocks == 2 ? kTurn : 0;  // the block's number in its stage
                uint32_t scale[2];
                scale[0] = lifted_scale(ahead[0]), scale[1] = lifted_scale(ahead[1]);
                load_scales(block + 1 < depth ? scales + (block + 1) * (kWideDepth / 32) : next_scales);
                const unsigned char* const stage = stages + slot * Stage::kBytes;
                if constexpr (kOwn == 0) {
                    await_barrier(full + slot, round);
                    if constexpr (Stage::kFp8) {
#pragma unroll
                        for (int s = 0; s < Stage::kBlocks * 4; ++s) {
                            const unsigned char* const at = stage + codes + (s ^ swizzle) * 16;
#pragma unroll
                            for (int i = 0; i < 4; ++i)  // rows +0, +8, then the same 8 values of k on
                                two[s / 4][s % 4][i] = *reinterpret_cast<const uint16_t*>(at + i % 2 * 8 * Stage::kRowBytes + i / 2 * 8);
                        }
                    }
                }
                if constexpr (Stage::kFp8) {
#pragma unroll
                    for (int s = 0; s < 4; ++s)
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[kTurn][s][i] = widen_e4m3<0>(two[kOwn][s][i], scale[s / 2]);
                }
                const uint64_t columns = matrix_of(stage + kOwn * Stage::kTokenBytes);
                begin_group();
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    if constexpr (Stage::kFp8)
                        multiply_group(c, a[kTurn][s], columns + s * kMatrixStep);
                    else
                        multiply_group(c, matrix_of(stage + Stage::kWeights + group * 64 * 128) + s * kMatrixStep, columns + s * kMatrixStep);
                }
                close_group();
                if constexpr (kLast)
                    await_groups<0>();
                else
                    await_groups<1>();  // the block before has been multiplied, and its registers are free
                if constexpr (Stage::kFp8) {
#pragma unroll
                    for (int s = 0; s < 4; ++s) settle(a[1 - kTurn][s]);
                }
                if constexpr (kOwn == 0)
                    if (block > first) release(slot == 0 ? Stage::kCount - 1 : slot - 1);
                if constexpr (kLast) release(slot);
                if constexpr (kOwn == Stage::kBlocks - 1)
                    if (++slot == Stage::kCount) slot = 0, round ^= 1;
            };
            using Even = std::integral_constant<int, 0>;
            using Odd = std::integral_constant<int, 1>;
            const auto multiply_part = [&](int block, int end) __attribute__((always_inline)) {
                const int first = block;
                for (; block + 2 < end; block += 2)
                    multiply_block(first, block, Even(), std::false_type()), multiply_block(first, block + 1, Odd(), std::false_type());
                // The last wait stands right behind the instructions it is for: ptxas moves what reads c ahead of a wait that is in
                // another block of code than they are.
                if (Stage::kBlocks == 2 || block + 2 == end) {
                    multiply_block(first, block, Even(), std::false_type());
                    multiply_block(first, block + 1, Odd(), std::true_type());
                    settle(c);
                } else if constexpr (Stage::kBlocks == 1) {
                    multiply_block(first, block, Even(), std::true_type());
                    settle(c);
                }
            };
            if constexpr (Parts) {
                float4* const sums = reinterpret_cast<float4*>(outputs) + threadIdx.x % 128;  // the thread's own
                for (int first = 0; first < depth; first += length) {
                    const bool last = first + length >= depth;
                    multiply_part(first, min(first + length, depth));
                    if (first == 0 && !last) sync_group(1 + group);  // the last unit's outputs are on their way
                    if (first > 0)
#pragma unroll
                        for (int i = 0; i < N / 2; i += 4) {
                            const float4 sum = sums[i * 32];
                            c[i] = sum.x + c[i], c[i + 1] = sum.y + c[i + 1], c[i + 2] = sum.z + c[i + 2], c[i + 3] = sum.w + c[i + 3];
                        }
                    if (last) break;
#pragma unroll
                    for (int i = 0; i < N / 2; i += 4) {
                        sums[i * 32] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
                        c[i] = c[i + 1] = c[i + 2] = c[i + 3] = 0.0f;
                    }
                }
            } else {
                multiply_part(0, depth);
            }

            scales = next_scales;

            sync_group(1 + group);  // the last unit's outputs are on their way
            gather_sums<N>(c, outputs, warp);
            sync_group(1 + group);
            const WideUnits::Unit unit = units.at(number);
            store_sums<N>(p, outputs, {unit.row + rank * Stage::kRows + group * 64, unit.token, unit.group});
        }
    }
    leave_together();  // nobody ends while the other block's arrivals at its barriers are on their way
}

// Tokens and warp groups of a block.
struct WideTile {
    int tokens, groups;
};

inline WideUnits units_of(const Product& p, int64_t groups, WideTile tile) {
    const int rows = tile.groups * 64, pair = kWideCluster * rows;
    return {int((p.out_dim + pair - 1) / pair), int((p.tokens + tile.tokens - 1) / tile.tokens), int(groups), rows, tile.tokens};
}

// Do the dimensions suit these tiles and the copy engine?
template <class Weight>
bool fits_wide(const Product& p, const Weight& weight) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.y) | reinterpret_cast<uintptr_t>(values_of(weight));
    return !p.wide && p.in_dim % kWideDepth == 0 && p.out_dim % 32 == 0 && p.y_stride % 8 == 0 && p.x_stride % 8 == 0 && addresses % 16 == 0;
}

// Nanoseconds, about: to widen and multiply 64 values of k, which is about as long as it takes to bring them; a unit's end; beginning
// and ending.
inline int64_t wide_cost(const Product& p, int64_t groups, WideTile tile) {
    const int64_t rounds = (units_of(p, groups, tile).count() + kWideClusters - 1) / kWideClusters;
    return rounds * (p.in_dim / kWideDepth * tile.groups * (tile.tokens + 95) + 500) + 4000;
}

// Boxes of 64 values of k of so many tokens,
inline bool describe_tokens(CUtensorMap& map, const Product& p, int64_t groups, int tokens) {
    const cuuint64_t sizes[] = {cuuint64_t(p.in_dim), cuuint64_t(groups), cuuint64_t(p.tokens)};
    const cuuint64_t strides[] = {cuuint64_t(p.in_dim) * sizeof(Bf16), cuuint64_t(p.x_stride) * sizeof(Bf16)};
    const cuuint32_t box[] = {kWideDepth, 1, cuuint32_t(tokens)};
    return describe(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, p.x, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}
// and of so many of rows of the weight.
template <class Weight>
bool describe_rows(CUtensorMap& map, const Product& p, const Weight& weight, int64_t groups, int depth, int rows) {
    constexpr bool kFp8 = Weight::kSteps == 4;
    const int row_bytes = kFp8 ? depth : depth * 2;
    const cuuint64_t sizes[] = {cuuint64_t(p.in_dim), cuuint64_t(groups * p.out_dim)}, stride[] = {cuuint64_t(p.in_dim) * (kFp8 ? 1 : 2)};
    const cuuint32_t box[] = {cuuint32_t(depth), cuuint32_t(rows)};
    return describe(map, kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, values_of(weight), sizes, stride, box,
                    row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int N, int G, bool Parts, class Weight>
cudaError_t run_wide(const Product& p, const Weight& weight, int64_t groups, int parts, void* stream) {
    using Stage = WideStage<N, G, Parts, Weight>;
    CUtensorMap x_map, weight_map;
    if (!describe_tokens(x_map, p, groups, N / 2) || !describe_rows(weight_map, p, weight, groups, Stage::kDepth, Stage::kRows))
        return cudaErrorNotSupported;
    const WideUnits units = units_of(p, groups, {N, G});
    const int depth = int(p.in_dim / kWideDepth), clusters = std::min(units.count(), kWideClusters);
    return launch(wide_product<N, G, Parts, Weight>, dim3(unsigned(clusters * kWideCluster)), Stage::kThreads, Stage::kShared, kWideCluster,
                  p.early, stream, p, weight, units, (depth + parts - 1) / parts, x_map, weight_map);
}

constexpr WideTile kWidest{256, 2};

// Has a product of very many tokens units for half of the multiprocessors?
inline bool fills_wide(const Product& p, int64_t groups) { return units_of(p, groups, kWidest).count() * kWideCluster >= kSms / 2; }

template <class Weight>
cudaError_t run_widest(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    return run_wide<kWidest.tokens, kWidest.groups, false>(p, weight, groups, 1, stream);
}

// Tiles for E4M3, with k in parts or whole.
template <bool Parts>
struct WideTiles {
    static constexpr WideTile kAll[10] = {{32, 1}, {48, 1}, {64, 1}, {96, 1}, {128, 1}, {96, 2}, {128, 2}, {176, 2}, {192, 2}, kWidest};
};
template <>
struct WideTiles<true> {
    static constexpr WideTile kAll[4] = {{64, 2}, {96, 2}, {128, 2}, {176, 2}};
};

template <bool Parts>
bool fits_tiles(const Product& p, const Fp8Weight& weight) {  // stages of whole k may have two blocks of it
    return p.in_dim % (Parts ? kWideDepth : 2 * kWideDepth) == 0 && fits_wide(p, weight);
}

// Number and cost of the cheapest of the tiles.
struct WideChoice {
    size_t number;
    int64_t cost;
};
template <bool Parts>
WideChoice best_tile(const Product& p, int64_t groups) {
    WideChoice best{0, INT64_MAX};
    for (size_t i = 0; i < std::size(WideTiles<Parts>::kAll); ++i)
        if (const int64_t cost = wide_cost(p, groups, WideTiles<Parts>::kAll[i]); cost < best.cost) best = {i, cost};
    return best;
}

template <bool Parts, size_t... I>
cudaError_t run_tile(const Product& p, const Fp8Weight& weight, int64_t groups, int parts, size_t number, void* stream, std::index_sequence<I...>) {
    using Tiles = WideTiles<Parts>;
    cudaError_t status = cudaErrorInvalidValue;
    ((I == number && (status = run_wide<Tiles::kAll[I].tokens, Tiles::kAll[I].groups, Parts>(p, weight, groups, parts, stream), true)) || ...);
    return status;
}
template <bool Parts>
cudaError_t run_tile(const Product& p, const Fp8Weight& weight, int64_t groups, int parts, const WideChoice& choice, void* stream) {
    return run_tile<Parts>(p, weight, groups, parts, choice.number, stream, std::make_index_sequence<std::size(WideTiles<Parts>::kAll)>());
}

}  // namespace cedar::cuda
