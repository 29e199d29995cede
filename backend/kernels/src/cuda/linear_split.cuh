// SPDX-License-Identifier: Apache-2.0
// y[t, n] = x_t . w_n with the weight streamed through a ring in shared memory. Its rows are the rows of the matrix instruction
// (m16n8k16), widened once for up to 128 tokens, the columns. The blocks of a cluster share k: a block then has many rows of a
// short k, so that its tokens are few bytes beside its weights, and all multiprocessors have the same to read.
//
// A result is the sum of the cluster's parts in their order, each over its blocks of k in rising order. Parts depend on the
// dimensions alone, so a token's bits do not depend on the other tokens; with one part they are those of tiles.cuh.
#pragma once

#include <cooperative_groups.h>

#include "linear_tensor.cuh"
#include "tiles.cuh"

namespace cedar::cuda {

constexpr int kMostParts = 8;           // blocks of the largest cluster
constexpr int64_t kWantedWarps = 1900;  // with two tiles of outputs and a part of k each, for which k is divided
constexpr int kMostRowTiles = 20, kSplitTokens = 128;
constexpr int64_t kSms = 132;  // an H200's; what divides the work evenly there does well elsewhere

struct Product {
    const Bf16* x;
    void* y;
    int64_t tokens, in_dim, out_dim;  // of one group
    int64_t x_stride, y_stride;       // between tokens
    bool wide;                        // y is float32
    bool early;                       // may begin before the launch before has ended, which may make x
};

// So many bytes of the weight, but at least a stage, are ordered before x is awaited. Copies come in the order in which they are ordered:
// behind a full ring the first tokens are late by some 3 us, in which nothing is multiplied.
constexpr int kBytesAhead = 16 * 1024;
__host__ __device__ constexpr int stages_ahead(int weight_bytes, int stages) {
    const int ahead = kBytesAhead / weight_bytes;
    return ahead < 1 ? 1 : ahead < stages ? ahead : stages;
}

// Before x is awaited it may come to L2, where what is written meanwhile finds it: a line for each thread.
__device__ inline void prefetch_tokens(const Product& p) {
    const int64_t block = blockIdx.x + gridDim.x * (blockIdx.y + int64_t(gridDim.y) * blockIdx.z), at = (block * blockDim.x + threadIdx.x) * 64;
    if (p.early && at < p.tokens * p.x_stride) prefetch_line(p.x + at);
}

// Where a weight's codes or values are.
template <class Weight>
const void* values_of(const Weight& weight) {
    if constexpr (Weight::kSteps == 4)
        return weight.codes;
    else
        return weight.values;
}

// parts: blocks that share k; tiles: of 16 outputs, of a block.
struct Split {
    int parts, tiles;
};

// Parts of k, so many that there are some sixteen warps of 32 outputs for each multiprocessor.
inline int parts_for(int64_t out_dim, int64_t blocks, int64_t groups, int most_parts) {
    int parts = 1;
    while (parts * 2 <= most_parts && parts * 2 <= blocks && (out_dim + 31) / 32 * groups * parts < kWantedWarps) parts *= 2;
    return parts;
}

// What the busiest multiprocessor has to do, in kilobytes of E4M3: its weights; for each block of k also its tokens, of which
// some tens are assumed; and what starting a block costs. resident: blocks that a multiprocessor has at a time.
inline int tiles_for(int64_t out_dim, int64_t blocks, int64_t groups, int parts, int most_tiles, int resident) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int tiles = 1; tiles <= most_tiles; tiles += tiles < 8 ? 1 : 2) {
        const int64_t all = (out_dim + tiles * 16 - 1) / (tiles * 16) * groups * parts, length = (blocks + parts - 1) / parts;
        const int64_t cost = (all + kSms * resident - 1) / (kSms * resident) * (length * (tiles + 2) + 45);
        if (cost < least) least = cost, best = tiles;
    }
    return best;
}

