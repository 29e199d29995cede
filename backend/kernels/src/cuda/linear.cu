// SPDX-License-Identifier: Apache-2.0
// wo_a and mxfp8_linear. Few rows by the portable matrix instruction, which begins sooner (linear_few.cuh; with E4M3 on Hopper
// linear_rows.cuh for wo_a, linear_stream.cuh for dimensions that it divides evenly). More on Hopper, in builds with CEDAR_WIDE_WGMMA,
// by its own (linear_group.cuh) or, where that costs less, in tiles that add in the same order (linear_narrow.cuh of some tens of
// tokens, wide.cuh of more); very many, and all those of wo_a with E4M3, in such tiles with an order of their own, k being whole, but
// for wo_a's of some tens, whose sums have an order of their own
// too; elsewhere, and what the copy engine cannot read, by the portable one (linear_split.cuh). Rounding the rows first and
// normalising their products are launches of their own. Launches of a linear may begin before the one before them has ended: until
// that is awaited they read weights alone, and write nothing.
#include "bodies.h"
#include "linear_few.cuh"
#include "linear_narrow.cuh"
#include "linear_rows.cuh"
#include "linear_stream.cuh"
#include "moe.cuh"
#include "wide.cuh"

#include <type_traits>

namespace cedar::cuda {
namespace {

constexpr int64_t kWideFrom = 640;  // with more rows

constexpr int kRowThreads = 256;

// What MXFP8 leaves of x. A thread has 8 values, 4 threads a group of 32.
__global__ void __launch_bounds__(kRowThreads) round_rows(const Bf16* x, Bf16* out, int64_t vectors) {
    release_launch();  // the product can begin with its weight
    await_launch();
    const int64_t i = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
    if (i / kWarp * kWarp >= vectors) return;
    float v[8];  // lanes behind the end repeat the last vector: a group is never divided
    load_pack<8>(x + (i < vectors ? i : vectors - 1) * 8, v);
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(v[j]));
    const float scale = power_of_two_scale(max_lanes(amax, 4), 1e-4f, float(1.0 / 448.0));
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = decode_e4m3(encode_e4m3(v[j] / scale)) * scale;
    if (i < vectors) store_pack<8>(out + i * 8, v);
}

// RMSNorm of a row, in place; one block a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads) norm_rows(T* y, const float* weight, int64_t dim, float eps) {
    __shared__ float sums[kRowThreads / kWarp];
    release_launch();
    await_launch();
    T* row = y + blockIdx.x * dim;
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < dim; i += kRowThreads) {
        const float value = to_float(row[i]);
        sum += value * value;
    }
    sum = sum_lanes(sum);
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kRowThreads / kWarp; ++w) sum += sums[w];
    const float factor = rsqrtf(sum / float(dim) + eps);
    for (int64_t i = threadIdx.x; i < dim; i += kRowThreads) row[i] = from_float<T>(to_float(row[i]) * factor * weight[i]);
}

template <class Weight>
cudaError_t run(const Product& p, const Weight& weight, int64_t groups, int most_parts, void* stream) {
    if constexpr (kWideBuilt && std::is_same_v<Weight, Fp8Weight>)
        if (groups > 1 && has_groups()) {  // as the dimensions are, for all numbers of tokens of a class
            if (p.tokens <= kFewTokens && fits_rows(p, weight)) return run_rows(p, weight, groups, stream);
            if (p.tokens > kFewTokens && fits_narrow(p, weight, 1, kNarrowGroups))
                return run_narrow<kNarrowGroups, NarrowWay::kDeep>(p, weight, groups, 0, stream);
            if (p.tokens > kFewTokens && fits_tiles<false>(p, weight))
                return run_tile<false>(p, weight, groups, 1, best_tile<false>(p, groups), stream);
        }
    if constexpr (kWideBuilt && std::is_same_v<Weight, Fp8Weight>)
        if (groups == 1 && most_parts > 1 && p.tokens <= kFewTokens && has_groups() && fits_stream(p, weight)) return run_stream(p, weight, stream);
    const int parts = parts_for(p.out_dim, p.in_dim / Weight::kBlock, groups, most_parts);
    if (p.tokens <= kFewTokens) return run_few(p, weight, groups, parts, stream);
    if constexpr (kWideBuilt) {
        if (has_groups() && p.tokens > kWideFrom && fills_wide(p, groups) && fits_wide(p, weight))
            return run_widest(p, weight, groups, stream);
        // with one part, sums are to be those of tiles.cuh
        if (most_parts > 1 && has_groups() && fits_groups(p, weight)) {
            if constexpr (std::is_same_v<Weight, Fp8Weight>) {
                const int parts_of_k = group_parts(p, groups, most_parts);
                const int64_t most = group_cost(p, groups, parts_of_k);
                const WideChoice whole = best_tile<false>(p, groups), divided = best_tile<true>(p, groups);
                if (parts_of_k == 1 && fits_narrow(p, weight, 1, 1) && narrow_cost(p, groups) < std::min(most, whole.cost))
                    return run_narrow<kNarrowGroups, NarrowWay::kRows>(p, weight, groups, 0, stream);
                if (parts_of_k > 1 && fits_narrow(p, weight, parts_of_k, 1))
                    return run_narrow_parts(p, weight, groups, parts_of_k, stream);
                if (parts_of_k == 1 && whole.cost < most && fits_tiles<false>(p, weight))
                    return run_tile<false>(p, weight, groups, 1, whole, stream);
                if (parts_of_k > 1 && divided.cost < most && fits_tiles<true>(p, weight))
                    return run_tile<true>(p, weight, groups, parts_of_k, divided, stream);
            }
            return run_groups(p, weight, groups, most_parts, stream);
        }
    }
    return run_split(p, weight, groups, parts, stream);
}

