// SPDX-License-Identifier: Apache-2.0
// Products of very many tokens on Hopper: a block has 256 rows of the weight and 128 tokens, each of its two warp groups 128 of
// the rows. Weights of E4M3 are widened in registers, from where the matrix instruction takes them; bf16 weights it reads from
// shared memory. k is walked in rising order.
#pragma once

#include <type_traits>

#include "skinny.cuh"
#include "wgmma.cuh"

namespace cedar::cuda {

constexpr int kWideRows = 256, kWideTokens = 128, kWideThreads = 256, kWideDepth = 64;

// Where a block's rows lie in shared memory: E4M3 64 bytes of k each and 16 of padding, which keep lanes in different banks.
template <class Weight>
struct WideStage {
    static constexpr bool kFp8 = Weight::kSteps == 4;
    static constexpr int kStride = kFp8 ? 80 : 128, kRowBytes = kFp8 ? 64 : 128;
    static constexpr int kTokenBytes = kWideTokens * 128, kBytes = kTokenBytes + kWideRows * kStride;
    static constexpr int kCount = kFp8 ? 5 : 4;
    static_assert(kBytes % 1024 == 0);
};

template <class Weight>
constexpr size_t wide_shared_bytes() {
    return size_t(WideStage<Weight>::kCount) * WideStage<Weight>::kBytes + 1024;  // to begin at a multiple of 1024
}

// c[m]: rows 128 group + 64 m + ... of the block times its tokens. codes_of(row), token_of(t): where their k begins, for any row
// below 256 and token below 128. scales: of the row 128 group + 64 m + 16 (warp % 4) in the first 32 values of k; E4M3 only.
template <class Weight, class CodesOf, class TokenOf>
__device__ inline void wide_product(const CodesOf& codes_of, const TokenOf& token_of, const uint8_t* const (&scales)[2], int depth,
                                    unsigned char* memory, float (&c)[2][64]) {
    using Stage = WideStage<Weight>;
    constexpr int kStages = Stage::kCount;
    constexpr int kRowChunks = Stage::kRowBytes / 16, kCodes = kWideRows * kRowChunks / kWideThreads, kTokens = kWideTokens * 8 / kWideThreads;
    const int thread = threadIdx.x, lane = thread % kWarp, quad = lane % 4, group = thread / 128;
    const int row = group * 128 + thread / kWarp % 4 * 16 + lane / 4;
    // a thread copies the same chunk of rows that are kWideThreads / chunks apart
    const uint8_t* codes[kCodes];
    const uint8_t* tokens[kTokens];
#pragma unroll
    for (int i = 0; i < kCodes; ++i) codes[i] = codes_of((thread + i * kWideThreads) / kRowChunks) + thread % kRowChunks * 16;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) tokens[i] = token_of((thread + i * kWideThreads) / 8) + thread % 8 * 16;
    const auto fetch = [&](int block) {
        if (block < depth) {
            unsigned char* stage = memory + block % kStages * Stage::kBytes;
#pragma unroll
            for (int i = 0; i < kTokens; ++i) {
                const int t = (thread + i * kWideThreads) / 8;
                copy_16(stage + t * 128 + (thread % 8 ^ t % 8) * 16, tokens[i] + int64_t(block) * 128);
            }
#pragma unroll
            for (int i = 0; i < kCodes; ++i) {
                const int r = (thread + i * kWideThreads) / kRowChunks, chunk = thread % kRowChunks;
                copy_16(stage + Stage::kTokenBytes + r * Stage::kStride + (Stage::kFp8 ? chunk : chunk ^ r % 8) * 16,
                        codes[i] + int64_t(block) * Stage::kRowBytes);
            }
        }
        close_copies();
    };
    for (int block = 0; block < kStages - 2; ++block) fetch(block);

    uint32_t ahead[2][2] = {};
    const auto load_scales = [&](int block) {
        if constexpr (Stage::kFp8) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) ahead[m][half] = __ldg(scales[m] + block * 2 + half);
        }
    };
    load_scales(0);
    uint32_t a[2][2][4] = {};  // by turns, so that one step's rows are widened while the last one's are multiplied
    const auto multiply_block = [&](int block, auto last) __attribute__((always_inline)) {
        await_copies<kStages - 3>();
        publish_shared();
        // the stage is complete; and the instructions that read the one before the last have ended, for all warps
        __syncthreads();
        fetch(block + kStages - 2);
        const unsigned char* stage = memory + block % kStages * Stage::kBytes;
        uint32_t scale[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) scale[m][half] = lifted_scale(ahead[m][half]);
        load_scales(block + 1 < depth ? block + 1 : block);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint64_t b = matrix_of(stage + step * 32);
            if constexpr (Stage::kFp8) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const unsigned char* at = stage + Stage::kTokenBytes + (row + m * 64) * Stage::kStride + step * 16 + quad * 2;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {  // rows +0, +8, then the same 8 values of k on
                        const uint32_t two = *reinterpret_cast<const uint16_t*>(at + i % 2 * 8 * Stage::kStride + i / 2 * 8);
                        a[step % 2][m][i] = widen_e4m3<0>(two, scale[m][step / 2]);
                    }
                }
            }
            begin_group();
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                if constexpr (Stage::kFp8)
                    multiply_group(c[m], a[step % 2][m], b);
                else
                    multiply_group(c[m], matrix_of(stage + Stage::kTokenBytes + (group * 128 + m * 64) * 128 + step * 32), b);
            }
            close_group();
            if (decltype(last)::value && step == 3) {
                await_groups<0>();
            } else {
                await_groups<1>();  // the step before has ended: its registers are free, and so is a stage whose last step it was
                if constexpr (Stage::kFp8) settle(a[(step + 1) % 2][0]), settle(a[(step + 1) % 2][1]);
            }
        }
    };
    for (int block = 0; block < depth - 1; ++block) multiply_block(block, std::false_type());
    // The last wait stands right behind the instructions it is for: ptxas moves what reads c ahead of a wait that is in another
    // block of code than they are, as it is behind the loop.
    multiply_block(depth - 1, std::true_type());
    settle(c[0]), settle(c[1]);
}

}  // namespace cedar::cuda
