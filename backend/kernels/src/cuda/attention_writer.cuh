// SPDX-License-Identifier: Apache-2.0
// The warpgroup of an attention block that decodes records into tiles.
#pragma once

#include "attention_block.cuh"
#include "records.cuh"

namespace cedar::cuda::attention {

// A lane has a group of 32 dimensions of a key, of which four units are made. Eight lanes have groups of one key, side by side in its
// record, and units of different banks. A step is what a warp writes at once: so many keys, of them all groups or half of those.
template <int D, int64_t Record>
struct Decoder {
    static constexpr bool kFp8 = Record == CEDAR_RECORD_FP8;
    static constexpr int kGroups = D / 32, kAbreast = kGroups < 8 ? kGroups : 8, kGroupSteps = kGroups / kAbreast;
    static constexpr int kKeys = kWarp / kAbreast, kSteps = kWarpKeys / kKeys * kGroupSteps;
    static constexpr int kWords = kFp8 ? 8 : 4, kValues = kFp8 ? D : D / 2, kBytes = kValues + (kFp8 ? D / kMxGroup : D / kNvfp4Group);
    static constexpr int kScaleBytes = kFp8 ? 1 : 2;  // of a group
    struct Raw {
        uint32_t words[kWords];
        uint32_t scale;
    };

    // Where a lane's codes and scale lie in the first record of a pool.
    struct Source {
        __device__ Source(const uint8_t* pool, int lane)
            : codes(pool + lane % kAbreast * kWords * 4), scale(pool + kValues + lane % kAbreast * kScaleBytes) {}
        const uint8_t *codes, *scale;

        // Whole addresses in registers, to which an instruction adds a record's offset.
        __device__ void keep() {
            size_t first = __cvta_generic_to_global(codes), second = __cvta_generic_to_global(scale);
            asm volatile("" : "+l"(first), "+l"(second));
            codes = static_cast<const uint8_t*>(__cvta_global_to_generic(first));
            scale = static_cast<const uint8_t*>(__cvta_global_to_generic(second));
        }
    };

    // The lane's group in step `behind` of a key's.
    __device__ static Raw load(const Source& source, uint32_t index, int behind) {
        Raw raw;
        const uint64_t offset = uint64_t(index) * kBytes;
        load_words(raw.words, source.codes + offset + behind * kAbreast * kWords * 4);
        const uint8_t* scale = source.scale + offset + behind * kAbreast * kScaleBytes;
        if constexpr (kFp8)
            raw.scale = *scale;
        else
            raw.scale = *reinterpret_cast<const uint16_t*>(scale);
        return raw;
    }

    template <int N>
    __device__ static void load_words(uint32_t (&words)[N], const uint8_t* from) {
        constexpr int kAligned = kBytes % 16 == 0 ? 4 : kBytes % 8 == 0 ? 2 : 1, kAtOnce = N < kAligned ? N : kAligned;  // words
#pragma unroll
        for (int i = 0; i < N; i += kAtOnce) {
            if constexpr (kAtOnce == 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(from + i * 4);
                words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
            } else if constexpr (kAtOnce == 2) {
                const uint2 v = *reinterpret_cast<const uint2*>(from + i * 4);
                words[i] = v.x, words[i + 1] = v.y;
            } else {
                words[i] = *reinterpret_cast<const uint32_t*>(from + i * 4);
            }
        }
    }

    // What makes up for what the codes' bits as bf16 lack (2^120 and 2^126), and divides by 256. FP8: of a scale, in both halves.
    __device__ static __nv_bfloat162 factor(uint32_t scale) {
        if constexpr (kFp8) return as_pair(scale == 255 ? 0x7fc07fc0u : min(scale + 112, 255u) * 0x00800080u);
        return factors(scale * 0x00010001u);
    }
    // NVFP4: of a scale in each half. Its NaN, all bits of a magnitude, grows to one of bf16.
    __device__ static __nv_bfloat162 factors(uint32_t scales) {
        const uint32_t bits = scales << 4 & 0x07f007f0u, nan = bits + 0x00100010u & 0x08000800u;
        return __hmul2(__hmul2(as_pair(bits + nan * 15), __float2bfloat162_rn(0x1p120f)), __float2bfloat162_rn(0x1p118f));
    }

