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
template <class W, int Batch>
struct Lookup {
    static constexpr int kBatch = Batch, kThreads = W::kThreads;
    uint32_t block[kBatch], page[kBatch], inside[kBatch], live[kBatch];  // block: of the sequence

    __device__ Lookup(const Search& s, const Listed& list, int from) {
        const cedar_mqa_logits_topk_args& a = s.a;
        const uint32_t per_page = uint32_t(a.per_page), most = uint32_t(list.most);
        const uint32_t per_block = uint32_t(a.block) / kBlockRows, candidates = candidates_of(s, most);
        uint32_t number[kBatch];  // of the block's candidate, then of its page; the block is first the row's, then the sequence's
        uint64_t candidate[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            block[i] = uint32_t(list.first + min(from + i * kThreads, list.count - 1));
            number[i] = quotient(block[i], per_block, s.block_shift);
            if (a.candidates != nullptr) candidate[i] = uint64_t(__ldcg(a.candidates + list.row * a.candidate_blocks + number[i]));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (a.candidates != nullptr) {
                const uint32_t part = block[i] - number[i] * per_block;
                block[i] = candidate[i] < candidates ? uint32_t(candidate[i]) * per_block + part : kEvery / kBlockRows;
            }
            const uint32_t entry = block[i] * kBlockRows;
            live[i] = from + i * kThreads >= list.count || entry >= most ? 0 : min(most - entry, uint32_t(kBlockRows));
            number[i] = quotient(entry, per_page, s.page_shift);
            inside[i] = (entry - number[i] * per_page) / kBlockRows;
            page[i] = 0;
            if (live[i] > 0) page[i] = uint32_t(__ldcg(a.pages + list.base + number[i]));
        }
    }

    template <int D>
    __device__ void store(const Search& s, const Listed& list, int from, ScoreMemory<D, W>& memory) const {
        const int padded = (list.count + W::kStep - 1) / W::kStep * W::kStep;
        const uint32_t per_page = uint32_t(s.a.per_page) / kBlockRows;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = from + i * kThreads;
            if (at >= padded) break;
            memory.places[at] = live[i] == 0 ? 0u : page[i] * per_page + inside[i];
            memory.numbers[at] = block[i];
            memory.live[at] = uint8_t(live[i]);
        }
    }
};

constexpr int kFirstBatch = 2;

// All of a list but what threads look up first.
template <int D, class W>
__device__ void look_up_rest(const Search& s, const Listed& list, ScoreMemory<D, W>& memory) {
    using Rest = Lookup<W, 4>;
    static_assert(kFirstBatch * W::kThreads % W::kStep == 0, "a list that ends there has no more to pad");
#pragma unroll 1
    for (int first = kFirstBatch * W::kThreads; first < list.count; first += Rest::kBatch * W::kThreads)
        Rest(s, list, first + int(threadIdx.x)).store(s, list, first + int(threadIdx.x), memory);
}

// A lane's part of the keys of a run: of each block its key lane / 4, of that a quarter of the dimensions. A lane copies what it will
// itself widen to the warp's ring in shared memory, and the scales of that key of block lane % 4, of which others read a byte.
template <int D>
struct Keys {
    static constexpr int kValues = D / 2, kScales = D / kMxGroup, kBytes = kBlockRows * (kValues + kScales), kWords = D / 32;
    static constexpr int kPart = kValues / 4, kStage = kWarp * (kRunBlocks * kPart + 4);  // bytes
    const uint8_t *values, *scales;  // this lane's of the pool's first block
    uint8_t *ring, *ring_scales;     // of the first stage, of its first block

    // ring: of the warp.
    __device__ Keys(const Search& s, uint8_t* ring, int lane) : ring(ring + lane * kPart) {
        values = static_cast<const uint8_t*>(s.a.keys) + lane / 4 * kValues + lane % 4 * kPart;
        scales = static_cast<const uint8_t*>(s.a.keys) + kBlockRows * kValues + lane / 4 * kScales / 4 * 4;
        ring_scales = ring + kRunBlocks * kWarp * kPart + lane / 4 * 16 + lane / 4 * kScales % 4 + lane % 4 * kScales / 4;
        // sums of an argument and a lane's part, which the compiler would otherwise do at each load
        asm("" : "+l"(values), "+l"(scales));
    }

