// SPDX-License-Identifier: Apache-2.0
// y[t, n] = x_t . w_n for few tokens t and a weight that is read once: the weight's rows are the rows of the matrix instruction
// (m16n8k16), tokens its columns, so 8 tokens cost what one costs and nothing is padded to 64. Weights go from memory to
// registers, 16 bytes of a row per thread and load; tokens lie in shared memory.
//
// A result is the sum of kKWarps partial sums, one per warp of a block that shares k, each over every kKWarps-th block of k in
// rising order. That order depends on the dimensions alone, so a token's bits do not depend on the other tokens.
#pragma once

#include "ptx.cuh"

namespace cedar::cuda {

constexpr int kKWarps = 4, kRowWarps = 2, kSkinnyThreads = kKWarps * kRowWarps * kWarp;
constexpr int kMostTokens = 64;
constexpr int kTokenPadding = 32;  // bf16 behind each token in shared memory: two tokens' 64 bytes then lie in different banks

// The bf16 pair of a scale 2^(byte - 127) times 2^120, which E4M3 codes widened by moving their bits lack. Scales end at 2^7.
__device__ inline uint32_t lifted_scale(uint32_t byte) { return byte * 0x00800080u + (120u << 7) * 0x00010001u; }

// E4M3 codes in bytes kFirst and kFirst + 1 of a word times a lifted scale, as bf16 pair: exact.
template <int kFirst>
__device__ inline uint32_t widen_e4m3(uint32_t word, uint32_t scale) {
    const uint32_t codes = __byte_perm(word, 0, kFirst == 0 ? 0x1404 : 0x3424);  // in the high bytes of both halves
    const uint32_t bits = (codes & 0x80008000) | (codes >> 4 & 0x07f007f0);
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&scale));
    return *reinterpret_cast<const uint32_t*>(&product);
}

// A weight of row-major bf16: a block of k is 32 wide, a thread's 16 bytes are 8 values.
struct Bf16Weight {
    static constexpr int kBlock = 32, kSteps = 2;
    const Bf16* values;
    int64_t stride;
    struct Loaded {
        uint4 bytes;
    };
    __device__ void prefetch(int64_t row, int64_t rows, int64_t k, int64_t count) const {
        prefetch_rows(values + row * stride + k, stride * int64_t(sizeof(Bf16)), rows, count * int64_t(sizeof(Bf16)));
    }
    __device__ Loaded load(int64_t row, int64_t k) const { return {load_once(values + row * stride + k)}; }
    // The pairs (2 tid, 2 tid + 1) and (2 tid + 8, 2 tid + 9) of step s.
    __device__ static uint2 fragment(const Loaded& x, int s) {
        return s == 0 ? make_uint2(x.bytes.x, x.bytes.y) : make_uint2(x.bytes.z, x.bytes.w);
    }
};

// E4M3 codes with a UE8M0 scale per tile of 32 x 32: a block of k is 64 wide, a thread's 16 bytes are 16 values of one tile.
struct Fp8Weight {
    static constexpr int kBlock = 64, kSteps = 4;
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t stride, scale_stride;
    struct Loaded {
        uint4 bytes;
        uint32_t scale;
    };
    __device__ void prefetch(int64_t row, int64_t rows, int64_t k, int64_t count) const {
        prefetch_rows(codes + row * stride + k, stride, rows, count);
    }
    __device__ const uint8_t* scale_at(int64_t row, int64_t k) const { return scales + row / 32 * scale_stride + k / 32; }
    __device__ Loaded load(int64_t row, int64_t k) const { return {load_once(codes + row * stride + k), lifted_scale(__ldg(scale_at(row, k)))}; }
    __device__ static uint2 fragment(const Loaded& x, int s) {
        const uint32_t four = s == 0 ? x.bytes.x : s == 1 ? x.bytes.y : s == 2 ? x.bytes.z : x.bytes.w;
        return make_uint2(widen_e4m3<0>(four, x.scale), widen_e4m3<2>(four, x.scale));
    }
};

// Stages k values [first, first + count) of the tokens, zeros where there is no token, for B columns up to 8 NT.
template <int NT>
__device__ void stage_tokens(const Bf16* x, int64_t stride, int tokens, int64_t first, int count, Bf16* staged) {
    const int vectors = count / 8;
    for (int i = threadIdx.x; i < NT * 8 * vectors; i += kSkinnyThreads) {
        const int token = i / vectors, v = i % vectors;
        const uint4 value = token < tokens ? *reinterpret_cast<const uint4*>(x + token * stride + first + v * 8) : make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(staged + token * (count + kTokenPadding) + v * 8) = value;
    }
}

