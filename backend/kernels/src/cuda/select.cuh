// SPDX-License-Identifier: Apache-2.0
// A cluster of blocks that chooses the k best of many keys exactly, ties to the lowest item, as ascending items. Each block has a
// run of neighbouring items; what they choose depends on the keys alone, not on the number of blocks or the order of threads.
//
// Blocks count their keys by a digit at a time, the highest first, and each sums the counts of all blocks from their shared
// memory. The counts of a pass are not touched again, so that a barrier of the cluster per pass is enough.
#pragma once

#include <cooperative_groups.h>

#include "cluster.cuh"
#include "common.cuh"

namespace cedar::cuda {

constexpr int kSelectThreads = 1024, kSelectWarps = kSelectThreads / kWarp;
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kDigitBits = 11, kBins = 1 << kDigitBits, kThreadBins = kBins / kSelectThreads;
constexpr int kMostPasses = (32 + kDigitBits - 1) / kDigitBits;
constexpr int kMostChosen = 2048;
constexpr int kMostKept = 8192;             // keys of a block that its shared memory has
constexpr uint32_t kEvery = 0x7fffffff;
static_assert(kThreadBins == 2, "a thread has the bins of an 8-byte load");
static_assert(kSelectWarps <= kWarp, "a warp has a sum of each warp");

// A float's bits as an unsigned number in the same order, which is not 0; zeros are equal, and a NaN is above or below everything
// by its sign. 0 is what no key is below.
__device__ inline uint32_t ordered_bits(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return max(bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u), 1u);
}

struct Selection {
    uint32_t bins[kMostPasses + 1][kBins];  // of each pass, and of the one that narrows
    uint32_t keys[kMostKept];
    uint32_t chosen[kMostChosen];
    uint32_t sums[kSelectWarps];
    uint32_t least, most;                   // of this block's keys
    uint32_t above, equal;
    uint32_t digit, before, inside, total;
};

// A block's dynamic shared memory: the selection, then what the caller has there.
__device__ inline Selection& selection() {
    extern __shared__ __align__(16) uint32_t shared[];
    return *reinterpret_cast<Selection*>(shared);
}

using Cluster = cooperative_groups::cluster_group;

// Keys that are in shared memory, `offset` words from the selection on. Not a pointer, of which a function that is not inlined would
// not know that it is to shared memory.
struct SharedKeys {
    int offset;
    __device__ uint32_t operator()(int i) const { return reinterpret_cast<const uint32_t*>(&selection())[offset + i]; }
};

// Until all threads of the cluster are here, and see what the others wrote.
__device__ inline void sync_cluster(const Cluster& cluster) {
    if (cluster.num_blocks() == 1)
        __syncthreads();
    else
        cluster.sync();
}

// What another block of the cluster, or this one, has where this block has it.
template <class T>
__device__ inline T load_of(const Cluster& cluster, T* own, unsigned block) {
    return cluster.num_blocks() == 1 ? *own : *cluster.map_shared_rank(own, block);
}

// The sum of x over this thread and all before it.
__device__ inline uint32_t prefix_sum(uint32_t x, uint32_t* sums) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, x, step);
        if (lane >= step) x += other;
    }
    if (lane == kWarp - 1) sums[warp] = x;
    __syncthreads();
    const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? sums[lane] : 0);
    __syncthreads();
    return before + x;
}

__device__ inline uint32_t block_max(uint32_t x, uint32_t* sums) {
    const int lane = threadIdx.x % kWarp;
    x = __reduce_max_sync(kAllLanes, x);
    if (lane == 0) sums[threadIdx.x / kWarp] = x;
    __syncthreads();
    const uint32_t result = __reduce_max_sync(kAllLanes, sums[lane % kSelectWarps]);
    __syncthreads();
    return result;
}

__device__ inline uint32_t block_min(uint32_t x, uint32_t* sums) { return ~block_max(~x, sums); }

