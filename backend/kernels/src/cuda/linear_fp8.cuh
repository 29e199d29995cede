// SPDX-License-Identifier: Apache-2.0
// Products of many rows that are rounded to MXFP8, on Hopper: codes times codes. Each 32 values of k are one matrix instruction,
// whose sums are multiplied by the row's scale and the weight tile's and added in float32. A unit of work is 128 tokens times N
// outputs in each block of a cluster, whose blocks share the tokens; clusters take units by turns. One warp keeps a ring full, by
// the copy engine; each of two warp groups has 64 of the tokens. k is walked in rising order, whatever N: a row's sums do not
// depend on the other rows.
#pragma once

#include <cooperative_groups.h>

#include "linear_fp8_mma.cuh"
#include "linear_split.cuh"
#include "linear_tensor.cuh"

namespace cedar::cuda {

#ifndef CEDAR_FP8_CLUSTER
#define CEDAR_FP8_CLUSTER 2
#endif
#ifndef CEDAR_FP8_TOGETHER
#define CEDAR_FP8_TOGETHER 8
#endif
constexpr int kFp8Tokens = 128, kFp8Threads = 384, kFp8Depth = 128, kFp8Cluster = CEDAR_FP8_CLUSTER;
constexpr int kFp8Together = CEDAR_FP8_TOGETHER;  // blocks of tokens that take turns with the same outputs, for the sake of L2

// x as codes, [rows, in_dim], and its scales' exponents: byte k / 32 % 4 of word [k / 128, row].
struct Fp8Rows {
    uint8_t* codes;
    uint32_t* scales;
};

inline Fp8Rows fp8_rows(void* memory, int64_t rows, int64_t in_dim) {
    uint8_t* const codes = static_cast<uint8_t*>(memory);
    return {codes, reinterpret_cast<uint32_t*>(codes + rows * in_dim)};
}

// E4M3 codes of two values that are at most 448.
__device__ inline uint32_t encode_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return encode_e4m3(low) | encode_e4m3(high) << 8;
#endif
}

// A thread has 8 values, 4 threads a group of 32.
__global__ void __launch_bounds__(256) encode_rows(const Bf16* x, const Fp8Rows out, uint32_t rows, uint32_t row_vectors) {
    release_launch();  // the product can begin
    const uint32_t vectors = rows * row_vectors, i = blockIdx.x * 256 + threadIdx.x;
    if (i / kWarp * kWarp >= vectors) return;
    float v[8];  // lanes behind the end repeat the last vector: a group is never divided
    load_pack<8>(x + int64_t(i < vectors ? i : vectors - 1) * 8, v);
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(v[j]));
    const uint32_t scale = __float_as_uint(power_of_two_scale(max_lanes(amax, 4), 1e-4f, float(1.0 / 448.0)));
    const float inverse = __uint_as_float(scale < 0x7f000000 ? 0x7f000000 - scale : 0x7fc00000);  // of an infinity NaNs remain
    uint32_t word[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
        word[j] = encode_pair(v[4 * j] * inverse, v[4 * j + 1] * inverse) | encode_pair(v[4 * j + 2] * inverse, v[4 * j + 3] * inverse) << 16;
    if (i >= vectors) return;
    *reinterpret_cast<uint2*>(out.codes + int64_t(i) * 8) = make_uint2(word[0], word[1]);
    const uint32_t row = i / row_vectors, group = i % row_vectors / 4;
    if (i % 4 == 0) reinterpret_cast<uint8_t*>(out.scales + int64_t(group / 4) * rows + row)[group % 4] = uint8_t(scale >> 23);
}

template <int N>
struct Fp8Stage {
    static constexpr int kTokenBytes = kFp8Tokens * kFp8Depth, kBytes = kTokenBytes + N * kFp8Depth;
    static constexpr int kCount = N == 128 ? 6 : 8;
    static constexpr int kOutputRow = N * int(sizeof(Bf16)), kOutputBytes = 64 * kOutputRow;  // of a warp group
    static constexpr size_t kShared = size_t(kCount) * kBytes + 2 * kOutputBytes + 1024;      // to begin at a multiple of 1024
    static_assert(kShared + 2 * kCount * sizeof(uint64_t) <= 227 * 1024);
};