    // Starts the copies of the run of the pool's blocks `places`. stage: its place in the ring, a multiple of kStage.
    __device__ void fetch(int stage, const uint32_t* places, int lane) const {
        const uint4 four = *reinterpret_cast<const uint4*>(places);
        const uint32_t numbers[kRunBlocks] = {four.x, four.y, four.z, four.w}, own = places[lane % 4];
        uint8_t* const to = ring + stage;
#pragma unroll
        for (int m = 0; m < kRunBlocks; ++m) {
            const uint8_t* const from = values + uint64_t(numbers[m]) * kBytes;
            if constexpr (kPart == 16) {
                copy_16(to + m * kWarp * kPart, from);
            } else {
#pragma unroll
                for (int i = 0; i < kPart; i += 4) copy_4(to + m * kWarp * kPart + i, from + i);
            }
        }
        copy_4(to + kRunBlocks * kWarp * kPart + lane * (4 - kPart), scales + uint64_t(own) * kBytes);
    }

    __device__ void load(int stage, int m, uint32_t (&words)[kWords]) const {
        const Pack<uint32_t, kWords> pack = *reinterpret_cast<const Pack<uint32_t, kWords>*>(ring + stage + m * kWarp * kPart);
#pragma unroll
        for (int j = 0; j < kWords; ++j) words[j] = pack.v[j];
    }

    // The scale of this lane's values of block m: 2^(byte - 127 - 32) times the 2^126 that the codes' bits as bf16 lack; NaN for 255.
    __device__ __nv_bfloat162 scale_of(int stage, int m) const {
        const uint32_t byte = ring_scales[stage + m * 4];
        constexpr uint32_t kOffset = uint32_t(126 - kQueryShift) << 7;
        const uint32_t both = byte == 255 ? 0x7fc07fc0u : byte * 0x00800080u + (kOffset << 16 | kOffset);
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

// Blocks b and b + 1 of a stage: of a lane its key of the former in the rows' upper half, that of the latter in the lower.
template <int D>
__device__ inline void widen_keys(const Keys<D>& keys, int stage, int b, uint32_t (&wide)[D / 16][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t words[D / 32];
        keys.load(stage, b + i, words);
        const __nv_bfloat162 scale = keys.scale_of(stage, b + i);
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
            uint32_t pairs[4];
            widen_word(words[j], scale, pairs);
#pragma unroll
            for (int p = 0; p < 4; ++p) wide[2 * j + p / 2][p % 2 * 2 + i] = pairs[p];
        }
    }
}

// The weights of a lane's heads.
struct Weights {
    float2 of[kMostHeads / 8];
    __device__ Weights(const float* weights, int lane) {
#pragma unroll
        for (int n = 0; n < kMostHeads / 8; ++n) of[n] = *reinterpret_cast<const float2*>(weights + 8 * n + lane % 4 * 2);
    }
};

// This lane's part of the weighted sums of two keys over the heads. x + |x| is relu(x) twice, or a NaN.
__device__ inline void weigh(const float (&c)[kMostHeads / 2], const Weights& weights, float& first, float& second) {
    first = second = 0.0f;
#pragma unroll
    for (int n = 0; n < kMostHeads / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = c[4 * n + i];
            float& sum = i / 2 == 0 ? first : second;
            sum = fmaf(i % 2 == 0 ? weights.of[n].x : weights.of[n].y, x + fabsf(x), sum);
        }
    }
}

