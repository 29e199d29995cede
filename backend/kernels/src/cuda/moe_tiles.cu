// SPDX-License-Identifier: Apache-2.0
// The experts' products for many tokens per expert.
#include "moe.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

namespace cedar::cuda {
namespace {

constexpr int kRowTiles = 2, kStages = 3;

// Block (b, i): rows [256 i, 256 i + 256) times the tokens of block b of the plan; neighbours share an expert.
template <bool kFirst>
__global__ void __launch_bounds__(kTileThreads, 2) tile_experts(const ExpertProduct p, const Groups groups) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int row_blocks = (p.tiles + kTileWarps * kRowTiles - 1) / (kTileWarps * kRowTiles);
    const int number = int(blockIdx.x) / row_blocks, first_tile = int(blockIdx.x) % row_blocks * kTileWarps * kRowTiles;
    if (number >= *groups.count) return;
    const int4 work = groups.blocks[number];
    if (work.z == 0) return;
    const int64_t before = int64_t(work.x) * p.tiles * p.depth;
    const Fp4Codes weight{p.codes + before * kFp4Codes, p.scales + before * kFp4Scales, p.tiles, p.depth};
    float c[kRowTiles][8][4] = {};
    tile_product<kRowTiles, kStages, 1>(
        weight, first_tile, p.depth, work.z, [&](int t) { return p.x + p.row_of(groups, work.y + t) * p.stride; }, memory, c);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
        const int at = first_tile + warp * kRowTiles + r;
        if (at >= p.tiles) continue;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = n * 8 + quad * 2 + i;
                if (column < work.z) store_result<kFirst>(p, groups, work.y + column, at, group, c[r][n][i], c[r][n][2 + i]);
            }
    }
}

// ---- on Hopper, in builds with CEDAR_WIDE_WGMMA ----

constexpr int kWideStages = 4, kWideThreads = 256, kWideRowTiles = 16;
constexpr int kWideWarpBytes = 2 * (kFp4Codes + 4 * kFp4Scales);  // of a stage: a warp's two tiles of codes, scales once per lane
constexpr int kWideStageBytes = 8 * kWideWarpBytes + kGroupTokens * kFp4Depth * int(sizeof(Bf16));
static_assert(kWideStageBytes % 1024 == 0);

// 256 rows times up to kColumns tokens, a multiple of 8. A warp group has 128 rows: its warp w the tiles w and 4 + w of 16 rows.
// Tokens lie in two matrices of 64 values of k each. Neighbours of a token's values are ordered as the codes are
// (order_for_groups).
template <int kColumns, bool kFirst>
__device__ inline void wide_expert(const ExpertProduct& p, const Groups& groups, const int4& work, int first_tile, unsigned char* memory) {
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp, count = work.z;
    const int tile = first_tile + warp / 4 * 8 + warp % 4;
    const int64_t before = int64_t(work.x) * p.tiles * p.depth;
    const Fp4Codes weight{p.codes + before * kFp4Codes, p.scales + before * kFp4Scales, p.tiles, p.depth};
    const uint8_t *codes[2][2], *scales[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            codes[m][half] = weight.codes_of(tile + m * 4, half, lane), scales[m][half] = weight.scales_of(tile + m * 4, half, lane);
    constexpr int kCopies = kColumns * 16 / kWideThreads;  // a thread copies the same chunk of tokens that are 16 apart
    const Bf16* tokens[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
        const int t = thread / 16 + i * 16;
        tokens[i] = p.x + p.row_of(groups, work.y + (t < count ? t : count - 1)) * p.stride + thread % 16 * 8;
    }
    const auto fetch = [&](int block) {
        if (block < p.depth) {
            unsigned char* stage = memory + block % kWideStages * kWideStageBytes;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int t = thread / 16 + i * 16;
                copy_16(stage + thread % 16 / 8 * (kColumns * 128) + t * 128 + (thread % 8 ^ t % 8) * 16, tokens[i] + int64_t(block) * kFp4Depth);
            }
            unsigned char* own = stage + kGroupTokens * 256 + warp * kWideWarpBytes;
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    copy_16(own + m * kFp4Codes + half * 512 + lane * 16, codes[m][half] + int64_t(block) * kFp4Codes);
                    copy_4(own + 2 * kFp4Codes + m * 256 + half * 128 + lane * 4, scales[m][half] + int64_t(block) * kFp4Scales);
                }
        }
        close_copies();
    };
    for (int block = 0; block < kWideStages - 2; ++block) fetch(block);

    float c[2][kColumns / 2] = {};
    uint32_t a[2][2][4] = {};  // by turns, so that one step's rows are widened while the last one's are multiplied
    for (int block = 0; block < p.depth; ++block) {
        await_copies<kWideStages - 3>();
        publish_shared();
        // the stage is complete; and the instructions that read the one before the last have ended, for all warps
        __syncthreads();
        fetch(block + kWideStages - 2);
        const unsigned char* stage = memory + block % kWideStages * kWideStageBytes;
        const unsigned char* own = stage + kGroupTokens * 256 + warp * kWideWarpBytes;
        uint4 bytes[2][2];
        uint32_t scale[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bytes[m][half] = *reinterpret_cast<const uint4*>(own + m * kFp4Codes + half * 512 + lane * 16);
                scale[m][half] = *reinterpret_cast<const uint32_t*>(own + 2 * kFp4Codes + m * 256 + half * 128 + lane * 4);
            }
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            uint32_t low[2][4], high[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                Fp4Codes::widen(bytes[m][0], scale[m][0], unit, low[m]);
                Fp4Codes::widen(bytes[m][1], scale[m][1], unit, high[m]);
            }
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int step = unit * 2 + s;
                const uint64_t b = matrix_of(stage + step / 4 * (kColumns * 128) + step % 4 * 32);
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    a[s][m][0] = low[m][2 * s], a[s][m][1] = high[m][2 * s], a[s][m][2] = low[m][2 * s + 1], a[s][m][3] = high[m][2 * s + 1];
                begin_group();
#pragma unroll
                for (int m = 0; m < 2; ++m) multiply_group(c[m], a[s][m], b);
                close_group();
                await_groups<1>();
                settle(a[1 - s][0]), settle(a[1 - s][1]);
            }
        }
    }
    await_groups<0>();  // c is read behind branches alone, and so not ahead of this (wide.cuh says more)
    settle(c[0]), settle(c[1]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        if (tile + m * 4 >= p.tiles) continue;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = n * 8 + lane % 4 * 2 + i;
                if (column < count) store_result<kFirst>(p, groups, work.y + column, tile + m * 4, lane / 4, c[m][n * 4 + i], c[m][n * 4 + 2 + i]);
            }
    }
}

