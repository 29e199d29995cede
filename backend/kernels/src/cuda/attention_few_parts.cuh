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

// The word at a place if there is one, and 0 otherwise. In its order among waits, where the compiler moves __ldg to before await_launch();
// and without a branch, at whose end the word would be waited for: of a sink instead.
__device__ inline uint32_t load_word(const cedar_mega_attention_args& a, const void* p, bool there) {
    uint32_t x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(there ? p : a.sink));
    return there ? x : 0;
}

// Two numbers of each of the part's tiles from each of `Slots` threads.
template <int Slots>
struct Parcel {
    static_assert(kFewTiles == 5);
    float4 four[2][Slots];
    float2 last[Slots];

    // Of tiles 2 i and 2 i + 1.
    __device__ static constexpr uint32_t bytes_of_two(int i) { return Slots * (i < kFewTiles / 2 ? sizeof(float4) : sizeof(float2)); }

    // Of so many tiles.
    __device__ static uint32_t bytes(int count) {
        return Slots * ((min(count, 4) + 1) / 2 * sizeof(float4) + (count > 4 ? sizeof(float2) : 0));
    }

    // Tiles 2 i and 2 i + 1 to this place in the memory of block `to`, announced to that block's barrier.
    __device__ void give(int to, int slot, int i, float4 x, uint64_t& barrier) const {
        const uint32_t landed = address_in(shared_address(&barrier), to);
        if (i < kFewTiles / 2)
            send(address_in(shared_address(&four[i][slot]), to), landed, x);
        else
            send_pair(address_in(shared_address(&last[slot]), to), landed, x.x, x.y);
    }

    // All of them.
    template <int Most>
    __device__ void give(int to, int slot, const float (&x)[Most][2], int count, uint64_t& barrier) const {
#pragma unroll
        for (int i = 0; 2 * i < Most; ++i)
            if (count > 2 * i) give(to, slot, i, two_of(x, i), barrier);
    }

    // To this place in the block's own memory.
    __device__ void keep(int slot, int i, float4 x) {
        if (i < kFewTiles / 2)
            four[i][slot] = x;
        else
            last[slot] = make_float2(x.x, x.y);
    }

