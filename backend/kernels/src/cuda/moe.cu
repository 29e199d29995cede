// SPDX-License-Identifier: Apache-2.0
// moe_fp4: pairs of token and expert are grouped by expert, and each expert's weights are multiplied with its tokens as they come
// from memory. Launches: plan; first product with swiglu and routing weight; second product; sum over a token's experts. Streamed
// (moe_stream.cuh), both products begin while the launch before ends, and the shared expert is part of them. Of very many rows they
// are wide (moe_wide.cuh) or, where there is no such instruction, tiled (moe_tiles.cu), and the shared expert has its own.
//
// Rows of weights are the rows of the matrix instruction and tokens its columns. A warp has 16 rows over the whole of k, in
// rising order, so a result's bits depend neither on the other tokens nor on how pairs are divided.
#include <algorithm>

#include "bodies.h"
#include "moe_stream.cuh"

namespace cedar::cuda {
namespace {

constexpr int kPlanThreads = 1024;

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

// body(pair, expert) for the pairs of the block's threads whose expert exists; several ids are on their way together.
template <class Body>
__device__ void for_pairs(const int64_t* ids, int pairs, int experts, const Body& body) {
    constexpr int kTogether = 8;
    for (int first = threadIdx.x; first < pairs; first += kTogether * kPlanThreads) {
        int64_t id[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) id[i] = first + i * kPlanThreads < pairs ? __ldcg(ids + first + i * kPlanThreads) : -1;
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            if (id[i] >= 0 && id[i] < experts) body(first + i * kPlanThreads, int(id[i]));
    }
}

// One block. Pairs whose expert does not exist belong to no group.
__global__ void __launch_bounds__(kPlanThreads) plan_groups(const int64_t* ids, int pairs, int experts, int most_tokens, const Groups groups) {
    __shared__ int counts[kPlanThreads], totals[kWarp];
    const int e = threadIdx.x;
    counts[e] = 0;
    await_launch();
    release_launch();  // not before: what the first product's launch reads of tokens before its own wait is there
    if (e < 2) groups.taken[e] = 0;
    __syncthreads();
    for_pairs(ids, pairs, experts, [&](int, int expert) { atomicAdd(&counts[expert], 1); });
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
    for_pairs(ids, pairs, experts, [&](int pair, int expert) { groups.pairs[atomicAdd(&counts[expert], 1)] = pair; });
}

// ---- what is left ----

// The shared expert between its products. hidden [T, 2 inner] -> out [T, inner].
__global__ void gate_rows(const Bf16* hidden, Bf16* out, int64_t inner, float limit, int64_t vectors) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    release_launch();
    await_launch();
    if (i >= vectors) return;
    const int64_t row = i * 8 / inner, column = i * 8 % inner;
    float g[8], u[8];
    load_pack<8>(hidden + row * 2 * inner + column, g);
    load_pack<8>(hidden + row * 2 * inner + inner + column, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] = swiglu(g[j], u[j], limit);
    store_pack<8>(out + i * 8, g);
}

constexpr int kRowThreads = 256, kSummedTogether = 6;  // experts whose results are on their way together, as registers for two blocks allow

// A token's experts in the order of its ids, then the shared expert.
__global__ void __launch_bounds__(kRowThreads, 2) sum_experts(const Bf16* parts, const int64_t* ids, int experts, int top_k, const Bf16* shared,
                                                              Bf16* out, int64_t hidden, int64_t vectors) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    release_launch();
    await_launch();
    if (i >= vectors) return;
    const int64_t row = i * 8 / hidden, column = i * 8 % hidden;
    float total[8] = {}, last[8];
    load_pack<8>(shared + row * hidden + column, last);
#pragma unroll 1
    for (int first = 0; first < top_k; first += kSummedTogether) {  // loads that wait for nothing, not even for the ids
        int64_t id[kSummedTogether];
        Pack<Bf16, 8> part[kSummedTogether];
#pragma unroll
        for (int k = 0; k < kSummedTogether; ++k) {
            const int64_t pair = row * top_k + min(first + k, top_k - 1);
            id[k] = first + k < top_k ? ids[pair] : -1;
            part[k] = *reinterpret_cast<const Pack<Bf16, 8>*>(parts + pair * hidden + column);
        }
#pragma unroll
        for (int k = 0; k < kSummedTogether; ++k)
#pragma unroll
            for (int j = 0; j < 8; ++j) total[j] += id[k] >= 0 && id[k] < experts ? to_float(part[k].v[j]) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += last[j];
    store_pack<8>(out + i * 8, total);
}

unsigned blocks_for(int64_t vectors) { return unsigned((vectors + kRowThreads - 1) / kRowThreads); }

bool is_streamed(int64_t rows) { return rows <= kStreamRows; }
bool is_wide(int64_t rows) { return !is_streamed(rows) && has_groups(); }

// Columns of the matrix instruction, in eights, of a streamed unit.
int stream_columns(int64_t rows) { return rows <= 8 ? 1 : rows <= 128 ? 2 : 4; }

// Tokens of a block of the plan, for so many rows of a step.
int most_tokens(int64_t rows) {
    if (is_streamed(rows)) return 8 * stream_columns(rows);
    return is_wide(rows) ? kGroupTokens : kTileTokens;
}

struct Workspace {
    explicit Workspace(const cedar_moe_fp4_args& a) : base(static_cast<uint8_t*>(a.workspace)) {
        const int64_t pairs = a.rows * a.top_k, each = std::min(most_tokens(a.rows), kTileTokens);
        most_blocks = std::min(pairs, std::min(a.experts, pairs) + pairs / each);
        groups.count = take<int>(3);
        groups.taken = groups.count + 1;
        groups.blocks = take<int4>(most_blocks);
        groups.pairs = a.rows > 1 ? take<int>(pairs) : nullptr;
        groups.ids = a.ids;
        x = a.act_quant ? take<Bf16>(a.rows * a.hidden) : nullptr;
        inner = take<Bf16>((pairs + a.rows) * a.inner);
        shared_inner = inner + pairs * a.inner;
        parts = take<Bf16>(pairs * a.hidden);
        shared_hidden = is_streamed(a.rows) ? nullptr : take<Bf16>(a.rows * 2 * a.inner);
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
    // parts: what the second product writes, and before that, for the wide one, the first's tokens
    Bf16 *x, *inner, *parts, *shared_hidden, *shared_inner, *shared;
};

// The launch of a product of the experts that are streamed, the shared one among them.
template <int NC, bool kFirst>
cudaError_t stream_product(const cedar_moe_fp4_args& a, const ExpertProduct& p, const Workspace& w, const ExpertProduct& q,
                           const SharedExpert& shared, void* stream) {
    int count = 0;
    const cudaError_t error = multiprocessors(&count);
    if (error != cudaSuccess) return error;
    StreamMaps maps;
    if (!describe_stream<NC>(maps, p, a.experts, shared)) return cudaErrorNotSupported;
    const int units = (shared.rows + NC * 8 - 1) / (NC * 8) * (p.tiles / kSharedTiles<NC>);
    return with_shared_rows<kFirst>(shared, [&](const auto& rows) {
        constexpr auto kernel = stream_experts<NC, kFirst, std::decay_t<decltype(rows)>>;
        const dim3 grid(unsigned(count * kStreamBlocks<NC>));
        const size_t bytes = size_t(kRingStages<NC>) * kRingStageBytes<NC>;
        return launch(kernel, grid, kStreamThreads, bytes, 1, true, stream, p, w.groups, maps, q, rows, int(a.experts), shared.rows,
                      units, int(a.top_k));
    });
}

template <bool kFirst>
cudaError_t multiply(const cedar_moe_fp4_args& a, const ExpertProduct& p, const Workspace& w, const Bf16* shared_x, void* stream) {
    if (is_wide(a.rows)) return multiply_wide<kFirst>(p, w.groups, a.experts, stream);
    if (!is_streamed(a.rows)) return multiply_tiles<kFirst>(p, w.groups, w.most_blocks, stream);
    ExpertProduct q = p;
    q.x = shared_x;
    q.top_k = 0;
    q.weights = nullptr;
    q.out = kFirst ? w.shared_inner : w.shared;
    const SharedExpert shared = {kFirst ? a.shared_w13 : a.shared_w2, kFirst ? a.shared_w13_scale : a.shared_w2_scale, a.shared_type,
                                 kFirst ? a.hidden : a.inner, kFirst ? 2 * a.inner : a.hidden, int(a.rows)};
    switch (stream_columns(a.rows)) {
        case 1: return stream_product<1, kFirst>(a, p, w, q, shared, stream);
        case 2: return stream_product<2, kFirst>(a, p, w, q, shared, stream);
        default: return stream_product<4, kFirst>(a, p, w, q, shared, stream);
    }
}

// The shared expert of very many rows: its two products.
int shared_expert(const cedar_moe_fp4_args& a, const Workspace& w, const Bf16* x, void* stream) {
    const Dense first{x, a.rows, a.hidden, 2 * a.inner, a.shared_w13, a.shared_w13_scale, a.shared_type, w.shared_hidden};
    if (const int status = dense_product("moe_fp4", first, stream)) return status;
    const int64_t values = a.rows * a.inner;
    cudaError_t error = launch(gate_rows, dim3(blocks_for(values / 8)), kRowThreads, 0, 1, true, stream, w.shared_hidden, w.shared_inner, a.inner,
                               float(a.limit), values / 8);
    if (error == cudaSuccess && a.act_quant) error = round_to_mxfp8(w.shared_inner, w.shared_inner, values, stream);
    if (error != cudaSuccess) return finish("moe_fp4", error);
    const Dense second{w.shared_inner, a.rows, a.inner, a.hidden, a.shared_w2, a.shared_w2_scale, a.shared_type, w.shared};
    return dense_product("moe_fp4", second, stream);
}

// The plan and both products of the routed experts, and streamed also of the shared one.
cudaError_t routed_experts(const cedar_moe_fp4_args& a, const Workspace& w, const Bf16* x, void* stream) {
    const int pairs = int(a.rows * a.top_k);
    const bool wide = is_wide(a.rows);
    cudaError_t error = cudaSuccess;
    if (a.rows > 1)
        error = launch(plan_groups, dim3(1), kPlanThreads, 0, 1, true, stream, a.ids, pairs, int(a.experts), most_tokens(a.rows), w.groups);
    if (error == cudaSuccess && wide) error = group_for_wide(x, w.parts, w.groups, w.most_blocks, int(a.top_k), a.hidden, stream);
    if (error != cudaSuccess) return error;
    const ExpertProduct first = {static_cast<const uint8_t*>(a.w13), a.w13_scale, wide ? w.parts : x, int(2 * a.inner / kFp4Rows),
                                 int(a.hidden / kFp4Depth), a.hidden, int(a.top_k), float(a.limit), a.weights, w.inner, a.inner};
    error = multiply<true>(a, first, w, x, stream);
    // one run of values where the shared expert's inner rows lie behind the routed ones
    const int64_t inner_rows = pairs + (is_streamed(a.rows) ? a.rows : 0);
    if (error == cudaSuccess && a.act_quant) error = round_to_mxfp8(w.inner, w.inner, inner_rows * a.inner, stream);
    if (error != cudaSuccess) return error;
    const ExpertProduct second = {static_cast<const uint8_t*>(a.w2), a.w2_scale, w.inner, int(a.hidden / kFp4Rows), int(a.inner / kFp4Depth),
                                  a.inner, 0, 0.0f, nullptr, w.parts, a.hidden};
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
        error = round_to_mxfp8(x, w.x, a.rows * a.hidden, stream);
        x = w.x;
    }
    if (error == cudaSuccess) error = routed_experts(a, w, x, stream);
    if (error != cudaSuccess) return finish("moe_fp4", error);
    if (!is_streamed(a.rows))
        if (const int status = shared_expert(a, w, x, stream)) return status;
    const int64_t vectors = a.rows * a.hidden / 8;
    const dim3 grid(blocks_for(vectors));
    Bf16* const out = static_cast<Bf16*>(a.out);
    return finish("moe_fp4", launch(sum_experts, grid, kRowThreads, 0, 1, true, stream, w.parts, a.ids, int(a.experts), int(a.top_k),
                                    w.shared, out, a.hidden, vectors));
}

}  // namespace cedar::cuda
