// SPDX-License-Identifier: Apache-2.0
// mega_mhc of float32 streams in one launch. A block takes a few rows, which share what it reads of fn; each warp has some of fn's
// outputs for all of them.
#include "bodies.h"
#include "plain.cuh"

namespace cedar::cuda::plain {
namespace {

constexpr int kStreams = 4, kCells = kStreams * kStreams, kOutputs = 2 * kStreams + kCells;
constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kRows = 4, kRowWarps = kWarps / kRows;  // rows of a block, warps that write one
constexpr int kWarpOutputs = kOutputs / kWarps;

// One row's part of the sums of squares, of the new streams and of what they collapse to.
struct Squares {
    float streams, collapsed;
};

struct Sums {
    float products[kRows][kOutputs];
    Squares squares[kRows][kRowWarps];
};

__device__ float4 collapse(const float4 (&streams)[kStreams], const float* pre) {
    float4 y = scaled(pre[0], streams[0]);
#pragma unroll
    for (int i = 1; i < kStreams; ++i) y = fused(pre[i], streams[i], y);
    return y;
}

__device__ void load_streams(const float* from, int64_t hidden, int64_t column, float4 (&streams)[kStreams]) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) streams[i] = load_four(from + i * hidden + column);
}

// This warp's columns of a row: the new streams, and the squares of what is asked for.
__device__ Squares cross_row(const cedar_mega_mhc_args& a, int64_t row, int part, int lane) {
    const int64_t width = kStreams * a.hidden;
    const float* from = static_cast<const float*>(a.streams) + row * width;
    float post[kStreams] = {}, comb[kCells] = {}, pre[kStreams] = {};
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
        if (a.output != nullptr) post[i] = a.post[row * kStreams + i];
        if (a.norm_weight != nullptr) pre[i] = a.pre[row * kStreams + i];
    }
#pragma unroll
    for (int i = 0; i < kCells; ++i)
        if (a.output != nullptr) comb[i] = a.comb[row * kCells + i];
    Squares squares = {};
    for (int64_t column = 4 * (part * kWarp + lane); column < a.hidden; column += 4 * kRowWarps * kWarp) {
        float4 streams[kStreams];
        load_streams(from, a.hidden, column, streams);
        if (a.output != nullptr) {
            const float4 output = load_four(static_cast<const float*>(a.output) + row * a.hidden + column);
            float4 expanded[kStreams];
#pragma unroll
            for (int j = 0; j < kStreams; ++j) {
                expanded[j] = scaled(post[j], output);
#pragma unroll
                for (int i = 0; i < kStreams; ++i) expanded[j] = fused(comb[i * kStreams + j], streams[i], expanded[j]);
                store_four(static_cast<float*>(a.new_streams) + row * width + j * a.hidden + column, expanded[j]);
            }
#pragma unroll
            for (int j = 0; j < kStreams; ++j) streams[j] = expanded[j];
        }
#pragma unroll
        for (int i = 0; i < kStreams; ++i) squares.streams = dot(streams[i], streams[i], squares.streams);
        const float4 y = collapse(streams, pre);
        squares.collapsed = dot(y, y, squares.collapsed);
    }
    return {sum_lanes(squares.streams), sum_lanes(squares.collapsed)};
}

