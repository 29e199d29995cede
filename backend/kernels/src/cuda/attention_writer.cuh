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

    __device__ static Raw load(const uint8_t* pool, uint32_t index, int lane) {
        Raw raw = {};
        if (index == 0) return raw;
        const uint8_t *record = pool + uint64_t(index) * kBytes, *codes = record + lane * kWords * 4;
        if constexpr (D == 512 && kFp8) {
            const uint4 v = *reinterpret_cast<const uint4*>(codes);
            raw.words[0] = v.x, raw.words[1] = v.y, raw.words[2] = v.z, raw.words[3] = v.w;
        } else if constexpr (!kFp8) {
            const uint2 v = *reinterpret_cast<const uint2*>(codes);
            raw.words[0] = v.x, raw.words[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < kWords; ++i) raw.words[i] = reinterpret_cast<const uint32_t*>(codes)[i];
        }
        raw.scale = record[kValues + (kFp8 ? lane / 2 : lane)];
        return raw;
    }

    __device__ static __nv_bfloat162 twice(uint32_t bits) {
        bits |= bits << 16;
        return *reinterpret_cast<const __nv_bfloat162*>(&bits);
    }

    // Makes up for what the codes' bits as bf16 lack (2^120 and 2^126), and divides by 256.
    __device__ static __nv_bfloat162 factor(uint32_t scale) {
        if constexpr (kFp8) return twice(scale == 255 ? 0x7fc0u : min(scale + 112, 255u) << 7);
        const __nv_bfloat162 e4m3 = __hmul2(twice((scale & 0x7f) << 4), __float2bfloat162_rn(0x1p120f));
        return __hmul2(e4m3, __float2bfloat162_rn(0x1p118f));
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
            const uint32_t word = raw.words[unit];
            return make_uint4(scaled((word << 12 & 0x80008000u) | (word << 6 & 0x01c001c0u), by),
                              scaled((word << 8 & 0x80008000u) | (word << 2 & 0x01c001c0u), by),
                              scaled((word << 4 & 0x80008000u) | (word >> 2 & 0x01c001c0u), by),
                              scaled((word & 0x80008000u) | (word >> 6 & 0x01c001c0u), by));
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

    // Step `step` of the warp's keys.
    __device__ static void store(const Raw& raw, uint32_t tile, uint32_t place, int step, int lane) {
        const __nv_bfloat162 by = factor(raw.scale);
        const uint4 low = unit(raw, 0, by), high = unit(raw, 1, by);
        const bool swapped = lane / 4 & 1;
        const uint32_t first = tile + (place ^ uint32_t(step * kKeys % 8) << 4) + uint32_t(step * kKeys * kRowBytes);
        store_unit(first, swapped ? high : low);
        store_unit(first ^ 16, swapped ? low : high);
    }
};

// Writes tiles [first, end) of the block, all of this record.
template <int D, int64_t Record>
__device__ void write_tiles(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, int first, int end, Memory<D>& memory) {
    using Form = Decoder<D, Record>;
    constexpr int kKeysAtOnce = Form::kFp8 ? kBatch / 2 : kBatch;  // of registers
    constexpr int kSteps = kKeysAtOnce < Form::kSteps / 2 ? kKeysAtOnce : Form::kSteps / 2, kBatches = Form::kSteps / kSteps;
    static_assert(kBatches % 2 == 0, "batches take turns in two sets of registers, across tiles too");
    const auto* pool = static_cast<const uint8_t*>(Record == CEDAR_RECORD_FP8 ? a.window : a.entries);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kWriterWarps, part = lane % Form::kLanes;
    uint32_t place = Form::place(warp, lane);
    // the record of a key of the warp, which this lane keeps
    const auto index_of = [&](int n) { return uint32_t(index_at(a, tiles, row, memory.tiles[n], warp * kWarpKeys + lane % kWarpKeys)); };
    typename Form::Raw raw[2][kSteps];
    const auto load = [&](int batch, uint32_t index) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int key = (batch * kSteps + i) * Form::kKeys + lane / Form::kLanes;
            raw[batch % 2][i] = Form::load(pool, __shfl_sync(kAllLanes, index, key), part);
        }
    };
    if (first >= end) return;
    uint32_t index = index_of(first);
    load(0, index);
    for (int n = first; n < end; ++n) {
        const int stage = n % kStages;
        const uint32_t next = n + 1 < end ? index_of(n + 1) : 0;
        if (n >= kStages) await(&memory.empty[stage], uint32_t(n / kStages - 1) & 1);
        const uint32_t to = shared_address(memory.keys[stage]);
        // the addresses of all steps, kept across tiles, would cost more registers than there are
        asm volatile("" : "+r"(place));
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
            if (batch + 1 < kBatches)
                load(batch + 1, index);
            else
                load(0, next);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) Form::store(raw[batch % 2][i], to, place, batch * kSteps + i, part);
        }
        const unsigned valid = __ballot_sync(kAllLanes, index != 0) & ((1u << kWarpKeys) - 1);
        publish_tiles();
        if (lane == 0) memory.valid[stage][warp] = uint16_t(valid);
        __syncwarp();
        if (lane == 0) arrive(&memory.full[stage]);
        index = next;
    }
}

}  // namespace cedar::cuda::attention
