// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of an attention block share: its shared memory, barriers, and which tiles of keys are the block's.
#pragma once

#include "attention_tiles.cuh"

namespace cedar::cuda::attention {

constexpr int kGroupThreads = 128, kReaders = 2, kThreads = kGroupThreads * (kReaders + 1), kReaderThreads = kGroupThreads * kReaders;
constexpr int kHeads = kTileRows, kStages = 2, kMostTiles = 128;
constexpr int kWriterWarps = kGroupThreads / kWarp, kWarpKeys = kTileRows / kWriterWarps, kBatch = 8;
constexpr float kShrunk = 256.0f;  // tiles hold values / 256: every scale of a record then has a bf16 factor
constexpr int kReaderRegisters = 208, kWriterRegisters = 88;

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

template <int D>
struct Memory {
    static constexpr int kChunks = D / kChunkDims, kTileBytes = kChunks * kChunkBytes;
    alignas(1024) uint8_t query[kTileBytes];
    alignas(1024) uint8_t keys[kStages][kTileBytes];  // at the end, the other block's sums
    float4 exchange[kReaders][8][kGroupThreads];      // at the end, the first part: the other block's references and their sums
    uint64_t full[kStages], empty[kStages];
    uint16_t valid[kStages][kWriterWarps];            // a bit per key
    uint32_t active[kMostTiles / 32];                 // a bit per tile with keys
    uint8_t tiles[kMostTiles / 2];                    // the block's, and how many they are: of window records, and in all
    int windows, count;
};

// Tiles of window records come first, then those of entries.
struct Tiles {
    __device__ explicit Tiles(const cedar_mega_attention_args& a)
        : window(int((a.window_width + kTileRows - 1) / kTileRows)),
          all(window + (a.entries == nullptr ? 0 : int((a.entry_width + kTileRows - 1) / kTileRows))) {}
    int window, all;
};

// A unit of 8 dimensions lies in the order 0 4 1 5 2 6 3 7, which is what decoding gives without moving codes.

// The record of a column of a row's tile, 0: none.
__device__ inline int64_t index_at(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, int tile, int key) {
    const bool entry = tile >= tiles.window;
    const int64_t column = int64_t(entry ? tile - tiles.window : tile) * kTileRows + key, width = entry ? a.entry_width : a.window_width;
    return column < width ? __ldg((entry ? a.entry_index : a.window_index) + row * width + column) : 0;
}

// The block's tiles: of those with keys, every second. All threads, none of which has passed this before.
template <int D>
__device__ void deal_tiles(const cedar_mega_attention_args& a, const Tiles& tiles, int64_t row, unsigned rank, Memory<D>& memory) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (threadIdx.x < kMostTiles / 32) memory.active[threadIdx.x] = 0;
    __syncthreads();
    for (int tile = warp; tile < tiles.all; tile += kThreads / kWarp) {
        const bool some = index_at(a, tiles, row, tile, lane) != 0 || index_at(a, tiles, row, tile, lane + kWarp) != 0;
        if (__any_sync(kAllLanes, some) && lane == 0) atomicOr(&memory.active[tile / 32], 1u << tile % 32);
    }
    __syncthreads();
    unsigned before = 0, windows = 0;  // tiles with keys: before this thread's, and of the window
    bool mine = false;
    for (int word = 0; word < kMostTiles / 32; ++word) {
        const uint32_t bits = memory.active[word];
        const auto below = [&](int tile) {
            return tile >= (word + 1) * 32 ? bits : tile <= word * 32 ? 0 : bits & ((1u << tile % 32) - 1);
        };
        before += __popc(below(int(threadIdx.x)));
        windows += __popc(below(tiles.window));
        if (int(threadIdx.x) / 32 == word) mine = bits >> threadIdx.x % 32 & 1;
    }
    if (mine && before % 2 == rank) memory.tiles[before / 2] = uint8_t(threadIdx.x);
    if (threadIdx.x == kMostTiles) {  // which is behind all of them
        memory.windows = int(windows + 1 - rank) / 2;
        memory.count = int(before + 1 - rank) / 2;
    }
    __syncthreads();
}

}  // namespace cedar::cuda::attention