    // Of tiles 2 i and 2 i + 1, as far as there are any.
    template <int Most>
    __device__ static float4 two_of(const float (&x)[Most][2], int i) {
        float v[4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (2 * i + k / 2 < Most) v[k] = x[2 * i + k / 2][k % 2];
        return make_float4(v[0], v[1], v[2], v[3]);
    }

    // Of tiles t and t + 1; of the last one, its own twice.
    __device__ float4 two(int t, int slot) const {
        if (t + 1 < kFewTiles) return four[t / 2][slot];
        const float2 v = last[slot];
        return make_float4(v.x, v.y, v.x, v.y);
    }

    // Those of tiles that the part does not have are anything.
    template <int Most>
    __device__ void take(int slot, float (&x)[Most][2]) const {
#pragma unroll
        for (int t = 0; t < Most; t += 2) {
            const float4 v = two(t, slot);
            x[t][0] = v.x, x[t][1] = v.y;
            if (t + 1 < Most) x[t + 1][0] = v.z, x[t + 1][1] = v.w;
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

constexpr int kMaxima = 0, kTotals = 1, kSums = 2, kTwos = (kFewTiles + 1) / 2;

// A slot of 32 is that of a quad: rows g and g + 8 of 16 heads.
struct FewMemory {
    union {
        alignas(1024) uint8_t keys[kFewDim / kChunkDims * kKeyChunk];
        Arrivals arrivals;
    };
    alignas(1024) uint8_t values[kFewTiles][kValueBytes];
    float4 exchange[kReaders][kFewTiles][kGroupThreads];
    Parcel<kWarp> highest[kSlices * kReaders];  // scores of 8 keys in each tile
    float4 notes[kFewParts][kWarp];             // references and sums of probabilities
    uint32_t index[kFewParts * kFewTiles][kTileRows];
    float2 turns[4 + kFewDim / 2];
    uint64_t landed[3], probabilities[kTwos], values_there;  // probabilities: of two tiles each
    uint64_t free;  // nobody in the other part's block with the same dimensions needs its keys any more
    uint8_t some[kWarp];
};

// A part's tiles: every other one of those of the row that have keys. Only the first may be of window records.
struct PartTiles {
    int tile[kFewTiles], count;
    bool window, in_order;  // in_order: before those of the row that have keys, there are none that have not

    __device__ PartTiles(const Tiles& tiles, int part, const FewMemory& memory) {
        const int lane = threadIdx.x % kWarp;
        uint32_t left = __ballot_sync(kAllLanes, lane < tiles.all && memory.some[lane] != 0);
        in_order = (left & (left + 1)) == 0;
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

// A group's half of the query's dimensions as the rows of the matrix instruction, 16 at a time, in a thread's registers.
struct QueryHalf {
    static constexpr int kPieces = kFewDim / kReaders / 32;  // a thread fetches 8 of 32 dimensions, of rows g and g + 8
    uint32_t steps[2 * kPieces][4];
    int left;  // from the first rotary dimension to the thread's first

    __device__ void load(const cedar_mega_attention_args& a, const Unit& at, int group, int thread) {
        const int row = thread / kWarp * 16 + thread % kWarp / 4, unit = group * (kFewDim / kReaders / 8) + thread % 4;
        left = unit * 8 - (kFewDim - 2 * int(a.pairs));
        const int last = int(a.heads) - at.first_head - 1;  // whose dimensions those have that are no heads
        const Bf16* from = static_cast<const Bf16*>(a.query) + (at.row * a.heads + at.first_head + min(row, last)) * kFewDim + unit * 8;
        const int heads = max(last - row, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const uint4 v = *reinterpret_cast<const uint4*>(from + min(half * 8, heads) * kFewDim + piece * 32);
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) word(piece, k, half) = words[k];
            }
    }
    // Of a group: a lane's word of a unit.
    __device__ uint32_t& word(int group, int unit, int half) { return steps[unit * kPieces / 2 + group / 2][half + group % 2 * 2]; }

    // Rotated, and in the order of the keys' dimensions. turns: of the row.
    __device__ void finish(const float2* turns) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const int here = left + piece * 32;
            if (here > -8) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float2 by = turns[here / 2 + k];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        uint32_t& pair = word(piece, k, half);
                        pair = here + 2 * k < 0 ? pair : turn_pair(pair, by.x, by.y);
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t v[4] = {word(piece, 0, half), word(piece, 1, half), word(piece, 2, half), word(piece, 3, half)};
#pragma unroll
                for (int k = 0; k < 4; ++k) word(piece, k, half) = __byte_perm(v[k / 2], v[k / 2 + 2], k % 2 == 0 ? 0x5410 : 0x7632);
            }
        }
    }
};

// The records of a key of each of a part's tiles if the row's tiles are in order, which is not known yet. What is computed in advance
// needs nothing of earlier launches.
struct Guess {
    const int64_t *first, *others;
    int left;  // columns from that of the second tile on
    int count;
    bool window;

    __device__ Guess(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, int part, int key)
        : count((tiles.all + kFewParts - 1 - part) / kFewParts), window(part < tiles.window) {
        first = count > 0 ? place_of_index(a, tiles, row, part, key) : nullptr;
        const int column = (part + kFewParts - tiles.window) * kTileRows + key;
        others = a.entry_index + row * a.entry_width + column;
        left = int(a.entry_width) - column;
        asm volatile("" : "+l"(first), "+l"(others), "+r"(left));
    }

    __device__ void take(const cedar_mega_attention_args& a, uint32_t (&index)[kFewTiles]) const {
        index[0] = load_word(a, first, first != nullptr);
#pragma unroll
        for (int t = 1; t < kFewTiles; ++t) {
            constexpr int kStep = kFewParts * kTileRows;
            index[t] = load_word(a, others + (t - 1) * kStep, t < count && (t - 1) * kStep < left);
        }
    }
};

// 16 dimensions of a key: two words of each of four units.
template <int64_t Record>
struct Piece {
    using Form = Decoder<kFewDim, Record>;
    static constexpr int kWords = Form::kWords / 2;
    uint32_t words[kWords];
    uint32_t scale;

    __device__ void load(const void* pool, uint32_t index, int piece) {
        const uint8_t* record = static_cast<const uint8_t*>(pool) + uint64_t(index) * Form::kBytes;
        Form::load_words(words, record + piece * kWords * 4);
        scale = record[Form::kValues + (Form::kFp8 ? piece / 2 : piece)];
    }
};

// Where a piece's words of its group's units lie. Of keys, the units are a chunk apart, as in other tiles. Of values they are side by
// side, and neighbouring chunks get them in different orders. So 16 lanes hit all banks.
struct KeyPlace {
    __device__ KeyPlace(int row, int piece)
        : first(uint32_t(piece / 16 * 4 * kKeyChunk) + unit_at(row, piece / 2 % 8) + piece % 2 * 8) {}
    __device__ static int unit(int i) { return i; }
    __device__ uint32_t place(int unit) const { return first + unit * kKeyChunk; }
    uint32_t first;
};
struct ValuePlace {
    __device__ ValuePlace(int row, int piece)
        : first(uint32_t(piece / 4 * kChunkBytes) + unit_at(row, piece / 2 % 2 * 4) + piece % 2 * 8), turn(piece / 4 % 2 * 2) {}
    __device__ int unit(int i) const { return i ^ turn; }
    __device__ uint32_t place(int unit) const { return first ^ unit << 4; }
    uint32_t first;
    int turn;
};

// A piece of a key in each of the part's tiles.
struct Pieces {
    using Window = Piece<CEDAR_RECORD_FP8>;
    using Entry = Piece<CEDAR_RECORD_NVFP4>;
    Window first;  // of either form
    Entry others[kFewTiles - 1];
    uint32_t present;

    // A key of each of so many tiles, the first of which may be of window records.
    __device__ void load(const cedar_mega_attention_args& a, const uint32_t (&index)[kFewTiles], int count, bool window, int piece) {
        present = 0;
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t) {
            if (t >= count) break;
            present |= uint32_t(index[t] != 0) << t;
            if (t == 0 && window) {
                first.load(a.window, index[t], piece);
                continue;
            }
            Entry raw;
            raw.load(a.entries, index[t], piece);
            if (t == 0)
                first.words[0] = raw.words[0], first.words[1] = raw.words[1], first.scale = raw.scale;
            else
                others[t - 1] = raw;
        }
    }

    __device__ void load(const cedar_mega_attention_args& a, const PartTiles& tiles, int key, int piece, const FewMemory& memory) {
        // all numbers of records first: the trips to shared memory are one after another otherwise
        uint32_t index[kFewTiles];
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t) index[t] = memory.index[tiles.tile[t]][key];
        load(a, index, tiles.count, tiles.window, piece);
    }

