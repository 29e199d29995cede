// SPDX-License-Identifier: Apache-2.0
// Scores of index keys: products of the matrix instruction with heads as rows and a block of 8 keys as columns. Of a key, the four
// lanes of a quad hold a quarter of the dimensions each, straight from memory, which is the order that the queries' fragments
// have too. A block of 8 rows of the pool is one aligned run of bytes, and 4 of them are what a warp scores at a time. A score's
// bits depend on its row and entry alone.
#pragma once

#include <type_traits>

#include "index_query.cuh"

namespace cedar::cuda::index {

// Where the key blocks [first, first + count) of a row are: block 0, whose scores nobody uses, where there is none. A thread looks up
// several at once, since each look-up waits for memory, with candidates twice.
template <int Threads, class Memory>
__device__ void list_blocks(const Search& s, int64_t row, int64_t base, int64_t most, int first, int count, Memory& memory) {
    constexpr int kBatch = 4;
    const cedar_mqa_logits_topk_args& a = s.a;
    const int per_block = a.candidates == nullptr ? 1 : int(a.block) / kBlockRows, per_page = int(a.per_page);
    const int padded = (count + kRunBlocks - 1) / kRunBlocks * kRunBlocks;
    for (int from = threadIdx.x; from < padded; from += Threads * kBatch) {
        int64_t entry[kBatch], page[kBatch];
        uint32_t number[kBatch];
        int live[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int block = first + min(from + i * Threads, count - 1);
            entry[i] = a.candidates == nullptr ? block : __ldg(a.candidates + row * a.candidate_blocks + block / per_block);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = from + i * Threads;
            entry[i] = (entry[i] * per_block + (first + at) % per_block) * kBlockRows;
            live[i] = at >= count || entry[i] < 0 || entry[i] >= most ? 0 : int(min(most - entry[i], int64_t(kBlockRows)));
            number[i] = s.page_shift >= 0 ? uint32_t(entry[i]) >> s.page_shift : uint32_t(entry[i]) / uint32_t(per_page);
            page[i] = 0;
            if (live[i] > 0) page[i] = __ldg(s.a.pages + base + number[i]);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = from + i * Threads;
            if (at >= padded) break;
            const uint32_t inside = uint32_t(entry[i]) - number[i] * uint32_t(per_page);
            memory.places[at] = live[i] == 0 ? 0u : uint32_t(page[i]) * uint32_t(per_page / kBlockRows) + inside / kBlockRows;
            memory.live[at] = uint8_t(live[i]);
        }
    }
}

// A lane's part of the keys of a run: of each block its key lane / 4, of that a quarter of the dimensions. Of the scales it has all of
// that key of block lane % 4.
template <int D>
struct Keys {
    static constexpr int kValues = D / 2, kScales = D / kMxGroup, kBytes = kBlockRows * (kValues + kScales), kWords = D / 32;
    using Scales = std::conditional_t<kScales == 4, uint32_t, std::conditional_t<kScales == 2, uint16_t, uint8_t>>;
    const uint8_t *values, *scales;  // this lane's of the pool's first block
    uint32_t words[kRunBlocks][kWords], scale;

    __device__ Keys(const Search& s, int lane) {
        values = static_cast<const uint8_t*>(s.a.keys) + lane / 4 * kValues + lane % 4 * (kValues / 4);
        scales = static_cast<const uint8_t*>(s.a.keys) + kBlockRows * kValues + lane / 4 * kScales;
    }

    // Block m from the pool's block `number`.
    __device__ void load(int m, uint32_t number) {
        const uint8_t* const from = values + uint64_t(number) * kBytes;
        if constexpr (kWords == 4) {
            const uint4 v = load_once(from);
            words[m][0] = v.x, words[m][1] = v.y, words[m][2] = v.z, words[m][3] = v.w;
        } else {
#pragma unroll
            for (int j = 0; j < kWords; ++j) words[m][j] = __ldg(reinterpret_cast<const uint32_t*>(from) + j);
        }
    }

