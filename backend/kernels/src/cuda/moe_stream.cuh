// SPDX-License-Identifier: Apache-2.0
// The experts' products for few tokens per expert. Blocks stay and take units: 128 rows of an expert over the whole of k, times a
// block of the plan; or 64 or 128 of the shared expert, times as many tokens. One warp orders copies of weights and tokens into a
// ring of stages, through the ends of units and from before the launch that it waits for has ended; each of the others has 16 of
// the rows, which it widens in registers and multiplies.
#pragma once

#include "moe_ring.cuh"

namespace cedar::cuda {

// c[n] += a warp's 16 rows times the tokens of column group n, over a unit of a routed expert.
template <int N, int NC>
__device__ inline void multiply_routed(StreamReader<NC>& reader, int depth, int count, float (&c)[N][4]) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const uint32_t codes = warp * kStreamDepth * kFp4Codes + lane * 16, scales = kStreamScales + warp * kStreamDepth * kFp4Scales + group * 4;
    uint32_t tokens[N];  // columns that have no token repeat the last one
#pragma unroll
    for (int n = 0; n < N; ++n) tokens[n] = kStreamTokens + min(n * 8 + group, count - 1) * kTokenPitch + quad * 16;
    int left = depth;
    reader.read((depth + kStreamDepth - 1) / kStreamDepth, [&](uint32_t stage) __attribute__((always_inline)) {
#pragma unroll
        for (int part = 0; part < kStreamDepth; ++part) {
            if (part > 0 && part >= left) break;
            const uint32_t from = stage + codes + part * kFp4Codes, scale = stage + scales + part * kFp4Scales;
            const uint4 low = shared_16(from), high = shared_16(from + kFp4Codes / 2);
            const uint32_t low_scale = shared_4(scale), high_scale = shared_4(scale + kFp4Scales / 2);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                uint32_t l[4], h[4];
                Fp4Codes::widen(low, low_scale, step, l);
                Fp4Codes::widen(high, high_scale, step, h);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const uint4 b = shared_16(stage + tokens[n] + part * kTokenBytes + step * 64);
                    multiply_bf16(c[n], l[0], h[0], l[1], h[1], b.x, b.y);
                    multiply_bf16(c[n], l[2], h[2], l[3], h[3], b.z, b.w);
                }
            }
        }
        left -= kStreamDepth;
    });
}

// The same of the shared expert. tile: of the warp.
template <bool kFirst, int N, int NC, class Shared>
__device__ inline void multiply_shared(StreamReader<NC>& reader, const Shared& weight, int tile, int depth, int count, float (&c)[N][4]) {
    constexpr int kBlock = Shared::kBlock, kUnits = Shared::kUnits;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const uint32_t row = (warp * (kFirst ? 8 : 16) + group) * kSharedBytes + quad * 16;
    uint32_t tokens[N];
#pragma unroll
    for (int n = 0; n < N; ++n) tokens[n] = kStreamTokens + min(n * 8 + group, count - 1) * kSharedPitch + quad * kUnits * 16;
    const uint8_t* const scales[2] = {weight.scales_of(tile, 0, lane), weight.scales_of(tile, 1, lane)};
    const int stages = depth * kFp4Depth / (2 * kBlock);
    uint32_t next[2][2] = {};  // of the halves of rows and of k, a stage ahead
    int number = 0;
    const auto load_scales = [&] {
        if constexpr (Shared::kScaleBytes == 1) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int part = 0; part < 2; ++part) next[half][part] = __ldg(scales[half] + (number * 2 + part) * Shared::kScaleStep);
        }
    };
    if (warp >= kSharedTiles<NC>) return reader.read(stages, [](uint32_t) {});
    load_scales();
    reader.read(stages, [&](uint32_t stage) __attribute__((always_inline)) {
        uint32_t scale[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int part = 0; part < 2; ++part) scale[half][part] = lifted_scale(next[half][part]);
        if (number + 1 < stages) ++number;
        load_scales();
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const uint32_t from = stage + row + part * 64;
            const uint4 low = shared_16(from), high = shared_16(from + (kFirst ? kSharedRows<NC> : 8) * kSharedBytes);
#pragma unroll
            for (int step = 0; step < kUnits; ++step) {
                uint32_t l[4], h[4];
                Shared::widen(low, scale[0][part], step, l);
                Shared::widen(high, scale[1][part], step, h);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const uint4 b = shared_16(stage + tokens[n] + part * kBlock * 2 + step * 16);
                    multiply_bf16(c[n], l[0], h[0], l[1], h[1], b.x, b.y);
                    multiply_bf16(c[n], l[2], h[2], l[3], h[3], b.z, b.w);
                }
            }
        }
    });
}

