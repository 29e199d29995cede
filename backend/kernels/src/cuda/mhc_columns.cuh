// SPDX-License-Identifier: Apache-2.0
// A warp's part of mega_mhc: 32 columns of 8 tokens. The new streams go from a lane's registers to memory and, as they are, into
// the matrix instruction (m16n8k16; rows: fn's outputs, columns: tokens). fn is the sum of two bf16: of its 24 bits, 16 are
// multiplied.
#pragma once

#include "mhc_cluster.cuh"
#include "mhc_gates.cuh"

#ifndef CEDAR_MHC_PROMOTION
#define CEDAR_MHC_PROMOTION "128B"
#endif

namespace cedar::cuda {

constexpr int kTokens = 8, kUnit = 32;  // columns of a warp
constexpr int kVector = 8;              // bf16 of a lane's access
constexpr int kSquares = kOutputs, kNormSquares = kOutputs + 1, kSums = kOutputs + 2;
constexpr int kFnStream = kOutputs * kUnit * int(sizeof(float)), kFnBytes = kStreams * kFnStream;
constexpr int kPieces = (kStreams + 1) * kWarp * 16, kCoefficients = (2 + kStreams) * kStreams * int(sizeof(float));
constexpr int kStageBytes = kPieces + kTokens * kCoefficients;

__device__ inline float2 unpack(uint32_t pair) { return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)); }

__device__ inline uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// ---- fn ----

// Copies of one stream's 24 rows of the warp's 32 columns, 16-byte chunks of odd rows flipped, so that eight lanes' loads meet
// every bank once. fn: the warp's first value.
__device__ inline void fetch_fn(const float* fn, int hidden, unsigned char* to, int lane) {
    constexpr int kRows = kWarp / 8;  // at once
    const int row = lane / 8, chunk = lane % 8;
    static_assert(kRows % 2 == 0);
    fn += row * kStreams * hidden + chunk * 4;
    to += row * 128 + (chunk ^ row % 2) * 16;
#pragma unroll
    for (int i = 0; i < kOutputs / kRows; ++i) copy_16(to + i * kRows * 128, fn + i * kRows * kStreams * hidden);
}

// In place, from float32 to the matrix instruction's rows: outputs 0-23 rounded to bf16, then what that left of outputs 0-23.
__device__ inline void split_fn(unsigned char* fn, int lane) {
    const int group = lane / 4, quad = lane % 4;
    uint32_t high[3][4], low[3][4];
#pragma unroll
    for (int r = 0; r < 3; ++r) {
        const int n = r * 8 + group;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 x = *reinterpret_cast<const float4*>(fn + n * 128 + ((2 * quad + half) ^ (n & 1)) * 16);
            const uint32_t h0 = pack(x.x, x.y), h1 = pack(x.z, x.w);
            const float2 v0 = unpack(h0), v1 = unpack(h1);
            high[r][2 * half] = h0, high[r][2 * half + 1] = h1;
            low[r][2 * half] = pack(x.x - v0.x, x.y - v0.y), low[r][2 * half + 1] = pack(x.z - v1.x, x.w - v1.y);
        }
    }
    __syncwarp();
    uint4* to = reinterpret_cast<uint4*>(fn) + lane;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        to[(t * 3 + 0) * kWarp] = make_uint4(high[0][2 * t], high[1][2 * t], high[0][2 * t + 1], high[1][2 * t + 1]);
        to[(t * 3 + 1) * kWarp] = make_uint4(high[2][2 * t], low[0][2 * t], high[2][2 * t + 1], low[0][2 * t + 1]);
        to[(t * 3 + 2) * kWarp] = make_uint4(low[1][2 * t], low[2][2 * t], low[1][2 * t + 1], low[2][2 * t + 1]);
    }
}

