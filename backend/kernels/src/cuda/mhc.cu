// SPDX-License-Identifier: Apache-2.0
// mega_mhc in one launch. A cluster of 8 blocks takes a tile of rows, each block a slice of the hidden dimension: the slice of
// the new streams goes to memory once and stays in shared memory for the products with fn; what a row's slices add up to is
// exchanged between the blocks. Sums are added in an order that depends on the dimensions alone, so a row's bits do not depend on
// its tile.
#include <cooperative_groups.h>

#include "bodies.h"
#include "ptx.cuh"

namespace cedar::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kStreams = 4, kOutputs = (2 + kStreams) * kStreams, kCells = kStreams * kStreams;
constexpr int kCluster = 8, kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kVector = 8;      // bf16 of a 16-byte access
constexpr int kRowPadding = 16; // bf16 between rows in shared memory: 8 rows' 8-byte reads then hit different banks
constexpr int kSquares = kOutputs, kNormSquares = kOutputs + 1, kSums = kOutputs + 2;

// Shared memory of a block, in this order.
template <int M>
struct Layout {
    __host__ __device__ explicit Layout(int slice) : slice(slice), stride(kStreams * slice + kRowPadding), chunks(slice / kVector) {}
    __host__ __device__ size_t streams() const { return 0; }
    __host__ __device__ size_t coefficients() const { return streams() + sizeof(Bf16) * M * stride; }
    __host__ __device__ size_t squares() const { return coefficients() + sizeof(float) * M * (kStreams + kStreams + kCells); }
    __host__ __device__ size_t partials() const { return squares() + sizeof(float) * M * chunks * 2; }
    __host__ __device__ size_t sums() const { return partials() + sizeof(float) * kWarps * M * kOutputs; }
    __host__ __device__ size_t totals() const { return sums() + sizeof(float) * M * kSums; }
    __host__ __device__ size_t norms() const { return totals() + sizeof(float) * (M / kCluster) * kSums; }
    __host__ __device__ size_t bytes() const { return norms() + sizeof(float) * M; }
    int slice, stride, chunks;
};

__device__ inline uint32_t to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

__device__ inline void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The new streams of 8 columns of one row, rounded; and their share of the two sums of squares.
__device__ void cross_chunk(const cedar_mega_mhc_args& a, int64_t row, int column, const float* coefficients, Bf16* staged, int slice,
                            float* squares) {
    const float *pre = coefficients, *post = pre + kStreams, *comb = post + kStreams;
    const int64_t width = kStreams * a.hidden;
    float streams[kStreams][kVector];
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
        load_pack(static_cast<const Bf16*>(a.streams) + row * width + i * a.hidden + column, streams[i]);
    if (a.output != nullptr) {
        float output[kVector], old[kStreams][kVector];
        load_pack(static_cast<const Bf16*>(a.output) + row * a.hidden + column, output);
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
#pragma unroll
            for (int v = 0; v < kVector; ++v) old[i][v] = streams[i][v];
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
#pragma unroll
            for (int v = 0; v < kVector; ++v) {
                float x = post[j] * output[v];
#pragma unroll
                for (int i = 0; i < kStreams; ++i) x = fmaf(comb[i * kStreams + j], old[i][v], x);
                streams[j][v] = rounded<Bf16>(x);
            }
            store_pack(static_cast<Bf16*>(a.new_streams) + row * width + j * a.hidden + column, streams[j]);
        }
    }
    float square = 0.0f, norm_square = 0.0f;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
        float y = pre[0] * streams[0][v];
#pragma unroll
        for (int i = 0; i < kStreams; ++i) square = fmaf(streams[i][v], streams[i][v], square);
#pragma unroll
        for (int i = 1; i < kStreams; ++i) y = fmaf(pre[i], streams[i][v], y);
        y = rounded<Bf16>(y);
        norm_square = fmaf(y, y, norm_square);
    }
#pragma unroll
    for (int i = 0; i < kStreams; ++i) store_pack(staged + i * slice, streams[i]);
    squares[0] = square;
    squares[1] = norm_square;
}