__device__ inline void clear_bins() {
    Selection& s = selection();
    uint4* const bins = reinterpret_cast<uint4*>(s.bins);
#pragma unroll
    for (int i = 0; i < int(sizeof(s.bins) / sizeof(uint4)); i += kSelectThreads) bins[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Between what the k best keys of a cluster, and maybe some more, are.
struct Range {
    uint32_t least, most;
};

// highest, lowest: of this thread's of the cluster's `count` keys, 0 and the most that there is where it has none. Of each warp, as
// many threads have a highest key at or above the warp's bound as make k over all warps, so that the least of these bounds is one
// for all. A block's own bound may instead be its lowest key, so that no run, of which the last is the shortest, may have fewer keys
// than its share of k.
__device__ inline Range bounds(const Cluster& cluster, uint32_t highest, uint32_t lowest, int count, int k) {
    Selection& s = selection();
    const int lane = threadIdx.x % kWarp, blocks = int(cluster.num_blocks()), warps = blocks * kSelectWarps;
    const int rank = (k + warps - 1) / warps, shortest = count - (count + blocks - 1) / blocks * (blocks - 1);
    const bool shares = shortest >= rank * kSelectWarps;
    uint32_t bound = 0, left = highest;
    if (shares && rank == kWarp) bound = __reduce_min_sync(kAllLanes, highest);
    if (shares && rank < kWarp) {
        for (int i = 0; i < rank; ++i) {
            bound = __reduce_max_sync(kAllLanes, left);
            if (left == bound) left = 0;
        }
    }
    const uint32_t common = block_min(bound, s.sums), least = block_min(lowest, s.sums), most = block_max(highest, s.sums);
    if (threadIdx.x == 0) s.least = max(common, count >= k ? least : 0), s.most = most;
    sync_cluster(cluster);
    const unsigned other = unsigned(lane % blocks);
    Range range{load_of(cluster, &s.least, other), load_of(cluster, &s.most, other)};
    range.least = max(__reduce_min_sync(kAllLanes, range.least), 1u);
    range.most = max(__reduce_max_sync(kAllLanes, range.most), range.least);
    return range;
}

// Where, from the highest bin of all blocks down, the wanted number is reached: not at all when total is less.
struct Digit {
    uint32_t digit, before, inside, total;
};

__device__ inline Digit find_digit(const Cluster& cluster, uint32_t* bins, uint32_t wanted) {
    Selection& s = selection();
    sync_cluster(cluster);
    const int first = kSelectThreads - 1 - int(threadIdx.x);  // thread 0 has the highest bins
    uint2* const here = reinterpret_cast<uint2*>(bins) + first;
    uint2 own = make_uint2(0, 0);
    if (cluster.num_blocks() == 1) {
        own = *here;
    } else {
#pragma unroll
        for (int block = 0; block < kMostBlocks; ++block) {  // loads of as many blocks as there may be, at once
            const bool is_there = block < int(cluster.num_blocks());
            const uint2 v = *cluster.map_shared_rank(here, is_there ? unsigned(block) : 0u);
            if (is_there) own.x += v.x, own.y += v.y;
        }
    }
    const uint32_t counts[kThreadBins] = {own.y, own.x}, sum = own.x + own.y;
    const uint32_t through = prefix_sum(sum, s.sums);
    uint32_t before = through - sum;
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) {
        if (before < wanted && before + counts[i] >= wanted) {
            s.digit = uint32_t(first * kThreadBins + kThreadBins - 1 - i);
            s.before = before;
            s.inside = counts[i];
        }
        before += counts[i];
    }
    if (threadIdx.x == kSelectThreads - 1) s.total = through;
    __syncthreads();
    const Digit found{s.digit, s.before, s.inside, s.total};
    __syncthreads();
    return found;
}

// Counts the keys in the range whose bits above `known` are `prefix` by the `digit` bits below.
template <class Keys>
__device__ void count_digit(const Keys& keys, int count, uint32_t least, uint32_t prefix, int known, int digit, uint32_t* bins) {
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
        const uint32_t key = keys(i), v = key - least;
        if (key >= least && uint32_t(uint64_t(v) >> known) == prefix) atomicAdd(&bins[(v >> (known - digit)) & ((1u << digit) - 1)], 1u);
    }
}