struct Fp8Units {
    int outputs, output_blocks, token_blocks;  // outputs: of a cluster
    struct Unit {
        int output, token;
    };
    __host__ __device__ int count() const { return output_blocks * token_blocks; }
    __device__ Unit at(int number) const {
        const int turn = number / (kFp8Together * output_blocks), place = number % (kFp8Together * output_blocks);
        const int width = min(token_blocks - turn * kFp8Together, kFp8Together);
        return {place / width * outputs, (turn * kFp8Together + place % width) * kFp8Tokens};
    }
};

// The scale 2^(byte - 127) of 32 values of k; a byte of 0 is 0.
__device__ inline float scale_of(uint32_t word, int step) { return __uint_as_float((word >> 8 * step & 0xff) << 23); }

template <int N>
__global__ void __launch_bounds__(kFp8Threads, 1)
    code_product(const Product p, const Fp8Weight weight, const uint32_t* x_scales, const Fp8Units units,
                 const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map) {
    namespace cg = cooperative_groups;
    using Stage = Fp8Stage<N>;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[Stage::kCount], empty[Stage::kCount];
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = int(cluster.block_rank()), first_unit = int(blockIdx.x) / kFp8Cluster, step = int(gridDim.x) / kFp8Cluster;
    const int depth = int(p.in_dim / kFp8Depth), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Stage::kCount; ++slot)
            init_barrier(full + slot, 1), init_barrier(empty + slot, kFp8Cluster * 8);  // by the warps of all blocks
        publish_barriers();
    }
    cluster.sync();
    await_launch();
    release_launch();  // to a normalisation

    if (warp < 4) {  // the ring's
        shrink_registers<40>();
        if (threadIdx.x == 0) {
            int slot = 0;
            uint32_t round = 1;  // the first waits find the stages empty
            for (int number = first_unit; number < units.count(); number += step) {
                const Fp8Units::Unit unit = units.at(number);
                for (int block = 0; block < depth; ++block) {
                    await_barrier(empty + slot, round);
                    announce_bytes(full + slot, Stage::kBytes);
                    unsigned char* stage = stages + slot * Stage::kBytes;
                    copy_box(stage + Stage::kTokenBytes, &weight_map, block * kFp8Depth, unit.output + rank * N, full + slot);
                    copy_box_to_all(stage + rank * (Stage::kTokenBytes / kFp8Cluster), &x_map, block * kFp8Depth, 0,
                                    unit.token + rank * (kFp8Tokens / kFp8Cluster), full + slot, (1 << kFp8Cluster) - 1);
                    if (++slot == Stage::kCount) slot = 0, round ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        grow_registers<232>();
        const int group = warp / 4 - 1, quad = lane % 4, own = group * 64 + warp % 4 * 16;  // the warp's first token
        unsigned char* const outputs = stages + Stage::kCount * Stage::kBytes + (warp - 4) * 16 * Stage::kOutputRow;
        const auto* const weight_scales = reinterpret_cast<const uint32_t*>(weight.scales);  // words of a block of k
        struct Scales {
            uint32_t x[2], w[N / 32];
        };
        struct Place {
            int64_t x[2], w;
            int last;  // tile of outputs that there is
        };
        const auto place_of = [&](int number) {
            const Fp8Units::Unit unit = units.at(number < units.count() ? number : first_unit);
            const int64_t token = unit.token + own + lane / 4, end = p.tokens - 1, tile = (unit.output + rank * N) / 32, tiles = p.out_dim / 32 - 1;
            return Place{{token < end ? token : end, token + 8 < end ? token + 8 : end}, (tile < tiles ? tile : tiles) * depth,
                         tile < tiles ? int(tiles - tile) : 0};
        };
        const auto load_scales = [&](const Place& at, int block) {
            Scales s;
#pragma unroll
            for (int half = 0; half < 2; ++half) s.x[half] = __ldg(x_scales + block * p.tokens + at.x[half]);
#pragma unroll
            for (int n = 0; n < N / 32; ++n) s.w[n] = __ldg(weight_scales + at.w + (n < at.last ? n : at.last) * depth + block);
            return s;
        };
        int slot = 0;
        uint32_t round = 0;
        Place place = place_of(first_unit);
        Scales ahead = load_scales(place, 0);  // a stage before they are used
        for (int number = first_unit; number < units.count(); number += step) {
            float c[N / 2] = {}, raw[2][N / 2];
            for (int block = 0; block < depth; ++block) {
                const Scales scales = ahead;
                const bool last = block + 1 == depth;
                if (last) place = place_of(number + step);
                ahead = load_scales(place, last ? 0 : block + 1);
                await_barrier(full + slot, round);
                const unsigned char *tokens = stages + slot * Stage::kBytes + group * 64 * kFp8Depth, *rows = stages + slot * Stage::kBytes + Stage::kTokenBytes;
                const auto start = [&](int s) __attribute__((always_inline)) {
                    begin_group();
                    multiply_codes(raw[s % 2], matrix_of(tokens + s * 32), matrix_of(rows + s * 32));
                    close_group();
                };
                const auto add = [&](int s) __attribute__((always_inline)) {
                    const float x[2] = {scale_of(scales.x[0], s), scale_of(scales.x[1], s)};
#pragma unroll
                    for (int n = 0; n < N / 8; ++n) {
                        const float w = scale_of(scales.w[n / 4], s);
#pragma unroll
                        for (int i = 0; i < 4; ++i) c[n * 4 + i] = fmaf(raw[s % 2][n * 4 + i], x[i / 2] * w, c[n * 4 + i]);
                    }
                };
                start(0);
#pragma unroll
                for (int s = 0; s < 4; ++s) {  // while the next is multiplied, one is added
                    if (s < 3) {
                        start(s + 1);
                        await_groups<1>();
                    } else {
                        await_groups<0>();
                        __syncwarp();
                        if (lane < kFp8Cluster) arrive_at(empty + slot, uint32_t(lane));
                    }
                    settle(raw[s % 2]);
                    add(s);
                }
                if (++slot == Stage::kCount) slot = 0, round ^= 1;
            }

            const Fp8Units::Unit unit = units.at(number);
            const int64_t first = unit.output + rank * N, token = unit.token + own;
            if (p.wide) {
                float* const y = static_cast<float*>(p.y) + (token + lane / 4) * p.y_stride + first + quad * 2;
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int n = 0; n < N / 8; ++n)
                        if (token + lane / 4 + half * 8 < p.tokens && first + n * 8 < p.out_dim)
                            *reinterpret_cast<float2*>(y + half * 8 * p.y_stride + n * 8) = make_float2(c[n * 4 + half * 2], c[n * 4 + half * 2 + 1]);
                continue;
            }
            // A warp's own 16 rows, of 16-byte chunks exchanged by the row, so that neither side's lanes meet in a bank.
            constexpr int kChunks = N / 8;
            __syncwarp();  // the last unit's have been read
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < kChunks; ++n)
                    *reinterpret_cast<uint32_t*>(outputs + (lane / 4 + half * 8) * Stage::kOutputRow + (n ^ lane / 4) * 16 + quad * 4) =
                        pair_of(c[n * 4 + half * 2], c[n * 4 + half * 2 + 1]);
            __syncwarp();
            const int chunk = lane % kChunks;
            Bf16* const y = static_cast<Bf16*>(p.y) + first + chunk * 8;
            if (first + chunk * 8 < p.out_dim)
#pragma unroll
                for (int t = lane / kChunks; t < 16; t += kWarp / kChunks)
                    if (token + t < p.tokens)
                        *reinterpret_cast<uint4*>(y + (token + t) * p.y_stride) =
                            *reinterpret_cast<const uint4*>(outputs + t * Stage::kOutputRow + (chunk ^ t % 8) * 16);
        }
    }
    cluster.sync();  // nobody leaves while another block's arrivals at its barriers are on their way
}

