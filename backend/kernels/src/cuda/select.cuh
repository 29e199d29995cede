// SPDX-License-Identifier: Apache-2.0
// A block that chooses the k best of many scores exactly, ties to the lowest column, as ascending columns. What it chooses
// depends on the scores alone, not on the order in which its threads get to them.
#pragma once

#include "common.cuh"

namespace cedar::cuda {

constexpr int kSelectThreads = 1024, kSelectWarps = kSelectThreads / kWarp;
constexpr int kDigitBits = 10;                // of a radix pass: a bin per thread
constexpr int kMostChosen = 2048;
constexpr int kMostFiltered = 4096;           // scores that may be left after the filter
constexpr int kColumnBits = 24;
static_assert(1 << kDigitBits == kSelectThreads, "a thread owns a bin");

// A float's bits as an unsigned number in the same order; zeros are equal, and a NaN is above or below everything by its sign.
__device__ inline uint32_t ordered_bits(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

struct Selection {
    uint32_t keys[kMostFiltered];
    uint32_t columns[kMostFiltered];
    uint32_t chosen[kMostChosen];
    uint32_t bins[kSelectThreads];
    uint32_t sums[kSelectWarps];
    uint32_t digit, above, inside, filtered;
};

// A block's dynamic shared memory: the selection, then the bitmap of chosen columns. Functions that are not inlined ask for it
// here rather than take pointers, of which the compiler would not know that they are to shared memory.
__device__ inline Selection& selection() {
    extern __shared__ __align__(16) uint32_t shared[];
    return *reinterpret_cast<Selection*>(shared);
}

__device__ inline uint32_t* chosen_bitmap() { return reinterpret_cast<uint32_t*>(&selection() + 1); }

// The sum of x over this thread and all before it.
__device__ inline uint32_t prefix_sum(uint32_t x, uint32_t* sums) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, x, step);
        if (lane >= step) x += other;
    }
    if (lane == kWarp - 1) sums[warp] = x;
    __syncthreads();
    uint32_t before = lane < warp ? sums[lane] : 0;
    before = __reduce_add_sync(kAllLanes, before);
    __syncthreads();
    return before + x;
}

__device__ inline uint32_t block_max(uint32_t x, uint32_t* sums) {
    x = __reduce_max_sync(kAllLanes, x);
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
    __syncthreads();
    const uint32_t result = __reduce_max_sync(kAllLanes, sums[threadIdx.x % kWarp]);
    __syncthreads();
    return result;
}

__device__ inline uint32_t block_min(uint32_t x, uint32_t* sums) { return ~block_max(~x, sums); }

// Values at or above `least` are the wanted number plus `over`; over > 0 only of values that equal `least`.
struct Cut {
    uint32_t least;
    int over;
};

// value(i, v) says whether i takes part, and with which value below 2^bits. At least `wanted` do.
template <class Value>
__device__ Cut cut(const Value& value, int count, int wanted, int bits) {
    Selection& s = selection();
    uint32_t prefix = 0;
    int shift = bits, inside = 0;
    while (shift > 0) {
        const int digit = shift < kDigitBits ? shift : kDigitBits, known = shift;
        shift -= digit;
        s.bins[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += kSelectThreads) {
            uint32_t v;
            if (value(i, v) && uint32_t(uint64_t(v) >> known) == prefix) atomicAdd(&s.bins[(v >> shift) & ((1u << digit) - 1)], 1u);
        }
        __syncthreads();
        // thread t sums the bins from the highest down to its own, which is the t-th from the top
        const uint32_t own = s.bins[kSelectThreads - 1 - threadIdx.x], sum = prefix_sum(own, s.sums);
        if (sum >= uint32_t(wanted) && sum - own < uint32_t(wanted)) {
            s.digit = kSelectThreads - 1 - threadIdx.x;
            s.above = sum - own;
            s.inside = own;
        }
        __syncthreads();
        prefix = prefix << digit | s.digit;
        wanted -= int(s.above);
        inside = int(s.inside);
        __syncthreads();
        if (inside == wanted) break;
    }
    return {prefix << shift, inside - wanted};
}