// A least key that at least `wanted` of the cluster's reach, and not many more.
template <class Keys>
__device__ uint32_t narrow(const Cluster& cluster, const Keys& keys, int count, uint32_t wanted, const Range& range) {
    uint32_t* const bins = selection().bins[kMostPasses];
    const int bits = 32 - __clz(int((range.most - range.least) | 1)), digit = min(bits, kDigitBits);
    count_digit(keys, count, range.least, 0, bits, digit, bins);
    const Digit found = find_digit(cluster, bins, wanted);
    return found.total < wanted ? range.least : range.least + (found.digit << (bits - digit));
}

// What is chosen: all keys above `least`, and the first `equal` of those that equal it.
struct Cut {
    uint32_t least, equal;
};

// Of the keys at or above range.least (none is above range.most) the best `wanted`, or all when there are fewer.
template <class Keys>
__device__ Cut cut(const Cluster& cluster, const Keys& keys, int count, uint32_t wanted, const Range& range) {
    if (wanted == 0) return {0xffffffffu, 0};
    Selection& s = selection();
    uint32_t prefix = 0;
    int known = 32 - __clz(int((range.most - range.least) | 1));
    for (int pass = 0; known > 0; ++pass) {
        const int digit = min(known, kDigitBits);
        count_digit(keys, count, range.least, prefix, known, digit, s.bins[pass]);
        const Digit found = find_digit(cluster, s.bins[pass], wanted);
        if (pass == 0 && found.total <= wanted) return {range.least, kEvery};
        known -= digit;
        prefix = prefix << digit | found.digit;
        wanted -= found.before;
        if (found.inside == wanted) return {range.least + (prefix << known), kEvery};
    }
    return {range.least + prefix, wanted};
}

// A block's part of what is chosen: selection().chosen[0, count), ascending, from place `start` of the cluster's `total` on.
struct Part {
    int start, count, total;
};

template <class Keys>
__device__ Part gather(const Cluster& cluster, const Keys& keys, int count, const Cut& best) {
    Selection& s = selection();
    const int run = (count + kSelectThreads - 1) / kSelectThreads | 1;  // odd: threads read from different banks
    const int first = min(int(threadIdx.x) * run, count), last = min(first + run, count);
    uint32_t above = 0, equal = 0;
#pragma unroll 2
    for (int i = first; i < last; ++i) {
        const uint32_t key = keys(i);
        above += key > best.least;
        equal += key == best.least;
    }
    const uint32_t above_through = prefix_sum(above, s.sums), equal_through = prefix_sum(equal, s.sums);
    if (threadIdx.x == kSelectThreads - 1) s.above = above_through, s.equal = equal_through;
    sync_cluster(cluster);
    const int lane = threadIdx.x % kWarp, other = lane % int(cluster.num_blocks());
    const bool counts = lane < int(cluster.num_blocks()), precedes = lane < int(cluster.block_rank());
    const uint32_t others_above = load_of(cluster, &s.above, unsigned(other));
    const uint32_t others_equal = load_of(cluster, &s.equal, unsigned(other));
    const auto sum = [](bool whether, uint32_t x) { return __reduce_add_sync(kAllLanes, whether ? x : 0); };
    const uint32_t above_before = sum(precedes, others_above), equal_before = sum(precedes, others_equal);
    const uint32_t above_total = sum(counts, others_above), equal_total = sum(counts, others_equal);
    const auto place = [&](uint32_t a, uint32_t e) { return a + min(e, best.equal); };
    const uint32_t start = place(above_before, equal_before), end = place(above_before + s.above, equal_before + s.equal);
    uint32_t a = above_before + above_through - above, e = equal_before + equal_through - equal;
    if (above + equal > 0) {
        for (int i = first; i < last; ++i) {
            const uint32_t key = keys(i);
            if (key > best.least || (key == best.least && e < best.equal)) s.chosen[place(a, e) - start] = uint32_t(i);
            a += key > best.least;
            e += key == best.least;
        }
    }
    __syncthreads();
    return {int(start), int(end - start), int(place(above_total, equal_total))};
}

// Not inlined: it is long, and called from several places.
template <class Keys>
__device__ __noinline__ Part choose(const Cluster cluster, const Keys keys, int count, int wanted, const Range range) {
    return gather(cluster, keys, count, cut(cluster, keys, count, uint32_t(wanted), range));
}

}  // namespace cedar::cuda
