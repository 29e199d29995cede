// SPDX-License-Identifier: Apache-2.0
// Sums over a cluster's blocks without a barrier of the cluster: every block stores its parts into the memory of the block that
// adds them, and each store announces its bytes to a barrier there.
#pragma once

#include "cluster.cuh"
#include "moe_bulk.cuh"

namespace cedar::cuda {

// Until the barrier's phase of this number has ended; what was stored for it is visible.
__device__ inline void await_phase(uint64_t* barrier, int phase) { await_barrier(barrier, uint32_t(phase) & 1); }

// In one piece: the compiler would store the components of an assigned uint4 one by one.
__device__ inline void store_16(void* to, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

}  // namespace cedar::cuda
