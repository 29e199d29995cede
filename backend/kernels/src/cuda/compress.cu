// SPDX-License-Identifier: Apache-2.0
// compress_store, in one launch. wk is on its way before the launch before has ended, to the warps that multiply by it. Of few groups, a
// cluster of eight blocks has one, or of four blocks one or two: each block makes their latents and multiplies them by its share of wk's
// rows, the first stores the index keys, the last the KV entries. Of many, one block has all of wk and takes up to eight at a time.
#include <algorithm>

#include "bodies.h"
#include "mhc_cluster.cuh"
#include "records.cuh"

namespace cedar::cuda {
namespace {

constexpr int kMostTokens = 8;                         // columns of one multiplication
constexpr int kMostOfEight = 12, kMostClustered = 64;  // groups with clusters of eight blocks, with any
constexpr int kClusters = 32;                          // of four blocks, that fewer groups have one each of
constexpr int kBlocksAlone = 64, kMostBlocks = 132;
static_assert(kMostClustered >= kClusters, "");

__device__ inline int cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}

// A group's vector of kDim elements is kTokenWarps warps', E a lane; kLanes lanes. The product with wk [kIndexDim, kDim] is made of
// kTiles 16 rows times kParts parts of kDim, one a warp of the kBlocks blocks.
template <class Type, int Each, int TokenWarps, int IndexEach, int Blocks>
struct Shape {
    using T = Type;
    static constexpr int E = Each, I = IndexEach, kTokenWarps = TokenWarps, kBlocks = Blocks;
    static constexpr int kLanes = kWarp * kTokenWarps, kDim = kLanes * E, kIndexDim = kWarp * I, kTiles = kIndexDim / 16;
    static constexpr int kParts = kDim / 32 < 4 ? kDim / 32 : 4, kPart = kDim / kParts, kWarps = kTiles * kParts / kBlocks;
    static constexpr int kMost = sizeof(T) == 4 ? kMostTokens / 2 : kMostTokens;  // what shared memory holds
    static constexpr int kTokens = kWarps / kTokenWarps < kMost ? kWarps / kTokenWarps : kMost;
    static constexpr int kFragments = kWarp * 4 + 4;          // a tile of products, a lane's four together
    static constexpr int kRow = kDim + 16 / int(sizeof(T));  // a latent in shared memory
    // Where a warp's registers do not hold its tile of wk, each lane keeps in shared memory what it will itself multiply by.
    static constexpr bool kShared = sizeof(T) == 2 && kBlocks == 1 && kPart > 32;
    static constexpr int kTileBytes = 16 * kPart * int(sizeof(T)), kSharedBytes = kShared ? kWarps * kTileBytes : 0;
};

// A warp's tile of wk, times latents: of rows lane / 4 and 8 below it, in this order, the products with tokens lane % 4 * 2 and the next
// one. The order of a sum depends on nothing but the dimensions.
template <class S, class T>
struct Tile;

template <class S>
struct Tile<S, Bf16> {
    static constexpr int kSteps = S::kPart / 32, kKept = S::kShared ? 1 : 2 * kSteps;
    uint4 kept[kKept];  // of 32 elements' step s 8 of row lane / 4 as 2 s, 8 of the row 8 below it as 2 s + 1
    uint4* own;

    __device__ void load(const void* wk, int tile, int part, int lane, unsigned char* shared) {
        const Bf16* from = static_cast<const Bf16*>(wk) + int64_t(tile * 16 + lane / 4) * S::kDim + part * S::kPart + lane % 4 * 8;
        own = reinterpret_cast<uint4*>(shared) + lane;
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
            const Bf16* piece = from + i % 2 * 8 * S::kDim + i / 2 * 32;
            if constexpr (S::kShared) copy_16(own + i * kWarp, piece);
            else kept[i] = load_cached(piece);
        }
    }

