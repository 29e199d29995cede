// SPDX-License-Identifier: Apache-2.0
// Scores of index keys: products of the matrix instruction with keys as rows and heads as columns. Of a key, the four
// lanes of a quad hold a quarter of the dimensions each, straight from memory, which is the order that the queries' fragments
// have too. A block of 8 rows of the pool is one aligned run of bytes, and 4 of them are what a warp scores at a time. A score's
// bits depend on its row and entry alone.
#pragma once

#include <type_traits>

#include "index_query.cuh"

namespace cedar::cuda::index {

// A row's key blocks that a block of threads looks up at a time.
struct Listed {
    int64_t row, base, most;  // most: entries
    int first, count;         // of the row's key blocks
};

// Where a thread's blocks of a list are, from its number `from` on: block 0, whose scores nobody uses, where there is none. It looks up
// several at once, since each look-up waits for memory, with candidates twice.
template <int G, int Batch>
struct Lookup {
    static constexpr int kBatch = Batch, kThreads = kScoreThreads<G>;
    uint32_t page[kBatch], inside[kBatch], live[kBatch];

    __device__ Lookup(const Search& s, const Listed& list, int from) {
        const cedar_mqa_logits_topk_args& a = s.a;
        const uint32_t per_block = a.candidates == nullptr ? 1 : uint32_t(a.block) / kBlockRows, per_page = uint32_t(a.per_page);
        const uint32_t most = uint32_t(list.most), candidates = (most + uint32_t(a.block) - 1) / uint32_t(a.block);
        uint32_t block[kBatch], number[kBatch];  // of the list, then of the sequence; its candidate, then its page
        uint64_t candidate[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            block[i] = uint32_t(list.first + min(from + i * kThreads, list.count - 1));
            number[i] = per_block == 1 ? block[i] : block[i] / per_block;
            if (a.candidates != nullptr) candidate[i] = uint64_t(__ldg(a.candidates + list.row * a.candidate_blocks + number[i]));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (a.candidates != nullptr) {
                const uint32_t part = block[i] - number[i] * per_block;
                block[i] = candidate[i] < candidates ? uint32_t(candidate[i]) * per_block + part : kEvery / kBlockRows;
            }
            const uint32_t entry = block[i] * kBlockRows;
            live[i] = from + i * kThreads >= list.count || entry >= most ? 0 : min(most - entry, uint32_t(kBlockRows));
            number[i] = s.page_shift >= 0 ? entry >> s.page_shift : entry / per_page;
            inside[i] = (entry - number[i] * per_page) / kBlockRows;
            page[i] = 0;
            if (live[i] > 0) page[i] = uint32_t(__ldg(a.pages + list.base + number[i]));
        }
    }

    template <int D>
    __device__ void store(const Search& s, const Listed& list, int from, ScoreMemory<D, G>& memory) const {
        constexpr int kStep = kScoreWarps<G> * kRunBlocks;
        const int padded = (list.count + kStep - 1) / kStep * kStep;
        const uint32_t per_page = uint32_t(s.a.per_page) / kBlockRows;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = from + i * kThreads;
            if (at >= padded) break;
            memory.places[at] = live[i] == 0 ? 0u : page[i] * per_page + inside[i];
            memory.live[at] = uint8_t(live[i]);
        }
    }
};

constexpr int kFirstBatch = 2;

// All of a list but what threads look up first.
template <int D, int G>
__device__ void look_up_rest(const Search& s, const Listed& list, ScoreMemory<D, G>& memory) {
    using Rest = Lookup<G, 4>;
    static_assert(kFirstBatch * kScoreThreads<G> % (kScoreWarps<G> * kRunBlocks) == 0, "a list that ends there has no more to pad");
#pragma unroll 1
    for (int first = kFirstBatch * kScoreThreads<G>; first < list.count; first += Rest::kBatch * kScoreThreads<G>)
        Rest(s, list, first + int(threadIdx.x)).store(s, list, first + int(threadIdx.x), memory);
}

// A lane's part of the keys of a run: of each block its key lane / 4, of that a quarter of the dimensions. Of the scales it has all of
// that key of block lane % 4.
template <int D>
struct Keys {
    static constexpr int kValues = D / 2, kScales = D / kMxGroup, kBytes = kBlockRows * (kValues + kScales), kWords = D / 32;
    using Scales = std::conditional_t<kScales == 4, uint32_t, std::conditional_t<kScales == 2, uint16_t, uint8_t>>;
    const uint8_t *values, *scales;  // this lane's of the pool's first block
    uint32_t words[kRunBlocks][kWords], scale, scale_bytes;

