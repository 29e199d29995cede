// SPDX-License-Identifier: Apache-2.0
// What of CUDA's language and runtime the kernels use, on the emulator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <tuple>
#include <type_traits>

#include "../machine.h"
#include "../ptx.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (::emulated::current->index)
#define blockIdx (::emulated::current->block->index)
#define __cvta_generic_to_shared(p) (size_t(::emulated::address_of(p)))
#define __cvta_generic_to_global(p) (size_t(p))
#define __cvta_global_to_generic(address) (reinterpret_cast<void*>(address))
#define __trap() ::emulated::failed("__trap")

inline const ::emulated::Index3 &blockDim = ::emulated::block_dim, &gridDim = ::emulated::grid_dim;

// ---- values ----

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return std::common_type_t<A, B>(b) < std::common_type_t<A, B>(a) ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? b : a;
}

inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __vmaxu2(unsigned x, unsigned y) { return std::max(x & 0xffffu, y & 0xffffu) | std::max(x & 0xffff0000u, y & 0xffff0000u); }
inline unsigned __vminu2(unsigned x, unsigned y) { return std::min(x & 0xffffu, y & 0xffffu) | std::min(x & 0xffff0000u, y & 0xffff0000u); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned result;
    emulated::ptx::prmt_b32(result, x, y, selector);
    return result;
}

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T x) { *p = x; }
template <class T, class U> T atomicAdd(T* p, U x) { const T before = *p; *p += T(x); return before; }
template <class T, class U> T atomicOr(T* p, U x) { const T before = *p; *p |= T(x); return before; }
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- barriers and warps ----

inline void __syncthreads() { ::emulated::block_barrier(0, 0, false); }
inline int __syncthreads_or(int x) { return int(::emulated::block_barrier(0, 0, x != 0)); }

namespace emulated {

template <class T>
T exchange(unsigned mask, const char* kind, T value, int from) {
    struct Given {
        T value;
        int from;
    } given{value, from & 31};
    together(mask, kind, given, [](Given* const* lanes) {
        T values[kWarpLanes];
        std::memset(values, 0xff, sizeof values);  // what comes of a lane that is not there
        for (int i = 0; i < kWarpLanes; ++i)
            if (lanes[i] != nullptr) values[i] = lanes[i]->value;
        for (int i = 0; i < kWarpLanes; ++i)
            if (lanes[i] != nullptr) lanes[i]->value = values[lanes[i]->from];
    });
    return given.value;
}

template <class T, class Join>
T reduce(unsigned mask, const char* kind, T value, Join) {
    together(mask, kind, value, [](T* const* lanes) {
        bool first = true;
        T result{};
        for (int i = 0; i < kWarpLanes; ++i)
            if (lanes[i] != nullptr) result = first ? *lanes[i] : Join()(result, *lanes[i]), first = false;
        for (int i = 0; i < kWarpLanes; ++i)
            if (lanes[i] != nullptr) *lanes[i] = result;
    });
    return value;
}

inline int lane() { return int(current->index.x % kWarpLanes); }

}  // namespace emulated

inline void __syncwarp(unsigned mask = ~0u) { ::emulated::reduce(mask, "__syncwarp", 0, [](int a, int) { return a; }); }
template <class T> T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
    return ::emulated::exchange(mask, "__shfl_sync", x, (::emulated::lane() & -width) | (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int step) {
    return ::emulated::exchange(mask, "__shfl_xor_sync", x, ::emulated::lane() ^ step);
}
template <class T> T __shfl_up_sync(unsigned mask, T x, int step) {
    const int lane = ::emulated::lane();
    return ::emulated::exchange(mask, "__shfl_up_sync", x, lane >= step ? lane - step : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool p) {
    return ::emulated::reduce(mask, "__ballot_sync", p ? 1u << ::emulated::lane() : 0u, [](unsigned a, unsigned b) { return a | b; });
}
inline bool __any_sync(unsigned mask, bool p) { return __ballot_sync(mask, p) != 0; }
inline bool __all_sync(unsigned mask, bool p) { return __ballot_sync(mask, !p) == 0; }
template <class T> T __reduce_add_sync(unsigned mask, T x) { return ::emulated::reduce(mask, "__reduce_add_sync", x, [](T a, T b) { return T(a + b); }); }
template <class T> T __reduce_max_sync(unsigned mask, T x) { return ::emulated::reduce(mask, "__reduce_max_sync", x, [](T a, T b) { return a < b ? b : a; }); }
template <class T> T __reduce_min_sync(unsigned mask, T x) { return ::emulated::reduce(mask, "__reduce_min_sync", x, [](T a, T b) { return b < a ? b : a; }); }

#include "cuda_host.h"
