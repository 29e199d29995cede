// SPDX-License-Identifier: Apache-2.0
// What a search works on, and the queries: rotated, rounded and laid out as the columns of the matrix instruction.
#pragma once

#include "mhc_cluster.cuh"
#include "records.cuh"
#include "select.cuh"
#include "wgmma.cuh"

namespace cedar::cuda::index {

constexpr int kRunBlocks = 4, kRun = kRunBlocks * kBlockRows;  // keys of a warp at a time
constexpr int kMostHeads = 32;  // and the columns of the matrix instruction
constexpr float kQueryUnit = 2.0f, kKeyUnit = 4.0f;  // what 1 is in E5M2 under the largest scale: no sum exceeds a half's range
constexpr int kKeyScales = 32;  // distances from a key's largest scale; codes at larger ones are zeros in E5M2 as well
constexpr int kStages = 3;  // runs of a warp that are on their way or scored
constexpr int kGroup = 128;  // threads of a warp group, which multiply together

// How blocks score: rows together, threads (whole warp groups), blocks of a multiprocessor, key blocks that are looked up at a time,
// and bytes that the memory of copies has at least.
template <int Rows, int Threads, int PerSm, int Listed, int LeastRing>
struct Way {
    static constexpr int kRows = Rows, kThreads = Threads, kWarps = Threads / kWarp, kPerSm = PerSm, kListed = Listed;
    static constexpr int kLeastRing = LeastRing, kShares = 0;  // blocks that share a row, where they are known
    static constexpr int kStep = kWarps * kRunBlocks;  // key blocks of a block of threads at a time
    static_assert(Threads % kGroup == 0 && Listed % kStep == 0);
};
using Alone = Way<1, 128, 4, 768, 0>;
using Together = Way<4, 128, 3, 768, 0>;  // rows of a chunk, which share their keys

// Scores are kept as ordered_bits, 0 where there is no entry.
struct Search {
    cedar_mqa_logits_topk_args a;
    uint32_t* scores;  // [rows of this pass, stride]
    uint32_t* maxima;  // [rows of this pass, stride / 8] the highest of each block of 8
    int64_t stride;    // columns, a multiple of 32
    int64_t first;     // row
    int rows;
    int page_shift;    // log2 of per_page, or -1
    int block_shift;   // that of the key blocks of a candidate; 0 where there are none
};

// Asks for what a row's search begins with, before the launches that write it have ended: the first of the row's blocks.
__device__ inline void prefetch_row(const Search& s, int64_t row, int threads) {
    const cedar_mqa_logits_topk_args& a = s.a;
    if (blockIdx.x != 0) return;
    const int bytes = int(a.heads * a.dim) * (a.type == CEDAR_BF16 ? 2 : 4);
    for (int i = int(threadIdx.x) * 128; i < bytes; i += threads * 128) prefetch_line(static_cast<const char*>(a.query) + row * bytes + i);
    if (threadIdx.x == 0) prefetch_line(a.visible + row);
    if (threadIdx.x == 1) prefetch_line(a.base + row);
    if (threadIdx.x == 2 && a.pairs > 0) prefetch_line(a.cos + row * a.pairs);
    if (threadIdx.x == 3 && a.pairs > 0) prefetch_line(a.sin + row * a.pairs);
    if (threadIdx.x == 4) prefetch_line(static_cast<const char*>(a.weight) + row * a.heads * (a.type == CEDAR_BF16 ? 2 : 4));
    if (a.candidates != nullptr)  // which of them are whose is known only when `visible` is
#pragma unroll 1
        for (int i = int(threadIdx.x) * 16; i < int(a.candidate_blocks); i += threads * 16)
            prefetch_line(a.candidates + row * a.candidate_blocks + i);
}

__device__ inline int64_t pool_row(const Search& s, int64_t base, int64_t entry) {
    if (s.page_shift >= 0) return (__ldcg(s.a.pages + base + (entry >> s.page_shift)) << s.page_shift) + (entry & (s.a.per_page - 1));
    const uint32_t page = uint32_t(entry) / uint32_t(s.a.per_page);
    return __ldcg(s.a.pages + base + page) * s.a.per_page + (entry - int64_t(page) * s.a.per_page);
}

__device__ inline void write_entry(const Search& s, int64_t row, int64_t base, int i, int64_t position) {
    s.a.index[row * s.a.width + i] = position;
    s.a.slots[row * s.a.width + i] = position < 0 ? 0 : pool_row(s, base, position);
}

__host__ __device__ inline bool is_scored(const cedar_mqa_logits_topk_args& a, int64_t visible) {
    return visible > a.top_k || (a.published != nullptr && visible > a.published_blocks * a.block);
}

// shift: log2 of `by`, or -1.
__device__ inline uint32_t quotient(uint32_t x, uint32_t by, int shift) { return shift >= 0 ? x >> shift : x / by; }

// Candidate blocks of so many entries.
__device__ inline uint32_t candidates_of(const Search& s, uint32_t entries) {
    const uint32_t blocks = (entries + kBlockRows - 1) / kBlockRows, each = uint32_t(s.a.block) / kBlockRows;
    return quotient(blocks + each - 1, each, s.block_shift);
}

// Key blocks of 8 columns of a row, of which those with entries come first. Candidates are different blocks.
__device__ inline int key_blocks(const Search& s, int64_t visible) {
    if (s.a.candidates == nullptr) return int((visible + kBlockRows - 1) / kBlockRows);
    return min(int(s.a.candidate_blocks), int(candidates_of(s, uint32_t(visible)))) * (int(s.a.block) / kBlockRows);
}

constexpr int kMatrixWords = kMostHeads * 32;  // of 64 dimensions of all heads, of both signs: see matrix_of

template <int D, class W>
struct ScoreMemory {
    static constexpr int kMatrices = (D + 63) / 64;
    static constexpr int kStage = kWarp * (kRunBlocks * D / 8 + 4);  // bytes of a run: see Keys
    static constexpr int kWarpRing = kStages * kStage, kRing = W::kWarps * kWarpRing;
    alignas(1024) uint32_t query[W::kRows][kMatrices * kMatrixWords];
    alignas(16) uint8_t ring[kRing > W::kLeastRing ? kRing : W::kLeastRing];
    uint4 codes[kKeyScales];                 // of keys in E5M2: see write_codes
    float weight[W::kRows][kMostHeads], scale[W::kRows][kMostHeads];  // scale: the largest of a head's query
    alignas(16) uint32_t places[W::kListed]; // the blocks' numbers in the pool
    uint32_t numbers[W::kListed];            // and in the row's sequence
    uint8_t live[W::kListed];                // their entries that the row may choose; with candidates
    uint64_t query_landed;                   // of other blocks' heads, where blocks prepare a query together

