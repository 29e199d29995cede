// SPDX-License-Identifier: Apache-2.0
// mega_mhc in one launch. A cluster takes 8 tokens at a time; each of its warps has 32 columns of them for good, and the share of
// fn that belongs to these columns in shared memory. What a token's columns add up to goes to the blocks that need it; a warp of its
// own makes the coefficients meanwhile.
//
// A sum is that of the blocks' parts in their order, a part that of its warps' in theirs: for one dimension one order, whatever
// the number of rows.
#include <atomic>

#include "bodies.h"
#include "mhc_columns.cuh"

namespace cedar::cuda {
namespace {

constexpr int kMostWarps = 10, kMostBlocks = 16;
constexpr int kMostAlone = 512;           // blocks of a launch without clusters
constexpr int kStages = 2;                // tiles of tokens on their way
constexpr int kGateSums = kNormSquares;   // sums that the coefficients need: the products and the squares
constexpr int kNormSlots = 4;             // tiles whose norms may be on their way; see cross
constexpr int kPartial = kSums * kTokens; // floats of a warp

// How many tiles' coefficients a block may have on their way: of kReuse tiles in a row, each goes to a place of its own.
template <int C>
constexpr int kGateSlots = C >= 4 ? 1 : 4 / C;
template <int C>
constexpr int kReuse = C * kGateSlots<C>;

template <int C>
__host__ __device__ constexpr int warps_of(int hidden) {
    return (hidden / kUnit + C - 1) / C;
}

// Shared memory of a block of C with `warps` warps of columns.
template <int C>
struct Layout {
    int warps;
    __host__ __device__ int ring() const { return warps * kFnBytes; }
    __host__ __device__ int partials() const { return ring() + warps * kStages * kStageBytes; }
    __host__ __device__ int norms() const { return partials() + 2 * warps * kPartial * int(sizeof(float)); }
    __host__ __device__ int gates() const { return norms() + kNormSlots * C * kTokens * int(sizeof(float)); }
    __host__ __device__ int barriers() const { return gates() + kReuse<C> * kGateSums * kTokens * int(sizeof(float)); }
    __host__ __device__ int bytes() const { return barriers() + (kNormSlots + 2 * kGateSlots<C>) * int(sizeof(uint64_t)); }
};

// ---- a block ----

// Tile n of a cluster is finished after tile n + 1 has been sent. So a block sends tile n + 4 when tile n + 2 of all blocks has
// come, and they have sent that after the last look at their norms of tile n: kNormSlots. Likewise kReuse for the coefficients,
// whose warp says when it has read them: a block sends tile n + kReuse - 2 only then.
// kHidden: 0 where only the call knows it.
template <int C, int kHidden>
__global__ void __launch_bounds__((kMostWarps + 1) * kWarp, 1) cross(const cedar_mega_mhc_args a, const int most_warps) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int warps = kHidden > 0 ? warps_of<C>(kHidden) : most_warps;
    const Layout<C> layout{warps};
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = int(blockIdx.x) % C, clusters = int(gridDim.x) / C;
    float* norms = reinterpret_cast<float*>(memory + layout.norms());
    float* gates = reinterpret_cast<float*>(memory + layout.gates());
    uint64_t* norms_full = reinterpret_cast<uint64_t*>(memory + layout.barriers());
    uint64_t *gates_full = norms_full + kNormSlots, *gates_read = gates_full + kGateSlots<C>;
    const int tiles = int((a.rows + kTokens - 1) / kTokens), first_tile = int(blockIdx.x) / C;
    const int count = (tiles - first_tile + clusters - 1) / clusters;
    const auto row_of = [&](int n) { return uint32_t((first_tile + n * clusters) * kTokens + lane / 4); };

