// SPDX-License-Identifier: Apache-2.0
// y[t, n] = x_t . w_n of few tokens. A warp has RT tiles of 16 outputs and one of the parts of k; it waits for no other warp
// until all is added. Each lane copies the 16 bytes of a row that it will widen itself to a ring of its own, so that not even
// the lanes of a warp wait for each other; tokens come from the cache, a stage ahead, in registers.
//
// The sums have the order of linear_split.cuh, whose parts are blocks of a cluster.
#pragma once

#include <algorithm>

#include "linear_split.cuh"

namespace cedar::cuda {

constexpr int kFewWarps = 8, kFewThreads = kFewWarps * kWarp, kFewTokens = 16;
constexpr int kFewStages = 3;    // of 128 bytes of each row
constexpr int kFewSingle = 125;  // percent that tiles by themselves cost, of what they cost by twos

// Block (i, g): of group g the i-th RT tiles times its warps over the parts.
template <int RT, int NT, class Weight>
__global__ void __launch_bounds__(kFewThreads, 2) few_product(const Product p, const Weight weight, int parts, bool vectors) {
    using Rows = RowMajor<Weight>;
    constexpr int kSteps = 2, kWarpBytes = kSteps * RT * 1024, kRows = RT * 16, kUnits = Rows::kUnits;
    extern __shared__ __align__(16) unsigned char memory[];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const int part = warp % parts, set = warp / parts, warps = int(blockDim.x) / kWarp, sets = warps / parts, tokens = int(p.tokens);
    const int64_t first_tile = (int64_t(blockIdx.x) * sets + set) * RT, base = blockIdx.y * p.out_dim;
    const int blocks = int(p.in_dim / Weight::kBlock), length = (blocks + parts - 1) / parts, first = part * length;
    const int count = max(0, min(length, blocks - first)), steps = (count + kSteps - 1) / kSteps;

    const Rows rows{weight, base, base + p.out_dim - 1};
    const uint8_t* codes[RT][2];
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) codes[r][half] = rows.codes_of(first_tile + r, half, lane) + int64_t(first) * Rows::kCodeStep;
    const uint8_t* scales = rows.scales_of(first_tile, 0, lane) + first * Rows::kScaleStep;  // of all the warp's rows
    unsigned char* const ring = memory + warp * kFewStages * kWarpBytes + lane * 16;
    const auto fetch = [&](int step) {  // of rising steps; codes go along
        if (step < steps) {
            unsigned char* own = ring + step % kFewStages * kWarpBytes;
            const bool whole = (step + 1) * kSteps <= count;
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int b = 0; b < kSteps; ++b)
                        if (b == 0 || whole) copy_codes(own + ((b * RT + r) * 2 + half) * 512, codes[r][half] + b * Rows::kCodeStep);
                    codes[r][half] += kSteps * Rows::kCodeStep;
                }
        }
        close_copies();
    };
    for (int step = 0; step < kFewStages - 1; ++step) fetch(step);  // the weight does not wait for x
    uint32_t scale[kSteps] = {}, next_scale[kSteps] = {};
    const auto load_scales = [&](int step) {
        if constexpr (Rows::kFp8) {
#pragma unroll
            for (int b = 0; b < kSteps; ++b)
                if (step * kSteps + b < count) next_scale[b] = __ldg(scales + (step * kSteps + b) * Rows::kScaleStep);
        }
    };
    load_scales(0);
    prefetch_tokens(p);
    release_launch();  // the next launch awaits this one
    await_launch();

    const Bf16* x[NT];  // a column behind the last token is the last token's
#pragma unroll
    for (int n = 0; n < NT; ++n)
        x[n] = p.x + blockIdx.y * p.in_dim + min(n * 8 + group, tokens - 1) * p.x_stride + int64_t(first) * Weight::kBlock;
    uint4 next[NT][kSteps][kUnits] = {};
    const auto load_tokens = [&](int step) {
#pragma unroll
        for (int b = 0; b < kSteps; ++b)
            if (step * kSteps + b < count)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int unit = 0; unit < kUnits; ++unit)
                        next[n][b][unit] =
                            *reinterpret_cast<const uint4*>(x[n] + (step * kSteps + b) * Weight::kBlock + Rows::chunk(unit, quad) * 8);
    };
    load_tokens(0);

    float c[RT][NT][4] = {};
    for (int step = 0; step < steps; ++step) {
        await_copies<kFewStages - 2>();
        fetch(step + kFewStages - 1);  // over what this lane has read and used
        uint4 v[NT][kSteps][kUnits];
#pragma unroll
        for (int b = 0; b < kSteps; ++b) {
            scale[b] = lifted_scale(next_scale[b]);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit) v[n][b][unit] = next[n][b][unit];
        }
        load_scales(step + 1);
        load_tokens(step + 1);
        const unsigned char* own = ring + step % kFewStages * kWarpBytes;
