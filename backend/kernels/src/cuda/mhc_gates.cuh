// SPDX-License-Identifier: Apache-2.0
// From a token's products with fn to its coefficients. Four lanes have a token: lane i adds up pre and post i and column i of
// comb; then each has the whole matrix in registers, so that the rounds exchange nothing.
#pragma once

#include "common.cuh"

namespace cedar::cuda {

constexpr int kStreams = 4, kCells = kStreams * kStreams, kOutputs = 2 * kStreams + kCells;

// 1 / x, wrong by a bit at most; of infinity 0.
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Row softmax + eps, then columns and rows divided in turn by their sum + eps, columns first and last. What rows and columns have
// been divided by so far is kept apart from the matrix: with r = 1 / d the factor of a row, r / (r sum + eps) = 1 / (sum + eps d).
// So a factor waits for three sums and a reciprocal.
__device__ inline void sinkhorn(float (&c)[kStreams][kStreams], float eps, int iterations) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
        const float most = fmaxf(fmaxf(c[i][0], c[i][1]), fmaxf(c[i][2], c[i][3]));
#pragma unroll
        for (int j = 0; j < kStreams; ++j) c[i][j] = expf(c[i][j] - most);
        const float factor = reciprocal((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]));
#pragma unroll
        for (int j = 0; j < kStreams; ++j) c[i][j] = fmaf(c[i][j], factor, eps);
    }
    float rows[kStreams] = {1.0f, 1.0f, 1.0f, 1.0f}, columns[kStreams];
    float row_divisors[kStreams] = {1.0f, 1.0f, 1.0f, 1.0f}, column_divisors[kStreams] = {1.0f, 1.0f, 1.0f, 1.0f};
    const auto divide_columns = [&] {
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
            const float sum = fmaf(rows[1], c[1][j], fmaf(rows[0], c[0][j], eps * column_divisors[j]));
            column_divisors[j] = sum + fmaf(rows[3], c[3][j], rows[2] * c[2][j]);
            columns[j] = reciprocal(column_divisors[j]);
        }
    };
    divide_columns();
#pragma unroll 1
    for (int n = 1; n < iterations; ++n) {
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
            const float sum = fmaf(columns[1], c[i][1], fmaf(columns[0], c[i][0], eps * row_divisors[i]));
            row_divisors[i] = sum + fmaf(columns[3], c[i][3], columns[2] * c[i][2]);
            rows[i] = reciprocal(row_divisors[i]);
        }
        divide_columns();
    }
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int j = 0; j < kStreams; ++j) c[i][j] = rows[i] * c[i][j] * columns[j];
}

// What a lane needs of scale and base, for the outputs that it adds up.
struct GateScales {
    float scale[2 + kStreams], base[2 + kStreams];
    __device__ static int output(int n, int i) { return n * kStreams + i; }
    __device__ GateScales(const cedar_mega_mhc_args& a, int i) {
#pragma unroll
        for (int n = 0; n < 2 + kStreams; ++n) {
            scale[n] = a.scale[output(n, i)];
            base[n] = a.base[output(n, i)];
        }
    }
};

// sums[n]: of output 4 n + i; square: of all the token's values; lane i of its four. All lanes of the warp call.
__device__ inline void write_gates(const cedar_mega_mhc_args& a, int64_t row, bool live, const GateScales& scales,
                                   const float (&sums)[2 + kStreams], float square, int i) {
    const float factor = rsqrtf(square / float(kStreams * a.hidden) + float(a.mix_eps));
    float raw[2 + kStreams];
#pragma unroll
    for (int n = 0; n < 2 + kStreams; ++n) raw[n] = fmaf(sums[n] * factor, scales.scale[n], scales.base[n]);
    if (live) {
        a.new_pre[row * kStreams + i] = reciprocal(1.0f + expf(-raw[0])) + float(a.hc_eps);
        a.new_post[row * kStreams + i] = reciprocal(1.0f + expf(-raw[1])) * 2.0f;
    }
    float c[kStreams][kStreams];
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
#pragma unroll
        for (int j = 0; j < kStreams; ++j) c[s][j] = __shfl_sync(kAllLanes, raw[2 + s], j, kStreams);
    sinkhorn(c, float(a.hc_eps), int(a.iterations));
    float mine[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) mine[j] = i == 0 ? c[0][j] : i == 1 ? c[1][j] : i == 2 ? c[2][j] : c[3][j];
    if (live) store_pack(a.new_comb + row * kCells + i * kStreams, mine);
}

}  // namespace cedar::cuda
