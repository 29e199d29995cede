// SPDX-License-Identifier: Apache-2.0
// Products of many tokens: a block has RT * 128 rows of the weight and up to 64 tokens, a warp RT * 16 of the rows. Copies run
// kStages blocks of k ahead. Each lane copies the 16 bytes of a weight's row that it will widen itself, once for all 64 tokens;
// tokens are shared. Rows of the weight are the rows of the matrix instruction (m16n8k16), tokens its columns.
#pragma once

#include "fp4.cuh"
#include "weights.cuh"

namespace cedar::cuda {

constexpr int kTileWarps = 8, kTileThreads = kTileWarps * kWarp, kTileColumns = 64;

// A weight as the tiles see it:
//   kBlock      values of k whose codes are 16 bytes of each lane; they are kUnits times two steps of the matrix instruction
//   codes_of    a lane's codes of row 8 half + lane / 4 of a tile of 16 rows; the next block's are kCodeStep bytes behind
//   scales_of   its scales: kScaleBytes for a block, the next block's kScaleStep behind
//   kSwizzle    what odd tokens flip in the numbers of their 16-byte chunks, so that a load of eight lanes meets every bank once
//   chunk       number of the chunk of a token with the unit's k of a lane
struct Fp4Codes {
    static constexpr int kBlock = kFp4Depth, kUnits = 4, kSwizzle = 4, kCodeStep = kFp4Codes, kScaleBytes = 4, kScaleStep = kFp4Scales;
    const uint8_t* codes;  // of the expert
    const uint8_t* scales;
    int tiles, depth;      // a tile behind the last is the last
    __device__ int64_t begin(int64_t tile) const { return (tile < tiles ? tile : tiles - 1) * depth; }
    __device__ const uint8_t* codes_of(int64_t tile, int half, int lane) const {
        return codes + begin(tile) * kFp4Codes + half * (kFp4Codes / 2) + lane * 16;
    }
    __device__ const uint8_t* scales_of(int64_t tile, int half, int lane) const {
        return scales + begin(tile) * kFp4Scales + half * (kFp4Scales / 2) + lane / 4 * 4;
    }
    __device__ static int chunk(int unit, int quad) { return unit * 4 + quad; }
    __device__ static void widen(const uint4& bytes, uint32_t scales, int unit, uint32_t (&f)[4]) {
        widen_e2m1(word_of(bytes, unit), fp4_scale(scales, unit), f);
    }
};

template <class Weight>
struct RowMajor {
    static constexpr bool kFp8 = Weight::kSteps == 4;
    static constexpr int kBlock = Weight::kBlock, kUnits = Weight::kSteps / 2, kSwizzle = kFp8 ? 1 : 0, kCodeStep = 64;
    static constexpr int kScaleBytes = kFp8 ? 1 : 0, kScaleStep = kBlock / 32;
    Weight weight;
    int64_t base, last;  // the first row of the group and its last
    __device__ int64_t row(int64_t tile, int half, int lane) const {
        const int64_t row = base + tile * 16 + half * 8 + lane / 4;
        return row < last ? row : last;
    }
    __device__ const uint8_t* row_codes(int64_t row, int lane) const {
        if constexpr (kFp8)
            return weight.codes + row * weight.stride + lane % 4 * 16;
        else
            return reinterpret_cast<const uint8_t*>(weight.values + row * weight.stride) + lane % 4 * 16;
    }
    __device__ const uint8_t* row_scales(int64_t row, int lane) const {
        if constexpr (kFp8)
            return weight.scale_at(row, lane % 4 * 16);
        else
            return nullptr;
    }
    __device__ const uint8_t* codes_of(int64_t tile, int half, int lane) const { return row_codes(row(tile, half, lane), lane); }
    __device__ const uint8_t* scales_of(int64_t tile, int half, int lane) const { return row_scales(row(tile, half, lane), lane); }
    __device__ static int chunk(int unit, int quad) { return quad * kUnits + unit; }
    __device__ static void widen(const uint4& bytes, uint32_t scale, int unit, uint32_t (&f)[4]) {
        typename Weight::Loaded loaded{};
        loaded.bytes = bytes;
        if constexpr (kFp8) loaded.scale = scale;
        const uint2 first = Weight::fragment(loaded, 2 * unit), second = Weight::fragment(loaded, 2 * unit + 1);
        f[0] = first.x, f[1] = first.y, f[2] = second.x, f[3] = second.y;
    }
};

// Scales of one byte come a block ahead, in a register; those of four are copied with the codes.
__device__ inline uint32_t byte_scale(const uint8_t* scales) { return lifted_scale(__ldg(scales)); }

template <class Weight, int RT>
__host__ __device__ constexpr int tile_stage_bytes() {
    return kTileWarps * RT * (1024 + Weight::kScaleBytes / 4 * 256) + kTileColumns * Weight::kBlock * int(sizeof(Bf16));
}

// The order in which blocks of k are added: kParts runs, each every kParts-th block.
template <int kParts>
struct Order {
    int block = 0, part = 0;
    __device__ void next(int blocks) {
        block += kParts;
        if (block >= blocks) block = ++part;
    }
    __device__ bool starts_part() const { return block == part && block > 0; }
};

// c[r][n][i]: row 16 (warp RT + r) + group + 8 (i / 2) of the block's rows, token 8 n + 2 quad + i % 2, over all of k.
// first_tile: of the block. row(t): token t's k values in memory, for any t < 64. Sums of the kParts runs are added in their
// order.
template <int RT, int kStages, int kParts, class Weight, class RowOf>
__device__ inline void tile_product(const Weight& weight, int64_t first_tile, int blocks, int tokens, const RowOf& row, unsigned char* memory,
                                    float (&c)[RT][8][4]) {
    constexpr int kChunks = Weight::kBlock / 8, kStage = tile_stage_bytes<Weight, RT>(), kLane = 1024 + Weight::kScaleBytes / 4 * 256;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    const uint8_t *codes_from[RT][2], *scales_from[RT][2];
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            codes_from[r][half] = weight.codes_of(first_tile + warp * RT + r, half, lane);
            scales_from[r][half] = weight.scales_of(first_tile + warp * RT + r, half, lane);
        }
    const int columns = (tokens + 7) / 8, copied = threadIdx.x / 4;
    const Bf16* source = row(copied < tokens ? copied : tokens - 1) + threadIdx.x % 4 * 8;
    const auto codes_of = [&](int slot) { return memory + slot * kStage + warp * RT * kLane; };
    const auto tokens_of = [&](int slot) { return memory + slot * kStage + kTileWarps * RT * kLane; };

