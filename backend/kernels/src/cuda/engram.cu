// SPDX-License-Identifier: Apache-2.0
// engram_gather and engram_gate. The table may lie in pinned host memory: its address serves both sides.
#include <cuda_fp8.h>

#include "bodies.h"
#include "common.cuh"

namespace cedar::cuda {
namespace {

constexpr int kGatherThreads = 256, kGateThreads = 256;
constexpr int64_t kManyRows = 16384;  // with fewer a warp's next row would leave another multiprocessor idle

// E4M3 codes, in the low and the high byte, as floats.
__device__ inline float2 decode_two(uint32_t codes) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes), __NV_E4M3);
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// A warp has kRows rows, a lane 8 values of each. Rows' loads do not wait for each other: the more are on their way, the less the
// distance to the host costs.
template <int kRows, class T>
__global__ void __launch_bounds__(kGatherThreads) gather(const int64_t* ids, const uint8_t* table, const uint8_t* scales, T* out, int64_t dim,
                                                         int64_t table_rows, int64_t rows) {
    const int64_t first = (int64_t(blockIdx.x) * (kGatherThreads / kWarp) + threadIdx.x / kWarp) * kRows;
    const int lane = threadIdx.x % kWarp;
    int64_t id[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        id[r] = first + r < rows ? __ldg(ids + first + r) : -1;
        if (id[r] >= table_rows) id[r] = -1;
    }
    for (int64_t at = lane * 8; at < dim; at += kWarp * 8) {
        uint2 codes[kRows];
        uint32_t bytes[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            codes[r] = id[r] < 0 ? make_uint2(0, 0) : __ldg(reinterpret_cast<const uint2*>(table + id[r] * dim + at));
            bytes[r] = id[r] < 0 ? 127 : __ldg(scales + id[r] * (dim / 32) + at / 32);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float scale = bytes[r] == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(bytes[r] == 0 ? 0x00400000u : bytes[r] << 23);
            float v[8];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 two = decode_two((j < 2 ? codes[r].x : codes[r].y) >> j % 2 * 16 & 0xffff);
                v[2 * j] = two.x * scale, v[2 * j + 1] = two.y * scale;
            }
            if (first + r < rows) store_pack<8>(out + (first + r) * dim + at, v);
        }
    }
}

// Sums of N values over the block, the same for all threads, in an order that depends on nothing.
template <int N>
__device__ void sum_block(float (&values)[N], float (*totals)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = sum_lanes(values[n]);
    if (threadIdx.x % kWarp == 0)
#pragma unroll
        for (int n = 0; n < N; ++n) totals[threadIdx.x / kWarp][n] = values[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
        values[n] = 0.0f;
        for (int warp = 0; warp < kGateThreads / kWarp; ++warp) values[n] += totals[warp][n];
    }
}

// Block (t, i): stream i of row t.
template <class T>
__global__ void __launch_bounds__(kGateThreads) gate(const T* streams, const T* keys_value, const float* weight, T* out, int hc, int hidden,
                                                     float eps) {
    __shared__ float totals[kGateThreads / kWarp][3];
    const int64_t row = blockIdx.x, i = blockIdx.y;
    const T* s = streams + (row * hc + i) * hidden;
    const T* key = keys_value + (row * (hc + 1) + i) * hidden;
    const T* value = keys_value + (row * (hc + 1) + hc) * hidden;
    const float* w = weight + i * hidden;
    float sums[3] = {};
    for (int d = threadIdx.x * 4; d < hidden; d += kGateThreads * 4) {
        float x[4], k[4], q[4];
        load_pack<4>(s + d, x);
        load_pack<4>(key + d, k);
        load_pack<4>(w + d, q);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sums[0] = fmaf(x[j], x[j], sums[0]);
            sums[1] = fmaf(k[j], k[j], sums[1]);
            sums[2] = fmaf(x[j] * q[j], k[j], sums[2]);
        }
    }
    sum_block(sums, totals);
    const float statistics = 1.0f / sqrtf((sums[0] / float(hidden) + eps) * (sums[1] / float(hidden) + eps));
    const float dot = sums[2] * statistics / sqrtf(float(hidden));
    const float size = fabsf(dot), kept = size < 1e-6f ? 1e-6f : size;
    const float g = sigmoid(copysignf(sqrtf(kept), dot));
    for (int d = threadIdx.x * 4; d < hidden; d += kGateThreads * 4) {
        float x[4], v[4];
        load_pack<4>(s + d, x);
        load_pack<4>(value + d, v);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = fmaf(g, v[j], x[j]);
        store_pack<4>(out + (row * hc + i) * hidden + d, x);
    }
}

template <int kRows, class T>
int run_gather(const cedar_engram_gather_args& a, void* stream) {
    constexpr int64_t kBlockRows = kGatherThreads / kWarp * kRows;
    const int64_t rows = a.rows * a.columns;
    return finish("engram_gather", launch(gather<kRows, T>, dim3(unsigned((rows + kBlockRows - 1) / kBlockRows)), kGatherThreads, 0, 1, stream,
                                          a.ids, a.table, a.table_scale, static_cast<T*>(a.out), a.dim, a.table_rows, rows));
}

template <class T>
int run_gather(const cedar_engram_gather_args& a, void* stream) {
    return a.rows * a.columns < kManyRows ? run_gather<1, T>(a, stream) : run_gather<4, T>(a, stream);
}

template <class T>
int run_gate(const cedar_engram_gate_args& a, void* stream) {
    return finish("engram_gate", launch(gate<T>, dim3(unsigned(a.rows), unsigned(a.hc)), kGateThreads, 0, 1, stream,
                                        static_cast<const T*>(a.streams), static_cast<const T*>(a.keys_value), a.qk_weight,
                                        static_cast<T*>(a.new_streams), int(a.hc), int(a.hidden), float(a.norm_eps)));
}

}  // namespace

int64_t engram_gather_workspace(const cedar_engram_gather_args&) { return 0; }

int engram_gather(const cedar_engram_gather_args& a, void* stream) {
    return a.type == CEDAR_BF16 ? run_gather<Bf16>(a, stream) : run_gather<float>(a, stream);
}

int64_t engram_gate_workspace(const cedar_engram_gate_args&) { return 0; }

int engram_gate(const cedar_engram_gate_args& a, void* stream) {
    if (a.hidden % 4 != 0) return fail(CEDAR_UNSUPPORTED, "engram_gate: hidden %lld on a GPU", (long long)a.hidden);
    return a.type == CEDAR_BF16 ? run_gate<Bf16>(a, stream) : run_gate<float>(a, stream);
}

}  // namespace cedar::cuda