    __device__ uint4 get(int i) const {
        if constexpr (S::kShared) return own[i * kWarp];
        else return kept[i];
    }

    __device__ void multiply(const Bf16* latents, int tokens, int part, int lane, float (&c)[4]) const {
        const Bf16* from = latents + lane / 4 * S::kRow + part * S::kPart + lane % 4 * 8;
        for (float& x : c) x = 0.0f;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const uint4 b = lane / 4 < tokens ? *reinterpret_cast<const uint4*>(from + 32 * s) : make_uint4(0, 0, 0, 0);
            const uint4 low = get(2 * s), high = get(2 * s + 1);
            multiply_bf16(c, low.x, high.x, low.y, high.y, b.x, b.y);
            multiply_bf16(c, low.z, high.z, low.w, high.w, b.z, b.w);
        }
    }
};

template <class S>
struct Tile<S, float> {
    const float* row;

    __device__ void load(const void* wk, int tile, int part, int lane, unsigned char*) {
        row = static_cast<const float*>(wk) + int64_t(tile * 16 + lane / 4) * S::kDim + part * S::kPart;
    }

    __device__ void multiply(const float* latents, int tokens, int part, int lane, float (&c)[4]) const {
        for (int i = 0; i < 4; ++i) {
            const int token = lane % 4 * 2 + i % 2;
            const float *x = latents + token * S::kRow + part * S::kPart, *w = row + i / 2 * 8 * S::kDim;
            c[i] = 0.0f;
            for (int k = 0; k < S::kPart && token < tokens; ++k) c[i] = fmaf(w[k], x[k], c[i]);
        }
    }
};

constexpr int kLine = 128;

// This lane's E of S::kDim values that a group is pooled from. What they depend on is loaded first, and nothing is awaited before pool.
template <class S>
struct Pooling {
    static constexpr int E = S::E, kDim = S::kDim;
    using T = typename S::T;
    int row, other;
    Pack<uint32_t, E * int(sizeof(T)) / 4> only;  // ratio 1; as words, whose parts nobody asks for before they are there
    Pack<float, E> value[2], gate[2];             // ratio 2

    __device__ void find(const cedar_compress_store_args& a, int group) {
        row = a.group_rows == nullptr ? group : int(a.group_rows[group]);
        other = a.ratio == 1 ? 0 : int(a.first[group]);
    }

    __device__ void load(const cedar_compress_store_args& a, int lane) {
        if (a.ratio == 1) {
            only = *reinterpret_cast<const decltype(only)*>(static_cast<const T*>(a.projected) + int64_t(row) * kDim + lane * E);
            return;
        }
        const float* rows = static_cast<const float*>(a.projected);
        const float* first = other < a.opens ? a.open + a.open_from[other] * 2 * kDim : rows + (other - a.opens) * 2 * kDim;
        const auto at = [&](const float* x) { return *reinterpret_cast<const Pack<float, E>*>(x + lane * E); };
        const float* second = rows + int64_t(row) * 2 * kDim;
        value[0] = at(first), value[1] = at(second);
        gate[0] = at(first + kDim), gate[1] = at(second + kDim);
    }

    // What load will read comes to L2.
    __device__ void prefetch(const cedar_compress_store_args& a, int lane) const {
        const char* const rows = static_cast<const char*>(a.projected);
        constexpr int kBytes = 2 * kDim * int(sizeof(float)), kEach = kBytes / S::kLanes;
        if (lane * kEach % kLine != 0) return;
        const char* const opened = reinterpret_cast<const char*>(a.open);
        const char* const first = other < a.opens ? opened + a.open_from[other] * kBytes : rows + (other - a.opens) * kBytes;
        prefetch_line(first + lane * kEach), prefetch_line(rows + int64_t(row) * kBytes + lane * kEach);
    }