    Order<kParts> ahead;
    const auto fetch = [&](int number) {
        if (number < blocks) {
            unsigned char* codes = codes_of(number % kStages);
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    copy_16(codes + r * kLane + half * 512 + lane * 16, codes_from[r][half] + int64_t(ahead.block) * Weight::kCodeStep);
                    if constexpr (Weight::kScaleBytes == 4)
                        copy_4(codes + r * kLane + 1024 + half * 128 + lane * 4, scales_from[r][half] + int64_t(ahead.block) * Weight::kScaleStep);
                }
            if (copied < columns * 8) {
                unsigned char* to = tokens_of(number % kStages) + copied * kChunks * 16;
#pragma unroll
                for (int j = 0; j < kChunks / 4; ++j)
                    copy_16(to + (((threadIdx.x % 4 + 4 * j) ^ (copied % 2 * Weight::kSwizzle)) * 16),
                            source + int64_t(ahead.block) * Weight::kBlock + j * 32);
            }
            ahead.next(blocks);
        }
        close_copies();
    };
    for (int number = 0; number < kStages - 1; ++number) fetch(number);

    float run[RT][8][4] = {};  // c itself where there is but one run
    float (&sums)[RT][8][4] = kParts > 1 ? run : c;
    const auto add_run = [&] {
        if constexpr (kParts > 1) {
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) c[r][n][i] += run[r][n][i], run[r][n][i] = 0.0f;
        }
    };
    uint32_t scales[RT][2] = {};
    const auto load_scales = [&](int block) {
        if constexpr (Weight::kScaleBytes == 1) {
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half) scales[r][half] = byte_scale(scales_from[r][half] + block * Weight::kScaleStep);
        }
    };

    Order<kParts> here;
    load_scales(0);
    for (int number = 0; number < blocks; ++number) {
        await_copies<kStages - 2>();
        __syncthreads();  // this stage is complete, and no warp reads the one before any more
        fetch(number + kStages - 1);
        if (here.starts_part()) add_run();
        const unsigned char* codes = codes_of(number % kStages);
        const unsigned char* staged = tokens_of(number % kStages) + group * kChunks * 16;
        uint4 bytes[RT][2];
        uint32_t scale[RT][2];
#pragma unroll
        for (int r = 0; r < RT; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bytes[r][half] = *reinterpret_cast<const uint4*>(codes + r * kLane + half * 512 + lane * 16);
                if constexpr (Weight::kScaleBytes == 4)
                    scale[r][half] = *reinterpret_cast<const uint32_t*>(codes + r * kLane + 1024 + half * 128 + lane * 4);
                else
                    scale[r][half] = scales[r][half];
            }
        here.next(blocks);
        if (number + 1 < blocks) load_scales(here.block);
#pragma unroll
        for (int unit = 0; unit < Weight::kUnits; ++unit) {
            uint32_t low[RT][4], high[RT][4];
#pragma unroll
            for (int r = 0; r < RT; ++r) {
                Weight::widen(bytes[r][0], scale[r][0], unit, low[r]);
                Weight::widen(bytes[r][1], scale[r][1], unit, high[r]);
            }
            const int place = (Weight::chunk(unit, quad) ^ (group % 2 * Weight::kSwizzle)) * 16;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (n >= columns) break;
                const uint4 b = *reinterpret_cast<const uint4*>(staged + n * 8 * kChunks * 16 + place);
#pragma unroll
                for (int r = 0; r < RT; ++r) {
                    multiply_bf16(sums[r][n], low[r][0], high[r][0], low[r][1], high[r][1], b.x, b.y);
                    multiply_bf16(sums[r][n], low[r][2], high[r][2], low[r][3], high[r][3], b.z, b.w);
                }
            }
        }
    }
    add_run();
}

}  // namespace cedar::cuda
