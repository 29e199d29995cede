// SPDX-License-Identifier: Apache-2.0
// wo_a and mxfp8_linear: few rows with the weight streamed once (stream.cuh, skinny.cuh), many in tiles
// (tiles.cuh), with the same bits; very many on Hopper, in builds with CEDAR_WIDE_WGMMA, by its own matrix instruction
// (wide.cuh), whose sums have another order.
#include "bodies.h"
#include "moe.cuh"
#include "stream.cuh"
#include "wide.cuh"

namespace cedar::cuda {
namespace {

constexpr int64_t kSms = 132;  // an H200's; what divides the work evenly there does well elsewhere

struct Product {
    const Bf16* x;
    void* y;
    int64_t tokens, in_dim, out_dim;   // of one group
    int64_t x_stride, y_stride;        // between tokens
    bool wide;                         // y is float32
};

// Block (i, g): RT * 32 outputs of group g.
template <int RT, int NT, class Weight>
__global__ void __launch_bounds__(kSkinnyThreads) product(const Product p, const Weight weight) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int kRows = RT * 16 * kRowWarps;
    const int chunk = skinny_chunk<NT>(p.in_dim);
    Bf16* staged = reinterpret_cast<Bf16*>(memory);
    float* partials = reinterpret_cast<float*>(memory + size_t(NT) * 8 * (chunk + kTokenPadding) * sizeof(Bf16));
    const int64_t group = blockIdx.y, row = int64_t(blockIdx.x) * kRows, base = group * p.out_dim;
    skinny_block<RT, NT>(weight, base + row, base + p.out_dim, p.x + group * p.in_dim, p.x_stride, int(p.tokens), 0, int(p.in_dim),
                                chunk, staged, partials);
    for (int i = threadIdx.x; i < kRows * int(p.tokens); i += kSkinnyThreads) {
        const int n = i % kRows, token = i / kRows;
        if (row + n >= p.out_dim) continue;
        const float value = skinny_sum<RT, NT>(partials, n, token);
        const int64_t at = token * p.y_stride + base + row + n;
        if (p.wide)
            static_cast<float*>(p.y)[at] = value;
        else
            static_cast<Bf16*>(p.y)[at] = from_float<Bf16>(value);
    }
}

constexpr int kStreamStages = 6, kStreamTiles = 2;  // of 16 outputs, per block

// Block (i, g): outputs [32 i, 32 i + 32) of group g, a warp's a tile of 16 and a kKWarps-th of k.
template <int NT, class Weight>
__global__ void __launch_bounds__(kSkinnyThreads) streamed_product(const Product p, const Weight weight) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ float partials[kKWarps * kStreamTiles * 16 * NT * 8];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4, part = warp % kKWarps;
    const int64_t base = blockIdx.y * p.out_dim, first = int64_t(blockIdx.x) * kStreamTiles;
    const int row = warp / kKWarps * 16;
    const Bf16* tokens[NT];  // columns that have no token repeat the last one
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int64_t token = n * 8 + group < p.tokens ? n * 8 + group : p.tokens - 1;
        tokens[n] = p.x + blockIdx.y * p.in_dim + token * p.x_stride;
    }
    float c[NT][4] = {};
    stream_tile<NT, kStreamStages, kKWarps>(RowMajor<Weight>{weight, base, base + p.out_dim - 1}, first + warp / kKWarps, part,
                                            int(p.in_dim / Weight::kBlock), tokens,
                                            memory + warp * kStreamStages * stream_stage_bytes<RowMajor<Weight>>(), c);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            partials[((part * kStreamTiles * 16) + row + group + i / 2 * 8) * NT * 8 + n * 8 + quad * 2 + i % 2] = c[n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < kStreamTiles * 16 * int(p.tokens); i += kSkinnyThreads) {
        const int n = i % (kStreamTiles * 16), token = i / (kStreamTiles * 16);
        if (first * 16 + n >= p.out_dim) continue;
        float value = 0.0f;
#pragma unroll
        for (int k = 0; k < kKWarps; ++k) value += partials[(k * kStreamTiles * 16 + n) * NT * 8 + token];
        const int64_t at = token * p.y_stride + base + first * 16 + n;
        if (p.wide)
            static_cast<float*>(p.y)[at] = value;
        else
            static_cast<Bf16*>(p.y)[at] = from_float<Bf16>(value);
    }
}

