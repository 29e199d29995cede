// SPDX-License-Identifier: Apache-2.0
// window_store and compress_store: latency-bound, one launch at decode.
#include "bodies.h"
#include "records.cuh"

namespace cedar::cuda {
namespace {

constexpr int kRowsPerBlock = 4;  // one warp each

bool matches_type(int64_t record, int64_t type) {
    return record > CEDAR_RECORD_BF16 || record == (type == CEDAR_F32 ? CEDAR_RECORD_F32 : CEDAR_RECORD_BF16);
}

int64_t bytes_of(int64_t record, int64_t dim) {
    switch (record) {
        case CEDAR_RECORD_F32: return dim * 4;
        case CEDAR_RECORD_BF16: return dim * 2;
        case CEDAR_RECORD_FP8: return dim + dim / kMxGroup;
        default: return dim / 2 + dim / kNvfp4Group;
    }
}

// Warps [0, rows) encode; with history, the warps behind them copy ring rows, which the second kernel overwrites.
template <class T, int E>
__global__ void window_encode(const cedar_window_store_args a, bool into_ring) {
    const int lane = threadIdx.x % kWarp;
    const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
    if (row >= a.rows) {
        const int64_t copied = row - a.rows;
        if (copied >= a.history_rows) return;
        const int64_t size = a.record == CEDAR_RECORD_FP8 ? kWarp * E + E : kWarp * E * int64_t(sizeof(T));
        const uint8_t* from = static_cast<const uint8_t*>(a.ring) + a.history[copied] * size;
        uint8_t* to = static_cast<uint8_t*>(a.table) + copied * size;
        for (int64_t i = lane; i < size; i += kWarp) to[i] = from[i];
        return;
    }
    float x[E];
    load_pack(static_cast<const T*>(a.kv) + row * kWarp * E + lane * E, x);
    norm_lanes<T>(x, a.norm_weight, float(a.norm_eps), lane);
    rotate_lanes<T>(x, a.cos + row * a.pairs, a.sin + row * a.pairs, int(a.pairs), lane);
    encode_record<T>(x, a.record, a.table, a.history_rows + row, lane);
    if (into_ring) encode_record<T>(x, a.record, a.ring, a.store_to[row], lane);
}

__global__ void window_keep(const cedar_window_store_args a, int64_t bytes) {
    const int lane = threadIdx.x % kWarp;
    const int64_t i = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
    if (i >= a.stores) return;
    const int64_t from = a.history_rows + (a.store_from == nullptr ? i : a.store_from[i]);
    const uint8_t* source = static_cast<const uint8_t*>(a.table) + from * bytes;
    uint8_t* target = static_cast<uint8_t*>(a.ring) + a.store_to[i] * bytes;
    for (int64_t n = lane; n < bytes; n += kWarp) target[n] = source[n];
}

unsigned blocks_for(int64_t warps) { return unsigned((warps + kRowsPerBlock - 1) / kRowsPerBlock); }

template <class T, int E>
cudaError_t launch_window(const cedar_window_store_args& a, void* stream) {
    const bool into_ring = a.history_rows == 0 && a.store_from == nullptr && a.stores == a.rows;
    const cudaError_t error = launch(window_encode<T, E>, blocks_for(a.rows + a.history_rows), kRowsPerBlock * kWarp, 0, 1, stream, a, into_ring);
    if (error != cudaSuccess || into_ring || a.stores == 0) return error;
    return launch(window_keep, blocks_for(a.stores), kRowsPerBlock * kWarp, 0, 1, stream, a, bytes_of(a.record, a.dim));
}

}  // namespace

int64_t window_store_workspace(const cedar_window_store_args&) { return 0; }

int window_store(const cedar_window_store_args& a, void* stream) {
    if (a.dim != 64 && a.dim != 128 && a.dim != 512) return fail(CEDAR_UNSUPPORTED, "window_store: dim %lld on a GPU", (long long)a.dim);
    if (!matches_type(a.record, a.type)) return fail(CEDAR_UNSUPPORTED, "window_store: record %lld on a GPU", (long long)a.record);
    const bool wide = a.type == CEDAR_F32;
    const auto run = a.dim == 512 ? (wide ? launch_window<float, 16> : launch_window<Bf16, 16>)
                   : a.dim == 128 ? (wide ? launch_window<float, 4> : launch_window<Bf16, 4>)
                                  : (wide ? launch_window<float, 2> : launch_window<Bf16, 2>);
    return finish("window_store", run(a, stream));
}

namespace {

constexpr int kCompressThreads = 128;

// Group g's latent of dimension 32 E as one warp's lanes.
template <class T, int E>
__device__ void latent_lanes(const cedar_compress_store_args& a, int64_t group, int lane, float (&x)[E]) {
    constexpr int kDim = kWarp * E;
    const int64_t row = a.group_rows == nullptr ? group : a.group_rows[group];
    if (a.ratio == 1) {
        load_pack(static_cast<const T*>(a.projected) + row * kDim + lane * E, x);
    } else {
        const float* rows = static_cast<const float*>(a.projected);
        const int64_t other = a.first[group];
        const float* first = other < a.opens ? a.open + a.open_from[other] * 2 * kDim : rows + (other - a.opens) * 2 * kDim;
        const float* second = rows + row * 2 * kDim;
#pragma unroll
        for (int i = 0; i < E; ++i) {
            const int d = lane * E + i;
            const float share = sigmoid(second[kDim + d] - first[kDim + d]);
            x[i] = rounded<T>(fmaf(share, second[d] - first[d], first[d]));
        }
    }
    norm_lanes<T>(x, a.norm_weight, float(a.norm_eps), lane);
}

__device__ void keep_open(const cedar_compress_store_args& a, int64_t entry) {
    const float* from = static_cast<const float*>(a.projected) + a.open_rows[entry] * 2 * a.dim;
    float* to = a.open + a.open_to[entry] * 2 * a.dim;
    for (int64_t i = threadIdx.x; i < 2 * a.dim; i += blockDim.x) to[i] = from[i];
}

// Does a group that is stored in this step read the open row of this slot?
__device__ bool is_read(const cedar_compress_store_args& a, int64_t slot) {
    bool found = false;
    for (int64_t g = threadIdx.x; g < a.groups; g += blockDim.x)
        found |= a.slots[g] >= 0 && a.first[g] < a.opens && a.open_from[a.first[g]] == slot;
    return __syncthreads_or(found) != 0;
}

// Blocks [0, groups): warp 0 makes the latent and stores its entry, all warps multiply it with wk, warp 0 stores the index key.
// The blocks behind them keep open rows. A row that a group reads first and another token of its sequence then replaces is
// replaced by the group's block.
template <class T, int E, int I>
__global__ void compress(const cedar_compress_store_args a) {
    constexpr int kDim = kWarp * E, kIndexDim = kWarp * I;
    __shared__ float latent[kDim];
    __shared__ float key[kIndexDim];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int64_t group = blockIdx.x;
    if (group >= a.groups) {
        const int64_t entry = group - a.groups;
        if (a.open_to[entry] >= 0 && !is_read(a, a.open_to[entry])) keep_open(a, entry);
        return;
    }
    const int64_t slot = a.slots[group];
    if (slot < 0) return;
    const float *cos = a.cos + group * a.pairs, *sin = a.sin + group * a.pairs;
    if (warp == 0) {
        float x[E];
        latent_lanes<T>(a, group, lane, x);
#pragma unroll
        for (int i = 0; i < E; ++i) latent[lane * E + i] = x[i];
        rotate_lanes<T>(x, cos, sin, int(a.pairs), lane);
        encode_record<T>(x, a.record, a.kv_pool, slot, lane);
    }
    __syncthreads();
    if (a.ratio == 2 && a.first[group] < a.opens)
        for (int64_t entry = 0; entry < a.leaves_open; ++entry)
            if (a.open_to[entry] == a.open_from[a.first[group]]) keep_open(a, entry);
    const T* wk = static_cast<const T*>(a.wk);
    for (int n = warp; n < kIndexDim; n += kCompressThreads / kWarp) {
        float w[E], total = 0.0f;
        load_pack(wk + int64_t(n) * kDim + lane * E, w);
#pragma unroll
        for (int i = 0; i < E; ++i) total = fmaf(latent[lane * E + i], w[i], total);
        total = sum_lanes(total);
        if (lane == 0) key[n] = rounded<T>(total);
    }
    __syncthreads();
    if (warp != 0) return;
    float k[I];
#pragma unroll
    for (int i = 0; i < I; ++i) k[i] = key[lane * I + i];
    norm_lanes<T>(k, a.index_norm_weight, float(a.norm_eps), lane);
    rotate_lanes<T>(k, cos, sin, int(a.pairs), lane);
    encode_record<T>(k, a.index_record, a.index_pool, slot, lane);
}

template <class T>
cudaError_t launch_compress(const cedar_compress_store_args& a, void* stream) {
    const dim3 grid(unsigned(a.groups + a.leaves_open));
    if (grid.x == 0) return cudaSuccess;
    if (a.dim == 512) return launch(compress<T, 16, 4>, grid, kCompressThreads, 0, 1, stream, a);
    if (a.dim == 128) return launch(compress<T, 4, 2>, grid, kCompressThreads, 0, 1, stream, a);
    return launch(compress<T, 2, 2>, grid, kCompressThreads, 0, 1, stream, a);
}

}  // namespace

int64_t compress_store_workspace(const cedar_compress_store_args&) { return 0; }

int compress_store(const cedar_compress_store_args& a, void* stream) {
    const bool known = (a.dim == 512 && a.index_dim == 128) || ((a.dim == 128 || a.dim == 64) && a.index_dim == 64);
    if (!known)
        return fail(CEDAR_UNSUPPORTED, "compress_store: dim %lld, index_dim %lld on a GPU", (long long)a.dim, (long long)a.index_dim);
    if (!matches_type(a.record, a.type) || !matches_type(a.index_record, a.type))
        return fail(CEDAR_UNSUPPORTED, "compress_store: records %lld, %lld on a GPU", (long long)a.record, (long long)a.index_record);
    return finish("compress_store", a.type == CEDAR_F32 ? launch_compress<float>(a, stream) : launch_compress<Bf16>(a, stream));
}

}  // namespace cedar::cuda
