// SPDX-License-Identifier: Apache-2.0
// wo_a and mxfp8_linear for at most 64 rows.
#include "bodies.h"
#include "skinny.cuh"

namespace cedar::cuda {
namespace {

constexpr int kRowTiles = 2, kRows = kRowTiles * 16 * kRowWarps;  // 64 outputs a block

struct Product {
    const Bf16* x;
    void* y;
    int64_t tokens, in_dim, out_dim;   // of one group
    int64_t x_stride, y_stride;        // between tokens
    bool wide;                         // y is float32
};

// Block (i, g): outputs [64 i, 64 i + 64) of group g.
template <int NT, class Weight>
__global__ void __launch_bounds__(kSkinnyThreads) product(const Product p, const Weight weight) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int chunk = skinny_chunk<NT>(p.in_dim);
    Bf16* staged = reinterpret_cast<Bf16*>(memory);
    float* partials = reinterpret_cast<float*>(memory + size_t(NT) * 8 * (chunk + kTokenPadding) * sizeof(Bf16));
    const int64_t group = blockIdx.y, row = int64_t(blockIdx.x) * kRows, base = group * p.out_dim;
    skinny_block<kRowTiles, NT>(weight, base + row, base + p.out_dim, p.x + group * p.in_dim, p.x_stride, int(p.tokens), 0, int(p.in_dim),
                                chunk, staged, partials);
    for (int i = threadIdx.x; i < kRows * int(p.tokens); i += kSkinnyThreads) {
        const int n = i % kRows, token = i / kRows;
        if (row + n >= p.out_dim) continue;
        const float value = skinny_sum<kRowTiles, NT>(partials, n, token);
        const int64_t at = token * p.y_stride + base + row + n;
        if (p.wide)
            static_cast<float*>(p.y)[at] = value;
        else
            static_cast<Bf16*>(p.y)[at] = from_float<Bf16>(value);
    }
}

template <class Weight>
cudaError_t run(const Product& p, const Weight& weight, int64_t groups, void* stream) {
    const dim3 grid(unsigned((p.out_dim + kRows - 1) / kRows), unsigned(groups));
    const auto with = [&](auto kernel, size_t shared) { return launch(kernel, grid, kSkinnyThreads, shared, 1, stream, p, weight); };
    if (p.tokens <= 8) return with(product<1, Weight>, skinny_shared<kRowTiles, 1>(p.in_dim));
    if (p.tokens <= 16) return with(product<2, Weight>, skinny_shared<kRowTiles, 2>(p.in_dim));
    if (p.tokens <= 32) return with(product<4, Weight>, skinny_shared<kRowTiles, 4>(p.in_dim));
    return with(product<8, Weight>, skinny_shared<kRowTiles, 8>(p.in_dim));
}

int dispatch(const char* op, const Product& p, const void* weight, const uint8_t* scale, int64_t weight_type, int64_t groups, void* stream) {
    if (weight_type == CEDAR_BF16) {
        if (p.in_dim % Bf16Weight::kBlock != 0) return fail(CEDAR_UNSUPPORTED, "%s: in_dim %lld on a GPU", op, (long long)p.in_dim);
        return finish(op, run(p, Bf16Weight{static_cast<const Bf16*>(weight), p.in_dim}, groups, stream));
    }
    if (weight_type != CEDAR_FP8_TILES || p.in_dim % Fp8Weight::kBlock != 0)
        return fail(CEDAR_UNSUPPORTED, "%s: weight type %lld, in_dim %lld on a GPU", op, (long long)weight_type, (long long)p.in_dim);
    const Fp8Weight tiles{static_cast<const uint8_t*>(weight), scale, p.in_dim, (p.in_dim + 31) / 32};
    return finish(op, run(p, tiles, groups, stream));
}

int too_many(const char* op, int64_t rows) {
    return fail(CEDAR_UNSUPPORTED, "%s: %lld rows on a GPU, at most %d", op, (long long)rows, kMostTokens);
}

}  // namespace

int64_t wo_a_workspace(const cedar_wo_a_args&) { return 0; }

int wo_a(const cedar_wo_a_args& a, void* stream) {
    if (a.type != CEDAR_BF16) return fail(CEDAR_UNSUPPORTED, "wo_a: type %lld on a GPU", (long long)a.type);
    if (a.rows > kMostTokens) return too_many("wo_a", a.rows);
    const Product p{static_cast<const Bf16*>(a.x), a.y, a.rows, a.in_dim, a.rank, a.groups * a.in_dim, a.groups * a.rank, false};
    return dispatch("wo_a", p, a.weight, a.weight_scale, a.weight_type, a.groups, stream);
}

int64_t mxfp8_linear_workspace(const cedar_mxfp8_linear_args&) { return 0; }

int mxfp8_linear(const cedar_mxfp8_linear_args& a, void* stream) {
    if (a.type != CEDAR_BF16 || a.act_quant || a.norm_weight != nullptr)
        return fail(CEDAR_UNSUPPORTED, "mxfp8_linear: on a GPU bf16 without act_quant and norm");
    if (a.rows > kMostTokens) return too_many("mxfp8_linear", a.rows);
    const Product p{static_cast<const Bf16*>(a.x), a.y, a.rows, a.in_dim, a.out_dim, a.in_dim, a.out_dim, a.out_type == CEDAR_F32};
    return dispatch("mxfp8_linear", p, a.weight, a.weight_scale, a.weight_type, 1, stream);
}

}  // namespace cedar::cuda
