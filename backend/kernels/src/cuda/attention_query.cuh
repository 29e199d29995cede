// SPDX-License-Identifier: Apache-2.0
// The query's tile, and the row's rotation.
#pragma once

#include "attention_block.cuh"

namespace cedar::cuda::attention {

// threadIdx.x, in a way that what is derived from it is derived again: kept across tiles it would cost too many registers.
__device__ inline int thread_now() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ inline float2 turn(float2 x, float c, float s) {
    return make_float2(__fsub_rn(__fmul_rn(x.x, c), __fmul_rn(x.y, s)), __fadd_rn(__fmul_rn(x.x, s), __fmul_rn(x.y, c)));
}

__device__ inline uint32_t turn_pair(uint32_t pair, float c, float s) {
    const __nv_bfloat162 y = __float22bfloat162_rn(turn(__bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair)), c, s));
    return *reinterpret_cast<const uint32_t*>(&y);
}

// The same if the pair is rotated; chosen behind, as branches would come one after another.
__device__ inline uint32_t turn_pair_if(bool rotated, uint32_t pair, float c, float s) {
    uint32_t y = turn_pair(pair, c, s);
    asm volatile("" : "+r"(y));
    return rotated ? y : pair;
}

// What a row's outputs need, on its way. The readers, who have it when they meet after their copies have come.
template <int D>
__device__ void stage_row(const cedar_mega_attention_args& a, const Unit& at, RowValues<D>& values) {
    const int thread = thread_now();
    if (thread < a.pairs) {
        copy_4(&values.turns[4 + thread].x, a.cos + at.row * a.pairs + thread);
        copy_4(&values.turns[4 + thread].y, a.sin + at.row * a.pairs + thread);
    }
    if (thread < min(kHeads, int(a.heads) - at.first_head))
        copy_4(&values.sinks[thread], a.sink + at.first_head + thread);
    else if (thread < kHeads)
        values.sinks[thread] = 0.0f;
}

// The query on its way to its tile, and there as the products need it: rotated, and in their order. The readers. A warp has 8 heads.
template <int D>
struct Query {
    static constexpr int kGroups = D / 32, kWarpHeads = kHeads / (kReaderThreads / kWarp);
    static_assert(kWarpHeads == 8, "a warp's heads have all places of a unit");

    template <class Shared>
    __device__ explicit Query(Shared& memory)
        : lane(thread_now() % kWarp), first(thread_now() / kWarp * kWarpHeads), tile(shared_address(memory.query) + first * kRowBytes) {}

    // With what its row's outputs need. Nobody reads the tile or the values meanwhile.
    __device__ void fetch(const cedar_mega_attention_args& a, const Unit& at, RowValues<D>& values) const {
        const int heads = int(a.heads) - at.first_head - first;
        const Bf16* query = static_cast<const Bf16*>(a.query) + (at.row * a.heads + at.first_head + first) * D;
        const uint32_t to = tile + unit_at(lane / 8, lane % 8);
        query += lane / 8 * D + lane % 8 * 8;
#pragma unroll
        for (int i = 0; i < kWarpHeads; i += 4)
#pragma unroll
            for (int chunk = 0; chunk < D / kChunkDims; ++chunk) {
                const int bytes = lane / 8 + i < heads ? 16 : 0;  // of the others 0
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             ::"r"(heads_on(to, i) + chunk * kChunkBytes), "l"(query + i * D + chunk * kChunkDims), "r"(bytes) : "memory");
            }
        stage_row(a, at, values);
        close_copies();
    }

    // What all readers have fetched.
    __device__ void finish(int pairs, const RowValues<D>& values) const {
        turn_units(pairs, values);
        __syncwarp();
        // Eight lanes have two groups, side by side, of four heads; all groups of a half are read before their units are written.
        constexpr int kPairs = kGroups / 2 < 4 ? kGroups / 2 : 4;
        const int head = lane / 2 % 4 + lane / 8 / kPairs * 4, group = lane / 8 % kPairs * 2 + lane % 2;
        const uint32_t from = tile + uint32_t(group / 2 * kChunkBytes) + unit_at(head, group % 2 * 4), to = tile + group_place<D>(head, group);
#pragma unroll
        for (int i = 0; i < kWarpHeads; i += 16 / kPairs)
#pragma unroll
            for (int half = 0; half < kGroups / 2 / kPairs; ++half) {
                const uint32_t on = half * (D / 2 / kChunkDims * kChunkBytes);
                uint32_t units[4][4];
#pragma unroll
                for (int unit = 0; unit < 4; ++unit) load(units[unit], (heads_on(from, i) ^ unit << 4) + on);
                __syncwarp();
#pragma unroll
                for (int unit = 0; unit < 4; ++unit) {
                    uint32_t v[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        v[j] = __byte_perm(units[j][unit / 2], units[j][unit / 2 + 2], unit % 2 == 0 ? 0x5410 : 0x7632);
                    store_unit(unit_behind<D>(heads_on(to, i), unit) + on, make_uint4(v[0], v[1], v[2], v[3]));
                }
            }
        publish_tiles();
    }

    // Rotates: 64 dimensions of four heads at a time, 8 a lane.
    __device__ void turn_units(int pairs, const RowValues<D>& values) const {
        const int plain = D - 2 * pairs;  // dimensions that are not rotated
#pragma unroll 1
        for (int dim = plain / 64 * 64; dim < D; dim += 64) {
            const int here = dim + lane % 8 * 8, left = here - plain;  // from the first rotary dimension to the lane's
            if (left <= -8) continue;
            float2 turns[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) turns[k] = values.turns[4 + left / 2 + k];
#pragma unroll
            for (int i = 0; i < kWarpHeads; i += 4) {
                const uint32_t at = heads_on(tile + dim / 64 * kChunkBytes + unit_at(lane / 8, lane % 8), i);
                uint32_t w[4];
                load(w, at);
#pragma unroll
                for (int k = 0; k < 4; ++k) w[k] = turn_pair_if(left + 2 * k >= 0, w[k], turns[k].x, turns[k].y);
                store_unit(at, make_uint4(w[0], w[1], w[2], w[3]));
            }
        }
    }

    __device__ static void load(uint32_t (&w)[4], uint32_t from) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
    }

    // The same place so many heads on, none of which are added to bits of those passed.
    __device__ static uint32_t heads_on(uint32_t place, int heads) { return (place ^ uint32_t(heads % 8) << 4) + heads * kRowBytes; }

    int lane, first;  // first: head of the warp
    uint32_t tile;    // from that head on
};

}  // namespace cedar::cuda::attention
