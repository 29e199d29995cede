// SPDX-License-Identifier: Apache-2.0
// y[r, n] = x_r . w_n for few rows and long vectors, both row-major. Every product is the same sequence of operations, 16 partial
// sums over k that are added at the end, whatever block it is computed in: a row's bits do not depend on the others.
#pragma once

#include "parallel.h"
#include "records.h"

namespace cedar::CEDAR_ISA {

#if defined(__AVX512F__)
constexpr int kRowBlock = 4, kColumnBlock = 4;
#else
constexpr int kRowBlock = 2, kColumnBlock = 4;
#endif

// A row-major weight of floats or bf16.
template <class T>
struct DenseWeight {
    const T* values;
    int64_t stride;
    V load(int64_t n, int64_t k) const { return CEDAR_ISA::load(values + n * stride + k); }
    V load_first(int64_t n, int64_t k, int count) const { return CEDAR_ISA::load_first(values + n * stride + k, count); }
};

// E4M3 codes with a UE8M0 scale per tile of 32 x 32. Their products are those of the dequantised weight, to the bit.
struct Fp8Weight {
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t stride, scale_stride;
    V load(int64_t n, int64_t k) const { return mul(load_e4m3(codes + n * stride + k), broadcast(scale(n, k))); }
    V load_first(int64_t n, int64_t k, int count) const {
        uint8_t some[kLanes] = {};
        std::memcpy(some, codes + n * stride + k, count);
        return mul(load_e4m3(some), broadcast(scale(n, k)));
    }
    float scale(int64_t n, int64_t k) const { return decode_e8m0(scales[n / kMxGroup * scale_stride + k / kMxGroup]); }
};

// Products of R rows with C rows of the weight from n on, C a multiple of 4 or 1.
template <int R, int C, class Weight>
inline void dot_block(const float* const* x, const Weight& weight, int64_t n, int64_t k, float (*out)[kColumnBlock]) {
    V total[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) total[r][c] = zero();
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
        V rows[R];
        for (int r = 0; r < R; ++r) rows[r] = load(x[r] + i);
        for (int c = 0; c < C; ++c) {
            const V w = weight.load(n + c, i);
            for (int r = 0; r < R; ++r) total[r][c] = fma(rows[r], w, total[r][c]);
        }
    }
    if (i < k) {
        const int left = int(k - i);
        for (int c = 0; c < C; ++c) {
            const V w = weight.load_first(n + c, i, left);
            for (int r = 0; r < R; ++r) total[r][c] = fma(load_first(x[r] + i, left), w, total[r][c]);
        }
    }
    for (int r = 0; r < R; ++r) {
        if constexpr (C == 4) {
            sum4(total[r], out[r]);
        } else {
            for (int c = 0; c < C; ++c) out[r][c] = sum(total[r][c]);
        }
    }
}

template <int R, class Weight, class Put>
inline void dot_rows(const float* const* x, const Weight& weight, int64_t first, int64_t k, int64_t columns, int64_t row, Put&& put) {
    float out[R][kColumnBlock];
    int64_t n = 0;
    for (; n + kColumnBlock <= columns; n += kColumnBlock) {
        dot_block<R, kColumnBlock>(x, weight, first + n, k, out);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kColumnBlock; ++c) put(row + r, n + c, out[r][c]);
    }
    for (; n < columns; ++n) {
        dot_block<R, 1>(x, weight, first + n, k, out);
        for (int r = 0; r < R; ++r) put(row + r, n, out[r][0]);
    }
}

// put(r, n, x_r . w_(first + n)) for r in [0, rows), n in [0, columns). row(r) is a pointer to k floats.
template <class Weight, class Row, class Put>
inline void gemm(int64_t rows, int64_t columns, int64_t k, Row&& row, const Weight& weight, int64_t first, Put&& put) {
    int64_t r = 0;
    for (; r + kRowBlock <= rows; r += kRowBlock) {
        const float* x[kRowBlock];
        for (int i = 0; i < kRowBlock; ++i) x[i] = row(r + i);
        dot_rows<kRowBlock>(x, weight, first, k, columns, r, put);
    }
    for (; r < rows; ++r) {
        const float* x[1] = {row(r)};
        dot_rows<1>(x, weight, first, k, columns, r, put);
    }
}

constexpr int64_t kTileRows = 32, kTileColumns = 32;  // a tile of the weight stays in the first-level cache between row blocks

inline int64_t tiles_of(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }

// `gemm` in parallel tiles of rows [first, first + columns) of the weight.
template <class Weight, class Row, class Put>
inline void parallel_gemm(int64_t threads, int64_t rows, int64_t columns, int64_t k, Row&& row, const Weight& weight, int64_t first,
                          Put&& put) {
    const int64_t across = tiles_of(columns, kTileColumns), down = tiles_of(rows, kTileRows);
    parallel(across * down, threads, rows * columns * k, [&](int64_t task, int64_t) {
        const int64_t c = task / down * kTileColumns, r = task % down * kTileRows;
        const int64_t height = smaller(kTileRows, rows - r), width = smaller(kTileColumns, columns - c);
        gemm(height, width, k, [&](int64_t i) { return row(r + i); }, weight, first + c,
             [&](int64_t i, int64_t n, float value) { put(r + i, c + n, value); });
    });
}

// use(weight) with the weight of this type, k wide.
template <class Use>
inline void with_weight(int64_t type, const void* values, const uint8_t* scales, int64_t k, Use&& use) {
    if (type == CEDAR_F32)
        use(DenseWeight<float>{static_cast<const float*>(values), k});
    else if (type == CEDAR_BF16)
        use(DenseWeight<uint16_t>{static_cast<const uint16_t*>(values), k});
    else
        use(Fp8Weight{static_cast<const uint8_t*>(values), scales, k, tiles_of(k, kMxGroup)});
}

}  // namespace cedar::CEDAR_ISA