// This block's share of the products of M rows with fn. B's float32 goes in as two TF32 parts, so nothing but the sum is rounded.
template <int M>
__device__ void multiply(const cedar_mega_mhc_args& a, const Layout<M>& layout, int first_column, const Bf16* staged, float* partials) {
    constexpr int kRowTiles = M / 16, kColumnTiles = kOutputs / 8;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
    constexpr int kBatch = 4;  // blocks whose fn is loaded before the first is used
    const int blocks = kStreams * layout.slice / 16;
    float c[kRowTiles][kColumnTiles][4] = {};
    for (int first = warp; first < blocks; first += kWarps * kBatch) {
        // Of 16 values of k, this lane has 4 neighbours: the order inside the block does not matter, only that A and B share it.
        const auto k_of = [&](int i) { return min(first + i * kWarps, blocks - 1) * 16 + quad * 4; };
        float4 b[kBatch][kColumnTiles];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int k = k_of(i), stream = k / layout.slice, column = first_column + k % layout.slice;
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n)
                b[i][n] = *reinterpret_cast<const float4*>(a.fn + (n * 8 + group) * kStreams * a.hidden + stream * a.hidden + column);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * kWarps >= blocks) break;
            const int k = k_of(i);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                float low[4], high[4];
                load_pack(staged + (m * 16 + group) * layout.stride + k, low);
                load_pack(staged + (m * 16 + group + 8) * layout.stride + k, high);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const uint32_t rows[4] = {__float_as_uint(low[2 * s]), __float_as_uint(high[2 * s]), __float_as_uint(low[2 * s + 1]),
                                              __float_as_uint(high[2 * s + 1])};
#pragma unroll
                    for (int n = 0; n < kColumnTiles; ++n) {
                        const float x = s == 0 ? b[i][n].x : b[i][n].z, y = s == 0 ? b[i][n].y : b[i][n].w;
                        const uint32_t xh = to_tf32(x), yh = to_tf32(y);
                        multiply_tf32(c[m][n], rows, xh, yh);
                        multiply_tf32(c[m][n], rows, to_tf32(x - __uint_as_float(xh)), to_tf32(y - __uint_as_float(yh)));
                    }
                }
            }
        }
    }
    float* out = partials + warp * M * kOutputs;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                out[(m * 16 + group + (i / 2) * 8) * kOutputs + n * 8 + quad * 2 + i % 2] = c[m][n][i];
}

// Row softmax + eps, then columns and rows divided in turn by their sum + eps, columns first and last.
__device__ void sinkhorn(float (&c)[kStreams][kStreams], float eps, int iterations) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
        float most = c[i][0], total = 0.0f;
#pragma unroll
        for (int j = 1; j < kStreams; ++j) most = fmaxf(most, c[i][j]);
#pragma unroll
        for (int j = 0; j < kStreams; ++j) total += c[i][j] = expf(c[i][j] - most);
#pragma unroll
        for (int j = 0; j < kStreams; ++j) c[i][j] = c[i][j] / total + eps;
    }
    for (int n = 0; n < iterations; ++n) {
        if (n > 0)
#pragma unroll
            for (int i = 0; i < kStreams; ++i) {
                const float factor = __frcp_rn(((eps + c[i][0]) + c[i][1]) + (c[i][2] + c[i][3]));
#pragma unroll
                for (int j = 0; j < kStreams; ++j) c[i][j] *= factor;
            }
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
            const float factor = __frcp_rn(((eps + c[0][j]) + c[1][j]) + (c[2][j] + c[3][j]));
#pragma unroll
            for (int i = 0; i < kStreams; ++i) c[i][j] *= factor;
        }
    }
}

