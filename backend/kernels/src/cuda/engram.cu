// SPDX-License-Identifier: Apache-2.0
// engram_gather and engram_gate. The table may lie in pinned host memory: its address serves both sides.
#include <cuda_fp8.h>

#include <algorithm>

#include "bodies.h"
#include "ptx.cuh"

namespace cedar::cuda {
namespace {

constexpr int kGatherThreads = 256, kLaneValues = 8;
constexpr int kMultiprocessorBlocks = 6, kManyRowsOfWarp = 4;  // of a gather of many
constexpr int64_t kManyRows = 6144;  // with fewer a warp's further rows would leave another multiprocessor idle
constexpr int64_t kMostRows = 1 << 30;
constexpr int64_t kGateThreadsAtATime = 132 * 2 * 640;
constexpr int kGateThreads = 640, kMostGateThreads = 1024;  // of which two blocks, or one, are on a multiprocessor

// E4M3 codes, in the low and the high byte, as floats.
__device__ inline float2 decode_two(uint32_t codes) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes), __NV_E4M3);
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

struct Table {
    const uint8_t *codes, *scales;
    int64_t width, scale_width, rows;  // bytes from row to row
};

// A lane's 8 values of each of kRows neighbouring rows, as stored.
template <int kRows>
struct Values {
    uint2 codes[kRows];
    uint32_t scales[kRows];

    // at: of the lane's first value.
    __device__ void load(const Table& table, const int64_t (&ids)[kRows], int at) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            codes[r] = make_uint2(0, 0), scales[r] = 127;
            if (uint64_t(ids[r]) >= uint64_t(table.rows)) continue;
            codes[r] = __ldg(reinterpret_cast<const uint2*>(table.codes + ids[r] * table.width + at));
            scales[r] = __ldg(table.scales + ids[r] * table.scale_width + at / 32);
        }
    }

    __device__ void decode(int r, float (&out)[kLaneValues]) const {
        const uint32_t byte = scales[r];
        const float scale = byte == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
#pragma unroll
        for (int j = 0; j < kLaneValues / 2; ++j) {
            const float2 two = decode_two((j < 2 ? codes[r].x : codes[r].y) >> j % 2 * 16 & 0xffff);
            out[2 * j] = two.x * scale, out[2 * j + 1] = two.y * scale;
        }
    }
};

template <int kRows>
__device__ inline void load_ids(const int64_t* ids, int first, int rows, int64_t (&out)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = first + r < rows ? __ldcg(ids + first + r) : -1;
}

// A warp has kRows rows, 256 values of each, the blockIdx.y-th; all of them are on their way together.
template <int kRows, class T>
__global__ void __launch_bounds__(kGatherThreads, kMultiprocessorBlocks) gather(const int64_t* ids, Table table, T* out, int dim, int rows) {
    const int at = (int(blockIdx.y) * kWarp + int(threadIdx.x) % kWarp) * kLaneValues;
    const int first = (int(blockIdx.x) * (kGatherThreads / kWarp) + int(threadIdx.x) / kWarp) * kRows;
    release_launch();
    await_launch();
    if (at >= dim) return;
    int64_t id[kRows];
    Values<kRows> values;
    load_ids<kRows>(ids, first, rows, id);
    values.load(table, id, at);
    T* const to = out + int64_t(first) * dim + at;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float decoded[kLaneValues];
        values.decode(r, decoded);
        if (first + r >= rows) return;
        store_pack<kLaneValues>(to + r * dim, decoded);
    }
}

// What a thread sums of a row of one stream; nothing behind the row's end.
template <class T>
struct GateRow {
    Pack<T, 8> stream = {}, key = {};

    __device__ void load(const T* streams, const T* keys_value, int64_t row, int i, int hc, int hidden, int d) {
        if (d >= hidden) return;
        stream = *reinterpret_cast<const Pack<T, 8>*>(streams + (row * hc + i) * hidden + d);
        key = *reinterpret_cast<const Pack<T, 8>*>(keys_value + (row * (hc + 1) + i) * hidden + d);
    }
};