    __device__ static __nv_bfloat162 as_pair(uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); }
    __device__ static uint32_t scaled(uint32_t bits, __nv_bfloat162 by) {
        const __nv_bfloat162 value = __hmul2(as_pair(bits), by);
        return *reinterpret_cast<const uint32_t*>(&value);
    }

    // Codes `which` and `which` + 4 of 8 as bf16 with their bits, which a word each holds, or two.
    __device__ static uint32_t pair(const uint32_t* words, int which) {
        if constexpr (kFp8) {
            const uint32_t x = __byte_perm(words[0], words[1], which / 2 == 0 ? 0x5410 : 0x7632);
            return which % 2 == 0 ? (x << 4 & 0x07f007f0u) | (x << 8 & 0x80008000u) : (x >> 4 & 0x07f007f0u) | (x & 0x80008000u);
        } else {
            // A product moves a code of each half to where its sign belongs and to where the rest does: no bit is in both, none is carried.
            const uint32_t low = words[0], high = low >> 6;
            if (which == 3) return (low & 0x80008000u) | (high & 0x01c001c0u);
            const uint32_t codes = which == 0 ? low & 0x000f000fu : which == 1 ? low & 0x00f000f0u : high & 0x003c003cu;
            return codes * (which == 0 ? 0x1040 : which == 1 ? 0x104 : 0x410) & 0x81c081c0u;
        }
    }

    // The same where it is not known which.
    __device__ static uint32_t any_pair(const uint32_t* words, int which) {
        if constexpr (kFp8) {
            const uint32_t x = __byte_perm(words[0], words[1], 0x0400 + which * 0x0101);
            return (x << 4 & 0x07f007f0u) | (x << 8 & 0x80008000u);
        } else {
            return (words[0] >> 4 * which & 0x000f000fu) * 0x1040 & 0x81c081c0u;
        }
    }

    // Where a lane's first unit of the warp's first keys lies in a tile.
    __device__ static uint32_t place(int warp, int lane) {
        return group_place<D>(warp * kWarpKeys + lane / kAbreast, lane % kAbreast);
    }

    // A scale becomes what the codes are multiplied by, a factor for 16 dimensions each. The null row, which is loaded like others, must
    // be finite: so are all codes with scale 0.
    __device__ static void scale(Raw& raw, bool present) {
        __nv_bfloat162 by;
        if constexpr (kFp8)
            by = factor(present ? raw.scale : 0);
        else
            by = factors(__byte_perm(raw.scale, 0, present ? 0x4140 : 0x4444));
        raw.scale = *reinterpret_cast<const uint32_t*>(&by);
    }

    // Step `step` of the warp's keys.
    __device__ static void store(const Raw& raw, uint32_t tile, uint32_t place, int step) {
        const __nv_bfloat162 both = as_pair(raw.scale), by[2] = {__low2bfloat162(both), __high2bfloat162(both)};
        const int first = step / kGroupSteps * kKeys;
        const uint32_t base = ((tile + place) ^ uint32_t(first % 8) << 4) + first * kRowBytes + step % kGroupSteps * (kChunkBytes * D / 128);
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            uint32_t v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = scaled(pair(raw.words + i * kWords / 4, unit), by[i / 2]);
            store_unit(unit_behind<D>(base, unit), make_uint4(v[0], v[1], v[2], v[3]));
        }
    }
};

// The block's tiles of a row: of those with keys every Parts'th, from the rank'th on. All lanes of the writers have the same.
template <int Parts>
struct TileList {
    uint64_t left[2];

