// SPDX-License-Identifier: Apache-2.0
// Scores of index keys: products of the matrix instruction with keys as rows and heads as columns. Of a key, the four
// lanes of a quad hold a quarter of the dimensions each, straight from memory, which is the order that the queries' fragments
// have too. A block of 8 rows of the pool is one aligned run of bytes, and 4 of them are what a warp scores at a time. A score's
// bits depend on its row and entry alone.
#pragma once

#include <type_traits>

#include "index_keys.cuh"
#include "index_lookup.cuh"

namespace cedar::cuda::index {

// The scores of the keys of a stage, which are widened once, for `count` rows: store(t, score) gets those of row t, a lane that of its key
// of block lane % 4. largest: the scale of that key. meanwhile(): what is to be done besides, while products are under way.
template <int D, class W, class Meanwhile, class Store>
__device__ void score_run(const ScoreMemory<D, W>& memory, const Weights (&weights)[W::kRows], int count, const Keys<D>& keys, int stage,
                          float largest, int lane, const Meanwhile& meanwhile, const Store& store) {
    float sums[W::kRows][kRunBlocks];
#pragma unroll
    for (int b = 0; b < kRunBlocks; b += 2) {
        uint32_t wide[D / 16][4];
        widen_keys(keys, memory.codes, stage, b, wide);
#pragma unroll
        for (int t = 0; t < W::kRows; ++t) {
            if (t >= count) break;
            float c[kMostHeads / 2] = {};
            start_products<D>(c, wide, memory.query[t], lane);
            if (b == 0 && t == 0) meanwhile();  // it branches: that no sum is read ahead of the wait was seen in the machine code (CUDA 13.0)
            await_products<D>(c, wide);
            weigh(c, weights[t], sums[t][b], sums[t][b + 1]);
        }
    }
#pragma unroll
    for (int t = 0; t < W::kRows; ++t) {
        if (t >= count) break;
        const float even = lane & 2 ? sums[t][2] : sums[t][0], odd = lane & 2 ? sums[t][3] : sums[t][1];
        store(t, (lane & 1 ? odd : even) * weights[t].factor * largest);
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
// with block `first`. part: of row `row`. All threads of the block; where blocks share a row as a cluster, they have arrived there.
template <int D, class W, class Store>
__device__ Share score_rows(const Search& s, int64_t row, int count, const Sight& sight, const QueryPart<D, W>& part,
                            ScoreMemory<D, W>& memory, const Store& store) {
    const cedar_mqa_logits_topk_args& a = s.a;
    const int lane = threadIdx.x % kWarp, self = int(threadIdx.x) / kWarp * kRunBlocks;
    int64_t most = a.candidates != nullptr || is_scored(a, sight.visible) ? sight.visible : 0;
    for (int t = 1; t < count; ++t) {
        const int64_t other = a.visible[row + t];
        if (is_scored(a, other)) most = max(most, other);
    }
    constexpr bool kShared = QueryPart<D, W>::kShared;
    // few blocks share whole steps of a warp group, in which its warps take part anyway
    constexpr int kGroupBlocks = kGroup / kWarp * kRunBlocks, kUnit = kShared ? kGroupBlocks : kRunBlocks;
    const int blocks = key_blocks(s, most), units = (blocks + kUnit - 1) / kUnit;
    const uint32_t shares = W::kShares > 0 ? uint32_t(W::kShares) : gridDim.x;
    // a warp group multiplies as long as one of its warps has a run, and copies no keys that it does not await
    const int of_group = W::kThreads == kGroup ? 0 : __shfl_sync(kAllLanes, int(threadIdx.x) / kGroup * kGroupBlocks, 0);
    const int begin = min(int(uint32_t(units) * blockIdx.x / shares) * kUnit, blocks);
    const int end = min(int(uint32_t(units) * (blockIdx.x + 1) / shares) * kUnit, blocks);
    if (!kShared && begin >= end) return {0, 0};
    const int mine = lane % 4 * kBlockRows + lane / 4;  // where a lane's score lies in its run
    if constexpr (!kShared) __syncthreads();  // nobody reads the last rows' memory
    constexpr int kItems = QueryPart<D, W>::kItems, kEarly = kItems / 2;
    const Keys<D> keys(s, memory.warp_ring(), lane);
    // Starts the copies of the warp's run `i` of the `listed` blocks.
    const auto fetch = [&](int i, int stage, int listed) {
        if (i * W::kStep + of_group < listed) keys.fetch(stage, memory.places + i * W::kStep + self, lane);
        close_copies();
    };
    const auto fetch_first = [&](int listed) {
#pragma unroll 1
        for (int i = 0; i < kStages - 1; ++i) fetch(i, i * Keys<D>::kStage, listed);
    };
    Listed list{row, sight.base, most, begin, min(end - begin, W::kListed)};
    if constexpr (kShared) {  // some warps prepare heads for all blocks while the others look up
        constexpr int kPreparers = QueryPart<D, W>::kPreparers;
        write_codes(memory);
        __syncwarp();
        await_cluster();  // all have started
        if (threadIdx.x < kPreparers) {
            part.keep(memory);
            prepare(s, row, 0, 0, part.has_heads() ? kItems : 0, part, memory);
            if (part.has_heads()) part.send_heads(memory);
        } else {
            look_up<W::kThreads - kPreparers>(s, list, memory);
        }
        __syncthreads();
        fetch_first(list.count);
        await_phase(&memory.query_landed, 0);
        if (begin >= end) return {0, 0};
    } else {
        part.keep(memory);
        write_codes(memory);
        {  // the query is prepared while look-ups and keys are on their way
            const Lookup<W, kFirstBatch> lookup(s, list, int(threadIdx.x));
            prepare(s, row, 0, 0, kEarly, part, memory);
            lookup.store(s, list, int(threadIdx.x), memory);
        }
        look_up_rest(s, list, memory);
        __syncthreads();
        fetch_first(list.count);
        prepare(s, row, 0, kEarly, kItems, part, memory);
    }
    if constexpr (W::kRows > 1) {
        for (int t = 1; t < count; ++t) {
            const QueryPart<D, W> other(s, row + t);
            other.keep(memory);
            prepare(s, row + t, t, 0, kItems, other, memory);
        }
    }
    publish_shared();
    if constexpr (!kShared) __syncthreads();
    Weights weights[W::kRows];
#pragma unroll
    for (int t = 0; t < W::kRows; ++t)
        if (t < count) weights[t].load(memory, t, float(a.weight_scale), lane);
    for (int first = begin; first < end; first += W::kListed) {
        const int listed = min(end - first, W::kListed);
        if (!kShared && first > begin) {
            __syncthreads();
            list.first = first, list.count = listed;
            Lookup<W, kFirstBatch>(s, list, int(threadIdx.x)).store(s, list, int(threadIdx.x), memory);
            look_up_rest(s, list, memory);
            __syncthreads();
            fetch_first(listed);
        }
        constexpr int kLastStage = (kStages - 1) * Keys<D>::kStage;
        int stage = 0, next_stage = kLastStage;
        for (int i = 0; i * W::kStep + of_group < listed; ++i) {
            const int here = i * W::kStep + self;
            await_copies<kStages - 2>();
            const float largest = keys.measure(stage, lane);
            __syncwarp();  // the others' copies too, and nobody reads the stage of the run before
            const auto fetch_next = [&] { fetch(i + kStages - 1, next_stage, listed); };
            score_run(memory, weights, count, keys, stage, largest, lane, fetch_next, [&](int t, float score) {
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
        score_rows(s, row, 1, first, QueryPart<D, W>(s, row), memory, StoredScores(s, row));
    } else {
        const int64_t stop = min(row + W::kRows, s.first + s.rows);
        while (row < stop) {
            int count = 1;
            while (row + count < stop && s.a.base[row + count] == s.a.base[row]) ++count;
            score_rows(s, row, count, Sight(s, row), QueryPart<D, W>(s, row), memory, StoredScores(s, row));
            row += count;
        }
    }
}

}  // namespace cedar::cuda::index