// The scores of the keys of a stage, which are widened once, for `count` rows: store(t, score) gets those of row t. weights: of row 0.
template <int D, class W, class Store>
__device__ void score_run(const ScoreMemory<D, W>& memory, const Weights& weights, int count, const Keys<D>& keys, int stage, int lane,
                          const Store& store) {
    float sums[W::kRows][kRunBlocks];
#pragma unroll
    for (int b = 0; b < kRunBlocks; b += 2) {
        uint32_t wide[D / 16][4];
        widen_keys(keys, stage, b, wide);
#pragma unroll
        for (int t = 0; t < W::kRows; ++t) {
            if (t >= count) break;
            float c[kMostHeads / 2] = {};
            multiply_keys<D>(c, wide, memory.query[t], lane);
            weigh(c, t == 0 ? weights : Weights(memory.weight[t], lane), sums[t][b], sums[t][b + 1]);
        }
    }
#pragma unroll
    for (int t = 0; t < W::kRows; ++t) {
        if (t >= count) break;
        store(t, sum_heads(sums[t], lane));
    }
}

// Where a row's entries are, and how many: a kernel's first loads, on which all others wait.
struct Sight {
    int64_t base, visible;
    __device__ Sight(const Search& s, int64_t row) : base(s.a.base[row]), visible(s.a.visible[row]) {}
};

// A row's part that a block of threads scores: key blocks [begin, end) of those of the row.
struct Share {
    int begin, end;
};

// Rows [row, row + count) of one sequence, `sight` that of the first; the grid's blocks in x share a row. Warps take runs side by side,
// also where none is left, since they multiply together; the next runs' keys are on their way while some are scored.
// store(t, first, here, is_entry, score): a lane's score of row t, of its key lane / 4 of block here + lane % 4 of the list that begins
// with block `first`. All threads of the block.
template <int D, class W, class Store>
__device__ Share score_rows(const Search& s, int64_t row, int count, const Sight& sight, ScoreMemory<D, W>& memory, const Store& store) {
    const cedar_mqa_logits_topk_args& a = s.a;
    const int lane = threadIdx.x % kWarp, self = int(threadIdx.x) / kWarp * kRunBlocks;
    const QueryPart<D, W> part(s, row);
    int64_t most = a.candidates != nullptr || is_scored(a, sight.visible) ? sight.visible : 0;
    for (int t = 1; t < count; ++t) {
        const int64_t other = a.visible[row + t];
        if (is_scored(a, other)) most = max(most, other);
    }
    const int blocks = key_blocks(s, most), runs = (blocks + kRunBlocks - 1) / kRunBlocks;
    const uint32_t shares = W::kShares > 0 ? uint32_t(W::kShares) : gridDim.x;
    const int begin = int(uint32_t(runs) * blockIdx.x / shares) * kRunBlocks;
    const int end = min(int(uint32_t(runs) * (blockIdx.x + 1) / shares) * kRunBlocks, blocks);
    if (begin >= end) return {0, 0};
    const int mine = lane % 4 * kBlockRows + lane / 4;  // where a lane's score lies in its run
    __syncthreads();  // nobody reads the last rows' memory
    constexpr int kItems = QueryPart<D, W>::kItems, kEarly = kItems / 2;
    const Keys<D> keys(s, memory.warp_ring(), lane);
    // Starts the copies of the warp's run `i` of the `listed` blocks.
    const auto fetch = [&](int i, int stage, int listed) {
        if (i * W::kStep < listed) keys.fetch(stage, memory.places + i * W::kStep + self, lane);
        close_copies();
    };
    const auto fetch_first = [&](int listed) {
#pragma unroll 1
        for (int i = 0; i < kStages - 1; ++i) fetch(i, i * Keys<D>::kStage, listed);
    };
    Listed list{row, sight.base, most, begin, min(end - begin, W::kListed)};
    part.keep(memory);
    {  // the query is prepared while look-ups and keys are on their way
        const Lookup<W, kFirstBatch> lookup(s, list, int(threadIdx.x));
        prepare(s, row, 0, 0, kEarly, part, memory);
        lookup.store(s, list, int(threadIdx.x), memory);
    }
    look_up_rest(s, list, memory);
    __syncthreads();
    fetch_first(list.count);
    prepare(s, row, 0, kEarly, kItems, part, memory);
    if constexpr (W::kRows > 1) {
        for (int t = 1; t < count; ++t) {
            const QueryPart<D, W> other(s, row + t);
            other.keep(memory);
            prepare(s, row + t, t, 0, kItems, other, memory);
        }
    }
    publish_shared();
    __syncthreads();
    const Weights weights(memory.weight[0], lane);
    for (int first = begin; first < end; first += W::kListed) {
        const int listed = min(end - first, W::kListed);
        if (first > begin) {
            __syncthreads();
            list.first = first, list.count = listed;
            Lookup<W, kFirstBatch>(s, list, int(threadIdx.x)).store(s, list, int(threadIdx.x), memory);
            look_up_rest(s, list, memory);
            __syncthreads();
            fetch_first(listed);
        }
        constexpr int kLastStage = (kStages - 1) * Keys<D>::kStage;
        int stage = 0, next_stage = kLastStage;
        for (int i = 0; i * W::kStep < listed; ++i) {
            const int here = i * W::kStep + self;
            await_copies<kStages - 2>();
            __syncwarp();  // the others' copies too, and nobody reads the stage of the run before
            fetch(i + kStages - 1, next_stage, listed);
            score_run(memory, weights, count, keys, stage, lane, [&](int t, float score) {
                if (here >= listed) return;
                const bool is_entry = W::kRows == 1 ? lane / 4 < memory.live[here + lane % 4]
                                                    : (first + here) * kBlockRows + mine < a.visible[row + t];
                store(t, first, here, is_entry, score);
            });
            next_stage = stage;
            stage = stage == kLastStage ? 0 : stage + Keys<D>::kStage;
        }
    }
    return {begin, end};
}