// Sets the bits of the columns of the k best of count keys, ties to the lowest column. At least k of keys(i) are `least` or more,
// none is more than `most`; columns(i) is the column of i. Not inlined: it is long, and called from several places.
template <class Keys, class Columns>
__device__ __noinline__ void mark(Keys keys, Columns columns, int count, int k, uint32_t least, uint32_t most) {
    Selection& s = selection();
    uint32_t* const bitmap = chosen_bitmap();
    const auto relative = [&](int i, uint32_t& v) {
        const uint32_t key = keys(i);
        v = key - least;
        return key >= least;
    };
    const Cut best = cut(relative, count, k, 32 - __clz(most - least | 1));
    uint32_t first = 0;  // of the inverted columns of values that equal the least
    if (best.over > 0) {
        const auto equal = [&](int i, uint32_t& v) {
            v = ~columns(i) & ((1u << kColumnBits) - 1);
            return keys(i) - least == best.least && keys(i) >= least;
        };
        int equals = 0;
        for (int i = threadIdx.x; i < count; i += kSelectThreads) {
            uint32_t v;
            equals += equal(i, v);
        }
        equals = int(prefix_sum(uint32_t(equals), s.sums));
        if (threadIdx.x == kSelectThreads - 1) s.inside = uint32_t(equals);
        __syncthreads();
        equals = int(s.inside);
        __syncthreads();
        first = cut(equal, count, equals - best.over, kColumnBits).least;
    }
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
        const uint32_t key = keys(i), column = columns(i);
        if (key < least || key - least < best.least) continue;
        if (best.over > 0 && key - least == best.least && (~column & ((1u << kColumnBits) - 1)) < first) continue;
        atomicOr(&bitmap[column / 32], 1u << column % 32);
    }
    __syncthreads();
}

// A value that at least k of the warps' values reach: of the lanes' maxima of each warp the one at rank k / warps, and the least
// of those. Of columns that are spread evenly over the threads, few reach it that are not among the k best by far.
__device__ inline uint32_t sure_bound(uint32_t mine, int k, uint32_t* sums) {
    const int lane = threadIdx.x % kWarp, rank = (k + kSelectWarps - 1) / kSelectWarps - 1;
    int above = 0;
    for (int other = 0; other < kWarp; ++other) {
        const uint32_t x = __shfl_sync(kAllLanes, mine, other);
        above += x > mine || (x == mine && other < lane);
    }
    const unsigned holder = __ballot_sync(kAllLanes, above == rank);
    return block_min(__shfl_sync(kAllLanes, mine, __ffs(int(holder)) - 1), sums);
}

// What the filter left, and its columns; a column of unfiltered keys.
struct FilteredKeys {
    __device__ uint32_t operator()(int i) const { return selection().keys[i]; }
};
struct FilteredColumns {
    __device__ uint32_t operator()(int i) const { return selection().columns[i]; }
};
struct SameColumns {
    __device__ uint32_t operator()(int i) const { return uint32_t(i); }
};

// selection().chosen[0, k): the columns of the k highest of n keys, ascending. keys(i) may read memory.
template <class Keys>
__device__ void choose(const Keys& keys, int n, int k) {
    Selection& s = selection();
    uint32_t* const bitmap = chosen_bitmap();
    const int lane = threadIdx.x % kWarp, words = (n + 31) / 32;
    for (int i = threadIdx.x; i < words; i += kSelectThreads) bitmap[i] = 0;
    if (threadIdx.x == 0) s.filtered = 0;
    uint32_t most = 0, least = 0xffffffffu;
#pragma unroll 8
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
        const uint32_t key = keys(i);
        most = max(most, key);
        least = min(least, key);
    }
    const uint32_t bound = k <= kSelectThreads ? sure_bound(most, k, s.sums) : 0;
    least = max(block_min(least, s.sums), bound);
    most = block_max(most, s.sums);
    bool filtered = n <= kMostFiltered || bound > 0;
    if (filtered) {
#pragma unroll 8
        for (int from = 0; from < n; from += kSelectThreads) {
            const int i = from + int(threadIdx.x);
            const uint32_t key = i < n ? keys(i) : 0;
            const bool stays = i < n && key >= least;
            const unsigned lanes = __ballot_sync(kAllLanes, stays);
            if (lanes == 0) continue;
            uint32_t place = 0;
            if (lane == 0) place = atomicAdd(&s.filtered, uint32_t(__popc(lanes)));
            place = __shfl_sync(kAllLanes, place, 0) + uint32_t(__popc(lanes & ((1u << lane) - 1)));
            if (stays && place < kMostFiltered) {
                s.keys[place] = key;
                s.columns[place] = uint32_t(i);
            }
        }
        __syncthreads();
        filtered = s.filtered <= kMostFiltered;
    }
    if (filtered)
        mark(FilteredKeys{}, FilteredColumns{}, int(s.filtered), k, least, most);
    else
        mark(keys, SameColumns{}, n, k, least, most);
    // the set bits in order: a thread numbers those of a run of words
    const int run = (words + kSelectThreads - 1) / kSelectThreads, first = int(threadIdx.x) * run;
    uint32_t mine = 0;
    for (int i = first; i < first + run && i < words; ++i) mine += uint32_t(__popc(bitmap[i]));
    uint32_t place = prefix_sum(mine, s.sums) - mine;
    for (int i = first; i < first + run && i < words; ++i)
        for (uint32_t bits = bitmap[i]; bits != 0; bits &= bits - 1) s.chosen[place++] = uint32_t(i * 32 + __ffs(int(bits)) - 1);
    __syncthreads();
}

}  // namespace cedar::cuda
