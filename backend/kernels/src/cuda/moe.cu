// SPDX-License-Identifier: Apache-2.0
// moe_fp4: pairs of token and expert are grouped by expert, and each expert's weights are multiplied with its tokens as they come
// from memory. Launches: plan; first product with swiglu and routing weight; second product; sum over a token's experts. The
// shared expert is part of both products for few rows, and has its own for many.
//
// Rows of weights are the rows of the matrix instruction and tokens its columns. A warp has 16 rows over the whole of k, in
// rising order, so a result's bits depend neither on the other tokens nor on how pairs are divided.
#include <algorithm>

#include "bodies.h"
#include "moe.cuh"
#include "stream.cuh"

namespace cedar::cuda {
namespace {

constexpr int kPlanThreads = 1024, kStages = 4, kProductWarps = 8;
constexpr int kRingBytes = kStages * stream_stage_bytes<Fp4Codes>();

// ---- plan ----

// Inclusive sums over the block.
__device__ int sum_to_here(int value, int* totals) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int step = 1; step < kWarp; step *= 2) {
        const int before = __shfl_up_sync(kAllLanes, value, step);
        if (lane >= step) value += before;
    }
    if (lane == kWarp - 1) totals[warp] = value;
    __syncthreads();
    if (warp == 0) {
        int total = totals[lane];
        for (int step = 1; step < kWarp; step *= 2) {
            const int before = __shfl_up_sync(kAllLanes, total, step);
            if (lane >= step) total += before;
        }
        totals[lane] = total;
    }
    __syncthreads();
    const int result = value + (warp > 0 ? totals[warp - 1] : 0);
    __syncthreads();
    return result;
}

// One block. Pairs whose expert does not exist belong to no group.
__global__ void __launch_bounds__(kPlanThreads) plan_groups(const int64_t* ids, int pairs, int experts, int most_tokens, const Groups groups) {
    __shared__ int counts[kPlanThreads], totals[kWarp];
    const int e = threadIdx.x;
    counts[e] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads)
        if (ids[pair] >= 0 && ids[pair] < experts) atomicAdd(&counts[ids[pair]], 1);
    __syncthreads();
    const int count = counts[e], blocks = (count + most_tokens - 1) / most_tokens;
    const int start = sum_to_here(count, totals) - count, last_block = sum_to_here(blocks, totals);
    // an expert's tokens are spread evenly over its blocks, in eights
    const int each = blocks == 0 ? 0 : ((count + blocks - 1) / blocks + 7) / 8 * 8;
    for (int b = 0; b < blocks; ++b)
        groups.blocks[last_block - blocks + b] = make_int4(e, start + b * each, max(0, min(each, count - b * each)), 0);
    if (e == kPlanThreads - 1) *groups.count = last_block;
    counts[e] = start;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads)
        if (ids[pair] >= 0 && ids[pair] < experts) groups.pairs[atomicAdd(&counts[ids[pair]], 1)] = pair;
}

// ---- products for few tokens per expert ----

// The shared expert's row-major weight as tiles: of rows as they come, or of 8 of w1 and the 8 of w3 beside them.
template <class Weight, bool kFirst>
struct SharedRows : RowMajor<Weight> {
    int64_t inner;
    __device__ int64_t row(int64_t tile, int half, int lane) const {
        return kFirst ? half * inner + tile * 8 + lane / 4 : tile * 16 + half * 8 + lane / 4;
    }
    __device__ const uint8_t* codes_of(int64_t tile, int half, int lane) const { return this->row_codes(row(tile, half, lane), lane); }
    __device__ const uint8_t* scales_of(int64_t tile, int half, int lane) const { return this->row_scales(row(tile, half, lane), lane); }
};

