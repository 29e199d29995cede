// SPDX-License-Identifier: Apache-2.0
// Copies of whole runs of memory by the copy engine, barriers that count their bytes, and launches that begin before the one
// before them has ended. On every architecture from sm_90 on.
#pragma once

#include "ptx.cuh"

namespace cedar::cuda {

__device__ inline uint32_t shared_address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

// A barrier's phase ends when so many arrivals have come and all bytes that they announced.
__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Barriers that this thread initialised are seen by copies, and by threads behind the next barrier of theirs.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ inline void arrive(uint64_t* barrier) { arrive(shared_address(barrier)); }

// Arrive for a warp that has read what others may overwrite from here on. Loads that are on their way do not hold back an arrival:
// without the fence they found what the copy engine brought next.
__device__ inline void arrive_after_reads(uint32_t barrier) {
    __threadfence_block();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(barrier);
}
__device__ inline void arrive_after_reads(uint64_t* barrier) { arrive_after_reads(shared_address(barrier)); }

// Arrive, and announce bytes.
__device__ inline void announce_bytes(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ inline void await_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ inline void await_barrier(uint64_t* barrier, uint32_t parity) { await_barrier(shared_address(barrier), parity); }

// What this thread and those that it has waited for did in shared memory comes before the copies that it starts from here on.
__device__ inline void release_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// L2 gives up first what is read with this.
__device__ inline uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// To L2; address and number of bytes are multiples of 16.
__device__ inline void prefetch_bulk(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// One thread's order; both addresses and the number of bytes are multiples of 16.
__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

}  // namespace cedar::cuda
