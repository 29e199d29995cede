// SPDX-License-Identifier: Apache-2.0
// mega_gate of very many tokens on Hopper, in one launch. A cluster has 128 tokens and all experts, its blocks share k; the matrix
// instruction of warp groups reads both operands from shared memory: 3 groups of 128 experts. Then a warp takes a token's logits
// from the blocks, adds them in their order and chooses: nothing goes through device memory.
#pragma once

#include "gate_choose.cuh"
#include "mhc_cluster.cuh"
#include "wgmma.cuh"

namespace cedar::cuda {

constexpr int kManyBlocks = 4, kManyGroups = 3, kManyExperts = kManyGroups * 128, kManyTokens = 128, kManyThreads = kManyGroups * 128;
constexpr int kManyDepth = 64, kManyStages = 3;  // values of k of a stage: rows of 128 bytes
constexpr int kManyTokensAt = kManyExperts * 128, kManyStageBytes = kManyTokensAt + kManyTokens * 128;
constexpr int kManyStride = kManyExperts + 4;    // floats of a token's logits: 2 tokens further is 8 banks further
constexpr int kManyLogits = kManyTokens * kManyStride * int(sizeof(float));
constexpr int kManyShared = 1024 + (kManyLogits > kManyStages * kManyStageBytes ? kManyLogits : kManyStages * kManyStageBytes);

// c += a b: a 64 x 16 and b 16 x 128 in shared memory; c as multiply_group has it.
__device__ inline void multiply_staged(float (&c)[64], uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(CEDAR_WIDE_WGMMA)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0;\n}\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
          "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "l"(a), "l"(b), "r"(1));
#else
    __trap();
#endif
}

static __global__ void __launch_bounds__(kManyThreads, 1) route_many(const cedar_mega_gate_args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = int(blockIdx.x) % kManyBlocks;
    const int64_t first_token = int64_t(blockIdx.x) / kManyBlocks * kManyTokens;
    const int tokens = int(a.rows - first_token < kManyTokens ? a.rows - first_token : kManyTokens);
    const int hidden = int(a.hidden), length = hidden / kManyBlocks, steps = length / kManyDepth, last = int(a.experts) - 1;

    // Eight threads copy a row; chunks of 16 bytes are swizzled as matrix_of describes. A token behind the last is zeros.
    constexpr int kRowsAtOnce = kManyThreads / 8;
    const int row = threadIdx.x / 8, k = rank * length + threadIdx.x % 8 * 8;
    const int place = row * 128 + (threadIdx.x % 8 ^ row % 8) * 16;
    const Bf16* const experts = static_cast<const Bf16*>(a.weight) + k;
    const Bf16* const x = static_cast<const Bf16*>(a.x) + first_token * hidden + k;
    const auto fetch = [&](int step) {
        unsigned char* to = stages + step % kManyStages * kManyStageBytes + place;
#pragma unroll
        for (int i = 0; i < kManyExperts / kRowsAtOnce; ++i)
            copy_16(to + i * kRowsAtOnce * 128, experts + min(row + i * kRowsAtOnce, last) * hidden + step * kManyDepth);
#pragma unroll
        for (int i = 0; i < (kManyTokens + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
            const int token = row + i * kRowsAtOnce;
            if (token < kManyTokens)
                copy_16_or_zero(to + kManyTokensAt + i * kRowsAtOnce * 128, x + int64_t(min(token, tokens - 1)) * hidden + step * kManyDepth, token < tokens);
        }
    };

    float c[2][64] = {};
    const auto multiply = [&](int step) {
        const unsigned char* stage = stages + step % kManyStages * kManyStageBytes;
        const unsigned char* own = stage + warp / 4 * 128 * 128;
        publish_shared();
        __syncthreads();  // the stage is complete, and the one before has been read
        begin_group();
#pragma unroll
        for (int s = 0; s < kManyDepth / 16; ++s) {
            multiply_staged(c[0], matrix_of(own + s * 32), matrix_of(stage + kManyTokensAt + s * 32));
            multiply_staged(c[1], matrix_of(own + 64 * 128 + s * 32), matrix_of(stage + kManyTokensAt + s * 32));
        }
        close_group();
    };
    static_assert(kManyStages == 3);
    fetch(0), close_copies();
    fetch(1), close_copies();
    int step = 0;
    for (; step + 2 < steps; ++step) {
        await_copies<1>(), multiply(step);
        fetch(step + 2), close_copies();
        await_groups<0>();
    }
    await_copies<1>(), multiply(step), await_groups<0>();
    await_copies<0>(), multiply(step + 1), await_groups<0>();  // nothing between the instructions and the wait for their sums
    settle(c[0]), settle(c[1]);
    __syncthreads();

    float* logits = reinterpret_cast<float*>(stages);  // [token][expert]
    const int expert = warp * 16 + warp / 4 * 64 + lane / 4, quad = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) logits[(n * 8 + quad * 2 + i % 2) * kManyStride + m * 64 + expert + i / 2 * 8] = c[m][n * 4 + i];
    __syncwarp();
    publish_to_cluster();
    await_cluster();
    for (int t = rank + warp * kManyBlocks; t < tokens; t += kManyThreads / kWarp * kManyBlocks) {
        const auto score = [&](int e) {
            const uint32_t mine = shared_address(logits + t * kManyStride + e);
            float parts[kManyBlocks], logit = 0.0f;
#pragma unroll
            for (int block = 0; block < kManyBlocks; ++block) parts[block] = load_one_from(address_in(mine, block));
#pragma unroll
            for (int block = 0; block < kManyBlocks; ++block) logit += parts[block];
            return score_of(logit);
        };
        choose<kManyExperts / kWarp>(a, first_token + t, bias_of(a, first_token + t), score, lane);
    }
    __syncwarp();
    arrive_at_cluster();  // nobody leaves while the others read its memory
    await_cluster();
}

// Has this device the instruction, and the call dimensions that suit its tiles?
inline bool fits_many(const cedar_mega_gate_args& a) {
    if (!kWideBuilt || a.experts > kManyExperts || a.hidden % (kManyBlocks * kManyDepth) != 0 || a.hidden < 2 * kManyBlocks * kManyDepth) return false;
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           major == 9;
}

inline cudaError_t run_many(const cedar_mega_gate_args& a, void* stream) {
    const dim3 grid(unsigned((a.rows + kManyTokens - 1) / kManyTokens * kManyBlocks));
    return launch(route_many, grid, kManyThreads, kManyShared, kManyBlocks, stream, a);
}

}  // namespace cedar::cuda
