// SPDX-License-Identifier: Apache-2.0
// The experts' products for few tokens per expert. Every warp of a grid that stays has a list of units, 16 rows of an expert over
// the whole of k times up to 8 tokens, and a ring in shared memory through which their weights come as one stream: the copies
// run ahead of the sums over the ends of units, and from before the launch that they wait for has ended.
#pragma once

#include "moe_bulk.cuh"
#include "moe_shared.cuh"
#include "stream.cuh"

namespace cedar::cuda {

#ifndef CEDAR_MOE_STAGES
#define CEDAR_MOE_STAGES 2
#endif
#ifndef CEDAR_MOE_BLOCKS
#define CEDAR_MOE_BLOCKS 2
#endif
#ifndef CEDAR_MOE_NEIGHBOURS
#define CEDAR_MOE_NEIGHBOURS 4
#endif

constexpr int kStreamWarps = 8, kStreamBlocks = CEDAR_MOE_BLOCKS;  // of a block; per multiprocessor
constexpr int kRingStages = CEDAR_MOE_STAGES, kRingDepth = 4;      // of a warp's ring; blocks of 128 values in a stage
constexpr int kRingStageBytes = kRingDepth * (kFp4Codes + kFp4Scales), kRingBytes = kRingStages * kRingStageBytes;
constexpr int kStreamedTokens = 8, kSharedStages = 8;
constexpr int kNeighbours = CEDAR_MOE_NEIGHBOURS;  // warps of a block that have units side by side
static_assert(kRingDepth % 2 == 0 && kRingStageBytes % 128 == 0 && kSharedStages * 1024 <= kRingBytes);
static_assert(kStreamWarps % kNeighbours == 0);

// A warp's place in its list of units. They are dealt out by turns, there and back, so that who has one of the longer first ones
// has none of the last; a few neighbours, who read the same tokens, go to one block, and the next to the next block.
struct Units {
    int all, shared, warps, me;
    __device__ int operator()(int round) const { return round * warps + (round % 2 ? warps - 1 - me : me); }
};

// Block of pairs and tile of a routed unit; false where the expert does not exist.
__device__ inline bool unit_work(const ExpertProduct& p, const Groups& groups, int experts, int routed, int4* work, int* tile) {
    *work = groups.block(routed / p.tiles);
    *tile = routed % p.tiles;
    return work->z > 0 && work->x >= 0 && work->x < experts;
}

// A warp's stream of weights: lane 0 orders, all lanes know how far it is.
struct WeightStream {
    unsigned char* ring;
    uint64_t* full;  // [kRingStages]
    uint64_t policy;
    const uint8_t *codes = nullptr, *scales = nullptr;
    int round, block = 0, left = 0, slot = 0;  // of the next copy: unit, block of k and blocks left in it, stage

    // Order the next stage, if there is one.
    __device__ void advance(const ExpertProduct& p, const Groups& groups, int experts, const Units& units) {
        while (left == 0) {
            const int unit = units(round);
            if (unit >= units.all) return;
            int4 work;
            int tile;
            ++round;
            if (!unit_work(p, groups, experts, unit - units.shared, &work, &tile)) continue;
            const int64_t before = (int64_t(work.x) * p.tiles + tile) * p.depth;
            codes = p.codes + before * kFp4Codes, scales = p.scales + before * kFp4Scales;
            left = p.depth;
        }
        const int count = left < kRingDepth ? left : kRingDepth;
        if (threadIdx.x % kWarp == 0) {
            unsigned char* stage = ring + slot * kRingStageBytes;
            announce_bytes(&full[slot], uint32_t(count * (kFp4Codes + kFp4Scales)));
            copy_bulk(stage, codes, uint32_t(count * kFp4Codes), &full[slot], policy);
            copy_bulk(stage + kRingDepth * kFp4Codes, scales, uint32_t(count * kFp4Scales), &full[slot], policy);
        }
        codes += count * kFp4Codes, scales += count * kFp4Scales;
        left -= count;
        slot = slot + 1 == kRingStages ? 0 : slot + 1;
    }
};

// Units [0, shared_units) are the shared expert's: tiles of rows, times 8 NT tokens each; behind them the routed experts'.
// plan_blocks: of a step without a plan.
template <int NT, bool kFirst, class Shared>
__global__ void __launch_bounds__(kStreamWarps* kWarp, kStreamBlocks)
    stream_experts(const ExpertProduct p, const Groups groups, const ExpertProduct shared, const Shared shared_weight, int experts, int rows,
                   int shared_units, int plan_blocks) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint64_t barriers[kStreamWarps][kRingStages];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    unsigned char* const ring = memory + warp * kRingBytes;
    uint64_t* const full = barriers[warp];
    if (lane < kRingStages) init_barrier(&full[lane], 1);
    publish_barriers();
    __syncwarp();
    const int me = (warp / kNeighbours * int(gridDim.x) + int(blockIdx.x)) * kNeighbours + warp % kNeighbours;
    Units units{shared_units, shared_units, int(gridDim.x) * kStreamWarps, me};
    int round = 0;