template <int NT, class Weight>
cudaError_t run_stream(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    const dim3 grid(unsigned((p.out_dim + kStreamTiles * 16 - 1) / (kStreamTiles * 16)), unsigned(groups));
    const size_t shared = size_t(kSkinnyThreads / kWarp) * kStreamStages * stream_stage_bytes<RowMajor<Weight>>();
    return launch(streamed_product<NT, Weight>, grid, kSkinnyThreads, shared, 1, stream, p, weight);
}

template <int RT, int NT, class Weight>
cudaError_t run_staged(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    const dim3 grid(unsigned((p.out_dim + RT * 16 * kRowWarps - 1) / (RT * 16 * kRowWarps)), unsigned(groups));
    return launch(product<RT, NT, Weight>, grid, kSkinnyThreads, skinny_shared<RT, NT>(p.in_dim), 1, stream, p, weight);
}

template <int RT, class Weight>
cudaError_t run_staged(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    if (p.tokens <= 32) return run_staged<RT, 4>(p, weight, groups, stream);
    if (p.tokens <= 48) return run_staged<RT, 6>(p, weight, groups, stream);
    return run_staged<RT, 8>(p, weight, groups, stream);
}

template <class Weight>
cudaError_t run_skinny(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    if (p.tokens <= 8) return run_stream<1>(p, weight, groups, stream);
    if (p.tokens <= 16) return run_stream<2>(p, weight, groups, stream);
    const bool fills = (p.out_dim + 63) / 64 * groups >= kSms * 3 / 4;  // tokens serve twice the outputs where blocks are enough
    return fills ? run_staged<2>(p, weight, groups, stream) : run_staged<1>(p, weight, groups, stream);
}

constexpr int kTileStages = 6;
constexpr int64_t kTogether = 16;  // blocks of tokens that take turns with the same rows of the weight, for the sake of L2

// Block (b, g): RT * 128 outputs of group g times 64 tokens.
template <int RT, int kParts, class Weight>
__global__ void __launch_bounds__(kTileThreads, 1) tiled_product(const Product p, const Weight weight) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int64_t kOutputs = kTileWarps * RT * 16;
    const int64_t row_blocks = (p.out_dim + kOutputs - 1) / kOutputs, token_blocks = (p.tokens + kTileColumns - 1) / kTileColumns;
    const int64_t turn = blockIdx.x / (kTogether * row_blocks), place = blockIdx.x % (kTogether * row_blocks);
    const int64_t left = token_blocks - turn * kTogether, width = left < kTogether ? left : kTogether;
    const int64_t first_row = place / width * kOutputs, token = (turn * kTogether + place % width) * kTileColumns;
    const int64_t base = blockIdx.y * p.out_dim, columns = p.tokens - token < kTileColumns ? p.tokens - token : kTileColumns;
    const Bf16* x = p.x + blockIdx.y * p.in_dim + token * p.x_stride;
    float c[RT][8][4] = {};
    tile_product<RT, kTileStages, kParts>(RowMajor<Weight>{weight, base, base + p.out_dim - 1}, first_row / 16, int(p.in_dim / Weight::kBlock),
                                           int(columns), [&](int t) { return x + t * p.x_stride; }, memory, c);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int64_t row = first_row + (warp * RT + r) * 16 + lane / 4 + i / 2 * 8, t = n * 8 + lane % 4 * 2 + i % 2;
                if (row >= p.out_dim || t >= columns) continue;
                const int64_t at = (token + t) * p.y_stride + base + row;
                if (p.wide)
                    static_cast<float*>(p.y)[at] = c[r][n][i];
                else
                    static_cast<Bf16*>(p.y)[at] = from_float<Bf16>(c[r][n][i]);
            }
}