    if (warp == warps) {  // the coefficients of every C-th tile of the cluster
        if (lane == 0) {
            for (int i = 0; i < kNormSlots + 2 * kGateSlots<C>; ++i) start_barrier(norms_full + i);
            publish_barriers();
        }
        __syncwarp();
        arrive_at_cluster();
        if (a.fn != nullptr) {
            const int i = lane % 4, token = lane / 4;
            const GateScales scales(a, i);
            await_cluster();
            for (int use = 0; use * C + rank < count; ++use) {
                const int slot = use % kGateSlots<C>, phase = use / kGateSlots<C>;
                if (lane == 0) expect_bytes(gates_full + slot, C * kGateSums * kTokens * sizeof(float));
                await_phase(gates_full + slot, phase);
                const float* parts = gates + slot * C * kGateSums * kTokens + token;
                float sums[2 + kStreams] = {}, square = 0.0f;
#pragma unroll
                for (int block = 0; block < C; ++block, parts += kGateSums * kTokens) {
#pragma unroll
                    for (int n = 0; n < 2 + kStreams; ++n) sums[n] += parts[GateScales::output(n, i) * kTokens];
                    square += parts[kSquares * kTokens];
                }
                __syncwarp();
                if (lane == 0) arrive(gates_read + slot);
                const uint32_t row = row_of(use * C + rank);
                write_gates(a, row, row < uint32_t(a.rows), scales, sums, square, i);
            }
        } else {
            await_cluster();
        }
    } else {
        const int unit = rank * warps + warp;
        const Columns<kHidden> columns{a, unit * kUnit + lane % 4 * kVector, lane, kHidden > 0 || unit * kUnit < int(a.hidden)};
        const float inverse = 1.0f / float(columns.hidden()), norm_eps = float(a.norm_eps);
        unsigned char *fn = memory + warp * kFnBytes, *ring = memory + layout.ring() + warp * kStages * kStageBytes;
        const auto fetch = [&](int n) {
            if (n < count) columns.fetch(row_of(n), ring + n % kStages * kStageBytes);
            close_copies();
        };
        fetch(0);
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
            if (a.fn != nullptr && columns.inside)
                fetch_fn(a.fn + i * columns.hidden() + unit * kUnit, columns.hidden(), fn + i * kFnStream, lane);
            close_copies();
        }
        for (int n = 1; n < kStages; ++n) fetch(n);
        float weight[kVector] = {};
        if (a.norm_weight != nullptr && columns.inside) load_pack(a.norm_weight + columns.column, weight);
        __syncwarp();
        arrive_at_cluster();
        uint4 streams[kStreams];
        float pre[kStreams];
        const auto take = [&](int n) {  // the tile that has come
            __syncwarp();
            columns.cross(row_of(n), ring + n % kStages * kStageBytes, streams, pre);
            __syncwarp();
            fetch(n + kStages);
        };
        const auto split = [&](int i) {
            __syncwarp();
            if (a.fn != nullptr && columns.inside) split_fn(fn + i * kFnStream, lane);
        };
        await_copies<kStages + 3>(), take(0);
        await_copies<kStages + 3>(), split(0);
        await_copies<kStages + 2>(), split(1);
        await_copies<kStages + 1>(), split(2);
        await_copies<kStages>(), split(3);
        await_cluster();

