// SPDX-License-Identifier: Apache-2.0
// Hopper's matrix instructions of a warp group. Products are carried out late, at the wait for their group, or at any time before;
// until then the registers of their sums are NaNs.
#pragma once

#include "ptx.h"

namespace emulated {

// A thread's part of a product: registers of its sums (side by side), and of a its registers or the matrix's descriptor. e5m2: not bf16.
struct Product {
    int columns;
    bool e5m2;
    float* c;
    bool a_in_registers, adds, b_transposed;
    uint32_t a[4];
    uint64_t a_matrix, b_matrix;
};
void start_product(Product& mine);
void close_products();
void await_products(size_t left);

template <size_t N>
float* side_by_side(const std::array<float*, N>& c) {
    for (size_t i = 0; i < N; ++i)
        if (c[i] != c[0] + i) failed("wgmma: the emulator wants sums side by side");
    return c[0];
}

namespace ptx {

inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { emulated::close_products(); }
inline void wgmma_wait_group_sync_aligned(int left) { await_products(size_t(left)); }

template <size_t N, class A>
void multiply(int columns, const std::array<float*, N>& c, const std::array<A*, 4>& a, uint64_t b, bool adds, int b_transposed) {
    Product mine{columns, false, side_by_side(c), true, adds, b_transposed != 0, {*a[0], *a[1], *a[2], *a[3]}, 0, b};
    start_product(mine);
}
template <size_t N>
void multiply(int columns, const std::array<float*, N>& c, uint64_t a, uint64_t b, bool adds, int a_transposed, int b_transposed) {
    if (a_transposed != 0) failed("wgmma: the emulator has no transposed left side");
    Product mine{columns, false, side_by_side(c), false, adds, b_transposed != 0, {}, a, b};
    start_product(mine);
}

// The two numbers between are the factors of a and b.
#define EMULATED_WGMMA(columns)                                                                                       \
    template <class A, class P, class... T>                                                                           \
    void wgmma_mma_async_sync_aligned_m64n##columns##k16_f32_bf16_bf16(const std::array<float*, columns / 2>& c, const A& a, uint64_t b, P adds, \
                                                                       int, int, T... transposed) {                   \
        multiply(columns, c, a, b, bool(adds), transposed...);                                                        \
    }
EMULATED_WGMMA(8)
EMULATED_WGMMA(16)
EMULATED_WGMMA(32)
EMULATED_WGMMA(48)
EMULATED_WGMMA(56)
EMULATED_WGMMA(64)
EMULATED_WGMMA(72)
EMULATED_WGMMA(80)
EMULATED_WGMMA(96)
EMULATED_WGMMA(128)
EMULATED_WGMMA(144)
EMULATED_WGMMA(160)
EMULATED_WGMMA(176)
EMULATED_WGMMA(192)
EMULATED_WGMMA(256)
#undef EMULATED_WGMMA
template <class P>
void wgmma_mma_async_sync_aligned_m64n32k32_f32_e5m2_e5m2(const std::array<float*, 16>& c, const std::array<const uint32_t*, 4>& a, uint64_t b, P adds, int, int) {
    Product mine{32, true, side_by_side(c), true, bool(adds), false, {*a[0], *a[1], *a[2], *a[3]}, 0, b};
    start_product(mine);
}

}  // namespace ptx
}  // namespace emulated