// Puts scores into the workspace, and the highest of each block: see score_rows.
struct StoredScores {
    uint32_t *scores, *maxima;  // of the first row, this lane's of its first run
    int64_t stride;

    __device__ StoredScores(const Search& s, int64_t row) : stride(s.stride) {
        const uint32_t lane = threadIdx.x % kWarp;
        scores = s.scores + (row - s.first) * stride + (lane % 4 * kBlockRows + lane / 4);
        maxima = s.maxima + (row - s.first) * (stride / kBlockRows) + lane;
        // sums of an argument and a lane's part, which the compiler would otherwise do at each store
        asm("" : "+l"(scores), "+l"(maxima));
    }

    __device__ void operator()(int t, int first, int here, bool is_entry, float score) const {
        const uint32_t bits = is_entry ? ordered_bits(score) : 0, block = uint32_t(first + here);
        (scores + t * stride)[block * kBlockRows] = bits;
        uint32_t most = bits;
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, step));
        if (threadIdx.x % kWarp < kRunBlocks) (maxima + t * (stride / kBlockRows))[block] = most;
    }
};

template <int D, class W>
__global__ void __launch_bounds__(W::kThreads, W::kPerSm) score(const Search s) {
    extern __shared__ __align__(1024) unsigned char score_memory[];
    ScoreMemory<D, W>& memory = *reinterpret_cast<ScoreMemory<D, W>*>(score_memory);
    int64_t row = s.first + int64_t(blockIdx.y) * W::kRows;
    if constexpr (W::kRows == 1) prefetch_row(s, row, W::kThreads);
    await_launch();
    release_launch();  // only now: those who choose read what came before this launch without a wait of their own
    const Sight first(s, row);
    if constexpr (W::kRows == 1) {
        score_rows(s, row, 1, first, memory, StoredScores(s, row));
    } else {
        const int64_t stop = min(row + W::kRows, s.first + s.rows);
        while (row < stop) {
            int count = 1;
            while (row + count < stop && s.a.base[row + count] == s.a.base[row]) ++count;
            score_rows(s, row, count, Sight(s, row), memory, StoredScores(s, row));
            row += count;
        }
    }
}

}  // namespace cedar::cuda::index