// A multiplying warp's rows of a unit with up to 8 N tokens.
template <int N, int NC, bool kFirst, class Shared>
__device__ inline void multiply_stream(StreamReader<NC>& reader, const StreamRing<NC>& ring, const ExpertProduct& p, const ExpertProduct& shared,
                                       const Shared& weight) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const StreamUnit<NC>& unit = ring.units[reader.slot];
    const int place = unit.place, count = unit.count, tile = unit.tile + warp;
    const bool routed = unit.routed;
    int pairs[N][2];  // of the columns whose results the lane gets
    float weights[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) pairs[n][i] = unit.pairs[n * 8 + quad * 2 + i], weights[n][i] = unit.weights[n * 8 + quad * 2 + i];
    float c[N][4] = {};
    if (routed)
        multiply_routed(reader, p.depth, count, c);
    else
        multiply_shared<kFirst>(reader, weight, tile, p.depth, count, c);
    if (!routed && warp >= kSharedTiles<NC>) return;
    Bf16* const out = routed ? p.out : shared.out;
    const int64_t stride = routed ? p.out_stride : shared.out_stride;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = n * 8 + quad * 2 + i;
            if (column < count)
                store_pair<kFirst>(out + int64_t(kFirst ? place + column : pairs[n][i]) * stride, weights[n][i], p.limit, tile, group, c[n][i],
                                   c[n][2 + i]);
        }
}

