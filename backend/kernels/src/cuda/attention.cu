// SPDX-License-Identifier: Apache-2.0
// mega_attention in one launch. A cluster of blocks takes a row and 64 of its heads, which are the rows of the matrix
// instructions: every key is read once. The row's tiles of 64 keys that hold any are dealt out to the cluster's blocks in turn.
// Where rows are very many, a block takes all tiles of a row, and one row after another. Where they are few, a cluster of eight
// blocks makes the sums of the cluster of two (attention_few.cuh).
//
// In a block, two warpgroups decode records into bf16 tiles in shared memory, which hold the keys and, read the other way, the
// values. Two others each own half of the dimensions: their halves of the scores' sums are exchanged through shared memory. In a
// cluster both then have all scores and the same maxima, and their probabilities never leave registers; a block that takes whole
// rows has no time for that, and its groups make the probabilities of half of a tile's keys each (share_tile). At a cluster's end
// block r of a cluster gets the other blocks' sums of the r'th part of the dimensions and finishes those. A row's sums thus
// depend on its own keys alone: not on other rows but for whether they are very many, nor on masked columns.
#include <algorithm>

#include "attention_few.cuh"
#include "attention_reader.cuh"
#include "attention_writer.cuh"
#include "bodies.h"

namespace cedar::cuda {
namespace attention {

constexpr int kParts = 2;             // blocks of a cluster
constexpr int64_t kClusterRows = 64;  // an H200 has places for so many clusters, one a row of up to 64 heads; of more, a block each keeps it busy
constexpr int64_t kFewUnits = 16;     // a cluster of eight each has a multiprocessor for every block
static_assert(kFewParts == kParts, "the same sums");

template <int D, int Parts>
__global__ void __launch_bounds__(kThreads, 1) attend(const cedar_mega_attention_args a, int units) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    auto& memory = *reinterpret_cast<Memory<D, Parts>*>(bytes);
    static_assert(sizeof(memory) <= 227 * 1024, "what a block of sm_90 may have");
    release_launch();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            make_barrier(&memory.full[stage], kWriterWarps);
            make_barrier(&memory.empty[stage], kReaderThreads / kWarp);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    await_launch();
    const unsigned rank = blockIdx.x % Parts;
    const int first = int(blockIdx.x) / Parts, step = int(gridDim.x) / Parts;
    if (threadIdx.x >= kReaderThreads) {
        give_registers<kWriterRegisters>();
        write_rows<D, Parts>(a, rank, first, units, step, memory);
        if constexpr (Parts > 1) {  // the readers' two
            meet_cluster();
            meet_cluster();
        }
    } else {
        take_registers<kReaderRegisters>();
        read_rows<D, Parts>(a, rank, first, units, step, memory);
    }
}

template <int D>
cudaError_t run(const cedar_mega_attention_args& a, void* stream) {
    const int64_t groups = (a.heads + kHeads - 1) / kHeads, units = a.rows * groups;
    if constexpr (D == kFewDim) {
        const Tiles tiles(a);
        if (units <= kFewUnits && tiles.window <= kFewParts && tiles.all <= kFewParts * kFewTiles)
            return launch(attend_few, dim3(unsigned(a.rows * kFewBlocks), unsigned(groups)), kThreads, sizeof(FewMemory), kFewBlocks,
                          true, stream, a);
    }
    if (a.rows <= kClusterRows)
        return launch(attend<D, kParts>, dim3(unsigned(units * kParts)), kThreads, sizeof(Memory<D, kParts>), kParts, true, stream, a,
                      int(units));
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    const dim3 grid{unsigned(std::min<int64_t>(units, processors))};
    return launch(attend<D, 1>, grid, kThreads, sizeof(Memory<D, 1>), 1, true, stream, a, int(units));
}

}  // namespace attention

int64_t mega_attention_workspace(const cedar_mega_attention_args&) { return 0; }

int mega_attention(const cedar_mega_attention_args& a, void* stream) {
    static const char* const name = "mega_attention";
    if (a.type != CEDAR_BF16 || (a.dim != 128 && a.dim != 512))
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU bf16 and dim 128 or 512, not %lld", name, (long long)a.dim);
    if (!(a.scale > 0)) return fail(CEDAR_UNSUPPORTED, "%s: on a GPU a positive scale", name);
    const bool entries = a.entries != nullptr && a.entry_width > 0;
    if ((a.window_width > 0 && a.window_record != CEDAR_RECORD_FP8) || (entries && a.entry_record != CEDAR_RECORD_NVFP4))
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU FP8 window records and NVFP4 entries", name);
    if ((a.window_width + kTileRows - 1) / kTileRows + (a.entry_width + kTileRows - 1) / kTileRows > attention::kMostTiles)
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU at most %d keys a row", name, attention::kMostTiles * kTileRows);
    if ((reinterpret_cast<uintptr_t>(a.window) | reinterpret_cast<uintptr_t>(a.entries)) % 16 != 0)
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU window and entries at multiples of 16 bytes", name);
    return finish(name, a.dim == 512 ? attention::run<512>(a, stream) : attention::run<128>(a, stream));
}

}  // namespace cedar::cuda
