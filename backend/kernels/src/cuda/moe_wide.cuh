// SPDX-License-Identifier: Apache-2.0
// The experts' products for very many tokens by Hopper's matrix instruction of warp groups. Blocks stay: of three warp groups
// a thread of the last orders copies, through the ends of units, and the other two widen weights in registers and multiply.
//
// A unit is 256 rows of an expert times a block of the plan. Its tokens lie in memory as they will in shared memory: matrices of
// 64 values of k, of 128 bytes per token whose chunks of 16 are swizzled by token % 8, and in each 32 values the order of the
// codes (order_for_groups).
#pragma once

#include "linear_tensor.cuh"
#include "moe.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

namespace cedar::cuda {

// With fewer registers the compiler lets each matrix instruction wait for the one before (its warning C7512).
constexpr int kWideStages = 5, kWideTiles = 16, kWideWarps = 8, kWideBlockThreads = (kWideWarps + 4) * kWarp;
constexpr int kMultiplierRegisters = 240, kCopierRegisters = 24;  // per thread; together what 384 threads have to begin with
constexpr int kWideTokenBytes = kGroupTokens * kFp4Depth * int(sizeof(Bf16)), kWideScales = kWideTokenBytes + kWideTiles * kFp4Codes;
constexpr int kWideStageBytes = kWideScales + kWideTiles * kFp4Scales;
static_assert(kWideStageBytes % 1024 == 0 && kWideTokenBytes % 1024 == 0);

// Columns of the matrix instruction for so many tokens.
__device__ inline int wide_columns(int tokens) { return tokens <= 32 ? 32 : tokens <= 56 ? 56 : tokens <= 64 ? 64 : tokens <= 72 ? 72 : tokens <= 80 ? 80 : 96; }

// Where a block of the plan with `count` tokens has value `column` (counted in the codes' order) of its token t, of its first.
__device__ inline int64_t grouped_place(int count, int t, int column) {
    return (int64_t(column / 64) * count + t) * 64 + ((column / 8 ^ t) % 8) * 8 + column % 8;
}

__device__ inline uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Lane 4 g + q has (row g, columns 2 q, 2 q + 1) of an 8 x 8 matrix, and gets (rows 2 q, 2 q + 1, column g).
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Blocks (b, i): tokens of block b of the plan, in the order of its places, laid out as described above. A lane has a chunk, and
// neighbours the chunks of whole lines.
__global__ void group_tokens(const Bf16* x, Bf16* out, const Groups groups, int top_k, int64_t hidden) {
    release_launch();
    await_launch();
    if (int(blockIdx.x) >= *groups.count) return;
    const int4 work = groups.blocks[blockIdx.x];
    const int chunks = int(hidden / 8);
    Bf16* const to = out + work.y * hidden;
    for (int i = int(blockIdx.y * blockDim.x + threadIdx.x); i < work.z * chunks; i += int(gridDim.y * blockDim.x)) {
        const int t = i / chunks, chunk = i % chunks;
        const Bf16* const run = x + int64_t(groups.pairs[work.y + t] / top_k) * hidden + chunk / 4 * 32;
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(run) + chunk % 4;
        *reinterpret_cast<uint4*>(to + grouped_place(work.z, t, chunk * 8)) = make_uint4(words[0], words[4], words[8], words[12]);
    }
}

// The ring of a block; `at` counts stages since the launch began.
struct WideRing {
    unsigned char* stages;
    uint64_t *full, *empty;
    uint32_t at = 0;
    __device__ unsigned char* stage() const { return stages + at % kWideStages * kWideStageBytes; }
    __device__ uint64_t* filled() const { return &full[at % kWideStages]; }
    __device__ uint64_t* emptied() const { return &empty[at % kWideStages]; }
    __device__ uint32_t parity() const { return at / kWideStages % 2; }
};

// What the copy engine brings of the weights of a product, 16 tiles at once: [tiles of all experts][words of a tile].
struct WideMaps {
    CUtensorMap codes, scales;
};

// The copying thread's part of a unit. Tiles behind an expert's last are others, whose results nobody stores.
__device__ inline void fetch_unit(const ExpertProduct& p, const WideMaps& maps, const int4& work, int first_tile, WideRing& ring) {
    const int columns = wide_columns(work.z), tile = work.x * p.tiles + first_tile;
    const Bf16* tokens = p.x + work.y * p.stride;
    const uint32_t bytes = uint32_t(work.z * 128);
    for (int block = 0; block < p.depth; ++block, ++ring.at) {
        await_barrier(ring.emptied(), ring.parity() ^ 1);
        unsigned char* const stage = ring.stage();
        announce_bytes(ring.filled(), uint32_t(kWideTiles * (kFp4Codes + kFp4Scales)) + 2 * bytes);
        copy_box(stage + kWideTokenBytes, &maps.codes, block * (kFp4Codes / 4), tile, ring.filled());
        copy_box(stage + kWideScales, &maps.scales, block * (kFp4Scales / 4), tile, ring.filled());
#pragma unroll
        for (int half = 0; half < 2; ++half, tokens += work.z * 64) copy_bulk(stage + half * columns * 128, tokens, bytes, ring.filled());
    }
}

// Results of a warp's two tiles of 16 rows, `tile` (even) and the next: c[tile][4 n + i] of the matrix instruction. pairs, weights:
// of the tokens that the lane stores.
template <bool kFirst, int N>
__device__ inline void store_wide(const ExpertProduct& p, const int4& work, int tile, const int (&pairs)[N / 4], const float (&weights)[N / 4],
                                  const float (&c)[2][N]) {
    const int lane = threadIdx.x % kWarp, quad = lane % 4, count = work.z;
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
        const int t = n * 8 + lane / 4;  // behind the transposition
        uint32_t low[2], high[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if constexpr (kFirst) {
                float values[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    values[i] = swiglu(rounded<Bf16>(c[m][n * 4 + i]), rounded<Bf16>(c[m][n * 4 + 2 + i]), p.limit) *
                                __shfl_sync(kAllLanes, weights[n], (quad * 2 + i) * 4);
                low[m] = transpose_8x8(pack_bf16(values[0], values[1]));
            } else {
                low[m] = transpose_8x8(pack_bf16(c[m][n * 4], c[m][n * 4 + 1]));
                high[m] = transpose_8x8(pack_bf16(c[m][n * 4 + 2], c[m][n * 4 + 3]));
            }
        }
        if (t >= count) continue;
        if constexpr (kFirst) {
            const int column = tile / 4 * 32 + order_for_groups(tile % 4, quad * 2);  // the next tile's are the next two
            *reinterpret_cast<uint2*>(p.out + work.y * p.out_stride + grouped_place(count, t, column)) = make_uint2(low[0], low[1]);
        } else {
            Bf16* const to = p.out + int64_t(pairs[n]) * p.out_stride + tile * 16 + quad * 2;
#pragma unroll
            for (int m = 0; m < 2; ++m)
                *reinterpret_cast<uint32_t*>(to + m * 16) = low[m], *reinterpret_cast<uint32_t*>(to + m * 16 + 8) = high[m];
        }
    }
}

// A warp group's part of a unit with up to kColumns tokens: 128 rows, of which its warp w has the tiles 2 w and 2 w + 1 of 16 rows.
template <int kColumns, bool kFirst>
__device__ inline void multiply_unit(const ExpertProduct& p, const Groups& groups, const int4& work, int first_tile, WideRing& ring) {
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    const int local = warp * 2;
    float c[2][kColumns / 2] = {};
    uint32_t a[2][2][2][4] = {};  // [turn][rows][step]: 32 values of k are widened while the last 32 are multiplied
    uint64_t* before = nullptr;
    const auto multiply_block = [&](auto last) __attribute__((always_inline)) {
        await_barrier(ring.filled(), ring.parity());
        const unsigned char* const stage = ring.stage();
        uint4 bytes[2][2];
        uint32_t scale[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bytes[m][half] = *reinterpret_cast<const uint4*>(stage + kWideTokenBytes + (local + m) * kFp4Codes + half * 512 + lane * 16);
                scale[m][half] = *reinterpret_cast<const uint32_t*>(stage + kWideScales + (local + m) * kFp4Scales + half * 32 + lane / 4 * 4);
            }
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            auto& rows = a[unit % 2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                uint32_t low[4], high[4];
                Fp4Codes::widen(bytes[m][0], scale[m][0], unit, low);
                Fp4Codes::widen(bytes[m][1], scale[m][1], unit, high);
#pragma unroll
                for (int s = 0; s < 2; ++s)
                    rows[m][s][0] = low[2 * s], rows[m][s][1] = high[2 * s], rows[m][s][2] = low[2 * s + 1], rows[m][s][3] = high[2 * s + 1];
            }
            begin_group();
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const uint64_t b = matrix_of(stage + unit / 2 * (kColumns * 128) + (unit % 2 * 2 + s) * 32);
#pragma unroll
                for (int m = 0; m < 2; ++m) multiply_group(c[m], rows[m][s], b);
            }
            close_group();
            if (decltype(last)::value && unit == 3) {
                await_groups<0>();
            } else {
                await_groups<1>();  // the instructions before these have ended: their registers are free, and so is the stage before
#pragma unroll
                for (int m = 0; m < 2; ++m) settle(a[1 - unit % 2][m][0]), settle(a[1 - unit % 2][m][1]);
            }
            if (unit == 0 && before != nullptr && lane == 0) arrive(before);
        }
        before = ring.emptied();
        ++ring.at;
    };
    for (int block = 0; block < p.depth - 1; ++block) multiply_block(std::false_type());
    // The last wait stands right behind the instructions it is for (wide.cuh says why).
    multiply_block(std::true_type());
    settle(c[0]), settle(c[1]);
    __syncwarp();
    if (lane == 0) arrive(before);
    if (first_tile + local >= p.tiles) return;  // tiles are in eights
    int pairs[kColumns / 8];  // of the tokens that the lane stores: during the product there is no register for them
    float weights[kColumns / 8] = {};
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) pairs[n] = groups.pair(work.y + min(n * 8 + lane / 4, work.z - 1));
    if constexpr (kFirst) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) weights[n] = p.weights[pairs[n]];
    }
    store_wide<kFirst>(p, work, first_tile + local, pairs, weights, c);
}

