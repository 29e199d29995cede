// SPDX-License-Identifier: Apache-2.0
// Launches, and what hosts ask of a device: one of Hopper's, whose errors are the emulator's findings.
#pragma once

#include <cstdlib>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
using cudaStream_t = void*;

enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension,
    cudaLaunchAttributeProgrammaticStreamSerialization,
    cudaLaunchAttributeClusterSchedulingPolicyPreference
};
enum cudaClusterSchedulingPolicy { cudaClusterSchedulingPolicyDefault, cudaClusterSchedulingPolicySpread, cudaClusterSchedulingPolicyLoadBalancing };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct { unsigned x, y, z; } clusterDim;
        int programmaticStreamSerializationAllowed;
        cudaClusterSchedulingPolicy clusterSchedulingPolicyPreference;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor, cudaDevAttrMultiProcessorCount };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
constexpr unsigned long long cudaEnableDefault = 0;

namespace emulated {

struct Leave {
    size_t shared = 0;
    bool large_clusters = false;
};
inline Leave& leave_of(const void* kernel) {
    static std::map<const void*, Leave> leaves;
    return leaves[kernel];
}

inline cudaError_t refused(const char*& text, const char* why) {
    text = why;
    return cudaErrorInvalidValue;
}

inline const char*& refusal() {
    static const char* text = "";
    return text;
}

inline int cluster_of(const cudaLaunchConfig_t& config) {
    for (unsigned i = 0; i < config.numAttrs; ++i)
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) return int(config.attrs[i].val.clusterDim.x);
    return 1;
}

inline bool is_early(const cudaLaunchConfig_t& config) {
    for (unsigned i = 0; i < config.numAttrs; ++i)
        if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) return config.attrs[i].val.programmaticStreamSerializationAllowed != 0;
    return false;
}

inline cudaError_t check(const cudaLaunchConfig_t& config, const Leave& leave) {
    const unsigned cluster = unsigned(cluster_of(config));
    if (config.gridDim.x == 0 || config.gridDim.y == 0 || config.gridDim.z == 0) return refused(refusal(), "a launch of no blocks");
    if (config.gridDim.y > 65535 || config.gridDim.z > 65535) return refused(refusal(), "a grid's y and z end at 65535");
    if (config.blockDim.x == 0 || config.blockDim.x > 1024 || config.blockDim.y != 1 || config.blockDim.z != 1)
        return refused(refusal(), "a block has 1 to 1024 threads");
    if (cluster == 0 || cluster > (leave.large_clusters ? 16u : 8u)) return refused(refusal(), "a cluster of so many blocks needs leave");
    if (config.gridDim.x % cluster != 0) return refused(refusal(), "the grid is not whole clusters");
    if (config.dynamicSmemBytes > kMostShared) return refused(refusal(), "more shared memory than there is");
    if (config.dynamicSmemBytes > kSharedWithoutLeave && leave.shared < config.dynamicSmemBytes)
        return refused(refusal(), "more than 48 KiB of shared memory without leave");
    return cudaSuccess;
}

inline int processors() {
    const char* given = std::getenv("CEDAR_EMULATOR_PROCESSORS");
    return given == nullptr ? 132 : std::atoi(given);
}

}  // namespace emulated

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorInvalidValue ? ::emulated::refusal() : "not supported"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrComputeCapabilityMinor ? 0 : ::emulated::processors();
    return cudaSuccess;
}

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    ::emulated::Leave& leave = ::emulated::leave_of(reinterpret_cast<const void*>(kernel));
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) return leave.large_clusters = value != 0, cudaSuccess;
    if (value < 0 || size_t(value) > ::emulated::kMostShared) return ::emulated::refused(::emulated::refusal(), "leave for more shared memory than there is");
    return leave.shared = size_t(value), cudaSuccess;
}

template <class... P>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*)(P...), const cudaLaunchConfig_t* config) {
    const size_t of_processor = std::min(2048 / size_t(config->blockDim.x), (228 << 10) / (config->dynamicSmemBytes + 1024));
    return *clusters = std::max(1, ::emulated::processors() * int(of_processor) / ::emulated::cluster_of(*config)), cudaSuccess;
}

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
    const ::emulated::Leave& leave = ::emulated::leave_of(reinterpret_cast<const void*>(kernel));
    if (const cudaError_t error = ::emulated::check(*config, leave); error != cudaSuccess) return error;
    const std::tuple<P...> values(static_cast<P>(arguments)...);
    const auto index = [](dim3 d) { return ::emulated::Index3{d.x, d.y, d.z}; };
    ::emulated::enqueue({index(config->gridDim), index(config->blockDim), config->dynamicSmemBytes, leave.shared, ::emulated::cluster_of(*config),
                         ::emulated::is_early(*config), [=] { std::apply(kernel, values); }});
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
