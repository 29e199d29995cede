// SPDX-License-Identifier: Apache-2.0
// mega_attention of float32 queries in one launch. A block takes a row and a few of its heads. Of the keys that the row sees it
// decodes a tile at a time into shared memory, and each tile is used twice: by a warp for a head's scores, a lane a key, and by
// threads that each own four neighbouring dimensions of some heads' outputs. Masked keys are left out before anything is added,
// so a row's sums depend on its own keys alone: not on other rows, nor on masked columns.
#include "bodies.h"
#include "plain.cuh"

namespace cedar::cuda::plain {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kTile = kWarp;    // keys of a tile, one a lane
constexpr int kKeyPadding = 4;  // floats between keys: 8 lanes' 16-byte reads of 8 keys then hit different banks
constexpr int kAtOnce = 4;      // keys whose records a warp asks for before it decodes the first
constexpr int kMostShared = 226 * 1024;

// Dynamic shared memory of a block with H heads.
template <int H>
struct Memory {
    __device__ Memory(unsigned char* bytes, int dim)
        : stride(dim + kKeyPadding), keys(reinterpret_cast<float*>(bytes)), query(keys + kTile * stride), probabilities(query + H * dim),
          factors(probabilities + H * kTile), rows(reinterpret_cast<int64_t*>(factors + H)) {}

    static size_t bytes(const cedar_mega_attention_args& a, int64_t columns) {
        return (kTile * (a.dim + kKeyPadding) + H * (a.dim + kTile + 1)) * sizeof(float) + columns * sizeof(int64_t);
    }

    int stride;
    float* keys;           // [kTile][stride], decoded
    float* query;          // [H][dim], rotated
    float* probabilities;  // [H][kTile], of the tile's keys relative to the maximum so far
    float* factors;        // [H], what the sums before the tile are to be multiplied with; in the end 1 / denominator
    int64_t* rows;         // pool rows of the keys that the row sees; entries' as ~row
};

__host__ __device__ inline int64_t columns_of(const cedar_mega_attention_args& a) {
    return a.window_width + (a.entries != nullptr ? a.entry_width : 0);
}

// Fill `rows`, window first; returns their number.
__device__ int gather(const cedar_mega_attention_args& a, int64_t row, int64_t* rows) {
    __shared__ int counts[kWarps];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int64_t columns = columns_of(a);
    int count = 0;
    for (int64_t first = 0; first < columns; first += kThreads) {
        const int64_t column = first + threadIdx.x, entry = column - a.window_width;
        int64_t key = 0;
        if (column < columns) key = entry < 0 ? a.window_index[row * a.window_width + column] : a.entry_index[row * a.entry_width + entry];
        const unsigned seen = __ballot_sync(kAllLanes, key != 0);
        if (lane == 0) counts[warp] = __popc(seen);
        __syncthreads();
        int place = count + __popc(seen & ((1u << lane) - 1));
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) place += counts[w];
            count += counts[w];
        }
        if (key != 0) rows[place] = entry < 0 ? key : ~key;
        __syncthreads();
    }
    return count;
}

template <int H>
__device__ void stage_query(const cedar_mega_attention_args& a, int64_t row, int first_head, int heads, const Memory<H>& memory) {
    const int dim = int(a.dim), chunks = dim / 4;
    const float* query = static_cast<const float*>(a.query) + (row * a.heads + first_head) * dim;
    for (int i = threadIdx.x; i < H * chunks; i += kThreads) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < heads * chunks)
            x = rotate_chunk(load_four(query + 4 * i), a.cos + row * a.pairs, a.sin + row * a.pairs, 1.0f, dim, int(a.pairs), i % chunks);
        store_four(memory.query + 4 * i, x);
    }
}

// Keys [first, first + kTile) of `rows`; what is beyond the last is zeros.
template <int H>
__device__ void stage_keys(const cedar_mega_attention_args& a, int first, int count, const Memory<H>& memory) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, dim = int(a.dim);
    for (int chunk = lane; chunk < dim / 4; chunk += kWarp) {
        for (int from = warp; from < kTile; from += kWarps * kAtOnce) {
            int64_t keys[kAtOnce];
            Chunk chunks[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int n = first + from + kWarps * i;
                keys[i] = n < count ? memory.rows[n] : 0;
                if (keys[i] > 0) chunks[i] = load_chunk(a.window_record, a.window, keys[i], dim, chunk);
                if (keys[i] < 0) chunks[i] = load_chunk(a.entry_record, a.entries, ~keys[i], dim, chunk);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (keys[i] != 0) values = decode_chunk(keys[i] < 0 ? a.entry_record : a.window_record, chunks[i]);
                store_four(memory.keys + (from + kWarps * i) * memory.stride + 4 * chunk, values);
            }
        }
    }
}

// The online softmax of this warp's heads, warp + kWarps i.
template <int H>
struct Softmax {
    static constexpr int kEach = H / kWarps;