// A copy of 16 bytes of a line whose other half a neighbouring warp copies.
__device__ inline void copy_stream(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::" CEDAR_MHC_PROMOTION " [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// A copy of 16 bytes that all warps of the block copy.
__device__ inline void copy_coefficients(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// ---- a warp's columns of one tile: lane 4 g + q has columns 8 q .. 8 q + 7 of token g ----

__device__ inline uint32_t& part(uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// kHidden > 0: the width, and no part of the boundary is left out. 0: only the call knows.
template <int kHidden>
struct Columns {
    const cedar_mega_mhc_args& a;
    uint32_t column, lane;  // column: the lane's first
    bool inside;            // the warp has columns
    __device__ uint32_t hidden() const { return kHidden > 0 ? kHidden : uint32_t(a.hidden); }
    __device__ bool expands() const { return kHidden > 0 || a.output != nullptr; }
    __device__ bool mixes() const { return kHidden > 0 || a.fn != nullptr; }
    __device__ bool norms() const { return kHidden > 0 || a.norm_weight != nullptr; }
    __device__ bool has(uint32_t row) const { return row < uint32_t(a.rows) && inside; }
    // The lane's place in a row of a tensor of bf16.
    __device__ unsigned char* place(const void* tensor, uint32_t row, uint32_t width) const {
        unsigned char* first = static_cast<unsigned char*>(const_cast<void*>(tensor)) + column * uint32_t(sizeof(Bf16));
        return first + uint64_t(row) * (width * uint32_t(sizeof(Bf16)));
    }

    // Behind the last row the last once more: what comes of it is nowhere stored.
    __device__ void fetch(uint32_t row, unsigned char* stage) const {
        if (!inside) return;
        row = min(row, uint32_t(a.rows) - 1);
        const uint32_t quad = lane % 4;
        const unsigned char* streams = place(a.streams, row, kStreams * hidden());
#pragma unroll
        for (int i = 0; i < kStreams; ++i) copy_stream(stage + (i * kWarp + lane) * 16, streams + i * hidden() * sizeof(Bf16));
        unsigned char* coefficients = stage + kPieces + lane / 4 * kCoefficients + quad * 16;
        if (quad == 0 ? norms() : quad == 1 && expands()) copy_coefficients(coefficients, (quad == 0 ? a.pre : a.post) + uint64_t(row) * kStreams);
        if (!expands()) return;
        copy_stream(stage + (kStreams * kWarp + lane) * 16, place(a.output, row, hidden()));
        copy_coefficients(coefficients + 32, a.comb + uint64_t(row) * kCells + quad * kStreams);
    }

    // The new streams, stored; `pre` for what follows. The stage may be overwritten when all lanes have come back.
    __device__ void cross(uint32_t row, const unsigned char* stage, uint4 (&streams)[kStreams], float (&pre)[kStreams]) const {
        if (!inside) return;
        const uint4* pieces = reinterpret_cast<const uint4*>(stage) + lane;
        const float* coefficients = reinterpret_cast<const float*>(stage + kPieces + lane / 4 * kCoefficients);
#pragma unroll
        for (int i = 0; i < kStreams; ++i) streams[i] = pieces[i * kWarp];
        if (norms()) load_pack(coefficients, pre);
        if (!expands()) return;
        uint4 output = pieces[kStreams * kWarp];
        float post[kStreams], comb[kStreams][kStreams];
        load_pack(coefficients + kStreams, post);
#pragma unroll
        for (int i = 0; i < kStreams; ++i) load_pack(coefficients + (2 + i) * kStreams, comb[i]);
#pragma unroll
        for (int v = 0; v < kVector / 2; ++v) {
            const float2 x = unpack(part(output, v));
            float2 old[kStreams];
#pragma unroll
            for (int i = 0; i < kStreams; ++i) old[i] = unpack(part(streams[i], v));
#pragma unroll
            for (int j = 0; j < kStreams; ++j) {
                float low = post[j] * x.x, high = post[j] * x.y;
#pragma unroll
                for (int i = 0; i < kStreams; ++i) low = fmaf(comb[i][j], old[i].x, low), high = fmaf(comb[i][j], old[i].y, high);
                part(streams[j], v) = pack(low, high);
            }
        }
        if (row >= uint32_t(a.rows)) return;
        unsigned char* to = place(a.new_streams, row, kStreams * hidden());
#pragma unroll
        for (int j = 0; j < kStreams; ++j) store_16(to + j * hidden() * sizeof(Bf16), streams[j]);
    }

    // This warp's sums of every token, and what the token collapses to.
    __device__ void add_up(uint4 (&streams)[kStreams], const float (&pre)[kStreams], const unsigned char* fn, float* partial, uint4& collapsed) const {
        float squares[kStreams] = {}, norm_square = 0.0f;
#pragma unroll
        for (int v = 0; v < kVector / 2; ++v) {
            float2 y = {};
#pragma unroll
            for (int i = 0; i < kStreams; ++i) {
                const float2 x = unpack(part(streams[i], v));
                squares[i] = fmaf(x.x, x.x, squares[i]), squares[i] = fmaf(x.y, x.y, squares[i]);
                y.x = i == 0 ? pre[0] * x.x : fmaf(pre[i], x.x, y.x), y.y = i == 0 ? pre[0] * x.y : fmaf(pre[i], x.y, y.y);
            }
            part(collapsed, v) = pack(y.x, y.y);
            const float2 kept = unpack(part(collapsed, v));
            norm_square = fmaf(kept.x, kept.x, norm_square), norm_square = fmaf(kept.y, kept.y, norm_square);
        }
        const uint32_t group = lane / 4, quad = lane % 4;
        const float square = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]), 4);
        norm_square = sum_lanes(norm_square, 4);
        if (quad == 0) partial[kSquares * kTokens + group] = square, partial[kNormSquares * kTokens + group] = norm_square;
        if (!mixes()) return;
        float c[3][4] = {};
        const uint4* rows = reinterpret_cast<const uint4*>(fn) + lane;
        if (inside) {
#pragma unroll
            for (int i = 0; i < kStreams; ++i)
#pragma unroll
                for (int t = 0; t < 2; ++t)
#pragma unroll
                    for (int m = 0; m < 3; ++m) {
                        const uint4 w = rows[((i * 2 + t) * 3 + m) * kWarp];
                        multiply_bf16(c[m], w.x, w.y, w.z, w.w, part(streams[i], 2 * t), part(streams[i], 2 * t + 1));
                    }
        }
        float2* to = reinterpret_cast<float2*>(partial + group * kTokens + quad * 2);  // of output group, tokens 2 quad and the next
        constexpr int kNext = 8 * kTokens / 2;
        to[0] = make_float2(c[0][0] + c[1][2], c[0][1] + c[1][3]);
        to[kNext] = make_float2(c[0][2] + c[2][0], c[0][3] + c[2][1]);
        to[2 * kNext] = make_float2(c[1][0] + c[2][2], c[1][1] + c[2][3]);
    }

    __device__ void write_normed(uint32_t row, uint4 collapsed, const float (&weight)[kVector], float factor) const {
        if (!has(row)) return;
#pragma unroll
        for (int v = 0; v < kVector / 2; ++v) {
            const float2 y = unpack(part(collapsed, v));
            part(collapsed, v) = pack(y.x * factor * weight[2 * v], y.y * factor * weight[2 * v + 1]);
        }
        store_16(place(a.normed, row, hidden()), collapsed);
    }
};

}  // namespace cedar::cuda