__device__ void write_gates(const cedar_mega_mhc_args& a, int64_t row, const float* totals) {
    const float factor = 1.0f / sqrtf(totals[kSquares] / float(kStreams * a.hidden) + float(a.mix_eps));
    const auto raw = [&](int n) { return fmaf(totals[n] * factor, a.scale[n], a.base[n]); };
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
        a.new_pre[row * kStreams + i] = sigmoid(raw(i)) + float(a.hc_eps);
        a.new_post[row * kStreams + i] = sigmoid(raw(kStreams + i)) * 2.0f;
    }
    float c[kStreams][kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int j = 0; j < kStreams; ++j) c[i][j] = raw(2 * kStreams + i * kStreams + j);
    sinkhorn(c, float(a.hc_eps), int(a.iterations));
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int j = 0; j < kStreams; ++j) a.new_comb[row * kCells + i * kStreams + j] = c[i][j];
}

template <int M>
__device__ void write_normed(const cedar_mega_mhc_args& a, const Layout<M>& layout, int64_t first_row, int rows, int first_column,
                             const Bf16* staged, const float* coefficients, const float* norms, int thread, int threads) {
    for (int item = thread; item < rows * layout.chunks; item += threads) {
        const int m = item / layout.chunks, chunk = item % layout.chunks * kVector;
        const float* pre = coefficients + m * (2 * kStreams + kCells);
        float y[kVector], stream[kVector];
        load_pack(staged + m * layout.stride + chunk, stream);
#pragma unroll
        for (int v = 0; v < kVector; ++v) y[v] = pre[0] * stream[v];
#pragma unroll
        for (int i = 1; i < kStreams; ++i) {
            load_pack(staged + m * layout.stride + i * layout.slice + chunk, stream);
#pragma unroll
            for (int v = 0; v < kVector; ++v) y[v] = fmaf(pre[i], stream[v], y[v]);
        }
        float weight[kVector];
        load_pack(a.norm_weight + first_column + chunk, weight);
#pragma unroll
        for (int v = 0; v < kVector; ++v) y[v] = rounded<Bf16>(y[v]) * norms[m] * weight[v];
        store_pack(static_cast<Bf16*>(a.normed) + (first_row + m) * a.hidden + first_column + chunk, y);
    }
}