template <int RT, int kParts, class Weight>
cudaError_t run_tiles(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    constexpr int64_t kOutputs = kTileWarps * RT * 16;
    const int64_t blocks = (p.out_dim + kOutputs - 1) / kOutputs * ((p.tokens + kTileColumns - 1) / kTileColumns);
    const size_t shared = size_t(kTileStages) * tile_stage_bytes<RowMajor<Weight>, RT>();
    return launch(tiled_product<RT, kParts, Weight>, dim3(unsigned(blocks), unsigned(groups)), kTileThreads, shared, 1, stream, p, weight);
}

// Block (b, g): 256 outputs of group g times 128 tokens.
template <class Weight>
__global__ void __launch_bounds__(kWideThreads, 1) wide_tiles(const Product p, const Weight weight) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int64_t kWideTogether = 8;  // as kTogether
    unsigned char* const stages = memory + (1024 - __cvta_generic_to_shared(memory) % 1024) % 1024;
    const int64_t row_blocks = (p.out_dim + kWideRows - 1) / kWideRows, token_blocks = (p.tokens + kWideTokens - 1) / kWideTokens;
    const int64_t turn = blockIdx.x / (kWideTogether * row_blocks), place = blockIdx.x % (kWideTogether * row_blocks);
    const int64_t left = token_blocks - turn * kWideTogether, width = left < kWideTogether ? left : kWideTogether;
    const int64_t first_row = place / width * kWideRows, token = (turn * kWideTogether + place % width) * kWideTokens;
    const int64_t base = blockIdx.y * p.out_dim, last_row = p.out_dim - 1 - first_row, last_token = p.tokens - 1 - token;
    const Bf16* x = p.x + blockIdx.y * p.in_dim + token * p.x_stride;
    const int lane = threadIdx.x % kWarp, group = threadIdx.x / 128, warp_row = group * 128 + threadIdx.x / kWarp % 4 * 16;
    constexpr bool kFp8 = WideStage<Weight>::kFp8;
    const auto row_at = [&](int64_t row) { return base + first_row + (row < last_row ? row : last_row); };
    const auto codes_of = [&](int row) {
        if constexpr (kFp8)
            return weight.codes + row_at(row) * weight.stride;
        else
            return reinterpret_cast<const uint8_t*>(weight.values + row_at(row) * weight.stride);
    };
    const auto token_of = [&](int t) { return reinterpret_cast<const uint8_t*>(x + (t < last_token ? t : last_token) * p.x_stride); };
    const uint8_t* scales[2] = {};
    if constexpr (kFp8) scales[0] = weight.scale_at(row_at(warp_row), 0), scales[1] = weight.scale_at(row_at(warp_row + 64), 0);
    float c[2][64] = {};
    wide_product<Weight>(codes_of, token_of, scales, int(p.in_dim / kWideDepth), stages, c);

    constexpr int kStride = kWideRows + 8;  // of a token's outputs in shared memory
    Bf16* const outputs = reinterpret_cast<Bf16*>(stages);
    __syncthreads();  // nobody reads the stages any more
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 64; ++i)
            outputs[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kStride + warp_row + m * 64 + lane / 4 + i / 2 % 2 * 8] = from_float<Bf16>(c[m][i]);
    __syncthreads();
    for (int i = threadIdx.x; i < kWideTokens * kWideRows / 8; i += kWideThreads) {
        const int t = i / (kWideRows / 8), row = i % (kWideRows / 8) * 8;
        if (t > last_token || row > last_row) continue;
        *reinterpret_cast<uint4*>(static_cast<Bf16*>(p.y) + (token + t) * p.y_stride + base + first_row + row) =
            *reinterpret_cast<const uint4*>(outputs + t * kStride + row);
    }
}

template <class Weight>
cudaError_t run_wide(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    const int64_t blocks = (p.out_dim + kWideRows - 1) / kWideRows * ((p.tokens + kWideTokens - 1) / kWideTokens);
    return launch(wide_tiles<Weight>, dim3(unsigned(blocks), unsigned(groups)), kWideThreads, wide_shared_bytes<Weight>(), 1, stream, p, weight);
}

