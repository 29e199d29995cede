// SPDX-License-Identifier: Apache-2.0
// What a search works on, and the queries: rotated, rounded and laid out as the columns of the matrix instruction.
#pragma once

#include "ptx.cuh"
#include "records.cuh"
#include "select.cuh"
#include "wgmma.cuh"

namespace cedar::cuda::index {

#ifndef CEDAR_INDEX_LISTED
#define CEDAR_INDEX_LISTED 1024
#endif
#ifndef CEDAR_INDEX_THREADS
#define CEDAR_INDEX_THREADS 128
#endif
#ifndef CEDAR_INDEX_PER_SM
#define CEDAR_INDEX_PER_SM 4
#endif

constexpr int kRunBlocks = 4, kRun = kRunBlocks * kBlockRows;  // keys of a warp at a time
constexpr int kTogether = 4;  // rows of a chunk, which share their keys
constexpr int kMostHeads = 32;  // and the columns of the matrix instruction
constexpr int kQueryShift = 32;  // queries are 2^32 too large and keys 2^32 too small, so that the keys' scales stay in range
// Threads of a block, whole warp groups, and blocks of a multiprocessor, that score G rows together.
template <int G>
constexpr int kScoreThreads = G == 1 ? CEDAR_INDEX_THREADS : 128;
template <int G>
constexpr int kScoreWarps = kScoreThreads<G> / kWarp;
template <int G>
constexpr int kScorePerSm = G == 1 ? CEDAR_INDEX_PER_SM : 3;

constexpr int kListed = CEDAR_INDEX_LISTED;  // key blocks that are looked up at a time
static_assert(kListed % (kScoreWarps<1> * kRunBlocks) == 0);

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

constexpr int kMatrixWords = kMostHeads * 32;  // of 64 dimensions of all heads: see matrix_of

template <int D, int G>
struct ScoreMemory {
    static constexpr int kMatrices = (D + 63) / 64;
    alignas(1024) uint32_t query[G][kMatrices * kMatrixWords];
    uint4 raw[kMostHeads * D / 8];          // a token's query as it is in memory
    float weight[G][kMostHeads];            // halved
    alignas(16) uint32_t places[kListed];   // the blocks' numbers in the pool
    uint8_t live[kListed];                  // their entries that the row may choose; with candidates
};

// A thread's part of a token's query: a word of codes of every kStep-th head. Queries and weights are bf16 or float32: which of them is
// asked at run time for the sake of fewer kernels.
template <int D, int G>
struct QueryPart {
    static constexpr int kChunks = D / 8, kStep = kScoreThreads<G> / kChunks, kItems = (kMostHeads + kStep - 1) / kStep;
    int chunk = int(threadIdx.x) % kChunks, head = int(threadIdx.x) / kChunks;
    uint4 bits[kItems];    // of bf16: as they are in memory
    float cos[4], sin[4];  // 1 and 0 where nothing is rotated
    uint32_t weight = 0;   // of head threadIdx.x, as it is in memory

    __device__ int64_t place(const Search& s, int64_t row, int item) const {
        return (row * s.a.heads + head + item * kStep) * D + chunk * 8;
    }

    // Its loads, which are awaited only in keep and prepare.
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

    // Frees the registers of what has come, for this thread.
    template <class Memory>
    __device__ void keep(Memory& memory) const {
#pragma unroll
        for (int i = 0; i < kItems; ++i)
            if (head + i * kStep < kMostHeads) memory.raw[i * kScoreThreads<G> + threadIdx.x] = bits[i];
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

// Rotates, rounds and lays out items [first, last) of the query of a row, which is kept, as the block's `token`; zeros where there is
// no head.
template <int D, int G>
__device__ void prepare(const Search& s, int64_t row, int token, int first, int last, const QueryPart<D, G>& part,
                        ScoreMemory<D, G>& memory) {
    using Part = QueryPart<D, G>;
    const cedar_mqa_logits_topk_args& a = s.a;
    const bool exact = a.type == CEDAR_F32;
    const int quad = part.chunk / (D / 32), word = part.chunk % (D / 32);
#pragma unroll 1
    for (int i = first; i < last; ++i) {
        const int head = part.head + i * Part::kStep;
        if (head >= kMostHeads) break;  // whole warps
        const uint4 raw = memory.raw[i * kScoreThreads<G> + threadIdx.x];
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
        // pair p of a word of codes is of the word's step p / 2, there the upper half of a row for odd p
        uint32_t* const to = memory.query[token] + head * 32 + quad;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const __nv_bfloat162 both = __floats2bfloat162_rn(x[p] * 0x1p32f, x[p + 4] * 0x1p32f);
            const int unit = word * 4 + p;
            to[unit / 8 * kMatrixWords + (unit % 8 ^ head % 8) * 4] = *reinterpret_cast<const uint32_t*>(&both);
        }
    }
    const float weight = __uint_as_float(exact ? part.weight : part.weight << 16);
    if (threadIdx.x < kMostHeads) memory.weight[token][threadIdx.x] = 0.5f * (weight * float(a.weight_scale));
}

}  // namespace cedar::cuda::index