    // Before the norm.
    __device__ void pool(const cedar_compress_store_args& a, float (&x)[E]) const {
        if (a.ratio == 1) {
#pragma unroll
            for (int i = 0; i < E; ++i) x[i] = to_float(reinterpret_cast<const T*>(&only)[i]);
        } else {  // the division's approximation has no branch between the elements
#pragma unroll
            for (int i = 0; i < E; ++i) {
                const float share = __fdividef(1.0f, 1.0f + expf(gate[0].v[i] - gate[1].v[i]));
                x[i] = rounded<T>(fmaf(share, value[1].v[i] - value[0].v[i], value[0].v[i]));
            }
        }
    }
};

// The step's rows come to L2, by all threads of the grid's first `blocks` blocks.
template <class S>
__device__ void prefetch_rows(const cedar_compress_store_args& a, int blocks) {
    const int64_t lines = a.rows * 2 * S::kDim * int64_t(sizeof(float)) / kLine;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < lines; i += int64_t(blocks) * blockDim.x)
        prefetch_line(static_cast<const char*>(a.projected) + i * kLine);
}

__device__ void keep_open(const cedar_compress_store_args& a, int64_t entry, int thread, int threads) {
    const float* from = static_cast<const float*>(a.projected) + a.open_rows[entry] * 2 * a.dim;
    float* to = a.open + a.open_to[entry] * 2 * a.dim;
    for (int64_t i = thread; i < 2 * a.dim; i += threads) to[i] = from[i];
}

// Does a group that is stored in this step read the open row of this slot?
__device__ bool is_read(const cedar_compress_store_args& a, int64_t slot) {
    bool found = false;
    for (int64_t g = threadIdx.x; g < a.groups; g += blockDim.x)
        found |= a.slots[g] >= 0 && a.first[g] < a.opens && a.open_from[a.first[g]] == slot;
    return __syncthreads_or(found) != 0;
}

// Keeps what replaces the open row of this slot, by `threads` threads in whole warps.
__device__ void replace_open(const cedar_compress_store_args& a, int64_t slot, int thread, int threads) {
    const int lane = thread % kWarp;
    for (int64_t base = 0; base < a.leaves_open; base += kWarp) {
        const bool here = base + lane < a.leaves_open && a.open_to[base + lane] == slot;
        for (unsigned found = __ballot_sync(kAllLanes, here); found != 0; found &= found - 1)
            keep_open(a, base + __ffs(int(found)) - 1, thread, threads);
    }
}

