// SPDX-License-Identifier: Apache-2.0
// The warpgroup of an attention block that decodes records into tiles.
#pragma once

#include "attention_block.cuh"
#include "records.cuh"

namespace cedar::cuda::attention {

// A lane has 16 dimensions of a key, so a warp has 512 / D keys at a time.
template <int D, int64_t Record>
struct Decoder {
    static constexpr bool kFp8 = Record == CEDAR_RECORD_FP8;
    static constexpr int kLanes = D / 16, kKeys = kWarp / kLanes, kWords = kFp8 ? 4 : 2, kValues = kFp8 ? D : D / 2;
    static constexpr int kBytes = kFp8 ? D + D / kMxGroup : D / 2 + D / kNvfp4Group;
    static constexpr int kSteps = kWarpKeys / kKeys;  // of a warp's keys
    struct Raw {
        uint32_t words[kWords];
        uint32_t scale;
    };

    // Where a lane's codes and scale lie in the first record of a pool.
    struct Source {
        __device__ Source(const uint8_t* pool, int lane) : codes(pool + lane * kWords * 4), scale(pool + kValues + (kFp8 ? lane / 2 : lane)) {}
        const uint8_t *codes, *scale;

        // Whole addresses in registers, to which an instruction adds a record's offset.
        __device__ void keep() {
            size_t first = __cvta_generic_to_global(codes), second = __cvta_generic_to_global(scale);
            asm volatile("" : "+l"(first), "+l"(second));
            codes = static_cast<const uint8_t*>(__cvta_global_to_generic(first));
            scale = static_cast<const uint8_t*>(__cvta_global_to_generic(second));
        }
    };

    __device__ static Raw load(const uint8_t* pool, uint32_t index, int lane) { return load(Source(pool, lane), index); }

    __device__ static Raw load(const Source& source, uint32_t index) {
        Raw raw;
        const uint64_t offset = uint64_t(index) * kBytes;
        const auto* codes = reinterpret_cast<const uint32_t*>(source.codes + offset);
        if constexpr (D == 512 && kFp8) {
            const uint4 v = *reinterpret_cast<const uint4*>(codes);
            raw.words[0] = v.x, raw.words[1] = v.y, raw.words[2] = v.z, raw.words[3] = v.w;
        } else if constexpr (!kFp8) {
            const uint2 v = *reinterpret_cast<const uint2*>(codes);
            raw.words[0] = v.x, raw.words[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < kWords; ++i) raw.words[i] = codes[i];
        }
        raw.scale = source.scale[offset];
        return raw;
    }

    // Makes up for what the codes' bits as bf16 lack (2^120 and 2^126), and divides by 256. Multiplied: shifted, and in both halves.
    __device__ static __nv_bfloat162 factor(uint32_t scale) {
        const uint32_t magnitude = scale & 0x7f;
        const uint32_t bits = kFp8 ? (scale == 255 ? 0x7fc07fc0u : min(scale + 112, 255u) * 0x00800080u)
                                   : (magnitude == 0x7f ? 0x7fcu : magnitude) * 0x00100010u;
        const __nv_bfloat162 both = *reinterpret_cast<const __nv_bfloat162*>(&bits);
        if constexpr (kFp8) return both;
        return __hmul2(__hmul2(both, __float2bfloat162_rn(0x1p120f)), __float2bfloat162_rn(0x1p118f));
    }

