// SPDX-License-Identifier: Apache-2.0
// Kernels with a mistake each, which the emulator has to find, and without it.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdio>

namespace {

constexpr int kThreads = 128;
enum Mistake { kNone, kNoBarrier, kNoSyncwarp, kNoWait, kReusedStage, kNoExpect, kNoClusterBarrier, kReadBeforeProduct, kEarlyRead };

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// out[i] = in[i] + in[i ^ 64] + in[i ^ 1], by way of shared memory.
__global__ void exchange(const float* in, float* out, Mistake mistake) {
    __shared__ float all[kThreads], pairs[kThreads];
    const int i = int(threadIdx.x);
    all[i] = pairs[i] = in[i];
    if (mistake != kNoBarrier) __syncthreads();
    const float far = all[i ^ 64];
    pairs[i] = in[i] + far;
    if (mistake != kNoSyncwarp) __syncwarp();
    out[i] = pairs[i ^ 1] - in[i ^ 1] - in[i ^ 65] + far + in[i] + in[i ^ 1];
}

// out[i]: the sum of 8 rows of in, copied in two stages.
__global__ void stages(const float* in, float* out, Mistake mistake) {
    __shared__ float rows[2][kThreads * 4];
    const int i = int(threadIdx.x), other = kThreads - 1 - i;
    const auto fetch = [&](int row) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&rows[row % 2][i * 4])), "l"(in + row * kThreads * 4 + i * 4) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float sum = 0.0f;
    fetch(0);
    for (int row = 0; row < 8; ++row) {
        if (mistake == kReusedStage && row + 1 < 8) fetch(row + 1);
        if (mistake == kReusedStage) asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory");
        else if (mistake != kNoWait) asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
        __syncthreads();
        if (mistake != kReusedStage && row + 1 < 8) fetch(row + 1);
        sum += rows[row % 2][other * 4];
    }
    out[other] = sum;
}

// out[i] of block r: the sum over the cluster's other blocks of their rank + i, stored for a barrier of block r.
__global__ void sums(const float*, float* out, Mistake mistake) {
    __shared__ __align__(16) float4 inbox[2];
    __shared__ uint64_t barrier;
    const auto cluster = cooperative_groups::this_cluster();
    const uint32_t rank = cluster.block_rank();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(1) : "memory");
        if (mistake != kNoExpect) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(16) : "memory");
    }
    if (mistake != kNoClusterBarrier) cluster.sync();
    if (threadIdx.x == 0) {
        uint32_t to, announced;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(&inbox[rank])), "r"(rank ^ 1));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(announced) : "r"(shared_address(&barrier)), "r"(rank ^ 1));
        const float4 x = make_float4(float(rank), 1.0f, 2.0f, 3.0f);
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x.x), "f"(x.y),
                     "f"(x.z), "f"(x.w), "r"(announced)
                     : "memory");
    }
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(shared_address(&barrier)), "r"(0) : "memory");
    out[rank * kThreads + threadIdx.x] = inbox[rank ^ 1].x + float(threadIdx.x);
    cluster.sync();
}

// A product of ones: 16 everywhere, in out[i] the thread's first.
__global__ void product(const float*, float* out, Mistake mistake) {
    extern __shared__ __align__(1024) unsigned char memory[];
    uint32_t* words = reinterpret_cast<uint32_t*>(memory);
    for (int i = int(threadIdx.x); i < 4096; i += kThreads) words[i] = 0x3f803f80;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float c[16] = {};
    const uint32_t a[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    const uint64_t b = shared_address(memory) >> 4 | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (mistake != kReadBeforeProduct) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(0) : "memory");
    out[threadIdx.x] = c[5];
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(0) : "memory");
}

// out[i] = in[i], which the launch behind it, as it may begin early, has to await.
__global__ void lead(const float* in, float* out, Mistake) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    out[threadIdx.x] = in[threadIdx.x];
}
__global__ void follow(const float*, float* out, Mistake mistake) {
    if (mistake != kEarlyRead) asm volatile("griddepcontrol.wait;" ::: "memory");
    out[kThreads + threadIdx.x] = 2.0f * out[threadIdx.x];
}

}  // namespace

// 0, or an error whose text is written.
extern "C" __attribute__((visibility("default"))) int emulate(int kernel, int mistake, const float* in, float* out, char* text, int bytes) {
    void (*const kernels[])(const float*, float*, Mistake) = {exchange, stages, sums, product, lead};
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kernel == 2 ? 2 : 1);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kernel == 3 ? 16384 : 0;
    config.attrs = &attribute;
    config.numAttrs = kernel == 2;
    cudaError_t error = cudaLaunchKernelEx(&config, kernels[kernel], in, out, Mistake(mistake));
    if (kernel == 4) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
        error = cudaLaunchKernelEx(&config, follow, in, out, Mistake(mistake));
    }
    const bool well = emulated::finish();
    std::snprintf(text, size_t(bytes), "%s", error != cudaSuccess ? cudaGetErrorString(error) : emulated::last_failure());
    return error != cudaSuccess || !well;
}