// Clusters [0, `clusters`) take turns at the groups, `each` at a time. The blocks of the clusters behind them keep open rows. A row
// that a group reads first and another token of its sequence then replaces is replaced by the group's cluster.
template <class S>
__global__ void __launch_bounds__(S::kWarps* kWarp, 1) compress(const __grid_constant__ cedar_compress_store_args a, int clusters, int each) {
    using T = typename S::T;
    constexpr int E = S::E, I = S::I, kBlocks = S::kBlocks, kLast = kBlocks - 1;
    extern __shared__ __align__(16) unsigned char tiles[];
    __shared__ __align__(16) T latents[S::kTokens * S::kRow];
    __shared__ __align__(16) float products[kBlocks == 1 ? 2 : 1][S::kParts][S::kTiles][S::kFragments];
    __shared__ __align__(16) float norms[S::kDim], key_norms[S::kIndexDim];
    __shared__ float squares[S::kTokens][S::kTokenWarps];
    __shared__ uint64_t arrived;  // of the cluster's products, at block 0
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = kBlocks == 1 ? 0 : cluster_rank();
    const int cluster = int(blockIdx.x) / kBlocks;
    release_launch();
    if (cluster >= clusters) {
        await_launch();
        const int64_t entry = int64_t(blockIdx.x) - int64_t(clusters) * kBlocks;
        if (entry < a.leaves_open && a.open_to[entry] >= 0 && !is_read(a, a.open_to[entry])) keep_open(a, entry, threadIdx.x, blockDim.x);
        return;
    }
    const int product = rank * S::kWarps + warp, tile = product / S::kParts, part = product % S::kParts;
    const int token = warp / S::kTokenWarps, piece = threadIdx.x % S::kLanes;  // whose values this thread has, and which
    Tile<S, T> wk;
    if (const int i = threadIdx.x * 4; i < S::kDim) copy_16(norms + i, a.norm_weight + i);
    if (const int i = threadIdx.x * 4; i < S::kIndexDim) copy_16(key_norms + i, a.index_norm_weight + i);
    close_copies();
    wk.load(a.wk, tile, part, lane, tiles + warp * S::kTileBytes);
    close_copies();
    if constexpr (kBlocks > 1) {
        if (threadIdx.x == 0) init_barrier(&arrived, 1), publish_barriers();
        __syncwarp();
        arrive_at_cluster();
    }
    if (kBlocks > 1 && a.ratio == 2) prefetch_rows<S>(a, clusters * kBlocks);
    if (const int64_t group = cluster * each + token; group < a.groups && token < each) {
        constexpr int kEach = S::E * int(sizeof(T));
        if (a.ratio == 1 && piece * kEach % kLine == 0) prefetch_line(static_cast<const T*>(a.projected) + group * S::kDim + piece * E);
        if (piece < 2) prefetch_line((piece == 0 ? a.cos : a.sin) + group * a.pairs);
    }
    await_launch();
    const int groups = int(a.groups), step = clusters * each;
    const auto count_from = [&](int start) { return min(groups - start, each); };
    Pooling<S> pooling;
    pooling.find(a, cluster * each + (token < count_from(cluster * each) ? token : 0));
    if (a.ratio == 1) pooling.load(a, piece);
    int turn = 0;
    for (int start = cluster * each; start < groups; start += step, turn ^= 1) {
        const int count = count_from(start);
        const bool has_token = token < count, has_key = rank == 0 && warp < count;
        const int group = has_token ? start + token : start, key_group = has_key ? start + warp : start;
        const bool has_next = kBlocks == 1 && start + step < groups;
        const int next_group = start + step + (token < count_from(start + step) ? token : 0);
        if (a.ratio == 2) pooling.load(a, piece);
        const int slot = int(a.slots[group]), key_slot = int(a.slots[key_group]);  // no pool has more than 2^31 rows
        if (has_next) {  // the next turn's values are on their way during this one
            pooling.find(a, next_group);
            if (piece < 2) prefetch_line((piece == 0 ? a.cos : a.sin) + next_group * a.pairs);
        }
        Rotation<E, S::kLanes> rotation = {};
        Rotation<I> key_rotation = {};
        if (kBlocks > 1 && rank == kLast) rotation.load(a.cos + group * a.pairs, a.sin + group * a.pairs, int(a.pairs), piece);
        if (kBlocks > 1 && has_key) key_rotation.load(a.cos + key_group * a.pairs, a.sin + key_group * a.pairs, int(a.pairs), lane);
        float x[E];
        pooling.pool(a, x);
        if (has_next && a.ratio == 1) pooling.load(a, piece);
        else if (has_next) pooling.prefetch(a, piece);
        const float some = sum_squares(x);
        if (has_token && lane == 0) squares[token][warp % S::kTokenWarps] = some;
        await_copies<1>();
        __syncthreads();
        if (has_token) {
            float total = 0.0f, norm[E];
#pragma unroll
            for (int w = 0; w < S::kTokenWarps; ++w) total += squares[token][w];
            load_pack(norms + piece * E, norm);
            norm_lanes<T, S::kLanes>(x, total, norm, float(a.norm_eps));
            store_pack(latents + token * S::kRow + piece * E, x);
        }
        __syncthreads();
        await_copies<0>();
        float c[4];
        wk.multiply(latents, count, part, lane, c);
        const float4 fragment = make_float4(c[0], c[1], c[2], c[3]);
        float* const to = &products[turn][part][tile][lane * 4];
        if constexpr (kBlocks > 1) {
            await_cluster();  // block 0's barrier is there
            if (lane % 4 * 2 < count) send(address_in(shared_address(to), 0), address_in(shared_address(&arrived), 0), fragment);
            if (rank == 0 && threadIdx.x == 0) announce_bytes(&arrived, uint32_t(S::kParts * S::kTiles * 8 * ((count + 1) / 2) * 16));
        } else {
            *reinterpret_cast<float4*>(to) = fragment;
            rotation.load(a.cos + group * a.pairs, a.sin + group * a.pairs, int(a.pairs), piece);
            if (has_key) key_rotation.load(a.cos + key_group * a.pairs, a.sin + key_group * a.pairs, int(a.pairs), lane);
        }
        if (rank == kLast && has_token && slot >= 0) {
            rotation.template apply<T>(x);
            encode_record<T, S::kLanes>(x, a.record, a.kv_pool, slot, piece);
        }
        if (kBlocks == 1) __syncthreads();
        else if (rank > 0) return;
        else await_phase(&arrived, 0);  // no block reads an open row any more
        if (has_key && key_slot >= 0) {
            float k[I] = {}, key_norm[I];
            load_pack(key_norms + lane * I, key_norm);
#pragma unroll
            for (int i = 0; i < I; ++i) {
                const int row = lane * I + i, at = (row % 8 * 4 + warp / 2) * 4 + row % 16 / 8 * 2 + warp % 2;
#pragma unroll
                for (int p = 0; p < S::kParts; ++p) k[i] += products[turn][p][row / 16][at];
            }
#pragma unroll
            for (int i = 0; i < I; ++i) k[i] = rounded<T>(k[i]);
            norm_lanes<T>(k, key_norm, float(a.norm_eps));
            key_rotation.template apply<T>(k);
            encode_record<T>(k, a.index_record, a.index_pool, key_slot, lane);
        }
        if (has_token && slot >= 0 && a.ratio == 2 && a.first[group] < a.opens)
            replace_open(a, a.open_from[a.first[group]], piece, S::kLanes);
        if (kBlocks > 1) return;  // every cluster has one turn
    }
}

