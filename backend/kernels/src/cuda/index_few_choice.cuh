// SPDX-License-Identifier: Apache-2.0
// What a cluster of blocks chooses of a row's keys, of which each has its share in shared memory: the same as select.cuh. Blocks send
// each other what may be chosen, or where that is too much what they counted, announced to barriers: the cluster needs no barrier but that
// of its start.
#pragma once

#include "index_score.cuh"

namespace cedar::cuda::index {

constexpr int kFewColumns = 16384;
// Keys of a block of a cluster: whole steps, of which the last may be of fewer runs.
constexpr int few_keys(int blocks, int step) { return (kFewColumns + blocks * step - 1) / (blocks * step) * step; }
constexpr int kFewDigit = 8, kFewBins = 1 << kFewDigit, kFewPasses = 32 / kFewDigit, kFewCounters = kFewBins / 2;  // threads

// Blocks of a cluster. The memory of copies is later that of all blocks' counts of two passes.
template <int Blocks, int Threads, int PerSm>
struct FewWay
    : Way<1, Threads, PerSm, few_keys(Blocks, Threads / kWarp * kRun) / kBlockRows, 2 * Blocks * kFewBins * int(sizeof(uint32_t))> {
    static constexpr int kBlocks = Blocks, kShares = Blocks, kCountBytes = Blocks * kFewBins * int(sizeof(uint32_t));
};

template <int D, class W>
struct FewMemory {
    static constexpr int kKeys = W::kListed * kBlockRows;  // of this block
    static constexpr int kRingWords = int(sizeof(ScoreMemory<D, W>::ring) / sizeof(uint32_t)) / W::kBlocks;
    static constexpr int kRoom = (kRingWords < kKeys ? kRingWords : kKeys) / 4 * 4;  // keys of a block that the others take
    static_assert(kRoom <= 0xffff);
    uint64_t ranges_landed, lists_landed, counts_landed[kFewPasses];
    alignas(8) uint32_t listed[W::kBlocks][2];                   // first: keys that each block has listed
    uint32_t members, starts[2][W::kWarps];
    alignas(16) uint32_t list[kRoom];                            // of this block
    uint16_t items[kRoom];                                       // what the listed keys are of
    alignas(16) uint32_t inside[kWarp];                          // keys that the cut is among, then zeros
    alignas(16) Range ranges[W::kBlocks][W::kWarps];             // of each warp of the cluster
    alignas(32) uint32_t bins[kFewPasses][kFewBins];             // this block's counts
    alignas(16) uint32_t keys[kKeys];
    uint32_t sums[W::kWarps];
    ScoreMemory<D, W> score;