    // The next tile, -1: none is left.
    __device__ int take() {
        const int tile = lowest();
        for (int i = 0; i < Parts; ++i) drop();
        return tile;
    }
    __device__ int lowest() const { return left[0] != 0 ? __ffsll(left[0]) - 1 : left[1] != 0 ? 63 + __ffsll(left[1]) : -1; }
    __device__ void drop() {
        if (left[0] != 0)
            left[0] &= left[0] - 1;
        else
            left[1] &= left[1] - 1;
    }
};

// The tiles with keys of the row that was looked through with this parity.
template <int D, int Parts>
__device__ TileList<Parts> found_tiles(const Tiles& tiles, unsigned rank, int parity, const Memory<D, Parts>& memory) {
    const int lane = threadIdx.x % kWarp;
    TileList<Parts> list;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        const int tile = word * 64 + lane;
        const uint64_t low = __ballot_sync(kAllLanes, tile < tiles.all && memory.some[parity][tile] != 0);
        const uint64_t high = __ballot_sync(kAllLanes, tile + 32 < tiles.all && memory.some[parity][tile + 32] != 0);
        list.left[word] = high << 32 | low;
    }
    for (unsigned i = 0; i < rank; ++i) list.drop();
    return list;
}

// Looks through a row's tiles. The writers, `parity` changing from row to row.
template <int D, int Parts>
__device__ TileList<Parts> list_tiles(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, unsigned rank, int parity,
                                      Memory<D, Parts>& memory) {
    constexpr int kAtOnce = 2;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kWriterWarps;
    for (int from = warp; from < tiles.all; from += kAtOnce * kWriterWarps) {
        uint32_t index[kAtOnce][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                index[i][half] = ask_index(a, tiles, row, from + i * kWriterWarps, lane + half * kWarp);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int tile = from + i * kWriterWarps;
            const bool any = __any_sync(kAllLanes, (index[i][0] | index[i][1]) != 0);
            if (lane == 0 && tile < tiles.all) memory.some[parity][tile] = any;
        }
    }
    meet<kWriterThreads>(kWriterBarrier);
    return found_tiles(tiles, rank, parity, memory);
}

// Waits until the readers have done with the stage of the n'th tile of the block.
template <int D, int Parts>
__device__ inline void await_stage(int n, Memory<D, Parts>& memory) {
    if (n >= kStages) await(&memory.empty[n % kStages], uint32_t(n / kStages - 1) & 1);
}

// Some 256 bytes come to L2 with a copy of the first whole 16 from p on, which nobody reads: prefetches keep a warp for long. There are 31
// from p on, or 16 and p is a multiple of 16, as the end of a record is.
template <int D>
__device__ void bring(const void* p, Memory<D, 1>& memory) {
    const void* const units = reinterpret_cast<const void*>((reinterpret_cast<uintptr_t>(p) + 15) / 16 * 16);
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
                 ::"r"(shared_address(memory.unread[threadIdx.x % kWriterThreads])), "l"(units) : "memory");
}

// Of the row's tiles, the two that are written next, and the records of the lane's key in them.
template <int Parts>
struct Ahead {
    __device__ Ahead(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, const TileList<Parts>& all) : list(all) {
        tile = list.take(), following = list.take();
        index = kept(a, tiles, row, tile), then = kept(a, tiles, row, following);
    }
    // What was put down for a row.
    template <int D>
    __device__ Ahead(const TileList<Parts>& all, const Memory<D, Parts>& memory) : list(all) {
        tile = list.take(), following = list.take();
        const auto& first = memory.first[threadIdx.x / kWarp % kWriterWarps];
        index = first[0][threadIdx.x % kWarpKeys], then = first[1][threadIdx.x % kWarpKeys];
    }
    // Records of the window, which take longest, come to L2.
    template <int D>
    __device__ void put_down(const cedar_mega_attention_args& a, const Tiles& tiles, Memory<D, Parts>& memory) const {
        constexpr int kBytes = Decoder<D, CEDAR_RECORD_FP8>::kBytes;
        const int lane = threadIdx.x % kWarp;
        auto& first = memory.first[threadIdx.x / kWarp % kWriterWarps];
        if (lane < kWarpKeys) first[0][lane] = index, first[1][lane] = then;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int of = i == 0 ? tile : following, at = lane % 4 * 256;
            if (of >= 0 && of < tiles.window && at < kBytes)
                bring(static_cast<const uint8_t*>(a.window) + uint64_t(first[i][lane / 4]) * kBytes + at, memory);
        }
    }
    // The record of the lane's key in a tile of the row.
    __device__ static uint32_t kept(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, int tile) {
        return ask_index(a, tiles, row, tile, threadIdx.x / kWarp % kWriterWarps * kWarpKeys + threadIdx.x % kWarpKeys);
    }

    TileList<Parts> list;
    int tile, following;
    uint32_t index, then;  // the latter may be on its way
};

