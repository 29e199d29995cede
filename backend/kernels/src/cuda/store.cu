// SPDX-License-Identifier: Apache-2.0
// window_store: latency-bound, one launch at decode.
#include "bodies.h"
#include "ptx.cuh"
#include "records.cuh"

namespace cedar::cuda {
namespace {

constexpr int kRowsPerBlock = 4;  // one warp each

int64_t bytes_of(int64_t record, int64_t dim) {
    switch (record) {
        case CEDAR_RECORD_F32: return dim * 4;
        case CEDAR_RECORD_BF16: return dim * 2;
        case CEDAR_RECORD_FP8: return dim + dim / kMxGroup;
        default: return dim / 2 + dim / kNvfp4Group;
    }
}

// One warp copies a record. Those of whole 16 bytes are aligned to them.
__device__ void copy_record(const void* from_pool, int64_t from_row, void* to_pool, int64_t to_row, int64_t bytes, int lane) {
    constexpr int kPiece = sizeof(uint4);
    const uint8_t* from = static_cast<const uint8_t*>(from_pool) + from_row * bytes;
    uint8_t* to = static_cast<uint8_t*>(to_pool) + to_row * bytes;
    if (bytes % kPiece == 0)
        for (int64_t i = lane * kPiece; i < bytes; i += kWarp * kPiece) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    else
        for (int64_t i = lane; i < bytes; i += kWarp) to[i] = from[i];
}

// Warps [0, rows) encode; with history, the warps behind them copy ring rows, which the second kernel overwrites.
template <class T, int E>
__global__ void window_encode(const cedar_window_store_args a, bool into_ring, int64_t bytes) {
    const int lane = threadIdx.x % kWarp;
    const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
    release_launch();
    if (row >= a.rows) {
        await_launch();
        const int64_t copied = row - a.rows;
        if (copied < a.history_rows) copy_record(a.ring, a.history[copied], a.table, copied, bytes, lane);
        return;
    }
    float x[E], weight[E];
    Rotation<E> rotation;
    load_pack(a.norm_weight + lane * E, weight);
    if (lane * E * int(sizeof(T)) % 128 == 0) prefetch_line(static_cast<const T*>(a.kv) + row * kWarp * E + lane * E);
    if (lane < 2) prefetch_line((lane == 0 ? a.cos : a.sin) + row * a.pairs);
    await_launch();
    load_pack(static_cast<const T*>(a.kv) + row * kWarp * E + lane * E, x);
    rotation.load(a.cos + row * a.pairs, a.sin + row * a.pairs, int(a.pairs), lane);
    const int64_t ring_row = into_ring ? a.store_to[row] : 0;
    norm_lanes<T>(x, weight, float(a.norm_eps));
    rotation.template apply<T>(x);
    encode_record<T>(x, a.record, a.table, a.history_rows + row, lane, into_ring ? a.ring : nullptr, ring_row);
}

__global__ void window_keep(const cedar_window_store_args a, int64_t bytes) {
    const int lane = threadIdx.x % kWarp;
    const int64_t i = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
    release_launch();
    await_launch();
    if (i >= a.stores) return;
    const int64_t from = a.history_rows + (a.store_from == nullptr ? i : a.store_from[i]);
    copy_record(a.table, from, a.ring, a.store_to[i], bytes, lane);
}

unsigned blocks_for(int64_t warps) { return unsigned((warps + kRowsPerBlock - 1) / kRowsPerBlock); }

template <class T, int E>
cudaError_t launch_window(const cedar_window_store_args& a, void* stream) {
    const bool into_ring = a.history_rows == 0 && a.store_from == nullptr && a.stores == a.rows;
    const int64_t bytes = bytes_of(a.record, a.dim);
    const cudaError_t error = launch(window_encode<T, E>, blocks_for(a.rows + a.history_rows), kRowsPerBlock * kWarp, 0, 1, true, stream, a,
                                     into_ring, bytes);
    if (error != cudaSuccess || into_ring || a.stores == 0) return error;
    return launch(window_keep, blocks_for(a.stores), kRowsPerBlock * kWarp, 0, 1, true, stream, a, bytes);
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

}  // namespace cedar::cuda
