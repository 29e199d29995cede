// SPDX-License-Identifier: Apache-2.0
// The experts' products for many tokens per expert.
#include <algorithm>
#include <type_traits>

#include "moe_shared.cuh"
#include "moe_wide.cuh"

namespace cedar::cuda {
namespace {

constexpr int kRowTiles = 2, kStages = 3, kBlockTiles = kTileWarps * kRowTiles;

// Block (b, i): rows [256 i, 256 i + 256) times 64 tokens b of the shared expert, for the first shared_blocks b; then times those of
// a block of the plan. Neighbours share an expert.
template <bool kFirst, class Shared>
__global__ void __launch_bounds__(kTileThreads, 2) tile_experts(const ExpertProduct p, const Groups groups, const ExpertProduct shared,
                                                                const Shared shared_weight, int rows, int shared_blocks) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int row_blocks = (p.tiles + kBlockTiles - 1) / kBlockTiles;
    const int number = int(blockIdx.x) / row_blocks - shared_blocks, first_tile = int(blockIdx.x) % row_blocks * kBlockTiles;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const auto multiply = [&](const ExpertProduct& q, const auto& weight, int blocks, int first, int count) {
        float c[kRowTiles][8][4] = {};
        tile_product<kRowTiles, kStages, 1>(
            weight, first_tile, blocks, count, [&](int t) { return q.x + q.row_of(groups, first + t) * q.stride; }, memory, c);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const int at = first_tile + warp * kRowTiles + r;
            if (at >= p.tiles) continue;
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = n * 8 + quad * 2 + i;
                    if (column < count) store_result<kFirst>(q, groups, first + column, at, group, c[r][n][i], c[r][n][2 + i]);
                }
        }
    };
    if (number < 0) {
        const int first = (number + shared_blocks) * kTileTokens;
        multiply(shared, shared_weight, int(p.depth * kFp4Depth / Shared::kBlock), first, min(kTileTokens, rows - first));
    } else if (number < *groups.count) {
        const int4 work = groups.blocks[number];
        const int64_t before = int64_t(work.x) * p.tiles * p.depth;
        const Fp4Codes weight{p.codes + before * kFp4Codes, p.scales + before * kFp4Scales, p.tiles, p.depth};
        if (work.z > 0) multiply(p, weight, p.depth, work.y, work.z);
    }
}

}  // namespace

cudaError_t multiprocessors(int* count) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) : error;
}

template <bool kFirst>
cudaError_t multiply_tiles(const ExpertProduct& p, const Groups& groups, int64_t most_blocks, const ExpertProduct& q,
                           const SharedExpert& shared, void* stream) {
    const int64_t row_blocks = (p.tiles + kBlockTiles - 1) / kBlockTiles;
    const int shared_blocks = (shared.rows + kTileTokens - 1) / kTileTokens;
    return with_shared_rows<kFirst>(shared, [&](const auto& rows) {
        using Shared = std::decay_t<decltype(rows)>;
        const size_t bytes = size_t(kStages) * std::max(tile_stage_bytes<Fp4Codes, kRowTiles>(), tile_stage_bytes<Shared, kRowTiles>());
        return launch(tile_experts<kFirst, Shared>, dim3(unsigned(row_blocks * (most_blocks + shared_blocks))), kTileThreads, bytes, 1, stream, p,
                      groups, q, rows, shared.rows, shared_blocks);
    });
}

template <bool kFirst>
cudaError_t multiply_wide(const ExpertProduct& p, const Groups& groups, int64_t experts, void* stream) {
    if constexpr (kWideBuilt) {
        int count = 0;
        const cudaError_t error = multiprocessors(&count);
        if (error != cudaSuccess) return error;
        WideMaps maps;
        if (!describe_wide(maps, p, experts)) return cudaErrorNotSupported;
        return launch(wide_experts<kFirst>, dim3(unsigned(count)), kWideBlockThreads, size_t(kWideStages) * kWideStageBytes + 1024, 1, stream, p,
                      groups, maps);
    }
    return cudaErrorNotSupported;
}

cudaError_t group_for_wide(const Bf16* x, Bf16* out, const Groups& groups, int64_t most_blocks, int top_k, int64_t hidden, void* stream) {
    return launch(group_tokens, dim3(unsigned(most_blocks), 8), 256, 0, 1, stream, x, out, groups, top_k, hidden);
}

template cudaError_t multiply_tiles<true>(const ExpertProduct&, const Groups&, int64_t, const ExpertProduct&, const SharedExpert&, void*);
template cudaError_t multiply_tiles<false>(const ExpertProduct&, const Groups&, int64_t, const ExpertProduct&, const SharedExpert&, void*);
template cudaError_t multiply_wide<true>(const ExpertProduct&, const Groups&, int64_t, void*);
template cudaError_t multiply_wide<false>(const ExpertProduct&, const Groups&, int64_t, void*);

}  // namespace cedar::cuda
