// SPDX-License-Identifier: Apache-2.0
// mega_attention in one launch. A cluster of two blocks takes a row and 64 of its heads, which are the rows of the matrix
// instructions: every key is read once a block. The row's tiles of 64 keys that hold any are dealt out to the two blocks in turn.
//
// In a block, one warpgroup decodes records into bf16 tiles in shared memory, which hold the keys and, read the other way, the
// values. Two warpgroups each own half of the dimensions: their halves of the scores' sums are exchanged through shared memory,
// so that both have all scores and the same maxima, and their probabilities never leave registers. At the end block r gets the
// other block's sums of half r of the dimensions and finishes those. A row's sums thus depend on its own keys alone: not on other
// rows, nor on masked columns.
#include "attention_reader.cuh"
#include "attention_writer.cuh"
#include "bodies.h"

namespace cedar::cuda {
namespace attention {

template <int D>
__global__ void __launch_bounds__(kThreads, 1) attend(const cedar_mega_attention_args a) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Memory<D>& memory = *reinterpret_cast<Memory<D>*>(bytes);
    static_assert(sizeof(Memory<D>) <= 227 * 1024, "what a block of sm_90 may have");
    const unsigned rank = blockIdx.x % 2;
    const int64_t row = blockIdx.x / 2;
    const int first_head = int(blockIdx.y) * kHeads;
    const Tiles tiles(a);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            make_barrier(&memory.full[stage], kWriterWarps);
            make_barrier(&memory.empty[stage], kReaderThreads / kWarp);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    deal_tiles<D>(a, tiles, row, rank, memory);
    const int windows = memory.windows;
    const int count = __shfl_sync(kAllLanes, memory.count, 0);  // the same in all lanes, which the compiler cannot see
    if (threadIdx.x >= kReaderThreads) {
        give_registers<kWriterRegisters>();
        write_tiles<D, CEDAR_RECORD_FP8>(a, tiles, row, 0, windows, memory);
        write_tiles<D, CEDAR_RECORD_NVFP4>(a, tiles, row, windows, count, memory);
        meet_cluster();
        meet_cluster();
    } else {
        take_registers<kReaderRegisters>();
        read_tiles<D>(a, row, first_head, rank, count, memory);
    }
}

template <int D>
cudaError_t run(const cedar_mega_attention_args& a, void* stream) {
    const dim3 grid{unsigned(a.rows * 2), unsigned((a.heads + kHeads - 1) / kHeads)};
    return launch(attend<D>, grid, kThreads, sizeof(Memory<D>), 2, stream, a);
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
    return finish(name, a.dim == 512 ? attention::run<512>(a, stream) : attention::run<128>(a, stream));
}

}  // namespace cedar::cuda
