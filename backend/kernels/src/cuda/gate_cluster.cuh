// SPDX-License-Identifier: Apache-2.0
// The memory of a cluster's other blocks, and half of its barrier.
#pragma once

#include "linear_tensor.cuh"

namespace cedar::cuda {

// The same place in the memory of block `rank` of the cluster.
__device__ inline uint32_t address_in(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// 16 bytes to a place in a block's memory, announced to a barrier of that block; both as address_in gives them.
__device__ inline void send(uint32_t to, uint32_t barrier, float4 x) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w), "r"(barrier)
                 : "memory");
}

// From a place as address_in gives it, after a barrier of the cluster.
__device__ inline float4 load_from(uint32_t from) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
    return x;
}

// The cluster's barrier, first half: nothing that the thread wrote is promised to be seen behind the others' await_cluster.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

}  // namespace cedar::cuda
