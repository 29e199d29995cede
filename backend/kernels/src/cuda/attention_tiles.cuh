// SPDX-License-Identifier: Apache-2.0
// Matrix products of a warpgroup (128 threads) on tiles in shared memory: wgmma on Hopper, mma.sync elsewhere, with the same
// tiles and the same registers.
//
// A tile is 64 rows of dimensions in chunks of 64: 8192 bytes a chunk, 128 a row, whose 16-byte units are exchanged, unit u of
// row r lying at u ^ r % 8. Tiles start at multiples of 1024 bytes. Of a result, lane 4 g + q of warp w of the group has of rows
// 16 w + g and 16 w + g + 8, in the last index's halves, columns 8 j + 2 q and 8 j + 2 q + 1.
#pragma once

#include "ptx.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(CEDAR_WITHOUT_WGMMA)
#define CEDAR_WGMMA 1
#endif

namespace cedar::cuda {

constexpr int kTileRows = 64, kChunkDims = 64, kChunkBytes = kTileRows * kChunkDims * 2, kRowBytes = kChunkDims * 2;
constexpr int kTileSteps = kTileRows / 16;

// Where unit `unit` of a row lies in its chunk.
__device__ inline uint32_t unit_at(int row, int unit) { return uint32_t(row * kRowBytes + ((unit ^ (row & 7)) << 4)); }

#ifdef CEDAR_WGMMA

// Of a matrix with exchanged units that starts `offset` bytes behind an address: address, bytes between chunks (where columns are
// the inner dimension), bytes between 8 rows. Offsets are added to the finished word, so that one of them serves a whole tile.
struct Descriptor {
    __device__ explicit Descriptor(uint32_t address) : low((kChunkBytes >> 4) << 16 | (address & 0x3ffff) >> 4) {}
    __device__ uint64_t at(int offset) const {
        constexpr uint32_t kHigh = uint32_t(1) << 30 | 8 * kRowBytes >> 4;  // 128 bytes exchanged
        uint64_t both;
        asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low + (offset >> 4)), "n"(kHigh));
        return both;
    }
    uint32_t low;
};

__device__ inline void multiply_64(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31 "
        "}, %32, %33, p, 1, 1, 0, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
        : "l"(a), "l"(b), "r"(int(add)));
}

__device__ inline void accumulate(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31 "
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void accumulate(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 "
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
          "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
          "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
          "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
          "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Products may use registers and tiles from here on.
__device__ inline void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving uses of results across this place.
template <int N>
__device__ inline void settle(float (&c)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) asm volatile("" : "+f"(c[i][k])::"memory");
}

// Until at most the last `Left` closed groups run.
template <int Left = 0>
__device__ inline void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory"); }

// c = A B^T over steps of 16 dimensions of both tiles, rows of a by rows of b; where From is not the first of them, c += A B^T.
template <int From, int To>
__device__ inline void multiply_tiles(float (&c)[8][4], uint32_t a, uint32_t b) {
    constexpr int kSteps = kChunkDims / 16;
    const Descriptor rows(a), columns(b);
#pragma unroll
    for (int step = From; step < To; ++step) {
        const int offset = step / kSteps * kChunkBytes + step % kSteps * 32;
        multiply_64(c, rows.at(offset), columns.at(offset), step > 0);
    }
}

// c += P V: p's 16-row steps of a tile's rows, by the dimensions of N / 8 chunks from v on.
template <int N>
__device__ inline void mix_tile(float (&c)[N][4], const uint32_t (&p)[kTileSteps][4], uint32_t v) {
    constexpr int kAtOnce = N < 16 ? N : 16;  // blocks of 8 columns
    const Descriptor columns(v);
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step)
#pragma unroll
        for (int j = 0; j < N; j += kAtOnce)
            accumulate(reinterpret_cast<float(&)[kAtOnce][4]>(c[j]), p[step], columns.at(step * 16 * kRowBytes + j / 8 * kChunkBytes));
}

#else

__device__ inline void open_products() {}
__device__ inline void close_products() {}
template <int N>
__device__ inline void settle(float (&)[N][4]) {}
template <int Left = 0>
__device__ inline void await_products() {}

template <bool Transposed>
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address) {
    if constexpr (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

template <int From, int To>
__device__ inline void multiply_tiles(float (&c)[8][4], uint32_t a, uint32_t b) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4;
    if constexpr (From == 0) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) c[j][i] = 0.0f;
    }
    for (int step = From; step < To; ++step) {
        const uint32_t chunk = step / 4 * kChunkBytes;
        uint32_t rows[4];
        load_matrices<false>(rows, a + chunk + unit_at(warp * 16 + lane % 16, step % 4 * 2 + lane / 16));
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t columns[4];
            load_matrices<false>(columns, b + chunk + unit_at(j * 8 + lane / 16 * 8 + lane % 8, step % 4 * 2 + lane / 8 % 2));
            multiply_bf16(c[j], rows[0], rows[1], rows[2], rows[3], columns[0], columns[1]);
            multiply_bf16(c[j + 1], rows[0], rows[1], rows[2], rows[3], columns[2], columns[3]);
        }
    }
}

template <int N>
__device__ inline void mix_tile(float (&c)[N][4], const uint32_t (&p)[kTileSteps][4], uint32_t v) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step)
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            uint32_t columns[4];
            load_matrices<true>(columns, v + j / 8 * kChunkBytes + unit_at(step * 16 + lane % 16, j % 8 + lane / 16));
            multiply_bf16(c[j], p[step][0], p[step][1], p[step][2], p[step][3], columns[0], columns[1]);
            multiply_bf16(c[j + 1], p[step][0], p[step][1], p[step][2], p[step][3], columns[2], columns[3]);
        }
}

#endif

}  // namespace cedar::cuda