// Writes the row's tiles of this record. n: tiles of the block so far.
template <int D, int64_t Record, int Parts>
__device__ void write_tiles(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, Ahead<Parts>& ahead, int& n,
                            Memory<D, Parts>& memory) {
    using Form = Decoder<D, Record>;
    // A lane holds as many steps as it has registers for. Where those are not a tile's, one half is decoded while the other is on its
    // way. The next tile's come behind the stage's last store, so that they are on their way while the next stage is waited for.
    constexpr int kMost = Form::kFp8 ? 2 : 4, kHeld = Form::kSteps < kMost ? Form::kSteps : kMost, kBatch = (kHeld + 1) / 2;
    static_assert(kHeld % kBatch == 0 && Form::kSteps % kHeld == 0);
    const int end = Form::kFp8 ? tiles.window : tiles.all;
    if (ahead.tile < 0 || ahead.tile >= end) return;
    const auto* pool = static_cast<const uint8_t*>(Record == CEDAR_RECORD_FP8 ? a.window : a.entries);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kWriterWarps;
    int part = lane;
    asm volatile("" : "+r"(part));  // read anew, it would be waited for with the records
    typename Form::Source source(pool, part);
    source.keep();
    uint32_t place = Form::place(warp, lane), own;
    const int key = part / Form::kAbreast;
    typename Form::Raw raw[kHeld];
    const auto load = [&](int step, uint32_t index) {  // steps in their order
        if (step % Form::kGroupSteps == 0) own = __shfl_sync(kAllLanes, index, step / Form::kGroupSteps * Form::kKeys + key);
        raw[step % kHeld] = Form::load(source, own, step % Form::kGroupSteps);
    };
#pragma unroll
    for (int step = 0; step < kHeld; ++step) load(step, ahead.index);
    for (bool more = true; more; ++n) {
        more = ahead.following >= 0 && ahead.following < end;
        const int stage = n % kStages;
        const unsigned valid = __ballot_sync(kAllLanes, ahead.index != 0) & ((1u << kWarpKeys) - 1);
        const auto scale = [&](int step) {
            Form::scale(raw[step % kHeld], valid >> (step / Form::kGroupSteps * Form::kKeys) >> key & 1);
        };
#pragma unroll
        for (int step = 0; step < kHeld; ++step) scale(step);
        await_stage(n, memory);
        const uint32_t to = shared_address(memory.keys[stage]);
        // the addresses of all steps, kept across tiles, would cost more registers than there are
        asm volatile("" : "+r"(place));
        const uint32_t then = ahead.then;
#pragma unroll
        for (int from = 0; from < Form::kSteps; from += kBatch) {
#pragma unroll
            for (int step = from; step < from + kBatch; ++step) {
                if (step >= kHeld) scale(step);
                Form::store(raw[step % kHeld], to, place, step);
            }
#pragma unroll
            for (int step = from + kHeld; step < from + kHeld + kBatch; ++step)
                if (step < Form::kSteps) load(step, ahead.index);
        }
        publish_tiles();  // before the next tile's records are asked for: it waits for what is on its way
        if (lane == 0) {
            memory.valid[stage][warp] = uint8_t(valid);
            if (warp == 0) memory.last[stage] = ahead.following < 0;
        }
        __syncwarp();
        if (lane == 0) arrive(&memory.full[stage]);
#pragma unroll
        for (int step = 0; step < kHeld; ++step)
            if (more) load(step, then);
        ahead.tile = ahead.following, ahead.following = ahead.list.take(), ahead.index = then;
        ahead.then = ahead.kept(a, tiles, row, ahead.following);
    }
}

