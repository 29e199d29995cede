// SPDX-License-Identifier: Apache-2.0
// A search among few entries by a cluster of blocks: each scores its share of the row's entries into its shared memory, and they choose
// together, so that no launch and no memory of the device stands between a score and what is chosen. The same choice as that of
// select.cuh. Blocks send each other what they counted, announced to barriers: the cluster has no barrier but that of its start.
#pragma once

#include "index_score.cuh"
#include "mhc_cluster.cuh"

namespace cedar::cuda::index {

constexpr int kFewColumns = 16384, kLeastFewBlocks = 8;
constexpr int kFewKeys = kFewColumns / kLeastFewBlocks;  // of a block
static_assert(kFewKeys % kRun == 0, "whole runs");
constexpr int kFewDigit = 8, kFewBins = 1 << kFewDigit, kFewPasses = 32 / kFewDigit, kFewCounters = kFewBins / 2;  // threads

// Blocks of a cluster. The memory of copies is later that of all blocks' counts of two passes.
template <int Blocks, int Threads, int PerSm>
struct FewWay
    : Way<1, Threads, PerSm, kFewKeys / kBlockRows, 2 * Blocks * kFewBins * int(sizeof(uint32_t))> {
    static constexpr int kBlocks = Blocks, kShares = Blocks, kCountBytes = Blocks * kFewBins * int(sizeof(uint32_t));
    static_assert(Blocks >= kLeastFewBlocks && Blocks * Threads / kWarp % kWarp == 0);
};

template <int D, class W>
struct FewMemory {
    uint64_t ranges_landed, counts_landed[kFewPasses];
    alignas(16) Range ranges[W::kBlocks][W::kWarps];             // of each warp of the cluster
    alignas(16) uint32_t bins[kFewPasses][kFewBins];             // this block's counts
    alignas(16) uint32_t keys[kFewKeys];
    uint32_t sums[W::kWarps], digit, before, inside, total;
    ScoreMemory<D, W> score;

    // All blocks' counts of a pass, of which a block is one ahead of another at most. Nobody sends them before all have scored.
    __device__ uint32_t* counts(int pass, int block) {
        return reinterpret_cast<uint32_t*>(score.ring) + (pass % 2 * W::kBlocks + block) * kFewBins;
    }
};

// Numbers of all blocks, and above these of the blocks before this one. Neither reaches 2^16.
static_assert(kFewColumns < 1 << 16);
__device__ inline uint32_t whole(uint32_t x) { return x & 0xffff; }

// A cluster's choice: `best` of the keys, of which the blocks before this one have `above` and `equal`, all blocks `total`.
struct Choice {
    Cut best;
    uint32_t above, equal, total;
};

template <int D, class W>
struct FewSearch {
    static constexpr int T = W::kThreads;
    FewMemory<D, W>& memory;
    const int rank, lane = int(threadIdx.x) % kWarp;

    __device__ void start() const {
        if (threadIdx.x == 0) {
            init_barrier(&memory.ranges_landed, 1);
            for (int i = 0; i < kFewPasses; ++i) init_barrier(&memory.counts_landed[i], 1);
            publish_barriers();
            announce_bytes(&memory.ranges_landed, sizeof(memory.ranges));
            for (int i = 0; i < kFewPasses; ++i) announce_bytes(&memory.counts_landed[i], W::kCountBytes);
        }
        uint4* const bins = reinterpret_cast<uint4*>(memory.bins);
        for (int i = threadIdx.x; i < kFewPasses * kFewBins / 4; i += T) bins[i] = make_uint4(0, 0, 0, 0);
        __syncwarp();
        arrive_at_cluster();
    }

    __device__ void send_words(int to, uint32_t* place, uint64_t* barrier, uint32_t x, uint32_t y) const {
        send_pair(address_in(shared_address(place), to), address_in(shared_address(barrier), to), __uint_as_float(x), __uint_as_float(y));
    }