// ---- host ----

// Do the dimensions suit these tiles and the copy engine? memory: of fp8_rows.
inline bool fits_codes(const Product& p, const void* weight, const uint8_t* scale, const void* memory) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.y) | reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(memory);
    return p.in_dim % kFp8Depth == 0 && p.out_dim % 32 == 0 && addresses % 16 == 0 && reinterpret_cast<uintptr_t>(scale) % 4 == 0 &&
           p.tokens * p.in_dim < int64_t(1) << 34;
}

inline Fp8Units fp8_units(const Product& p, int n) {
    const int outputs = n * kFp8Cluster;
    return {outputs, int((p.out_dim + outputs - 1) / outputs), int((p.tokens + kFp8Tokens - 1) / kFp8Tokens)};
}

// Rounds of all clusters times a unit's outputs, and what a unit costs besides.
inline int64_t fp8_cost(const Product& p, int n) {
    const int64_t clusters = kSms / kFp8Cluster;
    return (fp8_units(p, n).count() + clusters - 1) / clusters * (n + 16);
}

template <int N>
cudaError_t run_codes(const Product& p, const Fp8Weight& weight, const Fp8Rows& rows, void* stream) {
    CUtensorMap x_map, weight_map;
    const cuuint64_t x_sizes[] = {cuuint64_t(p.in_dim), 1, cuuint64_t(p.tokens)};
    const cuuint64_t x_strides[] = {cuuint64_t(p.in_dim), cuuint64_t(p.in_dim)};
    const cuuint32_t x_box[] = {kFp8Depth, 1, kFp8Tokens / kFp8Cluster};
    const cuuint64_t sizes[] = {cuuint64_t(p.in_dim), cuuint64_t(p.out_dim)}, stride[] = {cuuint64_t(p.in_dim)};
    const cuuint32_t box[] = {kFp8Depth, N};
    if (!describe(x_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, rows.codes, x_sizes, x_strides, x_box, CU_TENSOR_MAP_SWIZZLE_128B) ||
        !describe(weight_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, weight.codes, sizes, stride, box, CU_TENSOR_MAP_SWIZZLE_128B))
        return cudaErrorNotSupported;
    const Fp8Units units = fp8_units(p, N);
    const int clusters = units.count() < kSms / kFp8Cluster ? units.count() : int(kSms / kFp8Cluster);
    return launch_cluster(code_product<N>, dim3(unsigned(clusters * kFp8Cluster)), kFp8Threads, Fp8Stage<N>::kShared, kFp8Cluster, true, stream, p,
                          weight, static_cast<const uint32_t*>(rows.scales), units, x_map, weight_map);
}

// p.x is rounded to `memory`, which has room for 33/32 bytes of each of its values.
inline cudaError_t run_codes(const Product& p, const Fp8Weight& weight, void* memory, void* stream) {
    const Fp8Rows rows = fp8_rows(memory, p.tokens, p.in_dim);
    const int64_t vectors = p.tokens * p.in_dim / 8;
    const cudaError_t error =
        launch(encode_rows, dim3(unsigned((vectors + 255) / 256)), 256, 0, 1, stream, p.x, rows, uint32_t(p.tokens), uint32_t(p.in_dim / 8));
    if (error != cudaSuccess) return error;
    return fp8_cost(p, 64) < fp8_cost(p, 128) ? run_codes<64>(p, weight, rows, stream) : run_codes<128>(p, weight, rows, stream);
}

}  // namespace cedar::cuda
