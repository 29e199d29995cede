// SPDX-License-Identifier: Apache-2.0
// What a search works on, and the queries: rotated, rounded and laid out as the fragments of the matrix instruction.
#pragma once

#include "ptx.cuh"
#include "records.cuh"
#include "select.cuh"

namespace cedar::cuda::index {

#ifndef CEDAR_INDEX_LISTED
#define CEDAR_INDEX_LISTED 1024
#endif
#ifndef CEDAR_INDEX_THREADS
#define CEDAR_INDEX_THREADS 128
#endif

constexpr int kRunBlocks = 4, kRun = kRunBlocks * kBlockRows;  // keys of a warp at a time
constexpr int kTogether = 4;  // rows of a chunk, which share their keys
constexpr int kMostHeads = 32;
constexpr int kQueryShift = 32;  // queries are 2^32 too large and keys 2^32 too small, so that the keys' scales stay in range
// Threads of a block, and blocks of a multiprocessor, that score G rows together.
template <int G>
struct ScoreBlock {
    static constexpr int kThreads = G == 1 ? CEDAR_INDEX_THREADS : 128, kPerSm = G == 1 ? 512 / kThreads : 3;
};

constexpr int kListed = CEDAR_INDEX_LISTED;  // key blocks that are looked up at a time

// Scores are kept as ordered_bits, 0 where there is no entry.
struct Search {
    cedar_mqa_logits_topk_args a;
    uint32_t* scores;  // [rows of this pass, stride]
    uint32_t* maxima;  // [rows of this pass, stride / 8] the highest of each block of 8
    int64_t stride;    // columns, a multiple of 32
    int64_t first;     // row
    int rows;
    int page_shift;    // log2 of per_page, or -1
};

// Lets the next launch of the stream start, and waits for the end of the one before.
__device__ inline void release_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void await_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Asks for a line of memory to come to L2.
__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ inline int64_t pool_row(const Search& s, int64_t base, int64_t entry) {
    if (s.page_shift >= 0) return (__ldg(s.a.pages + base + (entry >> s.page_shift)) << s.page_shift) + (entry & (s.a.per_page - 1));
    const uint32_t page = uint32_t(entry) / uint32_t(s.a.per_page);
    return __ldg(s.a.pages + base + page) * s.a.per_page + (entry - int64_t(page) * s.a.per_page);
}

__host__ __device__ inline bool is_scored(const cedar_mqa_logits_topk_args& a, int64_t visible) {
    return visible > a.top_k || (a.published != nullptr && visible > a.published_blocks * a.block);
}

// Key blocks of 8 columns of a row, of which those with entries come first. Candidates are different blocks.
__device__ inline int key_blocks(const Search& s, int64_t visible) {
    if (s.a.candidates == nullptr) return int((visible + kBlockRows - 1) / kBlockRows);
    const int block = int(s.a.block);
    return min(int(s.a.candidate_blocks), (int(visible) + block - 1) / block) * (block / kBlockRows);
}

template <int D, int MT, int G>
struct ScoreMemory {
    uint4 query[G][MT][D / 32][2][kWarp];   // fragments of 16 heads: of a word of codes, two steps
    uint4 raw[2 * MT * D];                  // a token's query as it is in memory
    float weight[G][2 * MT * 8];            // halved
    uint32_t places[kListed];               // the blocks' numbers in the pool
    uint8_t live[kListed];                  // their entries that the row may choose; with candidates
};

// A thread's part of a token's query: a word of codes of every kStep-th head. Queries and weights are bf16 or float32: which of them is
// asked at run time for the sake of fewer kernels.
template <int D, int MT, int Threads>
struct QueryPart {
    static constexpr int kChunks = D / 8, kStep = Threads / kChunks, kItems = (2 * MT * 8 + kStep - 1) / kStep;
    int chunk = int(threadIdx.x) % kChunks, head = int(threadIdx.x) / kChunks;
    uint4 bits[kItems];    // of bf16: as they are in memory
    float cos[4], sin[4];  // 1 and 0 where nothing is rotated
    uint32_t weight = 0;   // of head threadIdx.x, as it is in memory

    __device__ int64_t place(const Search& s, int64_t row, int item) const {
        return (row * s.a.heads + head + item * kStep) * D + chunk * 8;
    }

