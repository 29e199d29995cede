// SPDX-License-Identifier: Apache-2.0
// The instructions that C++ has no name for, all of them on every architecture from sm_80 on.
#pragma once

#include "common.cuh"

namespace cedar::cuda {

// c += a b: a 16 x 16, b 16 x 8, of bf16. Lane 4 g + q holds of a the pairs (g, 2q), (g + 8, 2q), (g, 2q + 8), (g + 8, 2q + 8),
// of b (2q, g), (2q + 8, g), of c (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
__device__ inline void multiply_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of half precision.
__device__ inline void multiply_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two values in half precision,
__device__ inline uint32_t half_pair(float lower, float upper) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}
// and with zero for what is below; a NaN stays one.
__device__ inline uint32_t positive_half_pair(float lower, float upper) {
    uint32_t pair;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}

// Byte i is byte `nibble i of selector` % 8 of x (0-3) and y (4-7), or, for nibbles from 8 on, its sign eight times.
__device__ inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
    return bytes;
}

// 16 bytes that nobody reads again.
__device__ inline uint4 load_once(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// 16 bytes that were written by an earlier launch.
__device__ inline uint4 load_cached(const void* p) { return __ldg(static_cast<const uint4*>(p)); }

// ---- copies from device to shared memory behind the thread's back ----

__device__ inline void copy_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
}

__device__ inline void copy_4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
}

// The copies since the last call are one group.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `Left` of this thread's groups are on their way.
template <int Left>
__device__ inline void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// Brings a line to L2.
__device__ inline void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The launch before has ended, and what it wrote is seen from here on; so has everything before it.
__device__ inline void await_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next launch may begin once all blocks have come here, if it was launched to begin early.
__device__ inline void release_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace cedar::cuda