// Stages of a ring for up to W warps, each with RT tiles of 16 outputs, and 8 NT tokens.
template <int RT, int NT, int W, class Weight>
struct SplitRing {
    static constexpr int kSteps = 2;  // blocks of k of a stage: 128 bytes of a row of the weight
    static constexpr int kDepth = kSteps * Weight::kBlock, kChunks = kDepth / 8, kTokenBytes = kDepth * int(sizeof(Bf16));
    static constexpr int kFlip = kChunks == 16 ? 1 : 4;  // as kSwizzle of tiles.cuh
    static constexpr int kWarpBytes = kSteps * RT * 1024;
    static constexpr int kResident = RT == 1 && NT <= 6 ? 2 : 1;  // blocks of a multiprocessor: clusters find places in any group of them
    static constexpr int kFitting = (228 / kResident - 1) * 1024 / (W * kWarpBytes + NT * 8 * kTokenBytes), kStages = kFitting < 6 ? kFitting : 6;
    static_assert(kStages >= 3);
    __host__ __device__ static constexpr int stage_bytes(int warps) { return warps * kWarpBytes + NT * 8 * kTokenBytes; }
    __host__ __device__ static constexpr int sums_stride(int warps) { return warps * RT * 16 + 4; }  // of a token; stores of a warp meet all banks
    __host__ __device__ static constexpr size_t shared_bytes(int warps) {
        const size_t ring = size_t(kStages) * stage_bytes(warps), sums = size_t(NT) * 8 * sums_stride(warps) * sizeof(float);
        return ring > sums ? ring : sums;
    }
};