        uint4 before = {}, collapsed = {};  // of the tile that is not finished yet
        const auto finish = [&](int n) {
            const int slot = n % kNormSlots;
            await_phase(norms_full + slot, n / kNormSlots);
            if (a.norm_weight == nullptr) return;
            const float* parts = norms + slot * C * kTokens + lane / 4;
            float total = 0.0f;
#pragma unroll
            for (int block = 0; block < C; ++block) total += parts[block * kTokens];
            columns.write_normed(row_of(n), before, weight, rsqrtf(fmaf(total, inverse, norm_eps)));
        };
        const int threads = warps * kWarp;
        for (int n = 0; n < count; ++n) {
            float* partials = reinterpret_cast<float*>(memory + layout.partials()) + n % 2 * warps * kPartial;
            columns.add_up(streams, pre, fn, partials + warp * kPartial, collapsed);
            if (threadIdx.x == 0) {
                expect_bytes(norms_full + n % kNormSlots, C * kTokens * sizeof(float));
                const int read = n - (kReuse<C> - 2);
                if (a.fn != nullptr && read >= 0 && read % C == rank) await_phase(gates_read + read / C % kGateSlots<C>, read / kReuse<C>);
            }
            meet(threads);
            // Four tokens of a sum and where it goes: products and squares to the block whose turn it is, a norm's to every block.
            for (int item = threadIdx.x; item < 2 * (C + kGateSums); item += threads) {
                const int to = item / 2 - kGateSums, half = item % 2 * 4, sum = to < 0 ? item / 2 : kNormSquares;
                if (to < 0 && a.fn == nullptr) continue;
                float4 total = {};
#pragma unroll
                for (int w = 0; w < kMostWarps; ++w) {
                    if (w >= warps) break;
                    const float4 x = *reinterpret_cast<const float4*>(partials + w * kPartial + sum * kTokens + half);
                    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
                }
                const int slot = n / C % kGateSlots<C>;
                const float* place = to < 0 ? gates + ((slot * C + rank) * kGateSums + sum) * kTokens + half
                                            : norms + (n % kNormSlots * C + rank) * kTokens + half;
                const uint64_t* full = to < 0 ? gates_full + slot : norms_full + n % kNormSlots;
                const int there = to < 0 ? n % C : to;
                send(address_in(shared_address(place), there), address_in(shared_address(full), there), total);
            }
            if (n > 0) finish(n - 1);
            before = collapsed;
            if (n + 1 < count) await_copies<kStages - 1>(), take(n + 1);
        }
        finish(count - 1);
    }
    __syncwarp();
    arrive_at_cluster();  // nobody leaves before what was sent to it has come, nor while others send
    await_cluster();
}

// ---- host ----

// Clusters that the device runs at once, asked once.
template <int C, int kHidden>
cudaError_t clusters_at_once(const cudaLaunchConfig_t& config, int warps, int& clusters) {
    constexpr int kMostDevices = 64;
    static std::atomic<int> known[kMostDevices][kMostWarps + 1];
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    std::atomic<int>& place = known[device % kMostDevices][warps];
    clusters = place.load(std::memory_order_relaxed);
    if (clusters > 0) return cudaSuccess;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, cross<C, kHidden>, &config);
    if (error == cudaSuccess) place.store(clusters, std::memory_order_relaxed);
    return error;
}

template <int C, int kHidden>
int run(const cedar_mega_mhc_args& a, void* stream) {
    const auto kernel = cross<C, kHidden>;
    const int warps = warps_of<C>(int(a.hidden));
    const int64_t tiles = (a.rows + kTokens - 1) / kTokens;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = C;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(C);
    config.blockDim = dim3(unsigned(warps + 1) * kWarp);
    config.dynamicSmemBytes = size_t(Layout<C>{warps}.bytes());
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<C>{kMostWarps}.bytes());
    if (error == cudaSuccess && C > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    int clusters = kMostAlone;
    if (error == cudaSuccess && C > 1) error = clusters_at_once<C, kHidden>(config, warps, clusters);
    if (error != cudaSuccess) return finish("mega_mhc", error);
    if (clusters == 0) return fail(CEDAR_UNSUPPORTED, "mega_mhc: this GPU has no room for a cluster of %d blocks", C);
    config.gridDim = dim3(unsigned(tiles < clusters ? tiles : clusters) * C);
    return finish("mega_mhc", cudaLaunchKernelEx(&config, kernel, a, warps));
}

}  // namespace

int64_t mega_mhc_workspace(const cedar_mega_mhc_args&) { return 0; }

int mega_mhc(const cedar_mega_mhc_args& a, void* stream) {
    constexpr int kMostHidden = kMostBlocks * kMostWarps * kUnit;
    if (a.type != CEDAR_BF16 || a.hc != kStreams || a.hidden % kUnit != 0 || a.hidden > kMostHidden)
        return fail(CEDAR_UNSUPPORTED, "mega_mhc: on a GPU type bf16, hc 4 and hidden a multiple of %d up to %d; got type %lld, hc %lld, hidden %lld", kUnit,
                    kMostHidden, (long long)a.type, (long long)a.hc, (long long)a.hidden);
    if (a.hidden == kMostHidden) return run<kMostBlocks, kMostHidden>(a, stream);
    return a.hidden <= kMostWarps * kUnit ? run<1, 0>(a, stream) : run<kMostBlocks, 0>(a, stream);
}

}  // namespace cedar::cuda
