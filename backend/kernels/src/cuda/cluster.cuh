// SPDX-License-Identifier: Apache-2.0
// The memory of a cluster's other blocks, and its barrier.
#pragma once

#include <cuda_runtime.h>

namespace cedar::cuda {

// The same place in the memory of block `rank` of the cluster.
__device__ inline uint32_t address_in(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// To a place in a block's memory, announced to a barrier of that block; both as address_in gives them.
__device__ inline void send(uint32_t to, uint32_t barrier, float4 x) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w), "r"(barrier)
                 : "memory");
}
__device__ inline void send_pair(uint32_t to, uint32_t barrier, float x, float y) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(x), "f"(y), "r"(barrier)
                 : "memory");
}

// Arrives at a barrier of a block and announces bytes to it, which may have come before.
__device__ inline void announce_bytes_in(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// From a place as address_in gives it, after a barrier of the cluster.
__device__ inline float4 load_from(uint32_t from) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
    return x;
}

// The cluster's barrier, in two halves. publish_to_cluster: what the thread wrote is seen behind the others' wait.
__device__ inline void publish_to_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

}  // namespace cedar::cuda