    // The sink comes first, as a score that adds to the denominator only.
    __device__ Softmax(const cedar_mega_attention_args& a, int first_head, int heads, int warp) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int head = warp + kWarps * i;
            most[i] = head < heads ? a.sink[first_head + head] : 0.0f;
            sum[i] = most[i] == -INFINITY ? 0.0f : 1.0f;
        }
    }

    __device__ void take(const Memory<H>& memory, int dim, bool is_key, float scale, int warp, int lane) {
        float4 products[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) products[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float *key = memory.keys + lane * memory.stride, *query = memory.query + warp * dim;
#pragma unroll 4
        for (int d = 0; d < dim; d += 4) {
            const float4 k = load_four(key + d);
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const float4 q = load_four(query + kWarps * i * dim + d);
                float4& p = products[i];
                p = make_float4(fmaf(q.x, k.x, p.x), fmaf(q.y, k.y, p.y), fmaf(q.z, k.z, p.z), fmaf(q.w, k.w, p.w));
            }
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const float4 p = products[i];
            const float score = is_key ? ((p.x + p.y) + (p.z + p.w)) * scale : -INFINITY;
            const float before = most[i];
            most[i] = fmaxf(before, max_lanes(score, kWarp));
            const float factor = before == most[i] ? 1.0f : expf(before - most[i]);
            const float probability = is_key ? expf(score - most[i]) : 0.0f;
            sum[i] = fmaf(sum[i], factor, sum_lanes(probability));
            memory.probabilities[(warp + kWarps * i) * kTile + lane] = probability;
            if (lane == 0) memory.factors[warp + kWarps * i] = factor;
        }
    }

    float most[kEach], sum[kEach];
};

// Four dimensions of every groups-th head. Threads beyond the last whole group own nothing.
template <int H>
struct Outputs {
    __device__ explicit Outputs(int dim, int heads)
        : chunk(threadIdx.x % (dim / 4)), group(threadIdx.x / (dim / 4)), groups(kThreads / (dim / 4)) {
        each = group < groups ? (heads - group + groups - 1) / groups : 0;
#pragma unroll
        for (int i = 0; i < H; ++i) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    __device__ void take(const Memory<H>& memory, int keys) {
#pragma unroll
        for (int i = 0; i < H; ++i) {
            if (i >= each) break;
            sums[i] = scaled(memory.factors[group + groups * i], sums[i]);
        }
        const float* values = memory.keys + 4 * chunk;
        for (int n = 0; n < keys; n += 4) {  // those beyond the last have zeros and no probability
            float4 v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = load_four(values + (n + j) * memory.stride);
#pragma unroll
            for (int i = 0; i < H; ++i) {
                if (i >= each) break;
                const float4 p = load_four(memory.probabilities + (group + groups * i) * kTile + n);
                sums[i] = fused(p.w, v[3], fused(p.z, v[2], fused(p.y, v[1], fused(p.x, v[0], sums[i]))));
            }
        }
    }

    __device__ void write(const cedar_mega_attention_args& a, int64_t row, int first_head, const Memory<H>& memory) const {
        const int dim = int(a.dim);
#pragma unroll
        for (int i = 0; i < H; ++i) {
            if (i >= each) break;
            const int head = group + groups * i;
            const float4 out = scaled(memory.factors[head], sums[i]);
            store_four(static_cast<float*>(a.out) + (row * a.heads + first_head + head) * dim + 4 * chunk,
                       rotate_chunk(out, a.cos + row * a.pairs, a.sin + row * a.pairs, -1.0f, dim, int(a.pairs), chunk));
        }
    }

    int chunk, group, groups, each;
    float4 sums[H];
};

template <int H>
__global__ void __launch_bounds__(kThreads, H == kWarps ? 6 : 2) attend(const cedar_mega_attention_args a) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, dim = int(a.dim);
    const int64_t row = blockIdx.x;
    const int first_head = int(blockIdx.y) * H, heads = min(H, int(a.heads) - first_head);
    const Memory<H> memory(bytes, dim);
    const int count = gather(a, row, memory.rows);
    stage_query(a, row, first_head, heads, memory);
    Softmax<H> softmax(a, first_head, heads, warp);
    Outputs<H> outputs(dim, heads);
    for (int first = 0; first < count; first += kTile) {
        stage_keys(a, first, count, memory);
        __syncthreads();
        softmax.take(memory, dim, first + lane < count, float(a.scale), warp, lane);
        __syncthreads();
        outputs.take(memory, min(kTile, count - first));
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Softmax<H>::kEach; ++i)  // a row without keys is zeros, whatever the sink
        if (lane == 0) memory.factors[warp + kWarps * i] = count > 0 ? 1.0f / softmax.sum[i] : 0.0f;
    __syncthreads();
    outputs.write(a, row, first_head, memory);
}

template <int H>
int run(const cedar_mega_attention_args& a, void* stream) {
    const size_t shared = Memory<H>::bytes(a, columns_of(a));
    if (shared > kMostShared)
        return fail(CEDAR_UNSUPPORTED, "mega_attention: float32 on a GPU with fewer keys a row than %lld", (long long)columns_of(a));
    const dim3 grid(unsigned(a.rows), unsigned((a.heads + H - 1) / H));
    return finish("mega_attention", launch(attend<H>, grid, kThreads, shared, 1, false, stream, a));
}

}  // namespace

int64_t mega_attention_workspace(const cedar_mega_attention_args&) { return 0; }

int mega_attention(const cedar_mega_attention_args& a, void* stream) {
    if (a.dim % 32 != 0 || a.dim > 4 * kThreads)
        return fail(CEDAR_UNSUPPORTED, "mega_attention: float32 on a GPU with dim a multiple of 32 up to %d, not %lld", 4 * kThreads,
                    (long long)a.dim);
    return a.heads <= kWarps ? run<kWarps>(a, stream) : run<4 * kWarps>(a, stream);
}

}  // namespace cedar::cuda::plain
