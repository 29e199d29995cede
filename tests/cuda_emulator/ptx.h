// SPDX-License-Identifier: Apache-2.0
// PTX instructions by their names, dots as underlines: what `translate.py` makes of inline assembly.
#pragma once

#include <array>
#include <cmath>
#include <type_traits>

#include "machine.h"

struct CUtensorMap;

namespace emulated {

// Of a vector operand: where its registers are.
template <class... R>
auto registers(R&... r) {
    return std::array<std::common_type_t<R*...>, sizeof...(R)>{&r...};
}

struct Fragments {
    float* c[4];
    uint32_t a[4], b[2];
    bool halves;  // of half precision, not bf16
};
void multiply_fragments(Fragments* const* lanes);
struct Matrices {
    uint32_t address, values[4];
};
void load_matrices(Matrices* const* lanes, bool transposed);
void store_matrices_transposed(Matrices* const* lanes);
void transpose_matrix(uint32_t* const* lanes);
void copy_box(uint32_t shared, const CUtensorMap* map, std::array<int, 3> at, uint32_t barrier, uint32_t blocks);

constexpr unsigned kAll = ~0u;

inline float float_of_half(uint32_t x) {
    const uint32_t exponent = x >> 10 & 31, mantissa = x & 0x3ff;
    const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY) : std::ldexp(exponent ? 1024.0f + float(mantissa) : float(mantissa), int(exponent ? exponent : 1) - 25);
    return x & 0x8000 ? -magnitude : magnitude;
}
// Rounded to the nearest, to even ones.
inline uint32_t half_of_float(float x) {
    if (std::isnan(x)) return 0x7fff;
    const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    const double magnitude = std::fabs(x);
    if (magnitude >= 65520.0) return sign | 0x7c00;
    const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
    return sign | (uint32_t(exponent + 14) * 1024 + uint32_t(std::nearbyint(std::ldexp(magnitude, 10 - exponent))));
}

template <class T>
T* place(uint32_t address) {
    if (address % sizeof(T) != 0) failed("an access to shared memory is not aligned");
    return reinterpret_cast<T*>(shared_at(address, sizeof(T)));
}

inline const void* source(const void* p, size_t alignment) {
    if (reinterpret_cast<uintptr_t>(p) % alignment != 0) failed("the source of a copy is not aligned");
    return p;
}

inline void start_plain_copy(uint32_t shared, const void* global, uint32_t size, uint32_t bytes) {
    if (shared % size != 0) failed("a copy's place in shared memory is not aligned");
    start_copy(Copy{shared_at(shared, size), source(global, size), bytes, size - bytes, {}, nullptr, nullptr});
}

inline void start_bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    if (shared % 16 != 0 || bytes % 16 != 0 || bytes == 0) failed("a bulk copy is not of whole units of 16 bytes");
    phases_at(barrier);
    start_announced_copy(Copy{shared_at(shared, bytes), source(global, 16), bytes, 0, {}, place<uint64_t>(barrier), nullptr});
}

namespace ptx {

// ---- special registers, values ----

inline uint32_t cluster_ctarank() { return uint32_t(current->block->rank); }
inline uint32_t tid_x() { return current->index.x; }
template <class T, class U> void mov_u32(T& to, U from) { to = T(from); }
template <class A> void mov_b64(uint64_t& to, const A& halves) { to = uint64_t(uint32_t(*halves[1])) << 32 | uint32_t(*halves[0]); }
inline void prmt_b32(uint32_t& to, uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    to = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t nibble = selector >> (4 * i) & 15, byte = uint32_t(bytes >> (8 * (nibble & 7))) & 0xff;
        to |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
    }
}
inline void cvt_rn_f16x2_f32(uint32_t& pair, float upper, float lower) { pair = half_of_float(upper) << 16 | half_of_float(lower); }
inline float above_zero(float x) { return x < 0.0f ? 0.0f : x; }
inline void cvt_rn_relu_f16x2_f32(uint32_t& pair, float upper, float lower) { cvt_rn_f16x2_f32(pair, above_zero(upper), above_zero(lower)); }
template <class T> void setp_ne_b32(bool& p, T x, int y) { p = int(x) != y; }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline void ex2_approx_ftz_f32(float& y, float x) { y = flushed(exp2f(flushed(x))); }
inline void lg2_approx_ftz_f32(float& y, float x) { y = flushed(log2f(flushed(x))); }
inline void sqrt_approx_ftz_f32(float& y, float x) { y = flushed(sqrtf(flushed(x))); }
inline void rcp_approx_ftz_f32(float& y, float x) { y = flushed(1.0f / flushed(x)); }

inline void setp_lt_s32(bool& less, int x, int y) { less = x < y; }

// ---- memory ----

