// SPDX-License-Identifier: Apache-2.0
// The ring of stages in shared memory through which weights and tokens of units come (moe_stream.cuh): the warp that orders the
// copies, and where each of the others is.
#pragma once

#include "linear_tensor.cuh"
#include "moe_shared.cuh"

namespace cedar::cuda {

constexpr int kStreamWarps = 8, kStreamThreads = (kStreamWarps + 1) * kWarp;  // that multiply; of a block
// Blocks of a multiprocessor, for units with 8 NC tokens at most. Of very few tokens all units have a place at once, so that none
// is left over to run alone.
template <int NC>
constexpr int kStreamBlocks = NC == 1 ? 3 : 2;
constexpr int kStreamDepth = 2;  // blocks of 128 values of k in a stage of a routed expert
constexpr int kStreamScales = kStreamWarps * kStreamDepth * kFp4Codes, kStreamTokens = kStreamScales + kStreamWarps * kStreamDepth * kFp4Scales;
// Tokens lie so that the lanes which read two of them at a time meet different banks.
constexpr int kTokenBytes = kFp4Depth * int(sizeof(Bf16)), kTokenPitch = kStreamDepth * kTokenBytes + 64;
// Of the shared expert a stage has 128 bytes of each row, and as much of a token. Its rows have twice the bytes; where there is
// about one unit to a block, its units are half as many tiles, and take no longer than the others.
constexpr int kSharedBytes = 128, kSharedPitch = 256 + 16;
template <int NC>
constexpr int kSharedTiles = NC == 1 ? kStreamWarps / 2 : kStreamWarps;
template <int NC>
constexpr int kSharedRows = kSharedTiles<NC> * kFp4Rows / 2;  // of each of the two boxes of a stage
static_assert(2 * kSharedRows<2> * kSharedBytes <= kStreamScales && kSharedPitch <= kTokenPitch);

// The ring has as many stages as go into a block's share of 222 KiB.
template <int NC>
constexpr int kRingStageBytes = kStreamTokens + 8 * NC * kTokenPitch;
template <int NC>
constexpr int kRingStages = 222 * 1024 / kStreamBlocks<NC> / kRingStageBytes<NC>;
static_assert(kRingStageBytes<1> % 128 == 0 && kRingStageBytes<2> % 128 == 0 && kRingStageBytes<4> % 128 == 0);

// What the copy engine brings of the weights of a product: of kStreamWarps tiles, [tiles of all experts][values of a tile]; of
// kSharedRows rows of the shared expert, [rows][bytes].
struct StreamMaps {
    CUtensorMap codes, scales, shared;
};

// What those that multiply know of a unit; it lies beside the unit's first stage.
template <int NC>
struct StreamUnit {
    int place, count, tile, routed;  // count 0: there are no more
    int pairs[8 * NC];
    float weights[8 * NC];
};

template <int NC>
struct StreamRing {
    unsigned char* stages;
    StreamUnit<NC>* units;
    uint64_t *full, *empty;  // one behind the other
};

// Shared memory by addresses, which the compiler keeps instead of working them out anew in every stage.
__device__ inline uint32_t kept(uint32_t address) {
    uint32_t same;
    asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(address));
    return same;
}
__device__ inline uint4 shared_16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
__device__ inline uint32_t shared_4(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ inline void copy_16(uint32_t address, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
// What this thread has copied so counts as an arrival when it has landed.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The copying warp: a lane orders weights; eight have a token each at a time, of which they copy 16 bytes of a line.
template <int NC, bool kFirst, class Shared>
struct StreamCopier {
    static constexpr int kStageValues = 2 * Shared::kBlock;  // of k in a stage of the shared expert
    const ExpertProduct &p, &q;  // q: the shared expert's
    const Groups& groups;
    const StreamMaps& maps;
    const StreamRing<NC>& ring;
    const Shared& weight;
    int experts, rows, shared_units;
    uint32_t first_token;  // in the ring's first stage
    uint64_t policy = read_once_policy();
    int slot = 0;
    uint32_t parity = 0;
    // of the unit
    bool routed = false;
    int expert = 0, first_tile = 0, place = 0, count = 0, stages = 0;
    const Bf16* tokens[2 * NC] = {};  // (lane / 8) of each four

    // Whether the unit is one of an expert that exists. Its weights can be ordered from here on.
    __device__ bool begin(int unit) {
        routed = unit >= shared_units;
        if (routed) {
            const int row_blocks = p.tiles / kStreamWarps, number = unit - shared_units;
            first_tile = number % row_blocks * kStreamWarps;
            const int4 work = groups.block(number / row_blocks);
            expert = work.x, place = work.y, count = work.z;
            stages = (p.depth + kStreamDepth - 1) / kStreamDepth;
            return count > 0 && expert >= 0 && expert < experts;
        }
        const int row_blocks = p.tiles / kSharedTiles<NC>;
        first_tile = unit % row_blocks * kSharedTiles<NC>;
        place = unit / row_blocks * 8 * NC, count = min(8 * NC, rows - place);
        stages = p.depth * kFp4Depth / kStageValues;
        if (NC == 1) prefetch_scales();
        return true;
    }
    // Those that multiply read a unit's scales from memory, each only a stage before its use: bring them near, where few units hide
    // the way. A lane has every other line of the scales of half a tile.
    __device__ void prefetch_scales() const {
        if constexpr (Shared::kScaleBytes == 1) {
            const int lane = int(threadIdx.x) % kWarp, half = lane / 2 % 2, tile = lane / 4;
            if (tile >= kSharedTiles<NC>) return;
            const uint8_t* const scales = weight.scales_of(first_tile + tile, half, 0);
            for (int at = lane % 2 * 32; at < p.depth * kFp4Depth / 32; at += 64) prefetch_line(scales + at);
        }
    }
    // Tell those that multiply of the unit, which begins in this stage, and find its tokens.
    __device__ void tell() {
        StreamUnit<NC>& unit = ring.units[slot];
        const int lane = int(threadIdx.x) % kWarp, mine = place + min(lane, count - 1), pair = routed ? groups.pair(mine) : mine;
        const Bf16* const x = routed ? p.x : q.x;
        const int64_t stride = routed ? p.stride : q.stride;
        const int row = routed && p.top_k > 0 ? pair / p.top_k : mine;
#pragma unroll
        for (int j = 0; j < 2 * NC; ++j) tokens[j] = x + __shfl_sync(kAllLanes, row, j * 4 + lane / 8) * stride + lane % 8 * 8;
        if (lane == 0) unit.place = place, unit.count = count, unit.tile = first_tile, unit.routed = routed;
        if (lane < 8 * NC) unit.pairs[lane] = pair, unit.weights[lane] = kFirst && routed ? p.weights[pair] : 1.0f;
        __syncwarp();
    }
    // Bytes may come before they are announced, as long as an arrival is missing.
    __device__ void announce(int to) const {
        if (threadIdx.x % kWarp == 0) announce_bytes(&ring.full[to], uint32_t(routed ? kStreamTokens : 2 * kSharedRows<NC> * kSharedBytes));
    }
    __device__ void order_weights(int number, int to) const {
        if (threadIdx.x % kWarp != 0) return;
        unsigned char* const stage = ring.stages + to * kRingStageBytes<NC>;
        uint64_t* const full = &ring.full[to];
        if (routed) {
            const int tile = expert * p.tiles + first_tile;
            copy_box(stage, &maps.codes, number * (kStreamDepth * kFp4Codes / 8), tile, full, policy);
            copy_box(stage + kStreamScales, &maps.scales, number * (kStreamDepth * kFp4Scales / 4), tile, full, policy);
        } else {  // a tile of the first product has rows of w1 and of w3
            const int row = first_tile * (kFirst ? 8 : 16), other = kFirst ? p.tiles * 8 + row : row + kSharedRows<NC>;
            copy_box(stage, &maps.shared, number * kSharedBytes, row, full);
            copy_box(stage + kSharedRows<NC> * kSharedBytes, &maps.shared, number * kSharedBytes, other, full);
        }
    }
    template <bool kRouted>
    __device__ void order_tokens(int number) {
        constexpr int kPitch = kRouted ? kTokenPitch : kSharedPitch, kValues = kRouted ? kStreamDepth * kFp4Depth : kStageValues;
        const int lane = int(threadIdx.x) % kWarp;
        const bool whole = !kRouted || (number + 1) * kStreamDepth <= p.depth;
        const uint32_t to = first_token + slot * kRingStageBytes<NC> + lane / 8 * kPitch + lane % 8 * 16;
#pragma unroll
        for (int j = 0; j < 2 * NC; ++j) {
            if (j * 4 >= count) break;
            if (j * 4 + lane / 8 < count) {
#pragma unroll
                for (int line = 0; line < kValues / 64; ++line)
                    if (whole || line < kFp4Depth / 64) copy_16(to + j * 4 * kPitch + line * 128, tokens[j] + line * 64);
            }
            tokens[j] += kValues;
        }
        arrive_after_copies(&ring.full[slot]);
    }
    __device__ void await_empty() const {
        await_barrier(&ring.empty[slot], parity ^ 1);
        release_shared();
    }
    __device__ void next() {
        slot = slot + 1 == kRingStages<NC> ? 0 : slot + 1;
        parity ^= uint32_t(slot == 0);
    }
    __device__ void end() const {
        await_empty();
        if (threadIdx.x % kWarp == 0) {
            ring.units[slot].count = 0;
            arrive(&ring.full[slot]);
        }
        arrive(&ring.full[slot]);
    }
};

// Where a multiplying warp is in the ring.
template <int NC>
struct StreamReader {
    uint32_t first_stage, first_full, stage, full, parity = 0;
    int slot = 0;
    __device__ explicit StreamReader(const StreamRing<NC>& ring)
        : first_stage(kept(shared_address(ring.stages))), first_full(kept(shared_address(ring.full))), stage(first_stage), full(first_full) {}
    __device__ void await() const { await_barrier(full, parity); }
    // body(address of a stage) for so many stages, of which the first is there.
    template <class Body>
    __device__ void read(int stages, const Body& body) {
        for (;;) {
            body(stage);
            arrive_after_reads(full + kRingStages<NC> * 8);
            stage += kRingStageBytes<NC>, full += 8, ++slot;
            if (slot == kRingStages<NC>) stage = first_stage, full = first_full, slot = 0, parity ^= 1;
            if (--stages <= 0) return;
            await();
        }
    }
};

}  // namespace cedar::cuda