    __device__ uint8_t* warp_ring() { return ring + threadIdx.x / kWarp * kWarpRing; }
    // A thread's part of a token's query as it is in memory, where keys come only later.
    __device__ uint4* raw() { return reinterpret_cast<uint4*>(warp_ring() + (kStages - 1) * kStage) + threadIdx.x % kWarp; }
};

// The largest power of two that is not above x.
constexpr int power_below(int x) { return x < 2 ? 1 : 2 * power_below(x / 2); }

// A thread's part of a token's query: a word of codes of every kStep-th head of the block's, which are all, or where blocks share a row
// as many as make all together: the last blocks have none where their number is no power of two. Queries and weights are bf16 or
// float32: which of them is asked at run time for the sake of fewer kernels.
template <int D, class W>
struct QueryPart {
    static constexpr bool kShared = W::kShares > 0;
    static constexpr int kHeads = kMostHeads / power_below(W::kShares);
    static constexpr int kChunks = D / 8, kStep = W::kThreads / kChunks, kItems = (kHeads + kStep - 1) / kStep;
    // threads that prepare, whole warps: the others have no part in it
    static constexpr int kPreparers = kShared ? (kHeads * kChunks + kWarp - 1) / kWarp * kWarp : W::kThreads;
    static constexpr int kRowBytes = 128 * ScoreMemory<D, W>::kMatrices;  // of a head, laid out
    static_assert(kItems * kWarp * sizeof(uint4) <= ScoreMemory<D, W>::kStage);
    int chunk = int(threadIdx.x) % kChunks, head = first_head() + int(threadIdx.x) / kChunks;
    uint4 bits[kItems];    // of bf16: as they are in memory
    float cos[4], sin[4];  // 1 and 0 where nothing is rotated
    uint32_t weight = 0;   // of head threadIdx.x, as it is in memory

    __device__ static int first_head() { return kShared ? int(blockIdx.x) * kHeads : 0; }
    __device__ static int end_head() { return first_head() + kHeads; }
    // whether the block has heads, and bytes that it gets of the others' heads
    __device__ static bool has_heads() { return !kShared || first_head() < kMostHeads; }
    __device__ static int others_bytes() { return (kMostHeads - (has_heads() ? kHeads : 0)) * (kRowBytes + int(sizeof(float))); }