// 16 bytes of a row whose next ones follow soon.
__device__ inline void copy_codes(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ inline uint32_t pair_of(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four outputs can be stored at a time.
inline bool stores_fours(const Product& p) { return (p.out_dim | p.y_stride) % 4 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0; }

// Four neighbours' sums of so many parts, which lie `between` floats apart, in the parts' order.
__device__ __forceinline__ float4 add_parts(const float* at, int parts, int between) {
    float4 total = *reinterpret_cast<const float4*>(at);
    for (int s = 1; s < parts; ++s) {
        const float4 more = *reinterpret_cast<const float4*>(at + s * between);
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
    return total;
}

// Outputs n .. n + 3 of a token, as far as there are; p's group is blockIdx.y.
__device__ inline void store_four(const Product& p, int64_t token, int64_t n, float4 v, bool vectors) {
    const int64_t to = token * p.y_stride + blockIdx.y * p.out_dim + n;
    if (vectors && n + 4 <= p.out_dim) {  // stores that the compiler cannot take apart
        if (p.wide)
            __stcg(reinterpret_cast<float4*>(static_cast<float*>(p.y) + to), v);
        else
            __stcg(reinterpret_cast<uint2*>(static_cast<Bf16*>(p.y) + to), make_uint2(pair_of(v.x, v.y), pair_of(v.z, v.w)));
        return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (n + j >= p.out_dim) continue;
        if (p.wide)
            static_cast<float*>(p.y)[to + j] = values[j];
        else
            static_cast<Bf16*>(p.y)[to + j] = from_float<Bf16>(values[j]);
    }
}

// The sums of the cluster's parts, each block's share of them; p's group is blockIdx.y.
template <int RT, int NT, int W, class Weight>
__device__ inline void store_sums(const Product& p, int64_t first_row, int64_t first_token, int tokens, const float* sums, bool vectors) {
    namespace cg = cooperative_groups;
    const cg::cluster_group cluster = cg::this_cluster();
    const int parts = int(cluster.num_blocks()), part = int(cluster.block_rank()), warps = int(blockDim.x) / kWarp;
    const int stride = SplitRing<RT, NT, W, Weight>::sums_stride(warps), fours = warps * RT * 4;
    const int all = tokens * fours, end = all * (part + 1) / parts;
    for (int i = all * part / parts + int(threadIdx.x); i < end; i += int(blockDim.x)) {
        const int token = i / fours, row = i % fours * 4;
        const int64_t n = first_row + row;
        if (n >= p.out_dim) continue;  // no load may be on its way, unused, when its block ends
        const float* at = sums + token * stride + row;
        float4 v[kMostParts];
#pragma unroll
        for (int s = 0; s < kMostParts; ++s)
            if (s < parts) v[s] = *reinterpret_cast<const float4*>(cluster.map_shared_rank(const_cast<float*>(at), s));
        float total[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
#pragma unroll
        for (int s = 1; s < kMostParts; ++s)
            if (s < parts) total[0] += v[s].x, total[1] += v[s].y, total[2] += v[s].z, total[3] += v[s].w;
        store_four(p, first_token + token, n, make_float4(total[0], total[1], total[2], total[3]), vectors);
    }
}

// Cluster (i, g): of group g the outputs of row block i / token_blocks times the i % token_blocks-th `each` tokens, so that
// neighbours read the same weights. A warp has RT tiles of outputs, all in the same tiles of 32. vectors: four outputs can be stored at a time.
template <int RT, int NT, int W, class Weight>
__global__ void __launch_bounds__(W* kWarp, SplitRing<RT, NT, W, Weight>::kResident)
    split_product(const Product p, const Weight weight, int token_blocks, int each, bool vectors) {
    namespace cg = cooperative_groups;
    using Ring = SplitRing<RT, NT, W, Weight>;
    using Rows = RowMajor<Weight>;
    extern __shared__ __align__(16) unsigned char memory[];
    const cg::cluster_group cluster = cg::this_cluster();
    const int parts = int(cluster.num_blocks()), part = int(cluster.block_rank()), warps = int(blockDim.x) / kWarp;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const int number = int(blockIdx.x) / parts;
    const int64_t first_tile = int64_t(number / token_blocks) * warps * RT, base = blockIdx.y * p.out_dim;
    const int64_t first_token = int64_t(number % token_blocks) * each;
    const int tokens = int(p.tokens - first_token < each ? p.tokens - first_token : each);
    const int blocks = int(p.in_dim / Weight::kBlock), length = (blocks + parts - 1) / parts, first = part * length;
    const int count = max(0, min(length, blocks - first)), steps = (count + Ring::kSteps - 1) / Ring::kSteps;
    const int stage_bytes = Ring::stage_bytes(warps);

    const Rows rows{weight, base, base + p.out_dim - 1};
    const uint8_t* codes[RT][2];
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            codes[r][half] = rows.codes_of(first_tile + warp * RT + r, half, lane) + int64_t(first) * Rows::kCodeStep;
    const uint8_t* scales = rows.scales_of(first_tile + warp * RT, 0, lane) + first * Rows::kScaleStep;  // of all the warp's rows
    if (p.early && quad == 0)  // the weight does not wait for x: its first stages come to L2
#pragma unroll
        for (int r = 0; r < RT; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for (int step = 0; step < Ring::kStages - 1 && step < steps; ++step)
                    prefetch_line(codes[r][half] + step * Ring::kSteps * Rows::kCodeStep);
    await_launch();
    release_launch();

    const Bf16* x = p.x + blockIdx.y * p.in_dim + first_token * p.x_stride + int64_t(first) * Weight::kBlock;
    const auto fetch = [&](int step) {
        if (step < steps) {
            unsigned char* stage = memory + step % Ring::kStages * stage_bytes;
            unsigned char* own = stage + warp * Ring::kWarpBytes + lane * 16;
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int b = 0; b < Ring::kSteps; ++b)
                        if (step * Ring::kSteps + b < count)
                            copy_codes(own + ((b * RT + r) * 2 + half) * 512, codes[r][half] + (step * Ring::kSteps + b) * Rows::kCodeStep);
            const int chunks = min(Ring::kChunks, (count - step * Ring::kSteps) * (Weight::kBlock / 8));
            const int chunk = int(threadIdx.x) % Ring::kChunks;
            if (chunk < chunks)
#pragma unroll 1
                for (int token = int(threadIdx.x) / Ring::kChunks; token < tokens; token += int(blockDim.x) / Ring::kChunks)
                    copy_16(stage + warps * Ring::kWarpBytes + token * Ring::kTokenBytes + (chunk ^ token % 2 * Ring::kFlip) * 16,
                            x + token * p.x_stride + step * Ring::kDepth + chunk * 8);
        }
        close_copies();
    };
    for (int step = 0; step < Ring::kStages - 1; ++step) fetch(step);

    uint32_t ahead[Ring::kSteps] = {};  // scales as they come, a stage before they are used
    const auto load_scales = [&](int step) {
        if constexpr (Rows::kFp8) {
#pragma unroll
            for (int b = 0; b < Ring::kSteps; ++b)
                if (step * Ring::kSteps + b < count) ahead[b] = __ldg(scales + (step * Ring::kSteps + b) * Rows::kScaleStep);
        }
    };
    load_scales(0);
    float c[RT][NT][4] = {};
    for (int step = 0; step < steps; ++step) {
        await_copies<Ring::kStages - 2>();
        __syncthreads();  // this stage is complete, and no warp reads the one before any more
        fetch(step + Ring::kStages - 1);
        uint32_t scale[Ring::kSteps];
#pragma unroll
        for (int b = 0; b < Ring::kSteps; ++b) scale[b] = lifted_scale(ahead[b]);
        load_scales(step + 1);
        const unsigned char* stage = memory + step % Ring::kStages * stage_bytes;
        const unsigned char* own = stage + warp * Ring::kWarpBytes + lane * 16;
        const unsigned char* staged = stage + warps * Ring::kWarpBytes + group * Ring::kTokenBytes;
#pragma unroll
        for (int b = 0; b < Ring::kSteps; ++b) {
            if (step * Ring::kSteps + b >= count) break;
            const uint32_t lifted = b == 0 ? scale[0] : scale[1];
            uint4 bytes[RT][2];
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    bytes[r][half] = *reinterpret_cast<const uint4*>(own + ((b * RT + r) * 2 + half) * 512);
#pragma unroll(NT > 8 ? 1 : Rows::kUnits)
            for (int unit = 0; unit < Rows::kUnits; ++unit) {
                uint32_t low[RT][4], high[RT][4];
#pragma unroll
                for (int r = 0; r < RT; ++r) {
                    Rows::widen(bytes[r][0], lifted, unit, low[r]);
                    Rows::widen(bytes[r][1], lifted, unit, high[r]);
                }
                const int place = ((b * (Weight::kBlock / 8) + Rows::chunk(unit, quad)) ^ group % 2 * Ring::kFlip) * 16;
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 v = *reinterpret_cast<const uint4*>(staged + n * 8 * Ring::kTokenBytes + place);
#pragma unroll
                    for (int r = 0; r < RT; ++r) multiply_bf16(c[r][n], low[r][0], high[r][0], low[r][1], high[r][1], v.x, v.y);
#pragma unroll
                    for (int r = 0; r < RT; ++r) multiply_bf16(c[r][n], low[r][2], high[r][2], low[r][3], high[r][3], v.z, v.w);
                }
            }
        }
    }

    __syncthreads();  // nobody reads the stages any more
    float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[(n * 8 + quad * 2 + i % 2) * Ring::sums_stride(warps) + (warp * RT + r) * 16 + group + i / 2 * 8] = c[r][n][i];
    cluster.sync();
    store_sums<RT, NT, W, Weight>(p, first_tile * 16, first_token, tokens, sums, vectors);
    if (parts > 1) leave_together();  // a block's sums stay where they are until all have read them
}

template <int RT, int NT, int W, class Weight>
cudaError_t run_split(const Product& p, const Weight& weight, int64_t groups, const Split& split, int token_blocks, int each, void* stream) {
    const int64_t row_blocks = (p.out_dim + split.tiles * 16 - 1) / (split.tiles * 16);
    const int warps = split.tiles / RT;
    const dim3 grid(unsigned(row_blocks * token_blocks * split.parts), unsigned(groups));
    return launch(split_product<RT, NT, W, Weight>, grid, warps * kWarp, SplitRing<RT, NT, W, Weight>::shared_bytes(warps), split.parts,
                  p.early, stream, p, weight, token_blocks, each, stores_fours(p));
}

template <class Weight>
cudaError_t run_split(const Product& p, const Weight& weight, int64_t groups, int parts, void* stream) {
    // tokens are spread evenly over as few blocks as there must be, in eights
    const int64_t least = (p.tokens + kSplitTokens - 1) / kSplitTokens, blocks = p.in_dim / Weight::kBlock;
    const int each = int(((p.tokens + least - 1) / least + 7) / 8 * 8), token_blocks = int((p.tokens + each - 1) / each);
    if (each <= 48) {
        const Split split{parts, tiles_for(p.out_dim, blocks, groups, parts, 10, 2)};
        if (each <= 24) return run_split<1, 3, 10>(p, weight, groups, split, token_blocks, each, stream);
        if (each <= 32) return run_split<1, 4, 10>(p, weight, groups, split, token_blocks, each, stream);
        return run_split<1, 6, 10>(p, weight, groups, split, token_blocks, each, stream);
    }
    const int tiles = tiles_for(p.out_dim, blocks, groups, parts, kMostRowTiles, 1);
    const Split split{parts, tiles + tiles % 2};  // a warp has two
    if (each <= 64) return run_split<2, 8, kMostRowTiles / 2>(p, weight, groups, split, token_blocks, each, stream);
    if (split.tiles <= 16) return run_split<2, 16, 8>(p, weight, groups, split, token_blocks, each, stream);
    return run_split<2, 16, kMostRowTiles / 2>(p, weight, groups, split, token_blocks, each, stream);
}

}  // namespace cedar::cuda
