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

// The query on its way to its tile, and there as the products need it: rotated, and units in their order. The
// readers. A thread has one unit of every so many heads.
template <int D>
struct Query {
    static constexpr int kUnits = D / 8, kHeadStep = kReaderThreads / kUnits, kEach = kHeads / kHeadStep;

    template <class Shared>
    __device__ explicit Query(Shared& memory)
        : unit(thread_now() % kUnits), head(thread_now() / kUnits), tile(shared_address(memory.query) + unit / 8 * kChunkBytes) {}

    // Nobody reads the tile meanwhile.
    __device__ void fetch(const cedar_mega_attention_args& a, const Unit& at) const {
        const Bf16* query = static_cast<const Bf16*>(a.query) + (at.row * a.heads + at.first_head) * D + unit * 8;
        const int heads = int(a.heads) - at.first_head;
#pragma unroll 4
        for (int i = 0; i < kEach; ++i) {
            const int row = head + i * kHeadStep;
            if (row < heads)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place(row)), "l"(query + row * D) : "memory");
            else
                store_unit(place(row), make_uint4(0, 0, 0, 0));
        }
        close_copies();
    }

    // What this thread fetched. turn_of: the cosine and sine of a pair of the row.
    template <class TurnOf>
    __device__ void finish(const cedar_mega_attention_args& a, const TurnOf& turn_of) const {
        const int left = unit * 8 - (D - 2 * int(a.pairs));  // from the first rotary dimension to the unit
        float2 turns[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) turns[i] = left > -8 && left + 2 * i >= 0 ? turn_of(left / 2 + i) : make_float2(0, 0);
        constexpr int kAtOnce = kEach < 4 ? kEach : 4;
        await_copies<0>();
#pragma unroll 1
        for (int first = 0; first < kEach; first += kAtOnce) {
            uint32_t units[kAtOnce][4];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                uint32_t(&w)[4] = units[i];
                const uint32_t at = place(head + (first + i) * kHeadStep);
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
            }
            if (left > -8) {
#pragma unroll
                for (uint32_t(&w)[4] : units)
#pragma unroll
                    for (int k = 0; k < 4; ++k) w[k] = left + 2 * k < 0 ? w[k] : turn_pair(w[k], turns[k].x, turns[k].y);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const uint32_t(&w)[4] = units[i];
                const uint4 ordered = make_uint4(__byte_perm(w[0], w[2], 0x5410), __byte_perm(w[0], w[2], 0x7632),
                                                 __byte_perm(w[1], w[3], 0x5410), __byte_perm(w[1], w[3], 0x7632));
                store_unit(place(head + (first + i) * kHeadStep), ordered);
            }
        }
        publish_tiles();
    }

    __device__ uint32_t place(int row) const { return tile + unit_at(row, unit % 8); }

    int unit, head;
    uint32_t tile;
};

// What a row's outputs need. The readers, who have it when they meet next.
template <int D>
__device__ void stage_row(const cedar_mega_attention_args& a, const Unit& at, RowValues<D>& values) {
    const int thread = thread_now();
    float2 mine = {};
    float sink = 0.0f;
    if (thread < a.pairs) mine = make_float2(__ldcg(a.cos + at.row * a.pairs + thread), __ldcg(a.sin + at.row * a.pairs + thread));
    if (thread < min(kHeads, int(a.heads) - at.first_head)) sink = __ldg(a.sink + at.first_head + thread);
    if (thread < a.pairs) values.turns[4 + thread] = mine;
    if (thread < kHeads) values.sinks[thread] = sink;
}

}  // namespace cedar::cuda::attention