// Block (i, b): tiles [8 i, 8 i + 8), one per warp: for the first shared_blocks b of the shared expert, times 8 NT rows each;
// then of an expert, times the tokens of block b - shared_blocks of the plan.
template <int NT, bool kFirst, class Shared>
__global__ void __launch_bounds__(kProductWarps* kWarp) stream_experts(const ExpertProduct p, const Groups groups, const ExpertProduct shared,
                                                                       const Shared shared_weight, int experts, int rows, int shared_blocks) {
    extern __shared__ __align__(16) unsigned char memory[];
    const bool is_shared = int(blockIdx.y) < shared_blocks;
    const int number = int(blockIdx.y) - shared_blocks;
    if (!is_shared && groups.pairs != nullptr && number >= *groups.count) return;
    const int4 work = is_shared ? make_int4(0, int(blockIdx.y) * NT * 8, min(NT * 8, rows - int(blockIdx.y) * NT * 8), 0)
                                 : groups.block(number);
    const int lane = threadIdx.x % kWarp, group = lane / 4, quad = lane % 4, first = work.y, count = work.z;
    const int tile = int(blockIdx.x) * kProductWarps + threadIdx.x / kWarp;
    if (tile >= p.tiles || count == 0 || work.x < 0 || work.x >= experts) return;
    unsigned char* ring = memory + threadIdx.x / kWarp * kRingBytes;
    const auto multiply = [&](const ExpertProduct& q, const auto& weight, int blocks) {
        const Bf16* tokens[NT];  // columns that have no token repeat the last one
#pragma unroll
        for (int n = 0; n < NT; ++n) tokens[n] = q.x + q.row_of(groups, first + min(n * 8 + group, count - 1)) * q.stride;
        float c[NT][4] = {};
        stream_tile<NT, kStages, 1>(weight, tile, 0, blocks, tokens, ring, c);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = n * 8 + quad * 2 + i;
                if (column < count) store_result<kFirst>(q, groups, first + column, tile, group, c[n][i], c[n][2 + i]);
            }
    };
    if (is_shared) {
        multiply(shared, shared_weight, int(p.depth * kFp4Depth / Shared::kBlock));
    } else {
        const int64_t before = int64_t(work.x) * p.tiles * p.depth;
        multiply(p, Fp4Codes{p.codes + before * kFp4Codes, p.scales + before * kFp4Scales, p.tiles, p.depth}, p.depth);
    }
}

// ---- what is left ----

// x, rounded to MXFP8 or not, in its order or in that for warp groups. A thread has 8 values, 4 threads a group of 32.
__global__ void prepare_rows(const Bf16* x, Bf16* out, bool quantise, bool ordered, int64_t vectors) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i / kWarp * kWarp >= vectors) return;  // lanes behind the end repeat the last vector: a group is never divided
    float v[8];
    load_pack<8>(x + (i < vectors ? i : vectors - 1) * 8, v);
    if (quantise) {
        float amax = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(v[j]));
        const float scale = power_of_two_scale(max_lanes(amax, 4), 1e-4f, float(1.0 / 448.0));
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = decode_e4m3(encode_e4m3(v[j] / scale)) * scale;
    }
    if (i >= vectors) return;
    if (!ordered) return store_pack<8>(out + i * 8, v);
#pragma unroll
    for (int j = 0; j < 8; j += 2) store_pack<2>(out + i / 4 * 32 + order_for_groups(int(i % 4), j), {v[j], v[j + 1]});
}

// The shared expert between its products. hidden [T, 2 inner] -> out [T, inner].
__global__ void gate_rows(const Bf16* hidden, Bf16* out, int64_t inner, float limit, int64_t vectors) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    const int64_t row = i * 8 / inner, column = i * 8 % inner;
    float g[8], u[8];
    load_pack<8>(hidden + row * 2 * inner + column, g);
    load_pack<8>(hidden + row * 2 * inner + inner + column, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] = swiglu(g[j], u[j], limit);
    store_pack<8>(out + i * 8, g);
}

// A token's experts in the order of its ids, then the shared expert.
__global__ void sum_experts(const Bf16* parts, const int64_t* ids, int experts, int top_k, const Bf16* shared, Bf16* out, int64_t hidden,
                            int64_t vectors) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    const int64_t row = i * 8 / hidden, column = i * 8 % hidden;
    float total[8] = {}, part[8];
    for (int k = 0; k < top_k; ++k) {
        const int64_t pair = row * top_k + k;
        if (ids[pair] < 0 || ids[pair] >= experts) continue;
        load_pack<8>(parts + pair * hidden + column, part);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] += part[j];
    }
    load_pack<8>(shared + row * hidden + column, part);
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += part[j];
    store_pack<8>(out + i * 8, total);
}

constexpr int kRowThreads = 256;

unsigned blocks_for(int64_t vectors) { return unsigned((vectors + kRowThreads - 1) / kRowThreads); }

cudaError_t prepare(const Bf16* x, Bf16* out, bool quantise, bool ordered, int64_t values, void* stream) {
    return launch(prepare_rows, dim3(blocks_for(values / 8)), kRowThreads, 0, 1, stream, x, out, quantise, ordered, values / 8);
}

// In place.
cudaError_t quantise(Bf16* x, int64_t values, void* stream) { return prepare(x, x, true, false, values, stream); }