    // Tile t's to its places in a tile in shared memory.
    template <class Place>
    __device__ void store(int t, const PartTiles& tiles, uint32_t to, const Place& place) const {
        const bool is_key = present >> t & 1;
        if (t == 0 && tiles.window)
            put(first, is_key, to, place);
        else
            put(t == 0 ? Entry{{first.words[0], first.words[1]}, first.scale} : others[t == 0 ? 0 : t - 1], is_key, to, place);
    }

    // As Decoder::store does.
    template <int64_t Record, class Place>
    __device__ static void put(const Piece<Record>& raw, bool is_key, uint32_t to, const Place& place) {
        using Form = Decoder<kFewDim, Record>;
        const __nv_bfloat162 by = Form::factor(is_key ? raw.scale : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int unit = place.unit(i);
            uint32_t v[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) v[k] = Form::scaled(Form::any_pair(raw.words + k * Form::kWords / 4, unit), by);
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + place.place(unit)), "r"(v[0]), "r"(v[1]) : "memory");
        }
    }
};

// The two keys of a tile whose values a thread of the decoding groups has, and its 16 of the block's dimensions.
constexpr int kValueKeys = 2, kValuePieces = kFewDim / kSlices / 16;
static_assert(kValueKeys * kWriterThreads == kTileRows * kValuePieces);
__device__ inline int value_key(int half) { return thread_now() % kWriterThreads / kValuePieces + half * (kTileRows / kValueKeys); }
__device__ inline int value_piece() { return thread_now() % kValuePieces; }

}  // namespace cedar::cuda::attention