// Sums over the block, the same for all threads, in an order that depends on the block's size alone.
__device__ inline float4 sum_block(float4 x, float4* totals) {
    const int lane = threadIdx.x % kWarp;
    x = make_float4(sum_lanes(x.x), sum_lanes(x.y), sum_lanes(x.z), 0.0f);
    if (lane == 0) totals[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = lane < int(blockDim.x) / kWarp ? totals[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return make_float4(sum_lanes(x.x), sum_lanes(x.y), sum_lanes(x.z), 0.0f);
}

// A block has a stream, whose weights stay in registers, 8 a thread, and takes every so many rows. Blocks of the streams of one row
// are neighbours: its value comes from memory once. The next row is on its way while this one is summed.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 * kGateThreads / kThreads : 1)
    gate(const T* streams, const T* keys_value, const float* weight, T* out, int64_t rows, int hc, int hidden, float eps) {
    __shared__ float4 totals[2][kWarp];
    const int i = int(blockIdx.x) % hc, apart = int(gridDim.x) / hc, d = int(threadIdx.x) * 8;
    int64_t row = int(blockIdx.x) / hc;
    release_launch();
    float w[8] = {};
    if (d < hidden) load_pack(weight + i * hidden + d, w);
    await_launch();
    GateRow<T> now, next;
    now.load(streams, keys_value, row, i, hc, hidden, d);
    for (int turn = 0; row < rows; row += apart, turn ^= 1, now = next) {
        Pack<T, 8> value = {};
        if (d < hidden) value = *reinterpret_cast<const Pack<T, 8>*>(keys_value + (row * (hc + 1) + hc) * hidden + d);
        if (row + apart < rows) next.load(streams, keys_value, row + apart, i, hc, hidden, d);
        float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float x = to_float(now.stream.v[j]), k = to_float(now.key.v[j]);
            sums.x = fmaf(x, x, sums.x);
            sums.y = fmaf(k, k, sums.y);
            sums.z = fmaf(x * w[j], k, sums.z);
        }
        sums = sum_block(sums, totals[turn]);
        const float statistics = 1.0f / sqrtf((sums.x / float(hidden) + eps) * (sums.y / float(hidden) + eps));
        const float dot = sums.z * statistics / sqrtf(float(hidden));
        const float size = fabsf(dot), kept = size < 1e-6f ? 1e-6f : size;
        const float g = sigmoid(copysignf(sqrtf(kept), dot));
        if (d >= hidden) continue;
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = fmaf(g, to_float(value.v[j]), to_float(now.stream.v[j]));
        store_pack(out + (row * hc + i) * hidden + d, x);
    }
}

template <int kRows, class T>
int run_gather(const cedar_engram_gather_args& a, void* stream) {
    constexpr int64_t kBlockRows = kGatherThreads / kWarp * kRows, kWarpValues = kWarp * kLaneValues;
    const int64_t rows = a.rows * a.columns, blocks = (rows + kBlockRows - 1) / kBlockRows;
    const bool apart = a.table_scale != nullptr;
    const Table table{a.table, apart ? a.table_scale : a.table + a.dim, a.width, apart ? a.dim / 32 : a.width, a.table_rows};
    const dim3 grid(unsigned(blocks), unsigned((a.dim + kWarpValues - 1) / kWarpValues));
    return finish("engram_gather", launch(gather<kRows, T>, grid, kGatherThreads, 0, 1, true, stream, a.ids, table, static_cast<T*>(a.out),
                                          int(a.dim), int(rows)));
}

template <class T>
int run_gather(const cedar_engram_gather_args& a, void* stream) {
    if (a.rows * a.columns > kMostRows) return fail(CEDAR_UNSUPPORTED, "engram_gather: %lld rows on a GPU", (long long)(a.rows * a.columns));
    return a.rows * a.columns < kManyRows ? run_gather<1, T>(a, stream) : run_gather<kManyRowsOfWarp, T>(a, stream);
}

template <class T, int kThreads>
int run_gate(const cedar_engram_gate_args& a, int64_t threads, void* stream) {
    const int64_t most = std::max<int64_t>(1, kGateThreadsAtATime / threads / a.hc);  // rows at a time
    return finish("engram_gate", launch(gate<T, kThreads>, dim3(unsigned(std::min(a.rows, most) * a.hc)), int(threads), 0, 1, true, stream,
                                        static_cast<const T*>(a.streams), static_cast<const T*>(a.keys_value), a.qk_weight,
                                        static_cast<T*>(a.new_streams), a.rows, int(a.hc), int(a.hidden), float(a.norm_eps)));
}

template <class T>
int run_gate(const cedar_engram_gate_args& a, void* stream) {
    const int64_t threads = (a.hidden / 8 + kWarp - 1) / kWarp * kWarp;
    return threads <= kGateThreads ? run_gate<T, kGateThreads>(a, threads, stream) : run_gate<T, kMostGateThreads>(a, threads, stream);
}

}  // namespace

int64_t engram_gather_workspace(const cedar_engram_gather_args&) { return 0; }

int engram_gather(const cedar_engram_gather_args& a, void* stream) {
    return a.type == CEDAR_BF16 ? run_gather<Bf16>(a, stream) : run_gather<float>(a, stream);
}

int64_t engram_gate_workspace(const cedar_engram_gate_args&) { return 0; }

int engram_gate(const cedar_engram_gate_args& a, void* stream) {
    if (a.hidden % 8 != 0 || a.hidden > 8 * kMostGateThreads) return fail(CEDAR_UNSUPPORTED, "engram_gate: hidden %lld on a GPU", (long long)a.hidden);
    return a.type == CEDAR_BF16 ? run_gate<Bf16>(a, stream) : run_gate<float>(a, stream);
}

}  // namespace cedar::cuda