    __device__ uint32_t load_scale(uint32_t number) const {
        return __ldg(reinterpret_cast<const Scales*>(scales + uint64_t(number) * kBytes));
    }

    // The scale of this lane's values of block m, a byte. All lanes.
    __device__ uint32_t scale_of(int m, int lane) const {
        return __shfl_sync(kAllLanes, scale, (lane & ~3) + m) >> lane % 4 * kScales / 4 * 8 & 0xff;
    }
};

// 2^(byte - 127 - 32) times the 2^126 that the codes' bits as bf16 lack; NaN for 255.
__device__ inline __nv_bfloat162 key_scale(uint32_t byte) {
    const int exponent = int(byte) + 126 - kQueryShift;
    const uint32_t bits = byte == 255 ? 0x7fc0u : uint32_t(max(exponent, 0)) << 7;
    const uint32_t both = bits | bits << 16;
    return *reinterpret_cast<const __nv_bfloat162*>(&both);
}

// Of the codes 0..7 of a word, the pairs (i, i + 4) as bf16. The product puts the sign and the rest of a code, which no other code
// is next to, where bf16 has them.
__device__ inline void widen_word(uint32_t word, __nv_bfloat162 scale, uint32_t (&pairs)[4]) {
    const uint32_t upper = word >> 8;
    pairs[0] = ((word & 0x000f000fu) * 0x1040u) & 0x81c081c0u;
    pairs[1] = ((word & 0x00f000f0u) * 0x0104u) & 0x81c081c0u;
    pairs[2] = ((upper & 0x000f000fu) * 0x1040u) & 0x81c081c0u;
    pairs[3] = ((upper & 0x00f000f0u) * 0x0104u) & 0x81c081c0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pairs[i]), scale);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
    }
}

// sums[b][e] += this lane's heads' part of the scores of key 2 q + e of B blocks, q the lane in its quad. x + |x| is relu(x) twice,
// or a NaN.
template <int D, int MT, int B, class Query, class Weight, class Fragment>
__device__ void multiply_blocks(const Query& query, const Weight& weight, const Fragment& fragment, float (*sums)[2]) {
    float c[B][MT][4] = {};
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
        uint32_t k[B][4];
        fragment(j, k);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint4 q = query(m, j, step);
#pragma unroll
                for (int b = 0; b < B; ++b) multiply_bf16(c[b][m], q.x, q.y, q.z, q.w, k[b][2 * step], k[b][2 * step + 1]);
            }
        }
    }
#pragma unroll
    for (int b = 0; b < B; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            sums[b][e] = 0.0f;
#pragma unroll
            for (int n = 0; n < 2 * MT; ++n) {
                const float x = c[b][n / 2][n % 2 * 2 + e];
                sums[b][e] = fmaf(weight(n), x + fabsf(x), sums[b][e]);
            }
        }
}

// The sums over all heads: lane 8 b + 4 e + q gets that of key 2 q + e of block b.
__device__ inline float sum_heads(const float (&sums)[kRunBlocks][2], int lane) {
    const bool upper = lane & 16, middle = lane & 8, odd = lane & 4;
    float two[2][2], one[2];
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            two[b][e] = (upper ? sums[b + 2][e] : sums[b][e]) + __shfl_xor_sync(kAllLanes, upper ? sums[b][e] : sums[b + 2][e], 16);
#pragma unroll
    for (int e = 0; e < 2; ++e) one[e] = (middle ? two[1][e] : two[0][e]) + __shfl_xor_sync(kAllLanes, middle ? two[0][e] : two[1][e], 8);
    return (odd ? one[1] : one[0]) + __shfl_xor_sync(kAllLanes, odd ? one[0] : one[1], 4);
}

