// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of a tensor by the copy engine, to one block of a cluster or to all, and barriers of other blocks. On Hopper
// and later.
#pragma once

#include <cuda.h>  // types alone: the driver's function is looked up at run time

#include "cluster.cuh"
#include "moe_bulk.cuh"

namespace cedar::cuda {

// The box at these coordinates, x first, to shared memory, for a barrier of this block.
__device__ inline void copy_box(void* shared, const CUtensorMap* map, int x, int y, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}

__device__ inline void copy_box(void* shared, const CUtensorMap* map, int x, int y, uint64_t* barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

__device__ inline void copy_box(void* shared, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
                 : "memory");
}

__device__ inline void prefetch_box(const CUtensorMap* map, int x, int y, int z) {  // to L2
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}

// A map, in the launch's parameters, that a thread will soon use.
__device__ inline void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// To the same place of each of the blocks in the mask, and for the barrier at the same place there.
__device__ inline void copy_box_to_all(void* shared, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
            shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}

// At a barrier of a block of the cluster, as address_in gives it: what this thread has read may be overwritten.
__device__ inline void arrive_there(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same at the barrier that lies at the same place there.
__device__ inline void arrive_at(uint64_t* barrier, uint32_t block) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}

// Warp groups wait for each other; those that wait at the same time have different numbers, from 1 on.
__device__ inline void sync_groups(int number, int groups) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(groups * 128) : "memory"); }
// A warp group waits for itself.
__device__ inline void sync_group(int number) { sync_groups(number, 1); }

// All blocks of the cluster have come here; what they wrote is not promised to be seen.
__device__ inline void leave_together() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Four matrices of 8 x 8 bf16 whose rows are in registers, two values of row lane / 4 each, to shared memory by columns: lane
// 8 j + i has the address of column i of matrix j.
__device__ inline void store_transposed(void* column, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(column)), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// ---- host ----

// A tensor of `rank` dimensions, the innermost first; strides in bytes, of all but the innermost. A box's row of swizzle bytes has
// its 16-byte chunks swizzled. Values outside of the tensor are zeros.
inline bool describe(CUtensorMap& map, CUtensorMapDataType type, int rank, const void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                     const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
                                                                             : nullptr;
    }();
    const cuuint32_t ones[] = {1, 1, 1, 1, 1};
    return encode != nullptr && encode(&map, type, cuuint32_t(rank), const_cast<void*>(data), sizes, strides, box, ones,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace cedar::cuda