inline void ld_global_u32(uint32_t& to, const void* from) { to = *static_cast<const uint32_t*>(source(from, 4)); }
template <class A> void ld_global_nc_L1_no_allocate_v4_u32(const A& to, const void* from) {
    const auto* p = static_cast<const uint32_t*>(source(from, 16));
    for (int i = 0; i < 4; ++i) *to[size_t(i)] = p[i];
}
template <class A> void st_global_v4_u32(void* to, const A& from) {
    auto* p = static_cast<uint32_t*>(const_cast<void*>(source(to, 16)));
    for (int i = 0; i < 4; ++i) p[i] = *from[size_t(i)];
}
template <class T> void load_vector(const std::array<T*, 4>& to, uint32_t address) {
    struct alignas(16) Four { T v[4]; };
    const Four four = *place<Four>(address);
    for (size_t i = 0; i < 4; ++i) *to[i] = four.v[i];
}
inline void ld_shared_v4_u32(const std::array<uint32_t*, 4>& to, uint32_t address) { load_vector(to, address); }
inline void ld_shared_u16(uint16_t& to, uint32_t address) { to = *place<uint16_t>(address); }
inline void ld_shared_u32(uint32_t& to, uint32_t address) { to = *place<uint32_t>(address); }
inline void ld_shared_cluster_v4_f32(const std::array<float*, 4>& to, uint32_t address) { load_vector(to, address); }
template <class A> void st_shared_v4_u32(uint32_t address, const A& from) {
    struct alignas(16) Four { uint32_t v[4]; };
    *place<Four>(address) = {{*from[0], *from[1], *from[2], *from[3]}};
}
template <class A> void st_shared_v2_u32(uint32_t address, const A& from) {
    struct alignas(8) Two { uint32_t v[2]; };
    *place<Two>(address) = {{*from[0], *from[1]}};
}
inline void st_shared_cluster_f32(uint32_t address, float x) { *place<float>(address) = x; }
template <class T> void atom_add_acq_rel_gpu_global_u32(uint32_t& before, T* p, uint32_t x) { before = *p, *p += x; }
template <class T> void mapa_shared_cluster_u32(uint32_t& there, uint32_t address, T rank) {
    if (uint32_t(rank) >= current->block->cluster->blocks.size()) failed("mapa: no such block in the cluster");
    there = (uint32_t(rank) + 1) * kClusterWindow + address % kClusterWindow;
}
inline void prefetch_global_L2(const void*) {}
inline void prefetch_tensormap(const void*) {}
template <class T> void cp_async_bulk_prefetch_L2_global(T address, uint32_t bytes) {
    if (uint64_t(address) % 16 != 0 || bytes % 16 != 0) failed("a prefetch is not of whole units of 16 bytes");
}
template <class A> void cp_async_bulk_prefetch_tensor_3d_L2_global(const CUtensorMap*, const A&) {}
inline void createpolicy_fractional_L2_evict_first_b64(uint64_t& policy, double) { policy = 0; }

// ---- barriers ----

inline void bar_sync(int number, int threads) { block_barrier(number, threads, false); }
inline void barrier_cluster_arrive_relaxed() { arrive_cluster(); }
inline void barrier_cluster_arrive_relaxed_aligned() { arrive_cluster(); }
inline void barrier_cluster_arrive_release_aligned() { arrive_cluster(); }
inline void barrier_cluster_wait() { await_cluster(); }
inline void barrier_cluster_wait_aligned() { await_cluster(); }
inline void barrier_cluster_wait_acquire_aligned() { await_cluster(); }
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}
inline void griddepcontrol_wait() { await_launch(); }
inline void griddepcontrol_launch_dependents() {}
template <class T> void setmaxnreg_inc_sync_aligned_u32(T) {}
template <class T> void setmaxnreg_dec_sync_aligned_u32(T) {}
inline void mbarrier_init_shared_cta_b64(uint32_t address, int arrivals) {
    *place<uint64_t>(address) = 0;
    phases_at(address, true) = Phases{arrivals, arrivals, 0, 0, {}};
}
inline void mbarrier_arrive_shared_cta_b64(uint32_t address) { arrive_phase(address, 1, 0); }
inline void mbarrier_arrive_shared_cta_b64(uint64_t&, uint32_t address) { arrive_phase(address, 1, 0); }
inline void mbarrier_arrive_shared_cluster_b64(uint32_t address) { arrive_phase(address, 1, 0); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t address, uint32_t bytes) { arrive_phase(address, 1, bytes); }
inline void mbarrier_arrive_expect_tx_shared_cluster_b64(uint32_t address, uint32_t bytes) { arrive_phase(address, 1, bytes); }
inline void mbarrier_try_wait_parity_shared_cta_b64(bool& done, uint32_t address, uint32_t parity) { await_phase(address, parity), done = true; }

// ---- copies ----

