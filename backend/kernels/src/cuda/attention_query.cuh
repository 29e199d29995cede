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

// The query on its way to its tile, and there as the products need it: rotated, and units in their order. The readers. A thread has
// the same unit of all chunks, of every so many heads: all lanes have of what is rotated, which is seldom more than a chunk.
template <int D>
struct Query {
    static constexpr int kUnits = kChunkDims / 8, kChunks = D / kChunkDims, kHeadStep = kReaderThreads / kUnits, kEach = kHeads / kHeadStep;
    static_assert(kHeadStep % 8 == 0, "a thread's units lie alike");

    template <class Shared>
    __device__ explicit Query(Shared& memory)
        : unit(thread_now() % kUnits), head(thread_now() / kUnits), tile(shared_address(memory.query) + unit_at(head, unit)) {}

    // With what its row's outputs need. Nobody reads the tile or the values meanwhile.
    __device__ void fetch(const cedar_mega_attention_args& a, const Unit& at, RowValues<D>& values) const {
        const Bf16* query = static_cast<const Bf16*>(a.query) + (at.row * a.heads + at.first_head + head) * D + unit * 8;
        const int heads = int(a.heads) - at.first_head - head;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (i * kHeadStep < heads) {
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk)
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                                 ::"r"(place(chunk, i)), "l"(query + i * kHeadStep * D + chunk * kChunkDims) : "memory");
            } else {
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk) store_unit(place(chunk, i), make_uint4(0, 0, 0, 0));
            }
        }
        stage_row(a, at, values);
        close_copies();
    }

    // What this thread fetched.
    __device__ void finish(const cedar_mega_attention_args& a, int64_t row) const {
        const int plain = D - 2 * int(a.pairs), first = plain / kChunkDims;  // dimensions that are not rotated, whole chunks of them
        float2 turns[4];
        const auto load_turns = [&](int chunk) {  // without a branch, at whose end each would be waited for; what is not turned has any
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int64_t at = row * a.pairs + max((chunk * kChunkDims + unit * 8 - plain) / 2 + k, 0);
                turns[k] = make_float2(__ldcg(a.cos + at), __ldcg(a.sin + at));
            }
        };
        if (first < kChunks) load_turns(first);
        await_copies<0>();
        constexpr int kAtOnce = kChunks < 4 ? kChunks : 4;
#pragma unroll
        for (int from = 0; from < kChunks; from += kAtOnce) {
            uint32_t units[kAtOnce][kEach][4];
#pragma unroll
            for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
                for (int i = 0; i < kEach; ++i) load(units[c][i], from + c, i);
#pragma unroll
            for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
                for (int i = 0; i < kEach; ++i)
                    if (from + c < first) store_ordered(units[c][i], from + c, i);
        }
#pragma unroll 1
        for (int chunk = first; chunk < kChunks; ++chunk) {
            const int left = chunk * kChunkDims + unit * 8 - plain;  // from the first rotary dimension to the unit
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                uint32_t w[4];
                load(w, chunk, i);
#pragma unroll
                for (int k = 0; k < 4; ++k) w[k] = left + 2 * k < 0 ? w[k] : turn_pair(w[k], turns[k].x, turns[k].y);
                store_ordered(w, chunk, i);
            }
            if (chunk + 1 < kChunks) load_turns(chunk + 1);
        }
        publish_tiles();
    }

    __device__ void load(uint32_t (&w)[4], int chunk, int i) const {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(place(chunk, i)) : "memory");
    }
    __device__ void store_ordered(const uint32_t (&w)[4], int chunk, int i) const {
        store_unit(place(chunk, i), make_uint4(__byte_perm(w[0], w[2], 0x5410), __byte_perm(w[0], w[2], 0x7632),
                                               __byte_perm(w[1], w[3], 0x5410), __byte_perm(w[1], w[3], 0x7632)));
    }
    __device__ uint32_t place(int chunk, int i) const { return tile + uint32_t(chunk * kChunkBytes + i * kHeadStep * kRowBytes); }

    int unit, head;
    uint32_t tile;
};

}  // namespace cedar::cuda::attention