// Units [0, shared_units) are the shared expert's, of all its rows times 8 NC tokens each; behind them the routed experts'. A block
// has that of its number, and then, where there is a plan, whichever is next; where there is none, blocks have one more each in
// the opposite order, and so on by turns. plan_blocks: of a step without a plan.
template <int NC, bool kFirst, class Shared>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks<NC>)
    stream_experts(const ExpertProduct p, const Groups groups, const __grid_constant__ StreamMaps maps, const ExpertProduct shared,
                   const Shared shared_weight, int experts, int rows, int shared_units, int plan_blocks) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint64_t barriers[2 * kRingStages<NC>];
    __shared__ StreamUnit<NC> units[kRingStages<NC>];
    if (threadIdx.x < kRingStages<NC>) {
        init_barrier(&barriers[threadIdx.x], 1 + kWarp);  // weights, and each copying lane
        init_barrier(&barriers[kRingStages<NC> + threadIdx.x], kStreamWarps);
        publish_barriers();
    }
    if (threadIdx.x == kStreamWarps * kWarp) {
        prefetch_map(&maps.codes), prefetch_map(&maps.scales), prefetch_map(&maps.shared);
    }
    __syncthreads();
    const StreamRing<NC> ring{memory, units, barriers, barriers + kRingStages<NC>};
    if (threadIdx.x / kWarp < kStreamWarps) {
        StreamReader<NC> reader(ring);
        for (;;) {
            reader.await();
            const int count = units[reader.slot].count;
            if (count == 0) return;
            if (NC == 1 || count <= 8)
                multiply_stream<1, NC, kFirst>(reader, ring, p, shared, shared_weight);
            else if (NC == 2 || count <= 16)
                multiply_stream<NC == 1 ? 1 : 2, NC, kFirst>(reader, ring, p, shared, shared_weight);
            else
                multiply_stream<NC, NC, kFirst>(reader, ring, p, shared, shared_weight);
        }
    }

    StreamCopier<NC, kFirst, Shared> copier{
        p, shared, groups, maps, ring, shared_weight, experts, rows, shared_units, kept(shared_address(memory) + kStreamTokens)};
    const bool planned = groups.pairs != nullptr;
    const auto count_units = [&] { return shared_units + (planned ? __ldcg(groups.count) : plan_blocks) * (p.tiles / kStreamWarps); };
    int unit = int(blockIdx.x), early = 0;  // stages whose weights have been ordered
    const auto begin_first = [&] {
        if (!copier.begin(unit)) return false;
        for (; early < kRingStages<NC> && early < copier.stages; ++early) copier.order_weights(early, early);
        copier.tell();
        for (int stage = 0; stage < early; ++stage) copier.announce(stage);
        return true;
    };
    const auto order = [&] {
        for (int number = 0; number < copier.stages; ++number, copier.next()) {
            if (early > 0) {
                --early;
            } else {
                copier.await_empty();
                copier.order_weights(number, copier.slot);
                if (number == 0) copier.tell();
                copier.announce(copier.slot);
            }
            if (copier.routed)
                copier.template order_tokens<true>(number);
            else
                copier.template order_tokens<false>(number);
        }
    };
    // The first product's launch waits for the plan, which the shared expert does not need: its tokens are there when the plan begins.
    // Without a plan it waits for tokens too. The second's begins when the plan or the ids are there, and waits for the first's results.
    if (!kFirst) release_launch();
    const bool ahead = !kFirst || unit < shared_units;
    bool begun = ahead && unit < (unit < shared_units ? shared_units : count_units()) && begin_first();
    const bool has_tokens = kFirst && planned && begun;
    if (has_tokens) order();
    await_launch();
    if (kFirst) release_launch();
    const int all = count_units();
    if (!ahead) begun = unit < all && begin_first();
    if (begun && !has_tokens) order();
    const auto take = [&] {
        int next = unit + 2 * int(gridDim.x - unit % gridDim.x) - 1;
        if (planned && threadIdx.x % kWarp == 0) next = int(gridDim.x) + atomicAdd(groups.taken + !kFirst, 1);
        return next;
    };
    unit = __shfl_sync(kAllLanes, take(), 0);
    while (unit < all) {
        const int next = take();
        if (copier.begin(unit)) order();
        unit = __shfl_sync(kAllLanes, next, 0);
    }
    copier.end();
}

template <int NC>
bool describe_stream(StreamMaps& maps, const ExpertProduct& p, int64_t experts, const SharedExpert& shared) {
    const auto of_tiles = [&](CUtensorMap& map, CUtensorMapDataType type, int value_bytes, const uint8_t* data, int block_bytes) {
        const cuuint64_t sizes[] = {cuuint64_t(p.depth) * block_bytes / value_bytes, cuuint64_t(experts * p.tiles)};
        const cuuint64_t stride[] = {cuuint64_t(p.depth) * block_bytes};
        const cuuint32_t box[] = {cuuint32_t(kStreamDepth * block_bytes / value_bytes), kStreamWarps};
        return describe(map, type, 2, data, sizes, stride, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    const cuuint64_t row_bytes = cuuint64_t(shared.in_dim) * (shared.type == CEDAR_BF16 ? 2 : 1), sizes[] = {row_bytes, cuuint64_t(shared.out_dim)};
    const cuuint32_t box[] = {kSharedBytes, kSharedRows<NC>};
    return of_tiles(maps.codes, CU_TENSOR_MAP_DATA_TYPE_UINT64, 8, p.codes, kFp4Codes) &&
           of_tiles(maps.scales, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, p.scales, kFp4Scales) &&
           describe(maps.shared, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, shared.weight, sizes, &row_bytes, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace cedar::cuda