    // Its loads, which are awaited only in prepare.
    __device__ QueryPart(const Search& s, int64_t row) {
        const cedar_mqa_logits_topk_args& a = s.a;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            bits[i] = make_uint4(0, 0, 0, 0);
            if (a.type == CEDAR_BF16 && head + i * kStep < a.heads)
                bits[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const Bf16*>(a.query) + place(s, row, i)));
        }
        const int tail = chunk * 8 - (D - 2 * int(a.pairs));
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int64_t angle = row * a.pairs + (tail + 2 * p) / 2;
            cos[p] = tail + 2 * p < 0 ? 1.0f : __ldg(a.cos + angle);
            sin[p] = tail + 2 * p < 0 ? 0.0f : __ldg(a.sin + angle);
        }
        if (threadIdx.x < a.heads) {
            const int64_t at = row * a.heads + threadIdx.x;
            weight = a.type == CEDAR_F32 ? static_cast<const uint32_t*>(a.weight)[at] : static_cast<const uint16_t*>(a.weight)[at];
        }
    }
};

// Eight values rounded to MXFP4 together with those of the other three lanes of the group. Next to 1.5 * 2^22 times the power of two
// of a value, or of the scale if that is more, floats are as far apart as the codes, and even where these are. A group with an infinity
// or a NaN has an infinite scale, and is NaNs.
__device__ inline void round_to_mxfp4(float (&x)[8]) {
    const float scale = ue8m0_scale(group_amax(x, kMxGroup), 6.0f * 0x1p-126f, float(1.0 / 6.0));
#pragma unroll
    for (int p = 0; p < 8; ++p) {
        const float magnitude = fabsf(x[p]), power = __uint_as_float(__float_as_uint(fmaxf(magnitude, scale)) & 0x7f800000u);
        const float coarse = power * 0x1.8p22f, value = __fsub_rn(__fadd_rn(magnitude, coarse), coarse);
        x[p] = copysignf(value, x[p]);
    }
}

// Rotates, rounds and lays out the query of a row as the block's `token`; zeros where there is no head.
template <int D, int MT, int G, int Threads>
__device__ void prepare(const Search& s, int64_t row, int token, const QueryPart<D, MT, Threads>& part, ScoreMemory<D, MT, G>& memory) {
    using Part = QueryPart<D, MT, Threads>;
    const cedar_mqa_logits_topk_args& a = s.a;
    const bool exact = a.type == CEDAR_F32;
    const int quad = part.chunk / (D / 32), word = part.chunk % (D / 32);
#pragma unroll
    for (int i = 0; i < Part::kItems; ++i)
        if (part.head + i * Part::kStep < 2 * MT * 8) memory.raw[i * Threads + threadIdx.x] = part.bits[i];
#pragma unroll 1
    for (int i = 0; i < Part::kItems; ++i) {
        const int head = part.head + i * Part::kStep;
        if (head >= 2 * MT * 8) break;  // whole warps
        const uint4 raw = memory.raw[i * Threads + threadIdx.x];
        const uint32_t bits[4] = {raw.x, raw.y, raw.z, raw.w};
        float x[8];
#pragma unroll
        for (int p = 0; p < 8; ++p) x[p] = __uint_as_float(p % 2 ? bits[p / 2] & 0xffff0000u : bits[p / 2] << 16);
        if (exact && head < a.heads) load_pack(static_cast<const float*>(a.query) + part.place(s, row, i), x);
#pragma unroll
        for (int p = 0; p < 8; p += 2) {
            const float c = part.cos[p / 2], sine = part.sin[p / 2], even = x[p], odd = x[p + 1];
            x[p] = __fsub_rn(__fmul_rn(even, c), __fmul_rn(odd, sine));
            x[p + 1] = __fadd_rn(__fmul_rn(even, sine), __fmul_rn(odd, c));
            if (!exact) x[p] = rounded<Bf16>(x[p]), x[p + 1] = rounded<Bf16>(x[p + 1]);
        }
        if (a.quantise) round_to_mxfp4(x);
        // this head's rows of the fragment, word 2 c + head / 8 % 2, have its pairs 2 step + c
        uint32_t* const to = reinterpret_cast<uint32_t*>(&memory.query[token][head / 16][word][0][head % 8 * 4 + quad]) + head / 8 % 2;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const __nv_bfloat162 both = __floats2bfloat162_rn(x[p] * 0x1p32f, x[p + 4] * 0x1p32f);
            to[p / 2 * (kWarp * 4) + p % 2 * 2] = *reinterpret_cast<const uint32_t*>(&both);
        }
    }
    const float weight = __uint_as_float(exact ? part.weight : part.weight << 16);
    if (threadIdx.x < 2 * MT * 8) memory.weight[token][threadIdx.x] = 0.5f * (weight * float(a.weight_scale));
}

}  // namespace cedar::cuda::index
