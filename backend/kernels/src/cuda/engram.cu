// SPDX-License-Identifier: Apache-2.0
// engram_gather and engram_gate. The table may lie in pinned host memory: its address serves both sides.
#include "bodies.h"
#include "common.cuh"

namespace cedar::cuda {
namespace {

constexpr int kGatherThreads = 256, kGateThreads = 256;

// A thread has 16 values of a row, half of a scale's group: 16 bytes of codes and one of scales. A row's loads do not wait for
// each other, and every thread has its own: the more rows are on their way, the less the distance to the host costs.
template <class T>
__global__ void __launch_bounds__(kGatherThreads) gather(const int64_t* ids, const uint8_t* table, const uint8_t* scales, T* out, int64_t dim,
                                                         int64_t table_rows, int64_t pieces) {
    const int64_t i = int64_t(blockIdx.x) * kGatherThreads + threadIdx.x;
    if (i >= pieces) return;
    const int64_t per_row = dim / 16, id = ids[i / per_row], piece = i % per_row;
    float v[16] = {};
    if (id >= 0 && id < table_rows) {
        const uint4 codes = __ldg(reinterpret_cast<const uint4*>(table + id * dim) + piece);
        const uint32_t byte = __ldg(scales + id * (dim / 32) + piece / 2);
        const float scale = byte == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int j = 0; j < 16; ++j) v[j] = decode_e4m3(words[j / 4] >> j % 4 * 8 & 0xff) * scale;
    }
    float half[8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 8; ++j) half[j] = v[h * 8 + j];
        store_pack<8>(out + i * 16 + h * 8, half);
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

template <class T>
int run_gather(const cedar_engram_gather_args& a, void* stream) {
    const int64_t pieces = a.rows * a.columns * (a.dim / 16);
    const dim3 grid(unsigned((pieces + kGatherThreads - 1) / kGatherThreads));
    return finish("engram_gather", launch(gather<T>, grid, kGatherThreads, 0, 1, stream, a.ids, a.table, a.table_scale, static_cast<T*>(a.out),
                                          a.dim, a.table_rows, pieces));
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