template <int M>
__global__ void __launch_bounds__(kThreads) cross(const cedar_mega_mhc_args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = int(cluster.block_rank());
    const Layout<M> layout(int(a.hidden) / kCluster);
    const int first_column = rank * layout.slice;
    const int64_t first_row = int64_t(blockIdx.x) / kCluster * M;
    const int rows = int(a.rows - first_row < M ? a.rows - first_row : M);
    Bf16* staged = reinterpret_cast<Bf16*>(memory + layout.streams());
    float* coefficients = reinterpret_cast<float*>(memory + layout.coefficients());
    float* squares = reinterpret_cast<float*>(memory + layout.squares());
    float* partials = reinterpret_cast<float*>(memory + layout.partials());
    float* sums = reinterpret_cast<float*>(memory + layout.sums());
    float* totals = reinterpret_cast<float*>(memory + layout.totals());
    float* norms = reinterpret_cast<float*>(memory + layout.norms());

    if (a.fn != nullptr)
        for (int n = 0; n < kOutputs; ++n)
            prefetch_rows(a.fn + n * kStreams * a.hidden + first_column, a.hidden * int64_t(sizeof(float)), kStreams, layout.slice * int64_t(sizeof(float)));
    constexpr int kEach = 2 * kStreams + kCells;
    for (int i = threadIdx.x; i < rows * kEach; i += kThreads) {
        const int n = i % kEach;
        const int64_t row = first_row + i / kEach;
        float value = 0.0f;
        if (n < kStreams) {
            if (a.norm_weight != nullptr) value = a.pre[row * kStreams + n];
        } else if (a.output != nullptr) {
            value = n < 2 * kStreams ? a.post[row * kStreams + n - kStreams] : a.comb[row * kCells + n - 2 * kStreams];
        }
        coefficients[i] = value;
    }
    __syncthreads();

    for (int item = threadIdx.x; item < rows * layout.chunks; item += kThreads) {
        const int m = item / layout.chunks, chunk = item % layout.chunks * kVector;
        cross_chunk(a, first_row + m, first_column + chunk, coefficients + m * kEach, staged + m * layout.stride + chunk, layout.slice,
                    squares + item * 2);
    }
    __syncthreads();

    if (a.fn != nullptr) multiply<M>(a, layout, first_column, staged, partials);
    const int lane = threadIdx.x % kWarp;
    for (int m = threadIdx.x / kWarp; m < rows; m += kWarps) {
        float square = 0.0f, norm_square = 0.0f;
        for (int chunk = lane; chunk < layout.chunks; chunk += kWarp) {
            square += squares[(m * layout.chunks + chunk) * 2];
            norm_square += squares[(m * layout.chunks + chunk) * 2 + 1];
        }
        square = sum_lanes(square);
        norm_square = sum_lanes(norm_square);
        if (lane == 0) {
            sums[m * kSums + kSquares] = square;
            sums[m * kSums + kNormSquares] = norm_square;
        }
    }
    __syncthreads();
    if (a.fn != nullptr)
        for (int i = threadIdx.x; i < rows * kOutputs; i += kThreads) {
            float total = 0.0f;
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) total += partials[warp * M * kOutputs + i];
            sums[i / kOutputs * kSums + i % kOutputs] = total;
        }

    cluster.sync();
    // Every block needs every row's norm; of the coefficients, each block makes those of M / 8 rows.
    const auto over_blocks = [&](int m, int n) {
        float total = 0.0f;
#pragma unroll
        for (int block = 0; block < kCluster; ++block) total += cluster.map_shared_rank(sums, block)[m * kSums + n];
        return total;
    };
    if (a.norm_weight != nullptr && threadIdx.x < rows)
        norms[threadIdx.x] = 1.0f / sqrtf(over_blocks(threadIdx.x, kNormSquares) / float(a.hidden) + float(a.norm_eps));
    if (a.fn != nullptr)
        for (int i = threadIdx.x; i < M / kCluster * kSums; i += kThreads) {
            const int m = rank + i / kSums * kCluster;
            if (m < rows) totals[i] = over_blocks(m, i % kSums);
        }
    cluster.sync();  // nobody reads another block's memory any more; also the barrier of this block

    // The first warp's lanes iterate while the others write.
    const bool both = a.fn != nullptr && a.norm_weight != nullptr;
    if (a.fn != nullptr && threadIdx.x < M / kCluster) {
        const int m = rank + int(threadIdx.x) * kCluster;
        if (m < rows) write_gates(a, first_row + m, totals + threadIdx.x * kSums);
    }
    if (a.norm_weight == nullptr) return;
    const int idle = both ? kWarp : 0;
    if (int(threadIdx.x) >= idle)
        write_normed<M>(a, layout, first_row, rows, first_column, staged, coefficients, norms, int(threadIdx.x) - idle, kThreads - idle);
}

template <int M>
cudaError_t run(const cedar_mega_mhc_args& a, void* stream) {
    const dim3 grid(unsigned((a.rows + M - 1) / M * kCluster));
    return launch(cross<M>, grid, kThreads, Layout<M>(int(a.hidden) / kCluster).bytes(), kCluster, stream, a);
}

}  // namespace

int64_t mega_mhc_workspace(const cedar_mega_mhc_args&) { return 0; }

int mega_mhc(const cedar_mega_mhc_args& a, void* stream) {
    if (a.type != CEDAR_BF16 || a.hc != kStreams || a.hidden % (kCluster * kVector) != 0 || a.hidden > 5120)
        return fail(CEDAR_UNSUPPORTED, "mega_mhc: on a GPU type bf16, hc 4 and hidden a multiple of 64 up to 5120; got type %lld, hc %lld, hidden %lld",
                    (long long)a.type, (long long)a.hc, (long long)a.hidden);
    return finish("mega_mhc", a.rows <= 1024 ? run<16>(a, stream) : run<32>(a, stream));
}

}  // namespace cedar::cuda