    __device__ Keys(const Search& s, int lane) {
        values = static_cast<const uint8_t*>(s.a.keys) + lane / 4 * kValues + lane % 4 * (kValues / 4);
        scales = static_cast<const uint8_t*>(s.a.keys) + kBlockRows * kValues + lane / 4 * kScales;
        const uint32_t byte = uint32_t(lane % 4 * kScales / 4);
        scale_bytes = 0x4040 | byte << 8 | byte;  // this lane's in both halves of a word, zeros above
        // sums of an argument and a lane's part, which the compiler would otherwise do at each load
        asm("" : "+l"(values), "+l"(scales), "+r"(scale_bytes));
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

    // The scale of this lane's values of block m: 2^(byte - 127 - 32) times the 2^126 that the codes' bits as bf16 lack; NaN for 255. All
    // lanes.
    __device__ __nv_bfloat162 scale_of(int m, int lane) const {
        const uint32_t bytes = __byte_perm(__shfl_sync(kAllLanes, scale, (lane & ~3) + m), 0, scale_bytes);
        constexpr uint32_t kOffset = uint32_t(126 - kQueryShift) << 7;
        const uint32_t both = bytes == 0x00ff00ffu ? 0x7fc07fc0u : bytes * 128 + (kOffset << 16 | kOffset);
        return *reinterpret_cast<const __nv_bfloat162*>(&both);
    }
};

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

// c += the products of two blocks of keys with the heads. On Hopper a product of the whole warp group.
template <int D>
__device__ inline void multiply_keys(float (&c)[kMostHeads / 2], const uint32_t (&keys)[D / 16][4], const uint32_t* query, int lane) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(CEDAR_WIDE_WGMMA)
    const uint64_t matrix = matrix_of(query);
    begin_group();
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
        multiply_group(c, keys[step], matrix + uint64_t(step / 4 * (kMatrixWords / 4) + step % 4 * 2));
    close_group();
    await_groups<0>();
    settle(c);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) settle(keys[step]);
#else
    float(&parts)[kMostHeads / 8][4] = reinterpret_cast<float(&)[kMostHeads / 8][4]>(c);
    const uint32_t* const row = query + lane / 4 * 32 + lane % 4;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
        const uint32_t(&k)[4] = keys[step];
        const uint32_t *const lower = row + step / 4 * kMatrixWords + (step % 4 * 2 ^ lane / 4) * 4,
                       *const upper = row + step / 4 * kMatrixWords + (step % 4 * 2 + 1 ^ lane / 4) * 4;
#pragma unroll
        for (int n = 0; n < kMostHeads / 8; ++n) multiply_bf16(parts[n], k[0], k[1], k[2], k[3], lower[n * 256], upper[n * 256]);
    }
#endif
}

// The sums over all heads: a lane gets that of its key of block lane % 4.
__device__ inline float sum_heads(const float (&sums)[kRunBlocks], int lane) {
    const bool upper = lane & 2, odd = lane & 1;
    float two[2];
#pragma unroll
    for (int b = 0; b < 2; ++b)
        two[b] = (upper ? sums[b + 2] : sums[b]) + __shfl_xor_sync(kAllLanes, upper ? sums[b] : sums[b + 2], 2);
    return (odd ? two[1] : two[0]) + __shfl_xor_sync(kAllLanes, odd ? two[0] : two[1], 1);
}

// The scores of a run's keys, which are widened once, for `count` rows: store(t, score) gets those of row t. next(m) replaces block m
// of the keys, which is done with. x + |x| is relu(x) twice, or a NaN.
template <int D, int G, class Next, class Store>
__device__ void score_run(const ScoreMemory<D, G>& memory, int count, const Keys<D>& keys, int lane, const Next& next,
                          const Store& store) {
    float sums[G][kRunBlocks];
#pragma unroll
    for (int b = 0; b < kRunBlocks; b += 2) {
        uint32_t wide[D / 16][4];  // of a lane: its key of block b in the rows' upper half, that of block b + 1 in the lower
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const __nv_bfloat162 scale = keys.scale_of(b + i, lane);
#pragma unroll
            for (int j = 0; j < D / 32; ++j) {
                uint32_t pairs[4];
                widen_word(keys.words[b + i][j], scale, pairs);
#pragma unroll
                for (int p = 0; p < 4; ++p) wide[2 * j + p / 2][p % 2 * 2 + i] = pairs[p];
            }
        }
        next(b), next(b + 1);
#pragma unroll
        for (int t = 0; t < G; ++t) {
            if (t >= count) break;
            float c[kMostHeads / 2] = {};
            multiply_keys<D>(c, wide, memory.query[t], lane);
            sums[t][b] = sums[t][b + 1] = 0.0f;
#pragma unroll
            for (int n = 0; n < kMostHeads / 8; ++n) {
                const float2 weight = *reinterpret_cast<const float2*>(memory.weight[t] + 8 * n + lane % 4 * 2);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float x = c[4 * n + i];
                    sums[t][b + i / 2] = fmaf(i % 2 == 0 ? weight.x : weight.y, x + fabsf(x), sums[t][b + i / 2]);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < G; ++t) {
        if (t >= count) break;
        store(t, sum_heads(sums[t], lane));
    }
}

// The scores of a run of columns from `column` on, and the highest of each block.
__device__ inline void store_scores(const Search& s, int64_t row, int column, int lane, bool is_entry, float score) {
    const uint32_t bits = is_entry ? ordered_bits(score) : 0;
    uint32_t* const to = s.scores + (row - s.first) * s.stride;
    to[column + lane % 4 * kBlockRows + lane / 4] = bits;
    uint32_t most = bits;
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, step));
    uint32_t* const maximum = s.maxima + (row - s.first) * (s.stride / kBlockRows);
    if (lane < kRunBlocks) maximum[column / kBlockRows + lane] = most;
}