#pragma unroll
        for (int b = 0; b < kSteps; ++b) {
            if (step * kSteps + b >= count) break;
            uint4 bytes[RT][2];
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    bytes[r][half] = *reinterpret_cast<const uint4*>(own + ((b * RT + r) * 2 + half) * 512);
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                uint32_t low[RT][4], high[RT][4];
#pragma unroll
                for (int r = 0; r < RT; ++r) {
                    Rows::widen(bytes[r][0], scale[b], unit, low[r]);
                    Rows::widen(bytes[r][1], scale[b], unit, high[r]);
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 t = v[n][b][unit];
#pragma unroll
                    for (int r = 0; r < RT; ++r) multiply_bf16(c[r][n], low[r][0], high[r][0], low[r][1], high[r][1], t.x, t.y);
#pragma unroll
                    for (int r = 0; r < RT; ++r) multiply_bf16(c[r][n], low[r][2], high[r][2], low[r][3], high[r][3], t.z, t.w);
                }
            }
        }
    }

    __syncthreads();  // nobody reads the ring any more
    const int stride = sets * kRows + 4, part_size = NT * 8 * stride;
    float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[part * part_size + (n * 8 + quad * 2 + i % 2) * stride + set * kRows + r * 16 + group + i / 2 * 8] = c[r][n][i];
    __syncthreads();
    const int fours = sets * kRows / 4;
    for (int i = threadIdx.x; i < tokens * fours; i += int(blockDim.x)) {
        const int token = i / fours, row = i % fours * 4;
        const int64_t n = int64_t(blockIdx.x) * sets * kRows + row;
        if (n >= p.out_dim) continue;
        store_four(p, token, n, add_parts(sums + token * stride + row, parts, part_size), vectors);
    }
}

template <int RT, int NT, class Weight>
cudaError_t run_few(const Product& p, const Weight& weight, int64_t groups, int parts, void* stream) {
    const auto blocks = [&](int warps) { return (p.out_dim + warps / parts * RT * 16 - 1) / (warps / parts * RT * 16); };
    int warps = kFewWarps;
    while (warps > parts && blocks(warps) * groups < kSms) warps /= 2;  // where there is little, all are to have some
    const size_t ring = size_t(warps) * kFewStages * RT * 2048, sums = size_t(warps) * (RT * 16 + 4) * NT * 8 * sizeof(float);
    const dim3 grid(unsigned(blocks(warps)), unsigned(groups));
    return launch(few_product<RT, NT, Weight>, grid, warps * kWarp, std::max(ring, sums), 1, p.early, stream, p, weight, parts,
                  stores_fours(p));
}

template <class Weight>
cudaError_t run_few(const Product& p, const Weight& weight, int64_t groups, int parts, void* stream) {
    const bool deep = (p.out_dim + 31) / 32 * groups * parts < kSms * kFewWarps * 3 / 4;  // too few tiles to have two of them each
    const auto busiest = [&](int tiles) {  // how many tiles the busiest multiprocessor has
        const int64_t rows = kFewWarps / parts * tiles * 16, blocks = (p.out_dim + rows - 1) / rows * groups;
        return (blocks + kSms - 1) / kSms * tiles;
    };
    if (p.tokens <= 8) {  // two tiles together cost less; here three blocks with a tile each find a place
        const bool single = deep || busiest(1) * kFewSingle < busiest(2) * 100;
        return single ? run_few<1, 1>(p, weight, groups, parts, stream) : run_few<2, 1>(p, weight, groups, parts, stream);
    }
    return deep ? run_few<1, 2>(p, weight, groups, parts, stream) : run_few<2, 2>(p, weight, groups, parts, stream);
}

}  // namespace cedar::cuda