// The score of a lane's key of a run, for a query that the warp has. next(m) replaces block m of the keys, which is done with.
template <int D, int MT, class Next>
__device__ float score_run(const uint4 (&query)[MT][D / 32][2], const float (&weight)[2 * MT * 8], const Keys<D>& keys, int lane,
                           const Next& next) {
    constexpr int kPair = 2;
    float sums[kRunBlocks][2];
#pragma unroll
    for (int b = 0; b < kRunBlocks; b += kPair) {
        __nv_bfloat162 scale[kPair];
#pragma unroll
        for (int i = 0; i < kPair; ++i) scale[i] = key_scale(keys.scale_of(b + i, lane));
        multiply_blocks<D, MT, kPair>(
            [&](int m, int j, int step) { return query[m][j][step]; }, [&](int n) { return weight[n * 8 + lane / 4]; },
            [&](int j, uint32_t(&k)[kPair][4]) {
#pragma unroll
                for (int i = 0; i < kPair; ++i) widen_word(keys.words[b + i][j], scale[i], k[i]);
            },
            sums + b);
#pragma unroll
        for (int i = 0; i < kPair; ++i) next(b + i);
    }
    return sum_heads(sums, lane);
}

// The same for the queries of `count` rows, for which the keys are widened once: store(t, score) gets those of row t.
template <int D, int MT, int G, class Next, class Store>
__device__ void score_run_together(const ScoreMemory<D, MT, G>& memory, int count, const Keys<D>& keys, int lane, const Next& next,
                                   const Store& store) {
    uint32_t wide[D / 32][kRunBlocks][4];
#pragma unroll
    for (int b = 0; b < kRunBlocks; ++b) {
        const __nv_bfloat162 scale = key_scale(keys.scale_of(b, lane));
#pragma unroll
        for (int j = 0; j < D / 32; ++j) widen_word(keys.words[b][j], scale, wide[j][b]);
        next(b);
    }
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
        float sums[kRunBlocks][2];
        multiply_blocks<D, MT, kRunBlocks>(
            [&](int m, int j, int step) { return memory.query[t][m][j][step][lane]; },
            [&](int n) { return memory.weight[t][n * 8 + lane / 4]; },
            [&](int j, uint32_t(&k)[kRunBlocks][4]) {
#pragma unroll
                for (int b = 0; b < kRunBlocks; ++b)
#pragma unroll
                    for (int i = 0; i < 4; ++i) k[b][i] = wide[j][b][i];
            },
            sums);
        store(t, sum_heads(sums, lane));
    }
}

// The scores of a run of columns from `column` on, and the highest of each block.
__device__ inline void store_scores(const Search& s, int64_t row, int column, int lane, bool is_entry, float score) {
    const int mine = column + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
    const uint32_t bits = is_entry ? ordered_bits(score) : 0;
    s.scores[(row - s.first) * s.stride + mine] = bits;
    uint32_t most = bits;
#pragma unroll
    for (int step = 1; step < kBlockRows; step *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, step));
    if (lane % 8 == 0) s.maxima[(row - s.first) * (s.stride / kBlockRows) + column / kBlockRows + lane / 8] = most;
}