    // Between what the k best keys, and maybe some more, are. highest: of this thread's keys, 0 where it has none. Of each warp, as many
    // threads have a highest key at or above the warp's bound as make k over all warps.
    __device__ Range range_of(uint32_t highest, int k) const {
        constexpr int kWarps = W::kBlocks * W::kWarps;
        const int rank_wanted = (k + kWarps - 1) / kWarps;
        uint32_t bound = 0, left = rank_wanted <= kWarp ? highest : 0;
#pragma unroll 4
        for (int i = 0; i < min(rank_wanted, kWarp); ++i) {
            bound = __reduce_max_sync(kAllLanes, left);
            if (left == bound) left = 0;
        }
        const uint32_t most = __reduce_max_sync(kAllLanes, highest);
        if (lane < W::kBlocks) send_words(lane, &memory.ranges[rank][threadIdx.x / kWarp].least, &memory.ranges_landed, bound, most);
        __syncthreads();  // the block's keys are there
        await_phase(&memory.ranges_landed, 0);
        Range range{0xffffffffu, 0};
        const Range* const all = memory.ranges[0];
#pragma unroll
        for (int i = 0; i < kWarps; i += kWarp) {
            range.least = min(range.least, all[i + lane].least);
            range.most = max(range.most, all[i + lane].most);
        }
        range.least = max(__reduce_min_sync(kAllLanes, range.least), 1u);
        range.most = max(__reduce_max_sync(kAllLanes, range.most), range.least);
        return range;
    }

    // Where, from the highest bin of all blocks down, the wanted number is reached: not at all when the whole total is less.
    __device__ Digit find_digit(int pass, uint32_t wanted) const {
        __syncthreads();
        const int first = kFewCounters - 1 - int(threadIdx.x);  // thread 0 has the highest bins
        uint32_t through = 0;
        uint2 own = make_uint2(0, 0);
        if (first >= 0) {
            const uint2 mine = reinterpret_cast<const uint2*>(memory.bins[pass])[first];
#pragma unroll
            for (int to = 0; to < W::kBlocks; ++to)
                send_words(to, memory.counts(pass, rank) + 2 * first, &memory.counts_landed[pass], mine.x, mine.y);
            await_phase(&memory.counts_landed[pass], 0);
#pragma unroll
            for (int block = 0; block < W::kBlocks; ++block) {
                const uint2 v = reinterpret_cast<const uint2*>(memory.counts(pass, block))[first];
                const uint32_t factor = block < rank ? 0x10001u : 1u;
                own.x += v.x * factor, own.y += v.y * factor;
            }
            through = own.x + own.y;
#pragma unroll
            for (int step = 1; step < kWarp; step *= 2) {
                const uint32_t other = __shfl_up_sync(kAllLanes, through, step);
                if (lane >= step) through += other;
            }
            if (lane == kWarp - 1) memory.sums[threadIdx.x / kWarp] = through;
        }
        __syncthreads();
        if (first >= 0) {
            for (int warp = 0; warp < int(threadIdx.x) / kWarp; ++warp) through += memory.sums[warp];
            const uint32_t middle = through - own.x, before = middle - own.y;  // above the lower bin, and above both
            const auto found = [&](int bin, uint32_t above, uint32_t inside) {
                memory.digit = uint32_t(bin), memory.before = above, memory.inside = inside;
            };
            if (whole(before) < wanted && whole(middle) >= wanted) found(2 * first + 1, before, own.y);
            if (whole(middle) < wanted && whole(through) >= wanted) found(2 * first, middle, own.x);
            if (first == 0) memory.total = through;
        }
        __syncthreads();
        return {memory.digit, memory.before, memory.inside, memory.total};
    }

    // Of `count` keys of this block, and the others' keys, at or above range.least (none is above range.most) the best `wanted`, or all
    // when there are fewer.
    __device__ Choice choose(int count, uint32_t wanted, const Range& range) const {
        const uint32_t k = wanted;
        uint32_t prefix = 0, above = 0, equal = 0;
        int known = 32 - __clz(int((range.most - range.least) | 1));
#pragma unroll 1
        for (int pass = 0; known > 0; ++pass) {
            const int digit = min(known, kFewDigit);
            for (int i = threadIdx.x; i < count; i += T) {
                const uint32_t key = memory.keys[i], v = key - range.least;
                if (key >= range.least && uint32_t(uint64_t(v) >> known) == prefix)
                    atomicAdd(&memory.bins[pass][(v >> (known - digit)) & ((1u << digit) - 1)], 1u);
            }
            const Digit found = find_digit(pass, wanted);
            if (pass == 0 && whole(found.total) <= wanted) return {{range.least, kEvery}, found.total >> 16, 0, whole(found.total)};
            known -= digit;
            prefix = prefix << digit | found.digit;
            wanted -= whole(found.before);
            above += found.before >> 16;
            equal = found.inside >> 16;
            if (whole(found.inside) == wanted) return {{range.least + (prefix << known), kEvery}, above + equal, 0, k};
        }
        return {{range.least + prefix, wanted}, above, equal, k};
    }

