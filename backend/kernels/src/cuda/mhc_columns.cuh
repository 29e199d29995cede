// SPDX-License-Identifier: Apache-2.0
// A warp's part of mega_mhc: 32 columns of 8 tokens. The new streams go from a lane's registers to memory and, as they are, into
// the matrix instruction (m16n8k16; rows: fn's outputs, columns: tokens). fn is the sum of two bf16: of its 24 bits, 16 are
// multiplied.
#pragma once

#include "mhc_cluster.cuh"
#include "mhc_gates.cuh"

namespace cedar::cuda {

constexpr int kUnit = 32;    // columns of a warp
constexpr int kVector = 8;   // bf16 of a lane's access
constexpr int kSquares = kOutputs, kNormSquares = kOutputs + 1, kSums = kOutputs + 2;
constexpr int kFnStream = kOutputs * kUnit * int(sizeof(float)), kFnBytes = kStreams * kFnStream;
constexpr int kCoefficients = (2 + kStreams) * kStreams * int(sizeof(float));  // of a token

constexpr int kStreamsBytes = kTokens * kStreams * kUnit * int(sizeof(Bf16)), kOutputBytes = kTokens * kUnit * int(sizeof(Bf16));  // of a warp

// A block's part of a tile that has come. kPairs: the streams are, of each pair of warps, rows of 128 bytes, of a token's streams one
// after the other, swizzled by the copy engine: eight lanes' loads, of two tokens, meet every bank once. Else, for widths that are
// not of pairs, rows of 64 bytes of each warp. Then come each warp's rows of output, and the tokens' pre, post and comb.
template <bool kPairs>
struct Stage {
    static constexpr int kWidth = kPairs ? 2 * kUnit : kUnit;  // columns of a row
    int warps;  // of columns
    // Of a lane's 16 bytes of stream `stream`.
    __device__ static uint32_t streams(uint32_t warp, uint32_t token, uint32_t quad, uint32_t stream) {
        const uint32_t row = token * kStreams + stream;
        return kPairs ? warp / 2 * (2 * kStreamsBytes) + row * 128 + ((warp % 2 * 4 + quad) ^ token % 2 * 4 ^ stream) * 16
                      : warp * kStreamsBytes + row * 64 + quad * 16;
    }
    __host__ __device__ int output() const { return warps * kStreamsBytes; }
    __host__ __device__ int pre() const { return output() + warps * kOutputBytes; }
    __host__ __device__ int post() const { return pre() + kTokens * kStreams * int(sizeof(float)); }
    __host__ __device__ int comb() const { return post() + kTokens * kStreams * int(sizeof(float)); }
    __host__ __device__ int bytes() const { return (pre() + kTokens * kCoefficients + 1023) / 1024 * 1024; }
};

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

// ---- a warp's columns of one tile: lane 4 g + q has columns 8 q .. 8 q + 7 of token g ----

__device__ inline uint32_t& part(uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// What is written to the streams of a lane's token, and how the streams are mixed.
struct Written {
    uint4 output;
    float post[kStreams], comb[kStreams][kStreams];
};

// The squares of a lane's values, in their order.
__device__ inline void add_squares(float& sum, uint4 x) {
#pragma unroll
    for (int v = 0; v < kVector / 2; ++v) {
        const float2 y = unpack(part(x, v));
        sum = fmaf(y.x, y.x, sum), sum = fmaf(y.y, y.y, sum);
    }
}

// A warp's sums of a tile: of the products a lane's part as the matrix instruction leaves it, of the squares those of its token.
struct Sums {
    float products[3][4], square, norm_square;
};

// kHidden > 0: the width, and no part of the boundary is left out. 0: only the call knows.
template <int kHidden>
struct Columns {
    const cedar_mega_mhc_args& a;
    uint32_t column, lane;  // column: the lane's first; lane: the thread's number in the warp
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

    // A tile that has come. That the stage may be overwritten is for the caller to say, when what all lanes ask for here has come.
    __device__ void read(Stage<(kHidden > 0)> at, const unsigned char* stage, uint32_t warp, uint4 (&streams)[kStreams], float (&pre)[kStreams],
                         Written& written) const {
        if (!inside) return;
        const uint32_t token = lane / 4;
        const auto values = [&](int place) { return reinterpret_cast<const float*>(stage + place); };
#pragma unroll
        for (int i = 0; i < kStreams; ++i) streams[i] = *reinterpret_cast<const uint4*>(stage + at.streams(warp, token, lane % 4, i));
        if (norms()) load_pack(values(at.pre()) + token * kStreams, pre);
        if (!expands()) return;
        written.output = *reinterpret_cast<const uint4*>(stage + at.output() + warp * kOutputBytes + lane * 16);
        load_pack(values(at.post()) + token * kStreams, written.post);
#pragma unroll
        for (int i = 0; i < kStreams; ++i) load_pack(values(at.comb()) + token * kCells + i * kStreams, written.comb[i]);
    }

    // The new streams in place of the old ones, and stored.
    __device__ void expand(uint32_t row, uint4 (&streams)[kStreams], Written written) const {
        if (!inside || !expands()) return;
#pragma unroll
        for (int v = 0; v < kVector / 2; ++v) {
            const float2 x = unpack(part(written.output, v));
            float2 old[kStreams];
#pragma unroll
            for (int i = 0; i < kStreams; ++i) old[i] = unpack(part(streams[i], v));
#pragma unroll
            for (int j = 0; j < kStreams; ++j) {
                float low = written.post[j] * x.x, high = written.post[j] * x.y;
#pragma unroll
                for (int i = 0; i < kStreams; ++i)
                    low = fmaf(written.comb[i][j], old[i].x, low), high = fmaf(written.comb[i][j], old[i].y, high);
                part(streams[j], v) = pack(low, high);
            }
        }
        if (row >= uint32_t(a.rows)) return;
        unsigned char* to = place(a.new_streams, row, kStreams * hidden());
#pragma unroll
        for (int j = 0; j < kStreams; ++j) store_16(to + j * hidden() * sizeof(Bf16), streams[j]);
    }

    // What the token collapses to, and its squares.
    __device__ void collapse(uint4 (&streams)[kStreams], const float (&pre)[kStreams], uint4& collapsed, Sums& sums) const {
#pragma unroll
        for (int v = 0; v < kVector / 2; ++v) {
            float2 y = {};
#pragma unroll
            for (int i = 0; i < kStreams; ++i) {
                const float2 x = unpack(part(streams[i], v));
                y.x = i == 0 ? pre[0] * x.x : fmaf(pre[i], x.x, y.x), y.y = i == 0 ? pre[0] * x.y : fmaf(pre[i], x.y, y.y);
            }
            part(collapsed, v) = pack(y.x, y.y);
        }
        float square = 0.0f, norm_square = 0.0f;
        add_squares(norm_square, collapsed);
        if (mixes())
#pragma unroll
            for (int i = 0; i < kStreams; ++i) add_squares(square, streams[i]);
        sums.square = sum_lanes(square, 4), sums.norm_square = sum_lanes(norm_square, 4);
    }

    // The products of S tiles' tokens with the warp's columns of fn, which are looked at once; the first kKept pieces are in registers.
    template <int S, int kKept>
    __device__ void multiply(uint4 (&streams)[S][kStreams], const unsigned char* fn, const uint4 (&kept)[kKept + 1], Sums (&sums)[S]) const {
        if (!mixes() || !inside) return;
        const uint4* pieces = reinterpret_cast<const uint4*>(fn) + lane;
#pragma unroll
        for (int j = 0; j < S; ++j)
#pragma unroll
            for (int m = 0; m < 3; ++m)
#pragma unroll
                for (int k = 0; k < 4; ++k) sums[j].products[m][k] = 0.0f;
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int m = 0; m < 3; ++m) {
                    const int at = (i * 2 + t) * 3 + m;
                    const uint4 w = at < kKept ? kept[at < kKept ? at : 0] : pieces[at * kWarp];
#pragma unroll
                    for (int j = 0; j < S; ++j)
                        multiply_bf16(sums[j].products[m], w.x, w.y, w.z, w.w, part(streams[j][i], 2 * t), part(streams[j][i], 2 * t + 1));
                }
    }

    // This warp's part of a tile's sums.
    __device__ void store_sums(float* partial, const Sums& sums) const {
        const uint32_t group = lane / 4, quad = lane % 4;
        if (quad == group / 2)
            partial[kSquares * kTokens + group] = sums.square, partial[kNormSquares * kTokens + group] = sums.norm_square;
        if (!mixes()) return;
        const auto& c = sums.products;
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

// ---- a block's part of a tile: a box of the streams, one of output and the tokens' coefficients, each in the order of one lane ----

template <int kHidden>
struct TileCopies {
    using Part = Stage<(kHidden > 0)>;
    const Columns<kHidden>& columns;  // of the block
    Part stage;
    const CUtensorMap *streams, *output;

    __device__ uint32_t live(uint32_t row) const { return min(uint32_t(kTokens), uint32_t(columns.a.rows) - row); }
    // Boxes are whole, with zeros behind the last row or column; of the coefficients, those of rows that there are.
    __device__ uint32_t all_bytes(uint32_t row) const {
        const uint32_t values = (columns.norms() ? kStreams : 0) + (columns.expands() ? kStreams + kCells : 0);
        return (columns.expands() ? stage.pre() : stage.output()) + live(row) * values * uint32_t(sizeof(float));
    }
    // This lane's copy: box(place in the stage, tensor, row, number of the first columns), or run(place, from, bytes).
    template <class Box, class Run>
    __device__ void order(uint32_t row, const Box& box, const Run& run) const {
        const auto& a = columns.a;
        const uint32_t lane = columns.lane, kind = lane - 2;
        if (lane == 0) {
            box(0, streams, row * kStreams, columns.column / Part::kWidth);
        } else if (lane == 1) {
            if (columns.expands()) box(stage.output(), output, row, columns.column / kUnit);
        } else if (kind < 3) {
            if (!(kind == 0 ? columns.norms() : columns.expands())) return;
            const uint32_t width = kind == 2 ? kCells : kStreams;
            const float* const from = kind == 0 ? a.pre : kind == 1 ? a.post : a.comb;
            run(kind == 0 ? stage.pre() : kind == 1 ? stage.post() : stage.comb(), from + uint64_t(row) * width,
                live(row) * width * uint32_t(sizeof(float)));
        }
    }
};

}  // namespace cedar::cuda