// Tokens of a block of the plan, for so many rows of a step.
int most_tokens(int64_t rows, bool wide) { return rows <= 128 ? 8 : rows <= kStreamRows ? 16 : wide ? kGroupTokens : kTileTokens; }

bool is_wide(int64_t rows) { return rows > kStreamRows && has_groups(); }

// Rows that the shared expert takes beside the routed ones, streamed; more are a product of their own.
bool streams_shared(int64_t rows) { return rows <= kMostTokens; }

struct Workspace {
    explicit Workspace(const cedar_moe_fp4_args& a) : base(static_cast<uint8_t*>(a.workspace)) {
        const int64_t pairs = a.rows * a.top_k, each = most_tokens(a.rows, false);
        most_blocks = std::min(pairs, std::min(a.experts, pairs) + pairs / each);
        groups.count = take<int>(1);
        groups.blocks = take<int4>(most_blocks);
        groups.pairs = a.rows > 1 ? take<int>(pairs) : nullptr;
        groups.ids = a.ids;
        x = a.act_quant ? take<Bf16>(a.rows * a.hidden) : nullptr;
        inner = take<Bf16>((pairs + a.rows) * a.inner);
        shared_inner = inner + pairs * a.inner;
        parts = take<Bf16>(pairs * a.hidden);
        ordered = a.rows > kStreamRows ? take<Bf16>(a.rows * a.hidden) : nullptr;
        shared_hidden = streams_shared(a.rows) ? nullptr : take<Bf16>(a.rows * 2 * a.inner);
        shared = take<Bf16>(a.rows * a.hidden);
    }
    template <class T>
    T* take(int64_t count) {
        T* const p = reinterpret_cast<T*>(base + used);
        used += (count * int64_t(sizeof(T)) + 255) / 256 * 256;
        return p;
    }
    uint8_t* base;
    int64_t used = CEDAR_COUNTER_BYTES, most_blocks;
    Groups groups;
    Bf16 *x, *ordered, *inner, *parts, *shared_hidden, *shared_inner, *shared;
};

// The products [T, inner] -> out of the shared expert, and the launch that multiplies the routed ones, with it or without.
template <int NT, bool kFirst, class Weight>
cudaError_t stream(const cedar_moe_fp4_args& a, const ExpertProduct& p, const Workspace& w, const Bf16* shared_x, const Weight& weight, void* stream) {
    const int shared_blocks = streams_shared(a.rows) ? int((a.rows + NT * 8 - 1) / (NT * 8)) : 0;
    const dim3 grid(unsigned((p.tiles + kProductWarps - 1) / kProductWarps), unsigned(w.most_blocks + shared_blocks));
    ExpertProduct shared = p;
    shared.x = shared_x;
    shared.top_k = 0;
    shared.weights = nullptr;
    shared.out = kFirst ? w.shared_inner : w.shared;
    shared.direct = true;
    const SharedRows<Weight, kFirst> rows{{weight, 0, 0}, a.inner};
    return launch(stream_experts<NT, kFirst, SharedRows<Weight, kFirst>>, grid, kProductWarps * kWarp,
                  size_t(kProductWarps) * kRingBytes, 1, stream, p, w.groups, shared, rows, int(a.experts), int(a.rows), shared_blocks);
}

template <bool kFirst>
cudaError_t multiply(const cedar_moe_fp4_args& a, const ExpertProduct& p, const Workspace& w, const Bf16* shared_x, void* to) {
    if (a.rows > kStreamRows) return multiply_tiles<kFirst>(p, w.groups, w.most_blocks, is_wide(a.rows), to);
    const void* weight = kFirst ? a.shared_w13 : a.shared_w2;
    const int64_t in_dim = kFirst ? a.hidden : a.inner;
    const bool few = most_tokens(a.rows, false) == 8;
    if (a.shared_type == CEDAR_BF16) {
        const Bf16Weight dense{static_cast<const Bf16*>(weight), in_dim};
        return few ? stream<1, kFirst>(a, p, w, shared_x, dense, to) : stream<2, kFirst>(a, p, w, shared_x, dense, to);
    }
    const Fp8Weight dense{static_cast<const uint8_t*>(weight), kFirst ? a.shared_w13_scale : a.shared_w2_scale, in_dim, (in_dim + 31) / 32};
    return few ? stream<1, kFirst>(a, p, w, shared_x, dense, to) : stream<2, kFirst>(a, p, w, shared_x, dense, to);
}