// Rows [row, row + count) of one sequence. Warps take runs in turn; the next run's keys are on their way while one is scored. All
// threads of the block.
template <int D, int MT, int G>
__device__ void score_rows(const Search& s, int64_t row, int count, ScoreMemory<D, MT, G>& memory) {
    const cedar_mqa_logits_topk_args& a = s.a;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    constexpr int kThreads = ScoreBlock<G>::kThreads, kWarps = kThreads / kWarp;
    if (a.candidates != nullptr && blockIdx.x == 0)  // which of them are whose is known only when `visible` is
        for (int i = int(threadIdx.x) * 16; i < int(a.candidate_blocks); i += kThreads * 16)
            prefetch(a.candidates + row * a.candidate_blocks + i);
    const int64_t base = a.base[row], visible = a.visible[row];
    const QueryPart<D, MT, kThreads> part(s, row);
    int64_t most = a.candidates != nullptr || is_scored(a, visible) ? visible : 0;
    for (int t = 1; t < count; ++t) {
        const int64_t other = a.visible[row + t];
        if (is_scored(a, other)) most = max(most, other);
    }
    const int blocks = key_blocks(s, most), runs = (blocks + kRunBlocks - 1) / kRunBlocks;
    const int begin = int(uint32_t(runs) * blockIdx.x / gridDim.x) * kRunBlocks;
    const int end = min(int(uint32_t(runs) * (blockIdx.x + 1) / gridDim.x) * kRunBlocks, blocks);
    if (begin >= end) return;
    // where a lane's score lies in its run
    const int inside = lane % 4 * 2 + lane / 4 % 2, mine = lane / 8 * kBlockRows + inside;
    __syncthreads();  // nobody reads the last rows' memory
    list_blocks<kThreads>(s, row, base, most, begin, min(end - begin, kListed), memory);
    __syncthreads();
    const int self = warp * kRunBlocks;
    Keys<D> keys(s, lane);
    const auto load_first = [&](int listed) {
        if (self >= listed) return;
        keys.scale = keys.load_scale(memory.places[self + lane % 4]);
#pragma unroll
        for (int m = 0; m < kRunBlocks; ++m) keys.load(m, memory.places[self + m]);
    };
    load_first(min(end - begin, kListed));
    prepare(s, row, 0, part, memory);
    if constexpr (G > 1) {
        for (int t = 1; t < count; ++t) prepare(s, row + t, t, QueryPart<D, MT, kThreads>(s, row + t), memory);
    }
    __syncthreads();
    uint4 query[MT][D / 32][2];
    if constexpr (G == 1) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < D / 32; ++j)
#pragma unroll
                for (int step = 0; step < 2; ++step) query[m][j][step] = memory.query[0][m][j][step][lane];
    }
    for (int first = begin; first < end; first += kListed) {
        const int listed = min(end - first, kListed);
        if (first > begin) {
            __syncthreads();
            list_blocks<kThreads>(s, row, base, most, first, listed, memory);
            __syncthreads();
            load_first(listed);
        }
        for (int here = self; here < listed; here += kWarps * kRunBlocks) {
            const int next = here + kWarps * kRunBlocks, column = (first + here) * kBlockRows;
            const bool more = next < listed;
            const uint32_t next_scale = more ? keys.load_scale(memory.places[next + lane % 4]) : 0;
            const auto load_next = [&](int m) {
                if (more) keys.load(m, memory.places[next + m]);
            };
            if constexpr (G == 1) {
                const float score = score_run<D, MT>(query, memory.weight[0], keys, lane, load_next);
                const bool is_entry = a.candidates != nullptr ? inside < memory.live[here + lane / 8] : column + mine < visible;
                store_scores(s, row, column, lane, is_entry, score);
            } else {
                score_run_together(memory, count, keys, lane, load_next, [&](int t, float score) {
                    store_scores(s, row + t, column, lane, column + mine < a.visible[row + t], score);
                });
            }
            keys.scale = next_scale;
        }
    }
}

template <int D, int MT, int G>
__global__ void __launch_bounds__(ScoreBlock<G>::kThreads, ScoreBlock<G>::kPerSm) score(const Search s) {
    __shared__ ScoreMemory<D, MT, G> memory;
    release_launch();
    int64_t row = s.first + int64_t(blockIdx.y) * G;
    if constexpr (G == 1) {
        score_rows(s, row, 1, memory);
    } else {
        const int64_t stop = min(row + G, s.first + s.rows);
        while (row < stop) {
            int count = 1;
            while (row + count < stop && s.a.base[row + count] == s.a.base[row]) ++count;
            score_rows(s, row, count, memory);
            row += count;
        }
    }
}

}  // namespace cedar::cuda::index