template <class S>
cudaError_t run(const cedar_compress_store_args& a, int target, int most, void* stream) {
    const int64_t each = std::clamp<int64_t>((a.groups + target - 1) / target, 1, S::kTokens);
    const int clusters = int(std::min<int64_t>((a.groups + each - 1) / each, most));
    const int64_t keepers = (a.leaves_open + S::kBlocks - 1) / S::kBlocks;
    if (clusters + keepers == 0) return cudaSuccess;
    return launch(compress<S>, dim3(unsigned((clusters + keepers) * S::kBlocks)), S::kWarps * kWarp, S::kSharedBytes, S::kBlocks, true, stream, a,
                  clusters, int(each));
}

template <class T, int E, int kTokenWarps, int I>
cudaError_t run(const cedar_compress_store_args& a, void* stream) {
    if (a.groups > kMostClustered) return run<Shape<T, E, kTokenWarps, I, 1>>(a, kBlocksAlone, kMostBlocks, stream);
    if (a.groups <= kMostOfEight) return run<Shape<T, E, kTokenWarps, I, 8>>(a, kMostClustered, kMostClustered, stream);
    return run<Shape<T, E, kTokenWarps, I, 4>>(a, kClusters, kMostClustered, stream);
}

template <class T>
cudaError_t run_dim(const cedar_compress_store_args& a, void* stream) {
    if (a.dim == 512) return run<T, 4, 4, 4>(a, stream);
    if (a.dim == 64) return run<T, 2, 1, 2>(a, stream);
    return a.index_dim == 128 ? run<T, 4, 1, 4>(a, stream) : run<T, 4, 1, 2>(a, stream);
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
