// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of an attention block share: its shared memory, barriers, and how a row's keys are cut into tiles.
#pragma once

#include "attention_tiles.cuh"

namespace cedar::cuda::attention {

constexpr int kGroupThreads = 128, kReaders = 2, kWriters = 2;  // warpgroups
constexpr int kReaderThreads = kGroupThreads * kReaders, kWriterThreads = kGroupThreads * kWriters;
constexpr int kThreads = kReaderThreads + kWriterThreads;
constexpr int kHeads = kTileRows, kStages = 2, kMostTiles = 128;
constexpr int kWriterWarps = kWriterThreads / kWarp, kWarpKeys = kTileRows / kWriterWarps;
constexpr int kReaderBarrier = 1, kPairBarrier = 2, kWriterBarrier = 6;  // kPairBarrier + w: warps w of the two reading warpgroups
constexpr float kShrunk = 256.0f;  // tiles hold values / 256: every scale of a record then has a bf16 factor
constexpr int kReaderRegisters = 208, kWriterRegisters = 48;

// ---- barriers ----

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ inline void make_barrier(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void await(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Writes to shared memory become visible to the matrix instructions.
__device__ inline void publish_tiles() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void store_unit(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

template <int Threads>
__device__ inline void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int Registers>
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers)); }
template <int Registers>
__device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers)); }

// ---- shared memory ----

// Of a row: its cosines and sines from the fifth on, as units of 4 pairs may begin earlier, and its heads' sinks, raw.
template <int D>
struct RowValues {
    float2 turns[4 + D / 2];
    float sinks[kHeads];
};

// Parts: blocks of a cluster. A block alone takes many rows, and exchanges half as much.
template <int D, int Parts>
struct Memory {
    static constexpr int kChunks = D / kChunkDims, kTileBytes = kChunks * kChunkBytes, kShared = Parts == 1 ? 4 : 8;
    alignas(1024) uint8_t query[kTileBytes];
    alignas(1024) uint8_t keys[kStages][kTileBytes];    // at the end, the sums of the cluster's blocks
    float4 exchange[kReaders][kShared][kGroupThreads];  // at the end, references and the sums of probabilities
    RowValues<D> values[Parts == 1 ? 2 : 1];            // of rows in turn
    uint64_t full[kStages], empty[kStages];
    uint8_t valid[kStages][kWriterWarps];  // a bit per key
    bool last[kStages];                    // the row's last tile
    uint8_t some[2][kMostTiles];           // of rows in turn: tiles with keys
    uint32_t first[Parts == 1 ? kWriterWarps : 1][2][kWarpKeys];  // of the next row: records of a warp's keys in its first two tiles
    alignas(16) uint8_t unread[Parts == 1 ? kWriterThreads : 1][16];  // what is copied for L2's sake
};

// A row and 64 of its heads.
struct Unit {
    __device__ Unit(const cedar_mega_attention_args& a, int unit) {
        const int groups = (int(a.heads) + kHeads - 1) / kHeads;
        row = unit, first_head = 0;
        if (groups > 1) row = unit / groups, first_head = unit % groups * kHeads;  // a division takes long
    }
    __device__ Unit(int64_t row, int first_head) : row(row), first_head(first_head) {}
    int64_t row;
    int first_head;
};

// Tiles of window records come first, then those of entries.
struct Tiles {
    __host__ __device__ explicit Tiles(const cedar_mega_attention_args& a)
        : window(int((a.window_width + kTileRows - 1) / kTileRows)),
          all(window + (a.entries == nullptr ? 0 : int((a.entry_width + kTileRows - 1) / kTileRows))) {}
    int window, all;
};

// Of a group of 32 dimensions, unit i of four holds i and i + 4, 8 + i and 12 + i, 16 + i and 20 + i, 24 + i and 28 + i: what decoding
// gives without moving codes. Where they are columns of a result, a lane has 8 of the 32 in a row. In a half of the dimensions, first
// units of all groups come first, then second units, and so on.
template <int D>
constexpr int kUnitStep = D / 64;  // groups of a half

// Where the first unit of a group of a row lies.
template <int D>
__device__ inline uint32_t group_place(int row, int group) {
    return uint32_t(group / kUnitStep<D> * (D / 2 / kChunkDims) * kChunkBytes) + unit_at(row, group % kUnitStep<D>);
}

// So many units on.
template <int D>
__device__ inline uint32_t unit_behind(uint32_t place, int unit) {
    return (place ^ uint32_t(unit * kUnitStep<D> % 8) << 4) + uint32_t(unit * kUnitStep<D> / 8 * kChunkBytes);
}

// Where the record of a column of a row's tile is named, nullptr: nowhere.
__device__ inline const int64_t* place_of_index(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, int tile, int key) {
    const bool entry = tile >= tiles.window;
    const int64_t column = int64_t(entry ? tile - tiles.window : tile) * kTileRows + key, width = entry ? a.entry_width : a.window_width;
    return column < width ? (entry ? a.entry_index : a.window_index) + row * width + column : nullptr;
}

// The record of a column of a row's tile, asked for without a branch, at whose end it would be waited for; 0 where there is none, as of
// tile -1.
__device__ inline uint32_t ask_index(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, int tile, int key) {
    const bool entry = tile >= tiles.window;
    const int column = (entry ? tile - tiles.window : tile) * kTileRows + key;
    const int width = tile < 0 || tile >= tiles.all ? INT_MIN : int(entry ? a.entry_width : a.window_width);
    const int64_t* p = (entry ? a.entry_index : a.window_index) + row * width + column;
    uint32_t index;
    asm volatile("{.reg .pred there; setp.lt.s32 there, %2, %3; mov.u32 %0, 0; @there ld.global.u32 %0, [%1];}"
                 : "=&r"(index) : "l"(p), "r"(column), "r"(width));
    return index;
}

}  // namespace cedar::cuda::attention