// The shared expert of many rows: its two products, the same sums as streamed.
int shared_expert(const cedar_moe_fp4_args& a, const Workspace& w, const Bf16* x, void* stream) {
    const Dense first{x, a.rows, a.hidden, 2 * a.inner, a.shared_w13, a.shared_w13_scale, a.shared_type, w.shared_hidden};
    if (const int status = dense_product("moe_fp4", first, stream)) return status;
    const int64_t values = a.rows * a.inner;
    cudaError_t error = launch(gate_rows, dim3(blocks_for(values / 8)), kRowThreads, 0, 1, stream, w.shared_hidden, w.shared_inner, a.inner,
                               float(a.limit), values / 8);
    if (error == cudaSuccess && a.act_quant) error = quantise(w.shared_inner, values, stream);
    if (error != cudaSuccess) return finish("moe_fp4", error);
    return dense_product("moe_fp4", {w.shared_inner, a.rows, a.inner, a.hidden, a.shared_w2, a.shared_w2_scale, a.shared_type, w.shared}, stream);
}

// The plan and both products of all experts that are streamed or tiled.
cudaError_t routed_experts(const cedar_moe_fp4_args& a, const Workspace& w, const Bf16* x, void* stream) {
    const int pairs = int(a.rows * a.top_k);
    const bool wide = is_wide(a.rows);
    cudaError_t error = cudaSuccess;
    if (a.rows > 1) error = launch(plan_groups, dim3(1), kPlanThreads, 0, 1, stream, a.ids, pairs, int(a.experts), most_tokens(a.rows, wide),
                                w.groups);
    if (error == cudaSuccess && wide) error = prepare(x, w.ordered, false, true, a.rows * a.hidden, stream);
    if (error != cudaSuccess) return error;
    const ExpertProduct first = {static_cast<const uint8_t*>(a.w13), a.w13_scale, wide ? w.ordered : x, int(2 * a.inner / kFp4Rows), int(a.hidden / kFp4Depth), a.hidden,
                                 int(a.top_k), float(a.limit), a.weights, w.inner, a.inner, false, wide};
    error = multiply<true>(a, first, w, x, stream);
    // one run of values where the shared expert's inner rows lie behind the routed ones
    const int64_t inner_rows = pairs + (streams_shared(a.rows) ? a.rows : 0);
    if (error == cudaSuccess && a.act_quant) error = quantise(w.inner, inner_rows * a.inner, stream);
    if (error != cudaSuccess) return error;
    const ExpertProduct second = {static_cast<const uint8_t*>(a.w2), a.w2_scale, w.inner, int(a.hidden / kFp4Rows), int(a.inner / kFp4Depth),
                                  a.inner, 0, 0.0f, nullptr, w.parts, a.hidden, false, false};
    return multiply<false>(a, second, w, w.shared_inner, stream);
}

}  // namespace

int64_t moe_fp4_workspace(const cedar_moe_fp4_args& a) { return Workspace(a).used; }

int moe_fp4(const cedar_moe_fp4_args& a, void* stream) {
    if (a.type != CEDAR_BF16 || a.weight_type != CEDAR_MXFP4 || a.shared_type == CEDAR_F32 || a.hidden % kFp4Depth != 0 ||
        a.inner % kFp4Depth != 0 || a.experts > kPlanThreads)
        return fail(CEDAR_UNSUPPORTED, "moe_fp4: on a GPU bf16 with packed E2M1 experts, at most %d, dimensions in multiples of %d", kPlanThreads,
                    kFp4Depth);
    const Workspace w(a);
    if (a.workspace_bytes < w.used) return fail(CEDAR_WORKSPACE, "moe_fp4: workspace has %lld bytes", (long long)a.workspace_bytes);
    const Bf16* x = static_cast<const Bf16*>(a.x);
    cudaError_t error = cudaSuccess;
    if (a.act_quant) {
        error = prepare(x, w.x, true, false, a.rows * a.hidden, stream);
        x = w.x;
    }
    if (error == cudaSuccess) error = routed_experts(a, w, x, stream);
    if (error != cudaSuccess) return finish("moe_fp4", error);
    if (!streams_shared(a.rows))
        if (const int status = shared_expert(a, w, x, stream)) return status;
    const int64_t vectors = a.rows * a.hidden / 8;
    return finish("moe_fp4", launch(sum_experts, dim3(blocks_for(vectors)), kRowThreads, 0, 1, stream, w.parts, a.ids, int(a.experts), int(a.top_k),
                                    w.shared, static_cast<Bf16*>(a.out), a.hidden, vectors));
}

}  // namespace cedar::cuda