int dispatch(const char* op, const Product& p, const void* weight, const uint8_t* scale, int64_t weight_type, int64_t groups, void* stream,
             int most_parts = kMostParts) {
    if (weight_type == CEDAR_BF16) {
        if (p.in_dim % Bf16Weight::kBlock != 0) return fail(CEDAR_UNSUPPORTED, "%s: in_dim %lld on a GPU", op, (long long)p.in_dim);
        return finish(op, run(p, Bf16Weight{static_cast<const Bf16*>(weight), p.in_dim}, groups, most_parts, stream));
    }
    if (weight_type != CEDAR_FP8_TILES || p.in_dim % Fp8Weight::kBlock != 0)
        return fail(CEDAR_UNSUPPORTED, "%s: weight type %lld, in_dim %lld on a GPU", op, (long long)weight_type, (long long)p.in_dim);
    if (groups > 1 && p.out_dim % 32 != 0) return fail(CEDAR_UNSUPPORTED, "%s: groups of %lld outputs on a GPU", op, (long long)p.out_dim);
    const Fp8Weight tiles{static_cast<const uint8_t*>(weight), scale, p.in_dim, (p.in_dim + 31) / 32};
    return finish(op, run(p, tiles, groups, most_parts, stream));
}

}  // namespace

cudaError_t round_to_mxfp8(const Bf16* x, Bf16* out, int64_t values, void* stream) {
    const int64_t vectors = values / 8;
    const dim3 grid(unsigned((vectors + kRowThreads - 1) / kRowThreads));
    return launch(round_rows, grid, kRowThreads, 0, 1, true, stream, x, out, vectors);
}

bool has_groups() {
    if (!kWideBuilt) return false;
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           major == 9;
}

int dense_product(const char* op, const Dense& d, void* stream) {
    const Product p{d.x, d.y, d.rows, d.in_dim, d.out_dim, d.in_dim, d.out_dim, false, false};
    return dispatch(op, p, d.weight, d.scale, d.weight_type, 1, stream, 1);
}

int64_t wo_a_workspace(const cedar_wo_a_args&) { return 0; }

int wo_a(const cedar_wo_a_args& a, void* stream) {
    if (a.type != CEDAR_BF16) return fail(CEDAR_UNSUPPORTED, "wo_a: type %lld on a GPU", (long long)a.type);
    const Product p{static_cast<const Bf16*>(a.x), a.y, a.rows, a.in_dim, a.rank, a.groups * a.in_dim, a.groups * a.rank, false, true};
    return dispatch("wo_a", p, a.weight, a.weight_scale, a.weight_type, a.groups, stream);
}

int64_t mxfp8_linear_workspace(const cedar_mxfp8_linear_args& a) {
    return a.act_quant ? CEDAR_COUNTER_BYTES + a.rows * a.in_dim * int64_t(sizeof(Bf16)) : 0;
}

int mxfp8_linear(const cedar_mxfp8_linear_args& a, void* stream) {
    if (a.type != CEDAR_BF16) return fail(CEDAR_UNSUPPORTED, "mxfp8_linear: type %lld on a GPU", (long long)a.type);
    if (a.workspace_bytes < mxfp8_linear_workspace(a))
        return fail(CEDAR_WORKSPACE, "mxfp8_linear: workspace has %lld bytes", (long long)a.workspace_bytes);
    const Bf16* x = static_cast<const Bf16*>(a.x);
    if (a.act_quant) {
        if (a.in_dim % 32 != 0) return fail(CEDAR_UNSUPPORTED, "mxfp8_linear: in_dim %lld on a GPU", (long long)a.in_dim);
        Bf16* rounded = reinterpret_cast<Bf16*>(static_cast<char*>(a.workspace) + CEDAR_COUNTER_BYTES);
        const cudaError_t error = round_to_mxfp8(x, rounded, a.rows * a.in_dim, stream);
        if (error != cudaSuccess) return finish("mxfp8_linear", error);
        x = rounded;
    }
    const bool wide = a.out_type == CEDAR_F32;
    const Product p{x, a.y, a.rows, a.in_dim, a.out_dim, a.in_dim, a.out_dim, wide, true};
    const int status = dispatch("mxfp8_linear", p, a.weight, a.weight_scale, a.weight_type, 1, stream);
    if (status != CEDAR_OK || a.norm_weight == nullptr) return status;
    const auto run = [&](auto* y) {
        using T = std::remove_pointer_t<decltype(y)>;
        return launch(norm_rows<T>, dim3(unsigned(a.rows)), kRowThreads, 0, 1, true, stream, y, a.norm_weight, a.out_dim, float(a.norm_eps));
    };
    return finish("mxfp8_linear", wide ? run(static_cast<float*>(a.y)) : run(static_cast<Bf16*>(a.y)));
}

}  // namespace cedar::cuda