// One block: products of RT * 16 * kRowWarps rows from `row` on with up to 8 NT tokens, over k in [first, first + length).
// Rows at or behind `rows` are computed from the last row and must not be used. staged: 8 NT * (chunk + kTokenPadding) bf16;
// chunk: values of k staged at a time, a multiple of kKWarps blocks. partials: [kKWarps][rows of the block][8 NT] floats,
// complete when this returns.
template <int RT, int NT, class Weight>
__device__ void skinny_block(const Weight& weight, int64_t row, int64_t rows, const Bf16* x, int64_t x_stride, int tokens, int64_t first,
                             int length, int chunk, Bf16* staged, float* partials) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const int k_warp = warp % kKWarps, row_warp = warp / kKWarps;
    constexpr int kPerThread = Weight::kBlock / 4;
    constexpr int64_t kRowsOfBlock = RT * 16 * kRowWarps;
    weight.prefetch(row, rows - row < kRowsOfBlock ? rows - row : kRowsOfBlock, first, length);  // while tokens are staged
    float c[RT][NT][4] = {};
    for (int done = 0; done < length; done += chunk) {
        const int count = length - done < chunk ? length - done : chunk, stride = count + kTokenPadding;
        __syncthreads();
        stage_tokens<NT>(x, x_stride, tokens, first + done, count, staged);
        __syncthreads();
#pragma unroll 2
        for (int block = k_warp; block < count / Weight::kBlock; block += kKWarps) {
            const int k = block * Weight::kBlock + quad * kPerThread;
            typename Weight::Loaded low[RT], high[RT];
#pragma unroll
            for (int r = 0; r < RT; ++r) {
                const int64_t at = row + (row_warp * RT + r) * 16 + group;
                low[r] = weight.load(at < rows ? at : rows - 1, first + done + k);
                high[r] = weight.load(at + 8 < rows ? at + 8 : rows - 1, first + done + k);
            }
#pragma unroll
            for (int s = 0; s < Weight::kSteps; s += 2) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b = *reinterpret_cast<const uint4*>(staged + (n * 8 + group) * stride + k + s * 4);
#pragma unroll
                    for (int r = 0; r < RT; ++r) {
                        const uint2 l0 = Weight::fragment(low[r], s), h0 = Weight::fragment(high[r], s);
                        const uint2 l1 = Weight::fragment(low[r], s + 1), h1 = Weight::fragment(high[r], s + 1);
                        multiply_bf16(c[r][n], l0.x, h0.x, l0.y, h0.y, b.x, b.y);
                        multiply_bf16(c[r][n], l1.x, h1.x, l1.y, h1.y, b.z, b.w);
                    }
                }
            }
        }
    }
    constexpr int kRows = RT * 16 * kRowWarps;
    float* out = partials + k_warp * kRows * NT * 8;
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                out[((row_warp * RT + r) * 16 + group + (i / 2) * 8) * NT * 8 + n * 8 + quad * 2 + i % 2] = c[r][n][i];
    __syncthreads();
}

// The sum of the partial sums at one place.
template <int RT, int NT>
__device__ inline float skinny_sum(const float* partials, int row, int token) {
    constexpr int kRows = RT * 16 * kRowWarps;
    float total = 0.0f;
#pragma unroll
    for (int k_warp = 0; k_warp < kKWarps; ++k_warp) total += partials[(k_warp * kRows + row) * NT * 8 + token];
    return total;
}

// Values of k staged at a time: at most what fits, a multiple of 256, so that every warp keeps its blocks.
template <int NT>
__host__ __device__ constexpr int skinny_chunk(int64_t length) {
    const int most = 114688 / 2 / (NT * 8) / 256 * 256;
    return length < most ? int(length) : most;
}

template <int RT, int NT>
size_t skinny_shared(int64_t length) {
    return size_t(NT) * 8 * (skinny_chunk<NT>(length) + kTokenPadding) * sizeof(Bf16) +
           size_t(kKWarps) * RT * 16 * kRowWarps * NT * 8 * sizeof(float);
}

}  // namespace cedar::cuda