    __device__ static uint32_t scaled(uint32_t bits, __nv_bfloat162 by) {
        const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), by);
        return *reinterpret_cast<const uint32_t*>(&value);
    }

    // Unit `unit` of the lane's two.
    __device__ static uint4 unit(const Raw& raw, int unit, __nv_bfloat162 by) {
        if constexpr (kFp8) {
            const uint32_t low = raw.words[2 * unit], high = raw.words[2 * unit + 1];
            const uint32_t a = __byte_perm(low, high, 0x5410), b = __byte_perm(low, high, 0x7632);  // codes 0 1 4 5 and 2 3 6 7
            return make_uint4(scaled(even_bytes(a), by), scaled(odd_bytes(a), by), scaled(even_bytes(b), by), scaled(odd_bytes(b), by));
        } else {
            // A product moves a code of each half to where its sign belongs and to where the rest does: no bit is in both, none is carried.
            const uint32_t low = raw.words[unit], high = low >> 8;
            const auto value = [&](uint32_t codes, uint32_t places) { return scaled(codes * places & 0x81c081c0u, by); };
            return make_uint4(value(low & 0x000f000fu, 0x1040), value(low & 0x00f000f0u, 0x104), value(high & 0x000f000fu, 0x1040),
                              value(high & 0x00f000f0u, 0x104));
        }
    }

    // E4M3 codes in bytes 0 and 2, or 1 and 3, as bf16 with their bits.
    __device__ static uint32_t even_bytes(uint32_t x) { return (x << 4 & 0x07f007f0u) | (x << 8 & 0x80008000u); }
    __device__ static uint32_t odd_bytes(uint32_t x) { return (x >> 4 & 0x07f007f0u) | (x & 0x80008000u); }

    // Where a lane's first unit of the warp's first keys lies in a tile. Neighbouring quads of lanes write their two units in
    // different orders, so that eight lanes hit all banks.
    __device__ static uint32_t place(int warp, int lane) {
        const int part = lane % kLanes;
        return uint32_t(part / 4 * kChunkBytes + warp * kWarpKeys * kRowBytes) + unit_at(lane / kLanes, part % 4 * 2 + (part / 4 & 1));
    }

    // Step `step` of the warp's keys. The null row, which is loaded like others, must be finite: so are all codes with scale 0.
    __device__ static void store(const Raw& raw, bool present, uint32_t tile, uint32_t place, int step, int lane) {
        const __nv_bfloat162 by = factor(present ? raw.scale : 0);
        const bool swapped = lane / 4 & 1;
        Raw turned = raw;
#pragma unroll
        for (int i = 0; i < kWords; ++i) turned.words[i] = swapped ? raw.words[i ^ kWords / 2] : raw.words[i];
        // few addresses, which steps share, and what an instruction adds to them
        const uint32_t turn = uint32_t(step * kKeys % 8) << 4, further = uint32_t(step * kKeys * kRowBytes);
        store_unit(((tile + place) ^ turn) + further, unit(turned, 0, by));
        store_unit(((tile + place) ^ (turn ^ 16)) + further, unit(turned, 1, by));
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

// Finds the tiles with keys. The writers, `parity` changing from row to row.
template <int D, int Parts>
__device__ TileList<Parts> list_tiles(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, unsigned rank, int parity,
                                      Memory<D, Parts>& memory) {
    constexpr int kAtOnce = 2;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kWriterWarps;
    for (int from = warp; from < tiles.all; from += kAtOnce * kWriterWarps) {
        Index index[kAtOnce][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                index[i][half] = Index(a, tiles, row, min(from + i * kWriterWarps, tiles.all - 1), lane + half * kWarp);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int tile = from + i * kWriterWarps;
            const bool any = __any_sync(kAllLanes, (index[i][0].get() | index[i][1].get()) != 0);
            if (lane == 0 && tile < tiles.all) memory.some[parity][tile] = any;
        }
    }
    meet<kWriterThreads>(kWriterBarrier);
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

// Waits until the readers have done with the stage of the n'th tile of the block.
template <int D, int Parts>
__device__ inline void await_stage(int n, Memory<D, Parts>& memory) {
    if (n >= kStages) await(&memory.empty[n % kStages], uint32_t(n / kStages - 1) & 1);
}

// Of the row's tiles, the two that are written next, and the records of the lane's key in them.
template <int Parts>
struct Ahead {
    __device__ Ahead(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, const TileList<Parts>& all) : list(all) {
        tile = list.take(), following = list.take();
        if (tile < 0) return;
        const Index first = kept(a, tiles, row, tile);
        then = kept(a, tiles, row, following);
        index = first.get();
    }
    // The record of the lane's key in a tile of the row.
    __device__ static Index kept(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, int tile) {
        return Index(a, tiles, row, tile < 0 ? 0 : tile, threadIdx.x / kWarp % kWriterWarps * kWarpKeys + threadIdx.x % kWarpKeys);
    }

    TileList<Parts> list;
    int tile, following;
    uint32_t index;
    Index then;  // may be on its way
};

// Writes the row's tiles of this record. n: tiles of the block so far.
template <int D, int64_t Record, int Parts>
__device__ void write_tiles(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, Ahead<Parts>& ahead, int& n,
                            Memory<D, Parts>& memory) {
    using Form = Decoder<D, Record>;
    // A lane holds as many steps as it has registers for. Where those are not a tile's, one half is decoded while the other is on its
    // way. The next tile's come behind the stage's last store, so that they are on their way while the next stage is waited for.
    constexpr int kMost = Form::kFp8 ? 4 : 8, kHeld = Form::kSteps < kMost ? Form::kSteps : kMost, kBatch = kHeld / 2;
    static_assert(kBatch * 2 == kHeld && Form::kSteps % kHeld == 0);
    const int end = Form::kFp8 ? tiles.window : tiles.all;
    if (ahead.tile < 0 || ahead.tile >= end) return;
    const auto* pool = static_cast<const uint8_t*>(Record == CEDAR_RECORD_FP8 ? a.window : a.entries);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kWriterWarps;
    int part = lane % Form::kLanes;
    asm volatile("" : "+r"(part));  // read anew, it would be waited for with the records
    typename Form::Source source(pool, part);
    source.keep();
    uint32_t place = Form::place(warp, lane);
    typename Form::Raw raw[kHeld];
    const auto load = [&](int step, uint32_t index) {
        raw[step % kHeld] = Form::load(source, __shfl_sync(kAllLanes, index, step % Form::kSteps * Form::kKeys + lane / Form::kLanes));
    };
#pragma unroll
    for (int step = 0; step < kHeld; ++step) load(step, ahead.index);
    for (bool more = true; more; ++n) {
        more = ahead.following >= 0 && ahead.following < end;
        const int stage = n % kStages;
        await_stage(n, memory);
        const uint32_t to = shared_address(memory.keys[stage]);
        // the addresses of all steps, kept across tiles, would cost more registers than there are
        asm volatile("" : "+r"(place));
        const unsigned valid = __ballot_sync(kAllLanes, ahead.index != 0) & ((1u << kWarpKeys) - 1);
        const uint32_t then = ahead.then.get();
#pragma unroll
        for (int from = 0; from < Form::kSteps; from += kBatch) {
#pragma unroll
            for (int step = from; step < from + kBatch; ++step) {
                const bool present = valid >> (step * Form::kKeys + lane / Form::kLanes) & 1;
                Form::store(raw[step % kHeld], present, to, place, step, part);
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

// All tiles of the block, row after row. What the next row begins with comes to L2 meanwhile.
template <int D, int Parts>
__device__ void write_rows(const cedar_mega_attention_args& a, unsigned rank, int first, int units, int step,
                           Memory<D, Parts>& memory) {
    const Tiles tiles(a);
    int n = 0, parity = 0;
    for (int unit = first; unit < units; unit += step, parity ^= 1) {
        const int64_t row = Unit(a, unit).row;
        if (Parts == 1 && unit + step < units) {
            const Unit next(a, unit + step);
            const auto ask = [&](int thread, const void* p, int64_t bytes) {
                if (int(threadIdx.x) == kReaderThreads + thread && bytes >= 16) prefetch_bytes(p, uint32_t(bytes));
            };
            ask(0, static_cast<const Bf16*>(a.query) + (next.row * a.heads + next.first_head) * D,
                min(kHeads, int(a.heads) - next.first_head) * D * sizeof(Bf16));
            ask(kWarp, a.window_index + next.row * a.window_width, a.window_width * 8);
            if (a.entries != nullptr) ask(2 * kWarp, a.entry_index + next.row * a.entry_width, a.entry_width * 8);
        }
        Ahead<Parts> ahead(a, tiles, row, list_tiles<D, Parts>(a, tiles, row, rank, parity, memory));
        if (ahead.tile < 0) write_nothing(n++, memory);
        write_tiles<D, CEDAR_RECORD_FP8>(a, tiles, row, ahead, n, memory);
        write_tiles<D, CEDAR_RECORD_NVFP4>(a, tiles, row, ahead, n, memory);
    }
}

}  // namespace cedar::cuda::attention