// Has the device Hopper's matrix instruction, and the product blocks for most of its multiprocessors?
bool suits_wide(const Product& p, int64_t groups) {
    const int64_t blocks = (p.out_dim + kWideRows - 1) / kWideRows * ((p.tokens + kWideTokens - 1) / kWideTokens) * groups;
    return has_groups() && !p.wide && p.in_dim % kWideDepth == 0 && p.out_dim % 32 == 0 && p.y_stride % 8 == 0 && blocks >= kSms * 3 / 4;
}

// kParts: kKWarps for the sums that few rows have, 1 for those of moe_fp4.
template <int kParts, class Weight>
cudaError_t run(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    if (kParts == kKWarps && p.tokens <= kMostTokens) return run_skinny(p, weight, groups, stream);
    if constexpr (kWideBuilt)
        if (suits_wide(p, groups)) return run_wide(p, weight, groups, stream);
    const bool fills = (p.out_dim + 255) / 256 * ((p.tokens + kTileColumns - 1) / kTileColumns) * groups >= kSms;
    return fills ? run_tiles<2, kParts>(p, weight, groups, stream) : run_tiles<1, kParts>(p, weight, groups, stream);
}

template <int kParts = kKWarps>
int dispatch(const char* op, const Product& p, const void* weight, const uint8_t* scale, int64_t weight_type, int64_t groups, void* stream) {
    if (weight_type == CEDAR_BF16) {
        if (p.in_dim % Bf16Weight::kBlock != 0) return fail(CEDAR_UNSUPPORTED, "%s: in_dim %lld on a GPU", op, (long long)p.in_dim);
        return finish(op, run<kParts>(p, Bf16Weight{static_cast<const Bf16*>(weight), p.in_dim}, groups, stream));
    }
    if (weight_type != CEDAR_FP8_TILES || p.in_dim % Fp8Weight::kBlock != 0)
        return fail(CEDAR_UNSUPPORTED, "%s: weight type %lld, in_dim %lld on a GPU", op, (long long)weight_type, (long long)p.in_dim);
    const Fp8Weight tiles{static_cast<const uint8_t*>(weight), scale, p.in_dim, (p.in_dim + 31) / 32};
    return finish(op, run<kParts>(p, tiles, groups, stream));
}

}  // namespace

bool has_groups() {
    if (!kWideBuilt) return false;
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           major == 9;
}

int dense_product(const char* op, const Dense& d, void* stream) {
    const Product p{d.x, d.y, d.rows, d.in_dim, d.out_dim, d.in_dim, d.out_dim, false};
    return dispatch<1>(op, p, d.weight, d.scale, d.weight_type, 1, stream);
}

int64_t wo_a_workspace(const cedar_wo_a_args&) { return 0; }

int wo_a(const cedar_wo_a_args& a, void* stream) {
    if (a.type != CEDAR_BF16) return fail(CEDAR_UNSUPPORTED, "wo_a: type %lld on a GPU", (long long)a.type);
    const Product p{static_cast<const Bf16*>(a.x), a.y, a.rows, a.in_dim, a.rank, a.groups * a.in_dim, a.groups * a.rank, false};
    return dispatch("wo_a", p, a.weight, a.weight_scale, a.weight_type, a.groups, stream);
}

int64_t mxfp8_linear_workspace(const cedar_mxfp8_linear_args&) { return 0; }

int mxfp8_linear(const cedar_mxfp8_linear_args& a, void* stream) {
    if (a.type != CEDAR_BF16 || a.act_quant || a.norm_weight != nullptr)
        return fail(CEDAR_UNSUPPORTED, "mxfp8_linear: on a GPU bf16 without act_quant and norm");
    const Product p{static_cast<const Bf16*>(a.x), a.y, a.rows, a.in_dim, a.out_dim, a.in_dim, a.out_dim, a.out_type == CEDAR_F32};
    return dispatch("mxfp8_linear", p, a.weight, a.weight_scale, a.weight_type, 1, stream);
}

}  // namespace cedar::cuda