// Products of the rows with this warp's rows of fn. streams: of the block's first row; rows beyond the last repeat it.
__device__ void multiply(const cedar_mega_mhc_args& a, const float* streams, int rows, int warp, int lane, Sums& sums) {
    const int64_t width = kStreams * a.hidden;
    const float* fn = a.fn + warp * kWarpOutputs * width;
    float products[kRows][kWarpOutputs] = {};
    for (int64_t k = 4 * lane; k < width; k += 4 * kWarp) {
        float4 weights[kWarpOutputs];
#pragma unroll
        for (int n = 0; n < kWarpOutputs; ++n) weights[n] = load_four(fn + n * width + k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float4 x = load_four(streams + min(r, rows - 1) * width + k);
#pragma unroll
            for (int n = 0; n < kWarpOutputs; ++n) products[r][n] = dot(x, weights[n], products[r][n]);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int n = 0; n < kWarpOutputs; ++n) {
            const float sum = sum_lanes(products[r][n]);
            if (lane == 0) sums.products[r][warp * kWarpOutputs + n] = sum;
        }
}

// The gates of a row by half a warp: lane 4 i + j has cell (i, j) of comb. Row softmax + eps, then columns and rows divided in turn
// by their sum + eps, columns first and last.
__device__ void write_gates(const cedar_mega_mhc_args& a, int64_t row, bool is_row, const float* products, float square, int lane) {
    const float factor = 1.0f / sqrtf(square / float(kStreams * a.hidden) + float(a.mix_eps)), eps = float(a.hc_eps);
    const auto raw = [&](int n) { return fmaf(products[n] * factor, a.scale[n], a.base[n]); };
    if (is_row && lane < kStreams) a.new_pre[row * kStreams + lane] = sigmoid(raw(lane)) + eps;
    if (is_row && lane >= kStreams && lane < 2 * kStreams) a.new_post[row * kStreams + lane - kStreams] = sigmoid(raw(lane)) * 2.0f;
    const auto add = [](float x, int step) { return x + __shfl_xor_sync(kAllLanes, x, step); };
    const float logit = raw(2 * kStreams + lane);
    float cell = expf(logit - max_lanes(logit, kStreams));
    cell = cell / sum_lanes(cell, kStreams) + eps;
    for (int64_t n = 0; n < a.iterations; ++n) {
        if (n > 0) cell *= 1.0f / (sum_lanes(cell, kStreams) + eps);
        cell *= 1.0f / (add(add(cell, kStreams), 2 * kStreams) + eps);
    }
    if (is_row) a.new_comb[row * kCells + lane] = cell;
}

__global__ void __launch_bounds__(kThreads) cross(const cedar_mega_mhc_args a) {
    __shared__ Sums sums;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, mine = warp / kRowWarps, part = warp % kRowWarps;
    const int64_t first = int64_t(blockIdx.x) * kRows, width = kStreams * a.hidden;
    const int rows = int(a.rows - first < kRows ? a.rows - first : kRows);
    if (mine < rows) {
        const Squares squares = cross_row(a, first + mine, part, lane);
        if (lane == 0) sums.squares[mine][part] = squares;
    }
    __syncthreads();
    const float* streams = static_cast<const float*>(a.output != nullptr ? a.new_streams : a.streams) + first * width;
    const auto total = [&](int row, float Squares::* which) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kRowWarps; ++i) sum += sums.squares[row][i].*which;
        return sum;
    };
    if (a.norm_weight != nullptr && mine < rows) {
        const float factor = 1.0f / sqrtf(total(mine, &Squares::collapsed) / float(a.hidden) + float(a.norm_eps));
        const float* pre = a.pre + (first + mine) * kStreams;
        const float coefficients[kStreams] = {pre[0], pre[1], pre[2], pre[3]};
        for (int64_t column = 4 * (part * kWarp + lane); column < a.hidden; column += 4 * kRowWarps * kWarp) {
            float4 s[kStreams];
            load_streams(streams + mine * width, a.hidden, column, s);
            const float4 y = scaled(factor, collapse(s, coefficients)), w = load_four(a.norm_weight + column);
            float* to = static_cast<float*>(a.normed) + (first + mine) * a.hidden + column;
            store_four(to, make_float4(y.x * w.x, y.y * w.y, y.z * w.z, y.w * w.w));
        }
    }
    if (a.fn == nullptr) return;
    multiply(a, streams, rows, warp, lane, sums);
    __syncthreads();
    if (warp < kRows * kCells / kWarp) {
        const int r = threadIdx.x / kCells, row = min(r, rows - 1);
        write_gates(a, first + row, r < rows, sums.products[row], total(row, &Squares::streams), threadIdx.x % kCells);
    }
}

}  // namespace

int64_t mega_mhc_workspace(const cedar_mega_mhc_args&) { return 0; }

int mega_mhc(const cedar_mega_mhc_args& a, void* stream) {
    if (a.hc != kStreams || a.hidden % 4 != 0)
        return fail(CEDAR_UNSUPPORTED, "mega_mhc: float32 on a GPU with hc 4 and hidden a multiple of 4; got hc %lld, hidden %lld",
                    (long long)a.hc, (long long)a.hidden);
    return finish("mega_mhc", launch(cross, dim3(unsigned((a.rows + kRows - 1) / kRows)), kThreads, 0, 1, false, stream, a));
}

}  // namespace cedar::cuda::plain