inline void cp_async_cg_shared_global(uint32_t shared, const void* global, uint32_t size) { start_plain_copy(shared, global, size, size); }
inline void cp_async_cg_shared_global(uint32_t shared, const void* global, uint32_t size, uint32_t bytes) { start_plain_copy(shared, global, size, bytes); }
inline void cp_async_cg_shared_global_L2_256B(uint32_t shared, const void* global, uint32_t size) { start_plain_copy(shared, global, size, size); }
inline void cp_async_ca_shared_global(uint32_t shared, const void* global, uint32_t size) { start_plain_copy(shared, global, size, size); }
inline void cp_async_mbarrier_arrive_noinc_shared_cta_b64(uint32_t address) { arrive_after_copies(address); }
inline void cp_async_commit_group() { close_copies(); }
inline void cp_async_wait_group(int left) { await_copies(size_t(left)); }
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    start_bulk_copy(shared, global, bytes, barrier);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t) {
    start_bulk_copy(shared, global, bytes, barrier);
}
template <class A>
void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t shared, const CUtensorMap* map, const A& at, uint32_t barrier) {
    copy_box(shared, map, {*at[0], *at[1], 0}, barrier, 0);
}
template <class A>
void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(uint32_t shared, const CUtensorMap* map, const A& at, uint32_t barrier,
                                                                                            uint64_t) {
    copy_box(shared, map, {*at[0], *at[1], 0}, barrier, 0);
}
template <class A>
void cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t shared, const CUtensorMap* map, const A& at, uint32_t barrier) {
    copy_box(shared, map, {*at[0], *at[1], *at[2]}, barrier, 0);
}
template <class A>
void cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(uint32_t shared, const CUtensorMap* map, const A& at,
                                                                                                uint32_t barrier, uint16_t blocks) {
    copy_box(shared, map, {*at[0], *at[1], *at[2]}, barrier, blocks);
}
template <class T, size_t N>
void send_values(uint32_t to, const std::array<T*, N>& from, uint32_t barrier) {
    if (to / kClusterWindow != barrier / kClusterWindow) failed("st.async: the barrier is of another block than the place");
    phases_at(barrier);
    struct alignas(4 * N) Values { float v[N]; };
    Copy copy{reinterpret_cast<unsigned char*>(place<Values>(to)), nullptr, 4 * N, 0, {}, place<uint64_t>(barrier), nullptr};
    for (size_t i = 0; i < N; ++i) std::memcpy(copy.value + 4 * i, from[i], 4);
    start_announced_copy(std::move(copy));
}
template <class A> void st_async_shared_cluster_mbarrier_complete_tx_bytes_v2_f32(uint32_t to, const A& from, uint32_t barrier) { send_values(to, from, barrier); }
template <class A> void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_f32(uint32_t to, const A& from, uint32_t barrier) { send_values(to, from, barrier); }

// ---- matrices ----

template <class A, class B>
void multiply_sixteen(const std::array<float*, 4>& d, const A& a, const B& b, bool halves) {
    Fragments mine{{d[0], d[1], d[2], d[3]}, {*a[0], *a[1], *a[2], *a[3]}, {*b[0], *b[1]}, halves};
    together(kAll, "mma.sync", mine, [](Fragments* const* lanes) { multiply_fragments(lanes); });
}
template <class A, class B>
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(const std::array<float*, 4>& d, const A& a, const B& b, const std::array<float*, 4>&) {
    multiply_sixteen(d, a, b, false);
}
template <class A, class B>
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(const std::array<float*, 4>& d, const A& a, const B& b, const std::array<float*, 4>&) {
    multiply_sixteen(d, a, b, true);
}
template <bool Transposed>
void load_four(const std::array<uint32_t*, 4>& to, uint32_t address) {
    Matrices mine{address, {}};
    together(kAll, "ldmatrix", mine, [](Matrices* const* lanes) { load_matrices(lanes, Transposed); });
    for (size_t i = 0; i < 4; ++i) *to[i] = mine.values[i];
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(const std::array<uint32_t*, 4>& to, uint32_t address) { load_four<false>(to, address); }
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(const std::array<uint32_t*, 4>& to, uint32_t address) { load_four<true>(to, address); }
template <class A> void stmatrix_sync_aligned_m8n8_x4_trans_shared_cta_b16(uint32_t address, const A& from) {
    Matrices mine{address, {*from[0], *from[1], *from[2], *from[3]}};
    together(kAll, "stmatrix", mine, [](Matrices* const* lanes) { store_matrices_transposed(lanes); });
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& to, uint32_t from) {
    together(kAll, "movmatrix", from, [](uint32_t* const* lanes) { transpose_matrix(lanes); });
    to = from;
}

}  // namespace ptx
}  // namespace emulated

#include "wgmma.h"