    const auto multiply_shared = [&] {
        for (; units(round) < shared_units; ++round) {
            const int tile = units(round) % p.tiles, first = units(round) / p.tiles * NT * 8, count = min(NT * 8, rows - first);
            const Bf16* tokens[NT];  // columns that have no token repeat the last one
#pragma unroll
            for (int n = 0; n < NT; ++n) tokens[n] = shared.x + int64_t(first + min(n * 8 + group, count - 1)) * shared.stride;
            float c[NT][4] = {};
            stream_tile<NT, kSharedStages, 1>(shared_weight, tile, 0, int(p.depth * kFp4Depth / Shared::kBlock), tokens, ring, c);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = n * 8 + quad * 2 + i;
                    if (column < count) store_result<kFirst>(shared, groups, first + column, tile, group, c[n][i], c[n][2 + i]);
                }
            __syncwarp();  // all lanes have read the ring
        }
    };
    WeightStream weights{ring, full, read_once_policy()};
    const auto start = [&] {
        units.all = shared_units + (groups.pairs != nullptr ? __ldcg(groups.count) : plan_blocks) * p.tiles;
        weights.round = round;
        for (int stage = 0; stage < kRingStages; ++stage) weights.advance(p, groups, experts, units);
    };
    // The first product's launch waits for the plan, which the shared expert does not need; the second's begins when the plan is
    // there, and waits for the first's results.
    if constexpr (kFirst) {
        if (groups.pairs == nullptr) release_launch();  // there is no plan
        multiply_shared();
        await_launch();
        release_launch();
    } else {
        release_launch();
        if (units(0) >= shared_units) start();
        await_launch();
        multiply_shared();
    }
    if (kFirst || round > 0) {
        release_shared();  // to the copies: other ones were here before
        __syncwarp();
        start();
    }

    int slot = 0;
    uint32_t parity = 0;
    for (; units(round) < units.all; ++round) {
        int4 work;
        int tile;
        if (!unit_work(p, groups, experts, units(round) - shared_units, &work, &tile)) continue;
        const Bf16* token = p.x + p.row_of(groups, work.y + min(group, work.z - 1)) * p.stride + quad * 8;
        float c[4] = {};
        uint4 b[2][4];  // by turns, a block ahead
        const auto load_tokens = [&](int turn) {
#pragma unroll
            for (int unit = 0; unit < 4; ++unit) b[turn][unit] = *reinterpret_cast<const uint4*>(token + unit * 32);
            token += kFp4Depth;
        };
        load_tokens(0);
        for (int block = 0; block < p.depth; block += kRingDepth) {
            await_barrier(&full[slot], parity);
            const unsigned char* stage = ring + slot * kRingStageBytes;
#pragma unroll
            for (int part = 0; part < kRingDepth; ++part) {
                if (block + part >= p.depth) break;
                const uint4 low = *reinterpret_cast<const uint4*>(stage + part * kFp4Codes + lane * 16);
                const uint4 high = *reinterpret_cast<const uint4*>(stage + part * kFp4Codes + 512 + lane * 16);
                const unsigned char* scales = stage + kRingDepth * kFp4Codes + part * kFp4Scales + group * 4;
                const uint32_t low_scale = *reinterpret_cast<const uint32_t*>(scales);
                const uint32_t high_scale = *reinterpret_cast<const uint32_t*>(scales + kFp4Scales / 2);
                if (block + part + 1 < p.depth) load_tokens(1 - part % 2);
#pragma unroll
                for (int unit = 0; unit < 4; ++unit) {
                    uint32_t l[4], h[4];
                    Fp4Codes::widen(low, low_scale, unit, l);
                    Fp4Codes::widen(high, high_scale, unit, h);
                    multiply_bf16(c, l[0], h[0], l[1], h[1], b[part % 2][unit].x, b[part % 2][unit].y);
                    multiply_bf16(c, l[2], h[2], l[3], h[3], b[part % 2][unit].z, b[part % 2][unit].w);
                }
            }
            __syncwarp();  // all lanes have read the stage
            weights.advance(p, groups, experts, units);
            slot = slot + 1 == kRingStages ? 0 : slot + 1;
            parity ^= uint32_t(slot == 0);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (quad * 2 + i < work.z) store_result<kFirst>(p, groups, work.y + quad * 2 + i, tile, group, c[i], c[2 + i]);
    }
}

}  // namespace cedar::cuda
