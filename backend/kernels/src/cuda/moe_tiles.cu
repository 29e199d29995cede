// SPDX-License-Identifier: Apache-2.0
// The experts' products for many tokens per expert.
#include "moe_wide.cuh"
#include "tiles.cuh"

namespace cedar::cuda {
namespace {

constexpr int kRowTiles = 2, kStages = 3, kBlockTiles = kTileWarps * kRowTiles;

// Block (b, i): rows [256 i, 256 i + 256) times the tokens of block b of the plan. Neighbours share an expert.
template <bool kFirst>
__global__ void __launch_bounds__(kTileThreads, 2) tile_experts(const ExpertProduct p, const Groups groups) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int row_blocks = (p.tiles + kBlockTiles - 1) / kBlockTiles;
    const int number = int(blockIdx.x) / row_blocks, first_tile = int(blockIdx.x) % row_blocks * kBlockTiles;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    if (number >= *groups.count) return;
    const int4 work = groups.blocks[number];
    const int first = work.y, count = work.z;
    if (count <= 0) return;
    const int64_t before = int64_t(work.x) * p.tiles * p.depth;
    const Fp4Codes weight{p.codes + before * kFp4Codes, p.scales + before * kFp4Scales, p.tiles, p.depth};
    float c[kRowTiles][8][4] = {};
    tile_product<kRowTiles, kStages, 1>(
        weight, first_tile, p.depth, count, [&](int t) { return p.x + p.row_of(groups, first + t) * p.stride; }, memory, c);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
        const int at = first_tile + warp * kRowTiles + r;
        if (at >= p.tiles) continue;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = n * 8 + quad * 2 + i;
                if (column < count) store_result<kFirst>(p, groups, first + column, at, group, c[r][n][i], c[r][n][2 + i]);
            }
    }
}

}  // namespace

cudaError_t multiprocessors(int* count) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) : error;
}

template <bool kFirst>
cudaError_t multiply_tiles(const ExpertProduct& p, const Groups& groups, int64_t most_blocks, void* stream) {
    const int64_t row_blocks = (p.tiles + kBlockTiles - 1) / kBlockTiles;
    constexpr size_t kBytes = size_t(kStages) * tile_stage_bytes<Fp4Codes, kRowTiles>();
    return launch(tile_experts<kFirst>, dim3(unsigned(row_blocks * most_blocks)), kTileThreads, kBytes, 1, false, stream, p, groups);
}

template <bool kFirst>
cudaError_t multiply_wide(const ExpertProduct& p, const Groups& groups, int64_t experts, void* stream) {
    if constexpr (kWideBuilt) {
        int count = 0;
        const cudaError_t error = multiprocessors(&count);
        if (error != cudaSuccess) return error;
        WideMaps maps;
        if (!describe_wide(maps, p, experts)) return cudaErrorNotSupported;
        return launch(wide_experts<kFirst>, dim3(unsigned(count)), kWideBlockThreads, size_t(kWideStages) * kWideStageBytes + 1024, 1, true, stream, p,
                      groups, maps);
    }
    return cudaErrorNotSupported;
}

cudaError_t group_for_wide(const Bf16* x, Bf16* out, const Groups& groups, int64_t most_blocks, int top_k, int64_t hidden, void* stream) {
    return launch(group_tokens, dim3(unsigned(most_blocks), 8), 256, 0, 1, true, stream, x, out, groups, top_k, hidden);
}

template cudaError_t multiply_tiles<true>(const ExpertProduct&, const Groups&, int64_t, void*);
template cudaError_t multiply_tiles<false>(const ExpertProduct&, const Groups&, int64_t, void*);
template cudaError_t multiply_wide<true>(const ExpertProduct&, const Groups&, int64_t, void*);
template cudaError_t multiply_wide<false>(const ExpertProduct&, const Groups&, int64_t, void*);

}  // namespace cedar::cuda