    __device__ int64_t place(const Search& s, int64_t row, int item) const {
        return (row * s.a.heads + head + item * kStep) * D + chunk * 8;
    }

    // Its loads, which are awaited only in keep and prepare.
    __device__ QueryPart(const Search& s, int64_t row) {
        const cedar_mqa_logits_topk_args& a = s.a;
        const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const Bf16*>(a.query) + place(s, row, 0));
        if (kShared && threadIdx.x >= kPreparers) return;
        const int heads = a.type == CEDAR_BF16 ? min(int(a.heads), end_head()) : 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            bits[i] = make_uint4(0, 0, 0, 0);
            if (head + i * kStep < heads) bits[i] = __ldcg(from + i * kStep * kChunks);
        }
        const int tail = chunk * 8 - (D - 2 * int(a.pairs));
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int64_t angle = row * a.pairs + (tail + 2 * p) / 2;
            cos[p] = tail + 2 * p < 0 ? 1.0f : __ldcg(a.cos + angle);
            sin[p] = tail + 2 * p < 0 ? 0.0f : __ldcg(a.sin + angle);
        }
        if (int(threadIdx.x) < int(a.heads)) {
            const int64_t at = row * a.heads + threadIdx.x;
            weight = a.type == CEDAR_F32 ? static_cast<const uint32_t*>(a.weight)[at] : static_cast<const uint16_t*>(a.weight)[at];
        }
    }

    // Frees the registers of what has come, for this thread.
    __device__ void keep(ScoreMemory<D, W>& memory) const {
#pragma unroll
        for (int i = 0; i < kItems; ++i)
            if (kShared || head + i * kStep < kMostHeads) memory.raw()[i * kWarp] = bits[i];
    }

    // Sends the warp's heads, which it has laid out, to the other blocks of the cluster, 16 bytes of each lane, and their scales.
    __device__ static void send_heads(ScoreMemory<D, W>& memory) {
        // rows of 128 bytes: of each head one of each matrix
        constexpr int kWarpHeads = kWarp / kChunks < kHeads ? kWarp / kChunks : kHeads, kRows = ScoreMemory<D, W>::kMatrices * kWarpHeads;
        static_assert(kWarpHeads % 2 == 0 && kHeads % kWarpHeads == 0 && kItems == 1);
        __syncwarp();
        const int lane = int(threadIdx.x) % kWarp, first = first_head() + int(threadIdx.x) / kWarp * (kWarp / kChunks);
        const uint32_t landed = shared_address(&memory.query_landed);
        const auto each_other = [](const auto& send_to) {
#pragma unroll
            for (int i = 1; i < W::kShares; ++i) send_to(int(blockIdx.x + i) % W::kShares);
        };
        if (lane < kWarpHeads / 2) {  // scales of two heads
            const float* const pair = memory.scale[0] + first + 2 * lane;
            const uint32_t to = shared_address(pair);
            each_other([&](int block) { send_pair(address_in(to, block), address_in(landed, block), pair[0], pair[1]); });
        }
#pragma unroll
        for (int i = lane / 8; i < kRows; i += kWarp / 8) {
            const uint32_t* const place = memory.query[0] + i / kWarpHeads * kMatrixWords + (first + i % kWarpHeads) * 32 + lane % 8 * 4;
            const float4 piece = *reinterpret_cast<const float4*>(place);
            const uint32_t to = shared_address(place);
            each_other([&](int block) { send(address_in(to, block), address_in(landed, block), piece); });
        }
    }
};

