// SPDX-License-Identifier: Apache-2.0
// Sums over a cluster's blocks without a barrier of the cluster: every block stores its parts into the memory of the block that
// adds them, and each store announces its bytes to a barrier there.
#pragma once

#include "linear_tensor.cuh"

namespace cedar::cuda {

// Until the barrier's phase of this number has ended; what was stored for it is visible.
__device__ inline void await_phase(uint64_t* barrier, int phase) { await_barrier(barrier, uint32_t(phase) & 1); }

// Two warps wait for each other; the numbers of pairs differ.
__device__ inline void sync_pair(int number) { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(2 * kWarp) : "memory"); }

// Arrive for a warp that has used what it read but for the load of `last`: who arrives depends on it, so that it has come, without the
// fence of arrive_after_reads, which waits for the warp's stores too.
__device__ inline void arrive_after_use(uint64_t* barrier, float last) {
    const uint32_t numbers = __ballot_sync(kAllLanes, last == last);
    if (threadIdx.x % kWarp == (numbers == 0 ? 1 : 0)) arrive(barrier);
}

// ---- sums of four tokens on their way to a block of C ----

constexpr int kTokens = 8;

// A block alone stores them and arrives, because its launch need not be one of clusters; others send.
template <int C>
__device__ constexpr int arrivals(int sums) {
    return C == 1 ? 1 + 2 * sums : 1;
}

template <int C>
__device__ inline void expect_sums(uint64_t* full, int sums) {
    if (C == 1)
        arrive(full);
    else
        announce_bytes(full, C * sums * kTokens * sizeof(float));
}

template <int C>
__device__ inline void send_sums(float* place, uint64_t* full, int there, float4 total) {
    if (C == 1) {
        *reinterpret_cast<float4*>(place) = total;
        arrive(full);
    } else {
        send(address_in(shared_address(place), there), address_in(shared_address(full), there), total);
    }
}

// ---- memory ----

// In one piece: the compiler would store the components of an assigned uint4 one by one.
__device__ inline void store_16(void* to, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

}  // namespace cedar::cuda