template <bool kFirst>
__global__ void __launch_bounds__(kWideThreads, 1) wide_experts(const ExpertProduct p, const Groups groups) {
    extern __shared__ __align__(16) unsigned char memory[];
    unsigned char* const stages = memory + (1024 - __cvta_generic_to_shared(memory) % 1024) % 1024;
    const int row_blocks = (p.tiles + kWideRowTiles - 1) / kWideRowTiles;
    const int number = int(blockIdx.x) / row_blocks, first_tile = int(blockIdx.x) % row_blocks * kWideRowTiles;
    if (number >= *groups.count) return;
    const int4 work = groups.blocks[number];
    if (work.z == 0) return;
    if (work.z <= 32)
        wide_expert<32, kFirst>(p, groups, work, first_tile, stages);
    else if (work.z <= 64)
        wide_expert<64, kFirst>(p, groups, work, first_tile, stages);
    else if (work.z <= 80)
        wide_expert<80, kFirst>(p, groups, work, first_tile, stages);
    else
        wide_expert<96, kFirst>(p, groups, work, first_tile, stages);
}

}  // namespace

template <bool kFirst>
cudaError_t multiply_tiles(const ExpertProduct& p, const Groups& groups, int64_t most_blocks, bool wide, void* stream) {
    if constexpr (kWideBuilt)
        if (wide) {
            const dim3 grid(unsigned((p.tiles + kWideRowTiles - 1) / kWideRowTiles * most_blocks));
            return launch(wide_experts<kFirst>, grid, kWideThreads, size_t(kWideStages) * kWideStageBytes + 1024, 1, stream, p, groups);
        }
    const int64_t row_blocks = (p.tiles + kTileWarps * kRowTiles - 1) / (kTileWarps * kRowTiles);
    const size_t shared = size_t(kStages) * tile_stage_bytes<Fp4Codes, kRowTiles>();
    return launch(tile_experts<kFirst>, dim3(unsigned(row_blocks * most_blocks)), kTileThreads, shared, 1, stream, p, groups);
}

template cudaError_t multiply_tiles<true>(const ExpertProduct&, const Groups&, int64_t, bool, void*);
template cudaError_t multiply_tiles<false>(const ExpertProduct&, const Groups&, int64_t, bool, void*);

}  // namespace cedar::cuda
