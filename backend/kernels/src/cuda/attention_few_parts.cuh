// SPDX-License-Identifier: Apache-2.0
// What a block that shares few rows with others has: its memory, its tiles, the records it decodes, and what it gives to others.
#pragma once

#include "attention_few_tiles.cuh"
#include "attention_reader.cuh"
#include "attention_writer.cuh"
#include "mhc_cluster.cuh"

namespace cedar::cuda::attention {

// At a barrier of a block of the cluster.
__device__ inline void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Two numbers of each of the part's tiles from each of `Slots` threads.
template <int Slots>
struct Parcel {
    static_assert(kFewTiles == 5);
    float4 four[2][Slots];
    float2 last[Slots];

    // Of so many tiles.
    __device__ static uint32_t bytes(int count) {
        return Slots * ((min(count, 4) + 1) / 2 * sizeof(float4) + (count > 4 ? sizeof(float2) : 0));
    }

    // To this place in the memory of block `to`, announced to that block's barrier.
    __device__ void give(int to, int slot, const float (&x)[kFewTiles][2], int count, uint64_t& barrier) const {
        const uint32_t landed = address_in(shared_address(&barrier), to);
        if (count > 0) send(address_in(shared_address(&four[0][slot]), to), landed, make_float4(x[0][0], x[0][1], x[1][0], x[1][1]));
        if (count > 2) send(address_in(shared_address(&four[1][slot]), to), landed, make_float4(x[2][0], x[2][1], x[3][0], x[3][1]));
        if (count > 4) send_pair(address_in(shared_address(&last[slot]), to), landed, x[4][0], x[4][1]);
    }

    // Of tiles t and t + 1; of the last one, its own twice.
    __device__ float4 two(int t, int slot) const {
        if (t + 1 < kFewTiles) return four[t / 2][slot];
        const float2 v = last[slot];
        return make_float4(v.x, v.y, v.x, v.y);
    }

    // Those of tiles that the part does not have are anything.
    __device__ void take(int slot, float (&x)[kFewTiles][2]) const {
#pragma unroll
        for (int t = 0; t < kFewTiles; t += 2) {
            const float4 v = two(t, slot);
            x[t][0] = v.x, x[t][1] = v.y;
            if (t + 1 < kFewTiles) x[t + 1][0] = v.z, x[t + 1][1] = v.w;
        }
    }
};

// What other blocks write where keys were, once all of the part have multiplied theirs. p: of 8 keys of a block's 16, as the rows of
// the matrix instruction; pairs: sums of two probabilities, of 16 heads; sums: those of the other part.
struct Arrivals {
    Parcel<kGroupThreads> p[kSlices][kReaders];
    Parcel<kWarp> pairs[kSlices * kReaders];
    float4 sums[kColumnsFew][kGroupThreads];
};

constexpr int kMaxima = 0, kProbabilities = 1, kSums = 2;

// A slot of 32 is that of a quad: rows g and g + 8 of 16 heads.
struct FewMemory {
    union {
        alignas(1024) uint8_t query[kHeads * kFewDim * 2];
        float4 exchange[kReaders][kHeads * kFewDim * 2 / kReaders / sizeof(float4)];  // of a group, in its half of the query
        uint8_t last_values[kValueBytes];
    };
    union {
        alignas(1024) uint8_t keys[kFewDim / kChunkDims * kKeyChunk];
        Arrivals arrivals;
    };
    alignas(1024) uint8_t values[kFewTiles - 1][kValueBytes];
    Parcel<kWarp> highest[kSlices * kReaders];  // scores of 8 keys in each tile
    float4 notes[kFewParts][kWarp];             // references and sums of probabilities
    uint32_t index[kFewParts * kFewTiles][kTileRows];
    float2 turns[4 + kFewDim / 2];
    uint64_t landed[3], free, values_there;  // free: nobody in the other part's block with the same dimensions needs its keys any more
    uint8_t some[kWarp];

    __device__ uint8_t* values_of(int t) { return t < kFewTiles - 1 ? values[t] : last_values; }
};

// A part's tiles: every other one of those of the row that have keys. Only the first may be of window records.
struct PartTiles {
    int tile[kFewTiles], count;
    bool window;

    __device__ PartTiles(const Tiles& tiles, int part, const FewMemory& memory) {
        const int lane = threadIdx.x % kWarp;
        uint32_t left = __ballot_sync(kAllLanes, lane < tiles.all && memory.some[lane] != 0);
        count = (__popc(left) + kFewParts - 1 - part) / kFewParts;
        if (part > 0) left &= left - 1;
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t) {
            tile[t] = t < count ? __ffs(left) - 1 : 0;
            left &= left - 1;
            left &= left - 1;
        }
        window = tile[0] < tiles.window;
    }
};

// 16 dimensions of a key in each of the part's tiles.
struct Pieces {
    using Window = Decoder<kFewDim, CEDAR_RECORD_FP8>;
    using Entry = Decoder<kFewDim, CEDAR_RECORD_NVFP4>;
    Window::Raw first;  // of either form
    Entry::Raw others[kFewTiles - 1];
    uint32_t present;

    __device__ void load(const cedar_mega_attention_args& a, const PartTiles& tiles, int key, int piece, const FewMemory& memory) {
        // all numbers of records first: the trips to shared memory are one after another otherwise
        uint32_t index[kFewTiles];
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t) index[t] = memory.index[tiles.tile[t]][key];
        present = 0;
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t) {
            if (t >= tiles.count) break;
            present |= uint32_t(index[t] != 0) << t;
            if (t == 0 && tiles.window) {
                first = Window::load(static_cast<const uint8_t*>(a.window), index[t], piece);
                continue;
            }
            const Entry::Raw raw = Entry::load(static_cast<const uint8_t*>(a.entries), index[t], piece);
            if (t == 0)
                first.words[0] = raw.words[0], first.words[1] = raw.words[1], first.scale = raw.scale;
            else
                others[t - 1] = raw;
        }
    }

    // Tile t's to a row of chunks of `Chunk` bytes.
    template <int Chunk>
    __device__ void store(int t, const PartTiles& tiles, uint32_t chunks, int row, int piece) const {
        const uint32_t place = uint32_t(piece / 4 * Chunk) + unit_at(row, piece % 4 * 2 + (piece / 4 & 1));
        const bool is_key = present >> t & 1;
        if (t == 0 && tiles.window)
            Window::store(first, is_key, chunks, place, 0, piece);
        else
            Entry::store(t == 0 ? Entry::Raw{{first.words[0], first.words[1]}, first.scale} : others[t == 0 ? 0 : t - 1], is_key, chunks,
                         place, 0, piece);
    }
};

// The two keys of a tile whose values a thread of the decoding groups has, and its 16 of the block's dimensions.
constexpr int kValueKeys = 2, kValuePieces = kFewDim / kSlices / 16;
static_assert(kValueKeys * kWriterThreads == kTileRows * kValuePieces);
__device__ inline int value_key(int half) { return thread_now() % kWriterThreads / kValuePieces + half * (kTileRows / kValueKeys); }
__device__ inline int value_piece() { return thread_now() % kValuePieces; }

}  // namespace cedar::cuda::attention