// Rows [row, row + count) of one sequence. Warps take runs side by side, also where none is left, since they multiply together; the
// next runs' keys are on their way while some are scored. All threads of the block.
template <int D, int G>
__device__ void score_rows(const Search& s, int64_t row, int count, ScoreMemory<D, G>& memory) {
    const cedar_mqa_logits_topk_args& a = s.a;
    const int lane = threadIdx.x % kWarp, self = int(threadIdx.x) / kWarp * kRunBlocks;
    if (a.candidates != nullptr && blockIdx.x == 0)  // which of them are whose is known only when `visible` is
        for (int i = int(threadIdx.x) * 16; i < int(a.candidate_blocks); i += kScoreThreads<G> * 16)
            prefetch(a.candidates + row * a.candidate_blocks + i);
    const int64_t base = a.base[row], visible = a.visible[row];
    const QueryPart<D, G> part(s, row);
    int64_t most = a.candidates != nullptr || is_scored(a, visible) ? visible : 0;
    for (int t = 1; t < count; ++t) {
        const int64_t other = a.visible[row + t];
        if (is_scored(a, other)) most = max(most, other);
    }
    const int blocks = key_blocks(s, most), runs = (blocks + kRunBlocks - 1) / kRunBlocks;
    const int begin = int(uint32_t(runs) * blockIdx.x / gridDim.x) * kRunBlocks;
    const int end = min(int(uint32_t(runs) * (blockIdx.x + 1) / gridDim.x) * kRunBlocks, blocks);
    if (begin >= end) return;
    const int mine = lane % 4 * kBlockRows + lane / 4;  // where a lane's score lies in its run
    __syncthreads();  // nobody reads the last rows' memory
    constexpr int kItems = QueryPart<D, G>::kItems, kEarly = kItems / 2;
    Keys<D> keys(s, lane);
    const auto load_first = [&] {
        keys.scale = keys.load_scale(memory.places[self + lane % 4]);
#pragma unroll
        for (int m = 0; m < kRunBlocks; ++m) keys.load(m, memory.places[self + m]);
    };
    Listed list{row, base, most, begin, min(end - begin, kListed)};
    part.keep(memory);
    {  // the query is prepared while look-ups and keys are on their way
        const Lookup<G, kFirstBatch> lookup(s, list, int(threadIdx.x));
        prepare(s, row, 0, 0, kEarly, part, memory);
        lookup.store(s, list, int(threadIdx.x), memory);
    }
    look_up_rest(s, list, memory);
    __syncthreads();
    load_first();
    prepare(s, row, 0, kEarly, kItems, part, memory);
    if constexpr (G > 1) {
        for (int t = 1; t < count; ++t) {
            const QueryPart<D, G> other(s, row + t);
            other.keep(memory);
            prepare(s, row + t, t, 0, kItems, other, memory);
        }
    }
    publish_shared();
    __syncthreads();
    for (int first = begin; first < end; first += kListed) {
        const int listed = min(end - first, kListed);
        if (first > begin) {
            __syncthreads();
            list.first = first, list.count = listed;
            Lookup<G, kFirstBatch>(s, list, int(threadIdx.x)).store(s, list, int(threadIdx.x), memory);
            look_up_rest(s, list, memory);
            __syncthreads();
            load_first();
        }
        for (int here = self; here - self < listed; here += kScoreWarps<G> * kRunBlocks) {
            const int next = here + kScoreWarps<G> * kRunBlocks, column = (first + here) * kBlockRows;
            const bool more = next - self < listed;
            const uint32_t next_scale = more ? keys.load_scale(memory.places[next + lane % 4]) : 0;
            score_run(
                memory, count, keys, lane,
                [&](int m) {
                    if (more) keys.load(m, memory.places[next + m]);
                },
                [&](int t, float score) {
                    if (here >= listed) return;
                    const bool is_entry = G == 1 ? lane / 4 < memory.live[here + lane % 4] : column + mine < a.visible[row + t];
                    store_scores(s, row + t, column, lane, is_entry, score);
                });
            keys.scale = next_scale;
        }
    }
}

template <int D, int G>
__global__ void __launch_bounds__(kScoreThreads<G>, kScorePerSm<G>) score(const Search s) {
    __shared__ ScoreMemory<D, G> memory;
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
