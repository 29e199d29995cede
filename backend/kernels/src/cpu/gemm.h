// SPDX-License-Identifier: Apache-2.0
// y[r, n] = x_r . w_n for few rows and long vectors, both row-major. Every product is the same sequence of operations, 16 partial
// sums over k that are added at the end, whatever block it is computed in: a row's bits do not depend on the others.
#pragma once

#include "parallel.h"
#include "values.h"

namespace cedar::CEDAR_ISA {

#if defined(__AVX512F__)
constexpr int kRowBlock = 4, kColumnBlock = 4;
#else
constexpr int kRowBlock = 2, kColumnBlock = 4;
#endif

// Products of R rows with C vectors of the weight, C a multiple of 4 or 1.
template <int R, int C, class W>
inline void dot_block(const float* const* x, const W* w, int64_t stride, int64_t k, float (*out)[kColumnBlock]) {
    V total[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) total[r][c] = zero();
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
        V rows[R];
        for (int r = 0; r < R; ++r) rows[r] = load(x[r] + i);
        for (int c = 0; c < C; ++c) {
            const V weight = load(w + c * stride + i);
            for (int r = 0; r < R; ++r) total[r][c] = fma(rows[r], weight, total[r][c]);
        }
    }
    if (i < k) {
        const int left = int(k - i);
        for (int c = 0; c < C; ++c) {
            const V weight = load_first(w + c * stride + i, left);
            for (int r = 0; r < R; ++r) total[r][c] = fma(load_first(x[r] + i, left), weight, total[r][c]);
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

template <int R, class W, class Put>
inline void dot_rows(const float* const* x, const W* w, int64_t stride, int64_t k, int64_t columns, int64_t row, Put&& put) {
    float out[R][kColumnBlock];
    int64_t n = 0;
    for (; n + kColumnBlock <= columns; n += kColumnBlock) {
        dot_block<R, kColumnBlock>(x, w + n * stride, stride, k, out);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kColumnBlock; ++c) put(row + r, n + c, out[r][c]);
    }
    for (; n < columns; ++n) {
        dot_block<R, 1>(x, w + n * stride, stride, k, out);
        for (int r = 0; r < R; ++r) put(row + r, n, out[r][0]);
    }
}

// put(r, n, x_r . w_n) for r in [0, rows), n in [0, columns). row(r) is a pointer to k floats.
template <class W, class Row, class Put>
inline void gemm(int64_t rows, int64_t columns, int64_t k, Row&& row, const W* w, int64_t stride, Put&& put) {
    int64_t r = 0;
    for (; r + kRowBlock <= rows; r += kRowBlock) {
        const float* x[kRowBlock];
        for (int i = 0; i < kRowBlock; ++i) x[i] = row(r + i);
        dot_rows<kRowBlock>(x, w, stride, k, columns, r, put);
    }
    for (; r < rows; ++r) {
        const float* x[1] = {row(r)};
        dot_rows<1>(x, w, stride, k, columns, r, put);
    }
}

constexpr int64_t kTileRows = 32, kTileColumns = 32;  // a tile of the weight stays in the first-level cache between row blocks

inline int64_t tiles_of(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }

// `gemm` in parallel tiles, with the weight in either type.
template <class Row, class Put>
inline void parallel_gemm(int64_t threads, int64_t rows, int64_t columns, int64_t k, Row&& row, const void* weight, int64_t type,
                          Put&& put) {
    const int64_t across = tiles_of(columns, kTileColumns), down = tiles_of(rows, kTileRows);
    parallel(across * down, threads, rows * columns * k, [&](int64_t task, int64_t) {
        const int64_t c = task / down * kTileColumns, r = task % down * kTileRows;
        const int64_t height = smaller(kTileRows, rows - r), width = smaller(kTileColumns, columns - c);
        const auto at = [&](int64_t i) { return row(r + i); };
        const auto out = [&](int64_t i, int64_t n, float value) { put(r + i, c + n, value); };
        if (type == CEDAR_F32)
            gemm(height, width, k, at, static_cast<const float*>(weight) + c * k, k, out);
        else
            gemm(height, width, k, at, static_cast<const uint16_t*>(weight) + c * k, k, out);
    });
}

}  // namespace cedar::CEDAR_ISA
