// SPDX-License-Identifier: Apache-2.0
// How few rows are cut over the blocks of a cluster, and products of the query with the keys of one of them.
#pragma once

#include "attention_block.cuh"

namespace cedar::cuda::attention {

constexpr int kFewDim = 512, kFewParts = 2, kSlices = 4, kFewBlocks = kFewParts * kSlices, kFewTiles = 5;  // kFewTiles: a part's, at most
constexpr int kKeyChunk = kFewTiles * 16 * kRowBytes;           // bytes of a chunk of those
constexpr int kValueBytes = kFewDim / kSlices / kChunkDims * kChunkBytes;
constexpr int kColumnsFew = kFewDim / kSlices / kReaders / 8;   // blocks of 8 columns, of a warpgroup
constexpr int kBlockBarrier = kWriterBarrier + 1;
constexpr int kFewRegisters = 160;                              // of the groups that multiply
static_assert(kTileRows == kSlices * 16 && kFewDim / kSlices == kReaders * kChunkDims);

#ifdef CEDAR_WGMMA

__device__ inline void multiply_columns(float (&c)[2][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0;"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7 "
        "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

__device__ inline void multiply_columns(float (&c)[10][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %45, 0;"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39 "
        "}, {%40, %41, %42, %43}, %44, p, 1, 1, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
          "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

// c = A B^T over 16 dimensions at a time of the query's rows and of the block's keys.
template <int Steps, int N>
__device__ inline void multiply_few(float (&c)[N][4], const uint32_t (&a)[Steps][4], uint32_t b) {
    const Descriptor columns(b);
#pragma unroll
    for (int step = 0; step < Steps; ++step) multiply_columns(c, a[step], columns.at(step / 4 * kKeyChunk + step % 4 * 32), step > 0);
}

#else

template <int Steps, int N>
__device__ inline void multiply_few(float (&c)[N][4], const uint32_t (&a)[Steps][4], uint32_t b) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[j][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < Steps; ++step)
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            uint32_t columns[4];
            load_matrices<false>(columns,
                                 b + step / 4 * kKeyChunk + unit_at(j * 8 + lane / 16 * 8 + lane % 8, step % 4 * 2 + lane / 8 % 2));
            multiply_bf16(c[j], a[step][0], a[step][1], a[step][2], a[step][3], columns[0], columns[1]);
            multiply_bf16(c[j + 1], a[step][0], a[step][1], a[step][2], a[step][3], columns[2], columns[3]);
        }
}

#endif

}  // namespace cedar::cuda::attention
