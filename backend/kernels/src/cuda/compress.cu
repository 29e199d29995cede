// SPDX-License-Identifier: Apache-2.0
// compress_store: latency-bound at decode, one launch. A cluster of four blocks makes a group's latent in every warp, each block
// multiplies it with a quarter of wk, which its warps keep in registers for the next group, and block 0 stores what comes of it.
#include <algorithm>

#include "bodies.h"
#include "records.cuh"

namespace cedar::cuda {
namespace {

constexpr int kQuarters = 4, kWarps = 8, kThreads = kWarps * kWarp, kMostClusters = 33 * 6;

__device__ inline void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline int cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}

// *p of the cluster's block 0 = value, p in this block's own shared memory.
__device__ inline void store_to_first(float* p, float value) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(address) : "r"(uint32_t(__cvta_generic_to_shared(p))));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Group g's pooled values of dimension 32 E as a warp's lanes, before the norm.
template <class T, int E>
__device__ void pool_lanes(const cedar_compress_store_args& a, int64_t group, int lane, float (&x)[E]) {
    constexpr int kDim = kWarp * E;
    const int64_t row = a.group_rows == nullptr ? group : a.group_rows[group];
    if (a.ratio == 1) return load_pack(static_cast<const T*>(a.projected) + row * kDim + lane * E, x);
    const float* rows = static_cast<const float*>(a.projected);
    const int64_t other = a.first[group];
    const float* first = (other < a.opens ? a.open + a.open_from[other] * 2 * kDim : rows + (other - a.opens) * 2 * kDim) + lane * E;
    const float* second = rows + row * 2 * kDim + lane * E;
    constexpr int kEach = E < 4 ? E : 4;  // 16 bytes at a time
#pragma unroll
    for (int part = 0; part < E; part += kEach) {
        float value[2][kEach], gate[2][kEach];
        load_pack(first + part, value[0]);
        load_pack(second + part, value[1]);
        load_pack(first + kDim + part, gate[0]);
        load_pack(second + kDim + part, gate[1]);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            x[part + i] = rounded<T>(fmaf(sigmoid(gate[1][i] - gate[0][i]), value[1][i] - value[0][i], value[0][i]));
    }
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

// Clusters [0, `clusters`) take turns at the groups. The blocks of the clusters behind them keep open rows. A row that a group reads
// first and another token of its sequence then replaces is replaced by the group's cluster.
template <class T, int E, int I>
__global__ void __launch_bounds__(kThreads) compress(const cedar_compress_store_args a, int clusters) {
    constexpr int kDim = kWarp * E, kIndexDim = kWarp * I, kRows = kIndexDim / (kQuarters * kWarps);
    __shared__ float keys[2][kIndexDim];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = cluster_rank();
    const int cluster = int(blockIdx.x) / kQuarters;
    if (cluster >= clusters) {
        const int64_t entry = int64_t(blockIdx.x) - int64_t(clusters) * kQuarters;
        if (entry < a.leaves_open && a.open_to[entry] >= 0 && !is_read(a, a.open_to[entry])) keep_open(a, entry);
        return;
    }
    const int first_row = (rank * kWarps + warp) * kRows;
    Pack<T, E> wk[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) wk[r] = *reinterpret_cast<const Pack<T, E>*>(static_cast<const T*>(a.wk) + int64_t(first_row + r) * kDim + lane * E);
    float norm[E], index_norm[I];
    load_pack(a.norm_weight + lane * E, norm);
    load_pack(a.index_norm_weight + lane * I, index_norm);
    cluster_barrier();  // block 0 is there before anybody writes to it
    int turn = 0;
    for (int64_t group = cluster; group < a.groups; group += clusters) {  // the same for all blocks of a cluster
        const int64_t slot = a.slots[group];
        if (slot < 0) continue;
        float* key = keys[turn++ % 2];  // block 0 may still read the one of the turn before
        Rotation<E> rotation;
        Rotation<I> index_rotation;
        rotation.load(a.cos + group * a.pairs, a.sin + group * a.pairs, int(a.pairs), lane);
        index_rotation.load(a.cos + group * a.pairs, a.sin + group * a.pairs, int(a.pairs), lane);
        float x[E];
        pool_lanes<T>(a, group, lane, x);
        norm_lanes<T>(x, norm, float(a.norm_eps));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < E; ++i) total = fmaf(x[i], to_float(wk[r].v[i]), total);
            total = sum_lanes(total);
            if (lane == 0) store_to_first(key + first_row + r, rounded<T>(total));
        }
        if (rank == 1 && warp == 0) {
            rotation.template apply<T>(x);
            encode_record<T>(x, a.record, a.kv_pool, slot, lane);
        }
        cluster_barrier();
        if (rank == 0 && warp == 0) {
            float k[I];
#pragma unroll
            for (int i = 0; i < I; ++i) k[i] = key[lane * I + i];
            norm_lanes<T>(k, index_norm, float(a.norm_eps));
            index_rotation.template apply<T>(k);
            encode_record<T>(k, a.index_record, a.index_pool, slot, lane);
        }
        if (rank == 2 && a.ratio == 2 && a.first[group] < a.opens)  // no block of the cluster reads the open row any more
            for (int64_t entry = 0; entry < a.leaves_open; ++entry)
                if (a.open_to[entry] == a.open_from[a.first[group]]) keep_open(a, entry);
    }
    cluster_barrier();  // block 0 is there until all have written to it
}

template <class T, int E, int I>
cudaError_t run(const cedar_compress_store_args& a, void* stream) {
    const int clusters = int(std::min<int64_t>(a.groups, kMostClusters));
    const int64_t keepers = (a.leaves_open + kQuarters - 1) / kQuarters;
    if (clusters + keepers == 0) return cudaSuccess;
    return launch(compress<T, E, I>, dim3(unsigned((clusters + keepers) * kQuarters)), kThreads, 0, kQuarters, stream, a, clusters);
}

template <class T>
cudaError_t run_dim(const cedar_compress_store_args& a, void* stream) {
    if (a.dim == 512) return run<T, 16, 4>(a, stream);
    if (a.dim == 64) return run<T, 2, 2>(a, stream);
    return a.index_dim == 128 ? run<T, 4, 4>(a, stream) : run<T, 4, 2>(a, stream);
}

}  // namespace

int64_t compress_store_workspace(const cedar_compress_store_args&) { return 0; }

int compress_store(const cedar_compress_store_args& a, void* stream) {
    const bool known = a.index_dim == 128 ? a.dim == 512 || a.dim == 128 : a.index_dim == 64 && (a.dim == 128 || a.dim == 64);
    if (!known)
        return fail(CEDAR_UNSUPPORTED, "compress_store: dim %lld, index_dim %lld on a GPU", (long long)a.dim, (long long)a.index_dim);
    if (!matches_type(a.record, a.type) || !matches_type(a.index_record, a.type))
        return fail(CEDAR_UNSUPPORTED, "compress_store: records %lld, %lld on a GPU", (long long)a.record, (long long)a.index_record);
    return finish("compress_store", a.type == CEDAR_F32 ? run_dim<float>(a, stream) : run_dim<Bf16>(a, stream));
}

}  // namespace cedar::cuda
