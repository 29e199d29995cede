// SPDX-License-Identifier: Apache-2.0
// What the CUDA bodies share: activations as floats, sums over a warp, the codes of the release's formats, launching.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cedar_kernels.h"
#include "check.h"

namespace cedar::cuda {

using Bf16 = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- values ----

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline Bf16 from_float<Bf16>(float x) { return __float2bfloat16_rn(x); }

// What is left of a value that is stored in T.
template <class T>
__device__ inline float rounded(float x) { return to_float(from_float<T>(x)); }

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
    T v[N];
};

// N neighbouring values; p is aligned to all of them.
template <int N, class T>
__device__ inline void load_pack(const T* p, float (&out)[N]) {
    const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(p);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(pack.v[i]);
}

template <int N, class T>
__device__ inline void store_pack(T* p, const float (&values)[N]) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.v[i] = from_float<T>(values[i]);
    *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---- warps ----

// All lanes get the sum over groups of `width` neighbouring lanes, always added in the same order.
__device__ inline float sum_lanes(float x, int width = kWarp) {
    for (int step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

__device__ inline float max_lanes(float x, int width) {
    for (int step = width / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
    return x;
}

// ---- codes; the same functions as in src/cpu/records.h ----

__device__ inline float decode_e4m3(uint32_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float normal = __uint_as_float((magnitude << 20) + (120u << 23));
    const float value = magnitude >= 8 ? normal : float(magnitude) * 0x1p-9f;
    return __uint_as_float(__float_as_uint(magnitude == 0x7f ? __uint_as_float(0x7fc00000) : value) | (code & 0x80) << 24);
}

__device__ inline uint32_t encode_e4m3(float value) {
    const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1) - (120u << 23)) >> 20;
    const uint32_t subnormal = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - __float_as_uint(16384.0f);
    const uint32_t code = magnitude < 0x3c800000 ? subnormal : normal;
    return (magnitude > 0x43e80000 ? 0x7f : code & 0x7f) | bits >> 31 << 7;
}

__device__ inline uint32_t encode_e2m1(float value) {
    const float m = fabsf(value);
    const uint32_t code = uint32_t(m > 0.25f) + uint32_t(m >= 0.75f) + uint32_t(m > 1.25f) + uint32_t(m >= 1.75f) +
                          uint32_t(m > 2.5f) + uint32_t(m >= 3.5f) + uint32_t(m > 5.0f);
    return code | __float_as_uint(value) >> 31 << 3;
}

// The smallest power of two not below amax / limit.
__device__ inline float power_of_two_scale(float amax, float least, float inverse_limit) {
    const float scale = fmaxf(amax, least) * inverse_limit;
    return __uint_as_float((__float_as_uint(scale) + 0x7fffff) & 0x7f800000);
}

// ---- host ----

inline int finish(const char* op, cudaError_t error) {
    if (error == cudaSuccess) error = cudaGetLastError();
    if (error == cudaSuccess) return CEDAR_OK;
    return fail(CEDAR_FAILED, "%s: %s", op, cudaGetErrorString(error));
}

// Launch with a cluster of `cluster` blocks in x, placed by a policy; early: blocks may begin before the launch before has ended, and must
// await it.
template <class... Parameters, class... Arguments>
cudaError_t launch_placed(cudaClusterSchedulingPolicy placed, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
                          int cluster, bool early, void* stream, Arguments... arguments) {
    if (shared > 32 * 1024) {  // 48 KiB, static shared memory included, need no leave
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attributes[3];
    unsigned count = 0;
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = unsigned(cluster);
        attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
        ++count;
    }
    if (placed != cudaClusterSchedulingPolicyDefault) {
        attributes[count].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
        attributes[count].val.clusterSchedulingPolicyPreference = placed;
        ++count;
    }
    if (early) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        ++count;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, int cluster, bool early, void* stream,
                   Arguments... arguments) {
    return launch_placed(cudaClusterSchedulingPolicyDefault, kernel, grid, threads, shared, cluster, early, stream, arguments...);
}

// Clusters that run at the same time.
template <class... Parameters>
int places_of(void (*kernel)(Parameters...), int threads, size_t shared, int cluster,
              cudaClusterSchedulingPolicy placed = cudaClusterSchedulingPolicyDefault) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = unsigned(cluster);
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[1].val.clusterSchedulingPolicyPreference = placed;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(cluster));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = shared;
    config.attrs = attributes;
    config.numAttrs = placed == cudaClusterSchedulingPolicyDefault ? 1 : 2;
    int places = 0;
    const bool known = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)) == cudaSuccess &&
                       (cluster <= 8 || cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess) &&
                       cudaOccupancyMaxActiveClusters(&places, kernel, &config) == cudaSuccess;
    if (!known) cudaGetLastError();  // the launch that follows is not to be blamed
    return known && places > 0 ? places : 1;
}

}  // namespace cedar::cuda