// A tile of masked keys, for a row that has no others.
template <int D, int Parts>
__device__ void write_nothing(int n, Memory<D, Parts>& memory) {
    const int stage = n % kStages, thread = int(threadIdx.x) - kReaderThreads;
    await_stage(n, memory);
    const uint32_t to = shared_address(memory.keys[stage]);
    for (int unit = thread; unit < memory.kTileBytes / 16; unit += kWriterThreads) store_unit(to + unit * 16, make_uint4(0, 0, 0, 0));
    publish_tiles();
    if (thread < kWriterWarps) memory.valid[stage][thread] = 0;
    if (thread == 0) memory.last[stage] = true;
    __syncwarp();
    if (thread % kWarp == 0) arrive(&memory.full[stage]);
}

// All tiles of the block, row after row. What the next row begins with comes to L2 meanwhile. The row is looked up before this row's
// entries: then the readers have not yet begun with the row, and no stage is free.
template <int D, int Parts>
__device__ void write_rows(const cedar_mega_attention_args& a, unsigned rank, int first, int units, int step,
                           Memory<D, Parts>& memory) {
    const Tiles tiles(a);
    int n = 0, parity = 0;
    const auto look_up = [&](int64_t row, int parity) {
        return Ahead<Parts>(a, tiles, row, list_tiles<D, Parts>(a, tiles, row, rank, parity, memory));
    };
    const auto write = [&](int64_t row, Ahead<Parts> ahead, const auto& meanwhile) {
        if (ahead.tile < 0) write_nothing(n++, memory);
        write_tiles<D, CEDAR_RECORD_FP8>(a, tiles, row, ahead, n, memory);
        meanwhile();
        write_tiles<D, CEDAR_RECORD_NVFP4>(a, tiles, row, ahead, n, memory);
    };
    if constexpr (Parts > 1) {
        const int64_t row = Unit(a, first).row;
        write(row, look_up(row, 0), [] {});
        return;
    } else {
        look_up(Unit(a, first).row, 0).put_down(a, tiles, memory);
        for (int unit = first; unit < units; unit += step, parity ^= 1) {
            const bool more = unit + step < units;
            const Unit next(a, more ? unit + step : unit);
            const auto bring_all = [&](int first_thread, const void* of, int64_t bytes) {
                const int at = (int(threadIdx.x) - kReaderThreads - first_thread) * 256;
                if (at >= 0 && at + 32 <= bytes) bring(static_cast<const uint8_t*>(of) + at, memory);
            };
            if (more) {
                bring_all(0, a.window_index + next.row * a.window_width, a.window_width * 8);
                if (a.entries != nullptr) bring_all(kWriterThreads / 4, a.entry_index + next.row * a.entry_width, a.entry_width * 8);
            }
            write(Unit(a, unit).row, Ahead<Parts>(found_tiles(tiles, rank, parity, memory), memory), [&] {
                if (more) look_up(next.row, parity ^ 1).put_down(a, tiles, memory);
            });
            if (more)  // the readers are about to ask for it; much earlier, it would not stay there
                bring_all(0, static_cast<const Bf16*>(a.query) + (next.row * a.heads + next.first_head) * D,
                          min(kHeads, int(a.heads) - next.first_head) * D * int(sizeof(Bf16)));
        }
        close_copies();  // none may be on its way when the block ends
        await_copies<0>();
    }
}

}  // namespace cedar::cuda::attention
