// SPDX-License-Identifier: Apache-2.0
// y[t, n] = x_t . w_n of few tokens and E4M3, where a block takes whole rows: a run of memory, tile after tile of 16 rows. Each of
// its warps has one of the parts of k, of which it keeps the tokens in registers. The copy engine fills a ring of tiles, a quarter
// of k at a time, so that little is left to do when the last bytes come.
//
// Sums of the parts are added in their order.
#pragma once

#include "linear_split.cuh"

namespace cedar::cuda {

constexpr int kRowsParts = 16, kRowsThreads = kRowsParts * kWarp, kRowsSlots = 2, kRowsTiles = 4, kRowsQuarters = 4, kRowsBlocks = 4;
constexpr int kRowsDepth = kRowsParts * Fp8Weight::kBlock;  // in_dim is up to kRowsBlocks of it

// Rows of a tile lie behind each other, but for 64 bytes behind every second, so that rows 2 i and 2 i + 1 meet all banks.
__host__ __device__ constexpr int rows_slot_bytes(int in_dim) { return 16 * in_dim + 8 * 64; }
__device__ inline int rows_place(int row, int in_dim) { return row * in_dim + (row + 1) / 2 * 64; }

// Block (i, g): of group g the i-th tiles. Sums lie behind the ring: two sets, of tiles by turns; tokens of 16 values, whose
// eights change places so that stores of a warp meet all banks twice.
template <int NT>
__global__ void __launch_bounds__(kRowsThreads, 1) rows_product(const Product p, const Fp8Weight weight, bool vectors) {
    using Rows = RowMajor<Fp8Weight>;
    constexpr int kPartSums = NT * 8 * 16;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[kRowsSlots][kRowsQuarters];
    const int part = __shfl_sync(~0u, int(threadIdx.x) / kWarp, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % kWarp, group = lane / 4, quad = lane % 4, tokens = int(p.tokens);
    const int in_dim = int(p.in_dim), length = in_dim / kRowsDepth, first = part * length, quarter = in_dim / kRowsQuarters;
    const int slot_bytes = rows_slot_bytes(in_dim);
    float* const sums = reinterpret_cast<float*>(memory + kRowsSlots * slot_bytes);
    const int64_t base = blockIdx.y * p.out_dim, first_tile = int64_t(blockIdx.x) * kRowsTiles;
    const Rows rows{weight, base, base + p.out_dim - 1};

    const auto fetch = [&](int tile) {  // the first warps' quarters, a lane a row
        unsigned char* const slot = memory + tile % kRowsSlots * slot_bytes;
        uint64_t* const barrier = &full[tile % kRowsSlots][part];
        if (lane == 0) announce_bytes(barrier, uint32_t(16 * quarter));
        __syncwarp();
        if (lane < 16)
            copy_bulk(slot + rows_place(lane, in_dim) + part * quarter,
                      weight.codes + rows.row(first_tile + tile, lane / 8, lane % 8 * 4) * weight.stride + part * quarter, uint32_t(quarter), barrier,
                      read_once_policy());
    };
    if (threadIdx.x < kRowsSlots * kRowsQuarters) {
        init_barrier(&full[0][0] + threadIdx.x, 1);
        publish_barriers();
    }
    __syncthreads();
    if (part < kRowsQuarters) fetch(0);  // the weight does not wait for x; behind more of it x would be late
    uint32_t scales[kRowsTiles / 2][kRowsBlocks] = {};
#pragma unroll
    for (int pair = 0; pair < kRowsTiles / 2; ++pair)
#pragma unroll
        for (int b = 0; b < kRowsBlocks; ++b)
            if (b < length) scales[pair][b] = __ldg(rows.scales_of(first_tile + pair * 2, 0, lane) + (first + b) * Rows::kScaleStep);
    prefetch_tokens(p);
    release_launch();  // the next launch awaits this one
    await_launch();
    uint4 x[NT][kRowsBlocks][Rows::kUnits] = {};
#pragma unroll
    for (int n = 0; n < NT; ++n) {  // a column behind the last token is the last token's
        const Bf16* from = p.x + blockIdx.y * p.in_dim + min(n * 8 + group, tokens - 1) * p.x_stride + first * Fp8Weight::kBlock;
#pragma unroll
        for (int b = 0; b < kRowsBlocks; ++b)
#pragma unroll
            for (int unit = 0; unit < Rows::kUnits; ++unit)
                if (b < length) x[n][b][unit] = *reinterpret_cast<const uint4*>(from + b * Fp8Weight::kBlock + Rows::chunk(unit, quad) * 8);
    }

    if (part < kRowsQuarters)
        for (int tile = 1; tile < kRowsSlots; ++tile) fetch(tile);

#pragma unroll 1
    for (int tile = 0; tile < kRowsTiles; ++tile) {
        const int slot = tile % kRowsSlots;
        await_barrier(&full[slot][part / (kRowsParts / kRowsQuarters)], tile / kRowsSlots % 2);
        const unsigned char* const own = memory + slot * slot_bytes + first * Rows::kCodeStep + quad * 16;
        float c[NT][4] = {};
#pragma unroll
        for (int b = 0; b < kRowsBlocks; ++b) {
            if (b >= length) break;
            const uint32_t scale = lifted_scale(tile < 2 ? scales[0][b] : scales[1][b]);
            uint4 bytes[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                bytes[half] = *reinterpret_cast<const uint4*>(own + rows_place(half * 8 + group, in_dim) + b * Rows::kCodeStep);
#pragma unroll
            for (int unit = 0; unit < Rows::kUnits; ++unit) {
                uint32_t low[4], high[4];
                Rows::widen(bytes[0], scale, unit, low);
                Rows::widen(bytes[1], scale, unit, high);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 t = x[n][b][unit];
                    multiply_bf16(c[n], low[0], high[0], low[1], high[1], t.x, t.y);
                    multiply_bf16(c[n], low[2], high[2], low[3], high[3], t.z, t.w);
                }
            }
        }
        float* const set = sums + tile % 2 * kRowsParts * kPartSums;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = n * 8 + quad * 2 + i % 2, row = group + i / 2 * 8;
                set[part * kPartSums + token * 16 + (row ^ token / 2 % 2 * 8)] = c[n][i];
            }
        __syncthreads();  // nobody reads the slot any more, and all parts are there
        if (part < kRowsQuarters && tile + kRowsSlots < kRowsTiles) {
            release_shared();
            fetch(tile + kRowsSlots);
        }
        const int i = kRowsThreads - 1 - int(threadIdx.x), token = i / 4, row = i % 4 * 4;
        const int64_t n = (first_tile + tile) * 16 + row;
        if (token >= tokens || n >= p.out_dim) continue;
        store_four(p, token, n, add_parts(set + token * 16 + (row ^ token / 2 % 2 * 8), kRowsParts, kPartSums), vectors);
    }
}

// Do the dimensions suit it, and the copy engine?
inline bool fits_rows(const Product& p, const Fp8Weight& weight) {
    return p.in_dim % kRowsDepth == 0 && p.in_dim <= kRowsBlocks * kRowsDepth && p.x_stride % 8 == 0 &&
           (reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(weight.codes)) % 16 == 0;
}

inline cudaError_t run_rows(const Product& p, const Fp8Weight& weight, int64_t groups, void* stream) {
    const dim3 grid(unsigned((p.out_dim + kRowsTiles * 16 - 1) / (kRowsTiles * 16)), unsigned(groups));
    const auto run = [&](auto kernel, int columns) {
        const size_t shared = size_t(kRowsSlots) * rows_slot_bytes(int(p.in_dim)) + size_t(2) * kRowsParts * columns * 16 * sizeof(float);
        return launch(kernel, grid, kRowsThreads, shared, 1, p.early, stream, p, weight, stores_fours(p));
    };
    return p.tokens <= 8 ? run(rows_product<1>, 8) : run(rows_product<2>, 16);
}

}  // namespace cedar::cuda