    // Of this block's keys in their order what is chosen: place(i, item).
    template <class Place>
    __device__ void gather(int count, const Choice& choice, const Place& place) const {
        const Cut& best = choice.best;
        const int run = (count + T - 1) / T | 1;  // odd: threads read from different banks
        const int first = min(int(threadIdx.x) * run, count), last = min(first + run, count);
        uint32_t mine = 0;  // above, and 2^16 times those that equal
        for (int i = first; i < last; ++i) {
            const uint32_t key = memory.keys[i];
            mine += uint32_t(key > best.least) + (uint32_t(key == best.least) << 16);
        }
        uint32_t before = prefix_sum(mine) - mine;
        if (mine == 0) return;
        for (int i = first; i < last; ++i) {
            const uint32_t key = memory.keys[i];
            const uint32_t above = choice.above + whole(before), equal = choice.equal + (before >> 16);
            if (key > best.least || (key == best.least && equal < best.equal)) place(int(above + min(equal, best.equal)), i);
            before += uint32_t(key > best.least) + (uint32_t(key == best.least) << 16);
        }
    }

    // The sum of x over this thread and all of the block before it.
    __device__ uint32_t prefix_sum(uint32_t x) const {
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
            const uint32_t other = __shfl_up_sync(kAllLanes, x, step);
            if (lane >= step) x += other;
        }
        __syncthreads();  // nobody reads the sums before
        if (lane == kWarp - 1) memory.sums[threadIdx.x / kWarp] = x;
        __syncthreads();
        return x + __reduce_add_sync(kAllLanes, lane < int(threadIdx.x) / kWarp ? memory.sums[lane] : 0);
    }
};

// Cluster (0, row) searches for a row.
template <int D, class W>
__global__ void __launch_bounds__(W::kThreads, W::kPerSm) search_few(const Search s) {
    constexpr int T = W::kThreads;
    extern __shared__ __align__(1024) unsigned char few_memory[];
    FewMemory<D, W>& memory = *reinterpret_cast<FewMemory<D, W>*>(few_memory);
    const cedar_mqa_logits_topk_args& a = s.a;
    const FewSearch<D, W> few{memory, int(blockIdx.x)};
    const int64_t row = s.first + blockIdx.y, width = a.width;
    const int self = int(blockIdx.x * T + threadIdx.x), all = int(gridDim.x) * T, wanted = int(a.top_k);
    release_launch();
    prefetch_row(s, row, T);
    few.start();
    await_launch();
    const Sight sight(s, row);
    uint32_t highest = 0;
    const Share share = score_rows(s, row, 1, sight, memory.score, [&](int, int, int here, bool is_entry, float score) {
        const uint32_t bits = is_entry ? ordered_bits(score) : 0;
        const int lane = int(threadIdx.x) % kWarp;
        memory.keys[(here + lane % 4) * kBlockRows + lane / 4] = bits;
        highest = max(highest, bits);
    });
    __syncwarp();
    await_cluster();  // all have started
    if (a.candidates == nullptr && sight.visible <= wanted) {
        for (int i = self; i < width; i += all) write_entry(s, row, sight.base, i, i < sight.visible ? i : -1);
        return;
    }
    const int count = (share.end - share.begin) * kBlockRows;
    const Range range = few.range_of(highest, wanted);
    Choice choice{};
    if (wanted > 0) {
        choice = few.choose(count, uint32_t(wanted), range);
        few.gather(count, choice, [&](int i, int item) {
            const int block = item / kBlockRows, inside = item % kBlockRows;
            a.index[row * width + i] = int64_t(memory.score.numbers[block]) * kBlockRows + inside;
            a.slots[row * width + i] = int64_t(memory.score.places[block]) * kBlockRows + inside;
        });
    }
    for (int i = int(choice.total) + self; i < width; i += all) write_entry(s, row, 0, i, -1);
}

}  // namespace cedar::cuda::index