// Unit u: block u / row_blocks of the plan; neighbours share an expert.
template <bool kFirst>
__global__ void __launch_bounds__(kWideBlockThreads, 1)
    wide_experts(const ExpertProduct p, const Groups groups, const __grid_constant__ WideMaps maps) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[kWideStages], empty[kWideStages];
    if (threadIdx.x < kWideStages) {
        init_barrier(&full[threadIdx.x], 1);
        init_barrier(&empty[threadIdx.x], kWideWarps);
        publish_barriers();
    }
    release_launch();
    await_launch();
    __syncthreads();
    WideRing ring{memory + (1024 - shared_address(memory) % 1024) % 1024, full, empty};
    const int row_blocks = (p.tiles + kWideTiles - 1) / kWideTiles, units = *groups.count * row_blocks;
    const auto for_units = [&](const auto& body) {
        for (int unit = int(blockIdx.x); unit < units; unit += int(gridDim.x)) {
            const int4 work = groups.blocks[unit / row_blocks];
            if (work.z > 0) body(work, unit % row_blocks * kWideTiles);
        }
    };
    if (threadIdx.x / kWarp >= kWideWarps) {
        shrink_registers<kCopierRegisters>();
        if (threadIdx.x == kWideWarps * kWarp)
            for_units([&](const int4& work, int first_tile) { fetch_unit(p, maps, work, first_tile, ring); });
        return;
    }
    grow_registers<kMultiplierRegisters>();
    for_units([&](const int4& work, int first_tile) {
        switch (wide_columns(work.z)) {
            case 32: return multiply_unit<32, kFirst>(p, groups, work, first_tile, ring);
            case 56: return multiply_unit<56, kFirst>(p, groups, work, first_tile, ring);
            case 64: return multiply_unit<64, kFirst>(p, groups, work, first_tile, ring);
            case 72: return multiply_unit<72, kFirst>(p, groups, work, first_tile, ring);
            case 80: return multiply_unit<80, kFirst>(p, groups, work, first_tile, ring);
            default: return multiply_unit<96, kFirst>(p, groups, work, first_tile, ring);
        }
    });
}

inline bool describe_wide(WideMaps& maps, const ExpertProduct& p, int64_t experts) {
    const auto of_tiles = [&](CUtensorMap& map, const uint8_t* data, int block_bytes) {
        const cuuint64_t sizes[] = {cuuint64_t(p.depth) * block_bytes / 4, cuuint64_t(experts * p.tiles)};
        const cuuint64_t stride[] = {cuuint64_t(p.depth) * block_bytes};
        const cuuint32_t box[] = {cuuint32_t(block_bytes / 4), kWideTiles};
        return describe(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, data, sizes, stride, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    return of_tiles(maps.codes, p.codes, kFp4Codes) && of_tiles(maps.scales, p.scales, kFp4Scales);
}

}  // namespace cedar::cuda