    // The keys that another block has listed. Nobody sends them before all have scored.
    __device__ uint32_t* keys_of(int block) { return reinterpret_cast<uint32_t*>(score.ring) + block * kRoom; }
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
            init_barrier(&memory.lists_landed, W::kBlocks);
            init_barrier(&memory.score.query_landed, 1);
            for (int i = 0; i < kFewPasses; ++i) init_barrier(&memory.counts_landed[i], 1);
            publish_barriers();
            announce_bytes(&memory.ranges_landed, sizeof(memory.ranges));
            announce_bytes(&memory.score.query_landed, QueryPart<D, W>::others_bytes());
            memory.members = 0;
            for (int i = 0; i < kFewPasses; ++i) announce_bytes(&memory.counts_landed[i], W::kCountBytes);
        }
        if (threadIdx.x < kWarp) memory.inside[threadIdx.x] = 0;
        uint4* const bins = reinterpret_cast<uint4*>(memory.bins);
        for (int i = threadIdx.x; i < kFewPasses * kFewBins / 4; i += T) bins[i] = make_uint4(0, 0, 0, 0);
        __syncwarp();
        arrive_at_cluster();
    }

    __device__ void send_words(int to, uint32_t* place, uint64_t* barrier, uint32_t x, uint32_t y) const {
        send_pair(address_in(shared_address(place), to), address_in(shared_address(barrier), to), __uint_as_float(x), __uint_as_float(y));
    }

    // Between what the k best keys, and maybe some more, are. highest, second: of this thread's keys, 0 where it has none. Of each warp, as
    // many of these are at or above the warp's bound as make k over all warps.
    __device__ Range range_of(uint32_t highest, uint32_t second, int k) const {
        constexpr int kWarps = W::kBlocks * W::kWarps;
        const int rank_wanted = (k + kWarps - 1) / kWarps;
        const uint32_t most = __reduce_max_sync(kAllLanes, highest);
        // the best of the second keys first: with those above it, it is commonly about the seventh
        uint32_t bound = __reduce_max_sync(kAllLanes, second), left = highest;
        int reached = __popc(__ballot_sync(kAllLanes, highest >= bound)) + 1;
        if (reached > rank_wanted)
            reached = 0;
        else if (highest >= bound)
            left = second == bound ? 0 : second, second = 0;
#pragma unroll 4
        for (; reached < min(rank_wanted, 2 * kWarp); ++reached) {
            bound = __reduce_max_sync(kAllLanes, left);
            if (left == bound) left = second, second = 0;
        }
        if (rank_wanted > 2 * kWarp) bound = 0;
        if (lane < W::kBlocks) send_words(lane, &memory.ranges[rank][threadIdx.x / kWarp].least, &memory.ranges_landed, bound, most);
        __syncthreads();  // the block's keys are there
        await_phase(&memory.ranges_landed, 0);
        Range range{0xffffffffu, 0};
        const Range* const all = memory.ranges[0];
#pragma unroll
        for (int i = 0; i < kWarps; i += kWarp) {
            const Range& one = all[min(i + lane, kWarps - 1)];
            range.least = min(range.least, one.least);
            range.most = max(range.most, one.most);
        }
        range.least = max(__reduce_min_sync(kAllLanes, range.least), 1u);
        range.most = max(__reduce_max_sync(kAllLanes, range.most), range.least);
        return range;
    }

    // Puts what all blocks have counted in a pass in the place of this block's counts.
    __device__ void sum_counts(int pass) const {
        __syncthreads();
        if (threadIdx.x < kFewCounters) {
            uint2* const mine = reinterpret_cast<uint2*>(memory.bins[pass]) + threadIdx.x;
            const uint2 own = *mine;
#pragma unroll
            for (int to = 0; to < W::kBlocks; ++to)
                send_words(to, memory.counts(pass, rank) + 2 * threadIdx.x, &memory.counts_landed[pass], own.x, own.y);
            await_phase(&memory.counts_landed[pass], 0);
            uint2 sum = make_uint2(0, 0);
#pragma unroll
            for (int block = 0; block < W::kBlocks; ++block) {
                const uint2 v = reinterpret_cast<const uint2*>(memory.counts(pass, block))[threadIdx.x];
                const uint32_t factor = block < rank ? 0x10001u : 1u;
                sum.x += v.x * factor, sum.y += v.y * factor;
            }
            *mine = sum;
        }
        __syncthreads();
    }

    // Where, from the highest bin down, the wanted number is reached: not at all when the whole total is less. Every warp finds it by
    // itself.
    __device__ Digit find_digit(int pass, uint32_t wanted) const {
        constexpr int kEach = kFewBins / kWarp;
        const int first = (kWarp - 1 - lane) * kEach;  // lane 0 has the highest bins
        const Pack<uint32_t, kEach> own = *reinterpret_cast<const Pack<uint32_t, kEach>*>(memory.bins[pass] + first);
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum += own.v[i];
        const uint32_t through = warp_prefix_sum(sum);
        uint32_t before = through - sum, digit = 0, inside = 0;
        const bool is_here = whole(before) < wanted && whole(through) >= wanted;
        bool is_found = false;
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i) {
            const bool reaches = whole(before + own.v[i]) >= wanted;
            if (!is_found && reaches) digit = uint32_t(first + i), inside = own.v[i];
            if (!is_found && !reaches) before += own.v[i];
            is_found |= reaches;
        }
        const int at = max(__ffs(int(__ballot_sync(kAllLanes, is_here))) - 1, 0);
        return {__shfl_sync(kAllLanes, digit, at), __shfl_sync(kAllLanes, before, at), __shfl_sync(kAllLanes, inside, at),
                __shfl_sync(kAllLanes, through, kWarp - 1)};
    }

    // Lists what of this block's `count` keys reaches `least`, and sends it to all blocks if it is not too much. Whether all blocks' keys
    // are in the lists, which have landed.
    __device__ bool exchange_lists(int count, uint32_t least) const {
        static_assert(FewMemory<D, W>::kKeys <= 32 * T, "a bit of each of a thread's");
        constexpr int kRoom = FewMemory<D, W>::kRoom;
        const int run = (count + 4 * T - 1) / (4 * T) * 4, first = int(threadIdx.x) * run;
        uint32_t mine = 0;  // a bit of each
#pragma unroll 1
        for (int i = 0; i < run && first + i < count; i += 4) {
            const uint4 keys = *reinterpret_cast<const uint4*>(memory.keys + first + i);
            mine |= (uint32_t(keys.x >= least) | uint32_t(keys.y >= least) << 1 | uint32_t(keys.z >= least) << 2 |
                     uint32_t(keys.w >= least) << 3)
                    << i;
        }
        int place = int(prefix_sum(uint32_t(__popc(mine)))) - __popc(mine);
        const int listed = int(__reduce_add_sync(kAllLanes, lane < W::kWarps ? memory.sums[lane] : 0));
#pragma unroll 1
        for (; mine != 0 && place < kRoom; mine &= mine - 1, ++place) {
            const int item = first + __ffs(int(mine)) - 1;
            memory.list[place] = memory.keys[item], memory.items[place] = uint16_t(item);
        }
        if (threadIdx.x < 4 && listed + int(threadIdx.x) < kRoom) memory.list[listed + threadIdx.x] = 0;  // what is no key
        __syncthreads();
        const int to = int(threadIdx.x) % W::kBlocks, pieces = listed <= kRoom ? (listed + 3) / 4 : 0;
        const uint32_t landed = address_in(shared_address(&memory.lists_landed), to);
        if (threadIdx.x < W::kBlocks) {
            announce_bytes_in(landed, sizeof(memory.listed[0]) + pieces * sizeof(float4));
            send_words(to, memory.listed[rank], &memory.lists_landed, uint32_t(listed), 0);
        }
        const uint32_t there = address_in(shared_address(memory.keys_of(rank)), to);
#pragma unroll 1
        for (int i = int(threadIdx.x) / W::kBlocks; i < pieces && is_of_team(); i += kTeam)
            send(there + i * sizeof(float4), landed, reinterpret_cast<const float4*>(memory.list)[i]);
        await_phase(&memory.lists_landed, 0);
        return __reduce_max_sync(kAllLanes, memory.listed[lane % W::kBlocks][0]) <= kRoom;
    }

    // As many threads for each block's keys; the last threads may be left over.
    static constexpr int kTeam = T / W::kBlocks, kHeld = 2;
    __device__ static bool is_of_team() { return T % W::kBlocks == 0 || int(threadIdx.x) < kTeam * W::kBlocks; }
    __device__ int listed_by() const { return int(threadIdx.x) / kTeam; }

    // A thread's part of the listed keys of block `listed_by`, in fours, zeros where there are no more: commonly all are in registers.
    struct Part {
        const uint4* keys;
        int next, pieces;
        uint4 held[kHeld];

        template <class Take>
        __device__ void each(const Take& take) const {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) take(held[i]);
#pragma unroll 1
            for (int i = next; i < pieces; i += kTeam) take(keys[i]);
        }
    };

    __device__ Part part_of_listed() const {
        Part part{reinterpret_cast<const uint4*>(memory.keys_of(listed_by())), int(threadIdx.x) % kTeam, 0};
        if (is_of_team()) part.pieces = (int(memory.listed[listed_by()][0]) + 3) / 4;
#pragma unroll
        for (int i = 0; i < kHeld; ++i, part.next += kTeam)
            part.held[i] = part.next < part.pieces ? part.keys[part.next] : make_uint4(0, 0, 0, 0);
        return part;
    }

    // The cut of the listed keys, of which the best `wanted` are less than all: every block finds it by itself.
    __device__ Cut cut_lists(const Part& part, uint32_t wanted, const Range& range) const {
        uint32_t least = range.least;
        int known = 32 - __clz(int((range.most - range.least) | 1));
#pragma unroll 1
        for (int pass = 0;; ++pass) {
            const int digit = min(known, kFewDigit), shift = known - digit;
            const uint32_t furthest = 0xffffffffu >> (32 - known);
            uint32_t* const bins = memory.bins[pass];
            const auto count = [&](uint32_t key) {
                if (key >= least && key - least <= furthest) atomicAdd(bins + ((key - least) >> shift), 1u);
            };
            part.each([&](const uint4& four) { count(four.x), count(four.y), count(four.z), count(four.w); });
            __syncthreads();
            const Digit found = find_digit(pass, wanted);
            known = shift;
            least += found.digit << shift;
            wanted -= found.before;
            if (found.inside == wanted) return {least, kEvery};
            if (known == 0) return {least, wanted};
            if (found.inside <= kWarp) return cut_inside(part, found.inside, wanted, least, known);
        }
    }

    // The same where the cut is among no more keys than a warp has lanes: those from `least` on, and less than 2^bits above it.
    __device__ Cut cut_inside(const Part& part, uint32_t count, uint32_t wanted, uint32_t least, int bits) const {
        const uint32_t end = 1u << bits;
        part.each([&](const uint4& four) {
            if (min(min(four.x - least, four.y - least), min(four.z - least, four.w - least)) >= end) return;  // of most threads
            const auto add = [&](uint32_t key) {
                if (key - least < end && key >= least) memory.inside[atomicAdd(&memory.members, 1u)] = key;
            };
            add(four.x), add(four.y), add(four.z), add(four.w);
        });
        __syncthreads();
        const uint32_t own = memory.inside[lane];  // zeros are no keys
        uint32_t above = 0, through = 0;
#pragma unroll 2
        for (uint32_t i = 0; i < count; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(memory.inside + i);
            above += uint32_t(four.x > own) + uint32_t(four.y > own) + uint32_t(four.z > own) + uint32_t(four.w > own);
            through += uint32_t(four.x >= own) + uint32_t(four.y >= own) + uint32_t(four.z >= own) + uint32_t(four.w >= own);
        }
        const bool is_cut = own != 0 && above < wanted && through >= wanted;
        const int at = __ffs(int(__ballot_sync(kAllLanes, is_cut))) - 1;
        return {__shfl_sync(kAllLanes, own, at), wanted - __shfl_sync(kAllLanes, above, at)};
    }

    // Of the listed keys the best `wanted`, or all when there are fewer: place(i, item) those of this block. The number of all.
    template <class Place>
    __device__ uint32_t choose_listed(uint32_t wanted, const Range& range, const Place& place) const {
        const Part part = part_of_listed();
        const uint32_t all = __reduce_add_sync(kAllLanes, lane < W::kBlocks ? memory.listed[lane][0] : 0);
        const Cut best = all <= wanted ? Cut{range.least, kEvery} : cut_lists(part, wanted, range);
        const auto place_of = [&](uint32_t key) { return uint32_t(key > best.least) + (uint32_t(key == best.least) << 16); };
        uint32_t earlier = 0, mine = 0;  // of other blocks', and of this warp's: above, and 2^16 times those that equal
        if (listed_by() < rank)
            part.each([&](const uint4& four) { earlier += place_of(four.x) + place_of(four.y) + place_of(four.z) + place_of(four.w); });
        earlier = __reduce_add_sync(kAllLanes, earlier);
        const int warp = int(threadIdx.x) / kWarp, count = int(memory.listed[rank][0]), run = (count + T - 1) / T * kWarp;
        const int first = warp * run, last = min(first + run, count);
        const auto key_of = [&](int i) { return i < last ? memory.list[i] : 0; };
        const auto votes = [&](uint32_t key, uint32_t lanes) {
            return uint32_t(__popc(__ballot_sync(kAllLanes, key > best.least) & lanes) +
                            (__popc(__ballot_sync(kAllLanes, key == best.least) & lanes) << 16));
        };
#pragma unroll 1
        for (int i = first; i < last; i += kWarp) mine += votes(key_of(i + lane), kAllLanes);
        if (lane == 0) memory.starts[0][warp] = mine, memory.starts[1][warp] = earlier;
        __syncthreads();
        const uint32_t start = lane < W::kWarps ? memory.starts[1][lane] + (lane < warp ? memory.starts[0][lane] : 0) : 0;
        uint32_t before = __reduce_add_sync(kAllLanes, start);
#pragma unroll 1
        for (int i = first; i < last; i += kWarp) {
            const uint32_t key = key_of(i + lane), here = before + votes(key, (1u << lane) - 1), equal = here >> 16;
            if (key > best.least || (key == best.least && equal < best.equal))
                place(int(whole(here) + min(equal, best.equal)), int(memory.items[i + lane]));
            before += votes(key, kAllLanes);
        }
        return min(all, wanted);
    }

    __device__ void count_key(int pass, uint32_t key, uint32_t least, uint32_t prefix, int known, int digit) const {
        const uint32_t v = key - least;
        if (key >= least && uint32_t(uint64_t(v) >> known) == prefix)
            atomicAdd(&memory.bins[pass][(v >> (known - digit)) & ((1u << digit) - 1)], 1u);
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
#pragma unroll 2
            for (int i = threadIdx.x; i < count; i += T) count_key(pass, memory.keys[i], range.least, prefix, known, digit);
            sum_counts(pass);
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

    // The sum of x over this thread and all of the block before it. Nobody has read the sums since the last barrier.
    __device__ uint32_t prefix_sum(uint32_t x) const {
        x = warp_prefix_sum(x);
        if (lane == kWarp - 1) memory.sums[threadIdx.x / kWarp] = x;
        __syncthreads();
        return x + __reduce_add_sync(kAllLanes, lane < int(threadIdx.x) / kWarp ? memory.sums[lane] : 0);
    }

    __device__ uint32_t warp_prefix_sum(uint32_t x) const {
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
            const uint32_t other = __shfl_up_sync(kAllLanes, x, step);
            if (lane >= step) x += other;
        }
        return x;
    }
};

}  // namespace cedar::cuda::index