// Of a normal power of two below 2^127.
__device__ inline float power_inverse(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Four values in E5M2, what is too small for it cut off.
__device__ inline uint32_t e5m2_word(float x0, float x1, float x2, float x3) {
    return permute(half_pair(x0, x1), half_pair(x2, x3), 0x7531);
}

// Entry d: the magnitudes of codes 0 to 7 in E5M2, 2^d below those of a key's largest scale, then those of codes 7 to 0.
template <int D, class W>
__device__ void write_codes(ScoreMemory<D, W>& memory) {
    if (threadIdx.x >= kKeyScales) return;
    const float unit = __uint_as_float(uint32_t(127 - int(threadIdx.x)) << 23) * kKeyUnit;
    const uint32_t lower = e5m2_word(0.0f, 0.5f * unit, unit, 1.5f * unit), upper = e5m2_word(2 * unit, 3 * unit, 4 * unit, 6 * unit);
    memory.codes[threadIdx.x] = make_uint4(lower, upper, permute(upper, 0, 0x0123), permute(lower, 0, 0x0123));
}

// Eight values rounded to MXFP4 together with those of the other three lanes of the group, whose scale is the result. Next to 1.5 * 2^22
// times the power of two of a value, or of the scale if that is more, floats are as far apart as the codes, and even where these are. A
// group with an infinity or a NaN has an infinite scale, and is NaNs.
__device__ inline float round_to_mxfp4(float (&x)[8]) {
    const float scale = ue8m0_scale(group_amax(x, kMxGroup), 6.0f * 0x1p-126f, float(1.0 / 6.0));
#pragma unroll
    for (int p = 0; p < 8; ++p) {
        const float magnitude = fabsf(x[p]), power = __uint_as_float(__float_as_uint(fmaxf(magnitude, scale)) & 0x7f800000u);
        const float coarse = power * 0x1.8p22f, value = __fsub_rn(__fadd_rn(magnitude, coarse), coarse);
        x[p] = copysignf(value, x[p]);
    }
    return scale;
}

// Rotates, rounds and lays out items [first, last) of the query of a row, which is kept, as the block's `token`; zeros where there is
// no head.
template <int D, class W>
__device__ void prepare(const Search& s, int64_t row, int token, int first, int last, const QueryPart<D, W>& part,
                        ScoreMemory<D, W>& memory) {
    using Part = QueryPart<D, W>;
    const cedar_mqa_logits_topk_args& a = s.a;
    const bool exact = a.type == CEDAR_F32;
    const uint32_t quad = uint32_t(part.chunk) / (D / 32), unit = uint32_t(part.chunk) % (D / 32) * 4;
#pragma unroll 1
    for (int i = first; i < last; ++i) {
        const int head = part.head + i * Part::kStep;
        if (!Part::kShared && head >= kMostHeads) break;  // whole warps
        const uint4 raw = memory.raw()[i * kWarp];
        const uint32_t bits[4] = {raw.x, raw.y, raw.z, raw.w};
        float x[8];
#pragma unroll
        for (int p = 0; p < 8; ++p) x[p] = __uint_as_float(p % 2 ? bits[p / 2] & 0xffff0000u : bits[p / 2] << 16);
        if (__builtin_expect(exact && head < min(int(a.heads), Part::end_head()), false))
            load_pack(static_cast<const float*>(a.query) + part.place(s, row, i), x);
#pragma unroll
        for (int p = 0; p < 8; p += 2) {
            const float c = part.cos[p / 2], sine = part.sin[p / 2], even = x[p], odd = x[p + 1];
            x[p] = __fsub_rn(__fmul_rn(even, c), __fmul_rn(odd, sine));
            x[p + 1] = __fadd_rn(__fmul_rn(even, sine), __fmul_rn(odd, c));
            if (!exact) {
                const __nv_bfloat162 both = __floats2bfloat162_rn(x[p], x[p + 1]);
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(&both);
                x[p] = __uint_as_float(pair << 16), x[p + 1] = __uint_as_float(pair & 0xffff0000u);
            }
        }
        float scale = round_to_mxfp4(x);
#pragma unroll
        for (int step = kMxGroup / 8; step < Part::kChunks; step *= 2) scale = fmaxf(scale, __shfl_xor_sync(kAllLanes, scale, step));
        if (Part::kShared && head >= Part::end_head()) break;  // the last of a warp's
        if (part.chunk == 0) memory.scale[token][head] = scale;
        const float inverse = power_inverse(scale) * kQueryUnit;
        // four values are of one step, there the lower half of a row; the upper is of what a key has of the other sign
        uint32_t* const to = memory.query[token] + unit / 8 * kMatrixWords + uint32_t(head) * 32 + quad;
        const uint32_t place = unit % 8 ^ uint32_t(head) % 8;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const uint32_t word = e5m2_word(x[4 * p] * inverse, x[4 * p + 1] * inverse, x[4 * p + 2] * inverse, x[4 * p + 3] * inverse);
            to[(place ^ uint32_t(2 * p)) * 4] = word;
            to[(place ^ uint32_t(2 * p + 1)) * 4] = word ^ 0x80808080u;
        }
    }
    const float weight = __uint_as_float(exact ? part.weight : part.weight << 16);
    if (threadIdx.x < kMostHeads) memory.weight[token][threadIdx.x] = weight;
}

}  // namespace cedar::cuda::index
