// SPDX-License-Identifier: Apache-2.0
// mega_mhc in one launch. A cluster takes 8 tokens at a time; each of its warps has 32 columns of them for good, and the share of
// fn that belongs to these columns in shared memory. Other warps order the tiles' copies, as soon as all have read what lay there into
// registers, and add up what the warps of columns give, so that none of these waits for another; the sums go to the blocks that need
// them. One more warp makes the coefficients meanwhile. Where clusters have several tiles, the warps of columns take two at a time: one
// look at fn serves both, which else is half of what shared memory gives.
// What no launch writes, fn and the weights of norm and coefficients, is read while the launch before still runs.
//
// A sum is that of the blocks' parts in an order of theirs, a part that of its warps' in theirs: for one dimension one order,
// whatever the number of rows.
#include <atomic>

#include "bodies.h"
#include "mhc_columns.cuh"

namespace cedar::cuda {
namespace {

constexpr int kMostWarps = 10, kMostBlocks = 16;
constexpr int kMostAlone = 512;           // blocks of a launch without clusters
constexpr int kAhead = 3;                 // tiles of tokens on their way
constexpr uint32_t kAnnounced = 2;        // tiles whose data L2 fetches while the launch before still runs
constexpr int kTwoTiles = 2;              // at a time, where clusters have several
constexpr int kGateSums = kNormSquares;   // sums that the coefficients need: the products and the squares
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

// Tiles whose norms may be on their way, with S at a time; see cross.
template <int S>
constexpr int kNormSlots = 4 * S;

// Shared memory of a block of C with `warps` warps of columns that take S tiles at a time.
template <int C, int S>
struct Layout {
    int warps;
    __host__ __device__ int ring() const { return warps * kFnBytes; }
    __host__ __device__ int partials() const { return ring() + kAhead * Stage{warps}.bytes(); }
    __host__ __device__ int norms() const { return partials() + warps * kPartial * int(sizeof(float)); }
    __host__ __device__ int gates() const { return norms() + kNormSlots<S> * C * kTokens * int(sizeof(float)); }
    __host__ __device__ int barriers() const { return gates() + kReuse<C> * kGateSums * kTokens * int(sizeof(float)); }
    __host__ __device__ int bytes() const { return barriers() + (kNormSlots<S> + 2 * (kGateSlots<C> + 1 + kAhead)) * int(sizeof(uint64_t)); }
};

// ---- sums of four tokens on their way to a block ----

// A block alone stores them and arrives, because its launch need not be one of clusters; others send.
template <int C>
__device__ constexpr int arrivals(int sums) {
    return C == 1 ? 1 + 2 * sums : 1;
}

template <int C>
__device__ inline void expect_sums(uint64_t* full, int sums) {
    if (C == 1)
        arrive(full);
    else
        announce_bytes(full, C * sums * kTokens * sizeof(float));
}

template <int C>
__device__ inline void send_sums(float* place, uint64_t* full, int there, float4 total) {
    if (C == 1) {
        *reinterpret_cast<float4*>(place) = total;
        arrive(full);
    } else {
        send(address_in(shared_address(place), there), address_in(shared_address(full), there), total);
    }
}

// ---- a block ----

constexpr int threads_of(int warps) { return (warps + 1 + kCopyWarps) * kWarp; }

// The warps of columns take S tiles of the cluster at a time, so that one look at fn serves S.
//
// Step s is finished while the sums of step s + 1 are stored. So a block sends a tile of step s + 4 when step s + 2 of all blocks has
// come, and they have sent that after the last look at their norms of step s: kNormSlots. Likewise kReuse for the coefficients, whose
// warp says when it has read them: a block sends tile n + kReuse - 2 S only then.
// kHidden: see Columns.
template <int C, int kHidden, int S>
__global__ void __launch_bounds__(threads_of(kMostWarps), 1) cross(const cedar_mega_mhc_args a, const uint32_t most_warps) {
    extern __shared__ __align__(128) unsigned char memory[];
    release_launch();  // the next launch awaits this one
    const uint32_t warps = kHidden > 0 ? warps_of<C>(kHidden) : most_warps;
    const Layout<C, S> layout{int(warps)};
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = blockIdx.x % C, clusters = gridDim.x / C;
    float* const partials = reinterpret_cast<float*>(memory + layout.partials());
    float* const norms = reinterpret_cast<float*>(memory + layout.norms());
    float* const gates = reinterpret_cast<float*>(memory + layout.gates());
    uint64_t *const norms_full = reinterpret_cast<uint64_t*>(memory + layout.barriers()), *const gates_full = norms_full + kNormSlots<S>;
    uint64_t *const gates_read = gates_full + kGateSlots<C>, *const partials_full = gates_read + kGateSlots<C>;
    uint64_t *const partials_read = partials_full + 1, *const tile_full = partials_read + 1, *const tile_read = tile_full + kAhead;
    const uint32_t tiles = uint32_t((a.rows + kTokens - 1) / kTokens), first_tile = blockIdx.x / C;
    const uint32_t count = (tiles - first_tile + clusters - 1) / clusters;
    const auto first_row = [&](uint32_t n) { return (first_tile + n * clusters) * kTokens; };
    const auto row_of = [&](uint32_t n) { return first_row(n) + lane / 4; };
    const Stage stage{int(warps)};
    const auto stage_of = [&](uint32_t n) { return memory + layout.ring() + n % kAhead * stage.bytes(); };

    if (warp == warps) {
        if (lane == 0) {
            for (uint32_t i = 0; i < kNormSlots<S>; ++i) init_barrier(norms_full + i, arrivals<C>(1));
            for (int i = 0; i < kGateSlots<C>; ++i) init_barrier(gates_full + i, arrivals<C>(kGateSums)), init_barrier(gates_read + i, 1);
            init_barrier(partials_full, warps), init_barrier(partials_read, kCopyWarps);
            for (int i = 0; i < kAhead; ++i) init_barrier(tile_full + i, kCopyWarps), init_barrier(tile_read + i, warps);
            publish_barriers();
        }
        __syncwarp();
    }
    __syncthreads();
    arrive_at_cluster();

    if (warp > warps) {  // the tiles' copies, and the blocks' sums
        const uint32_t column = rank * warps * kUnit, part = warp - warps - 1;
        const uint32_t width = column < uint32_t(a.hidden) ? min(warps * kUnit, uint32_t(a.hidden) - column) : 0;
        const Columns<kHidden> columns{a, column, lane, true};
        const TileCopies<kHidden> copies{columns, stage, width * uint32_t(sizeof(Bf16))};
        const auto announce = [&](uint32_t n) {  // to L2
            if (n < count) copies.order(first_row(n), part, [](int, const void* from, uint32_t bytes) { prefetch_bulk(from, bytes); });
        };
        const auto copy = [&](uint32_t n) {  // when all have read what lay there
            if (n >= count) return;
            unsigned char* const to = stage_of(n);
            uint64_t* const full = tile_full + n % kAhead;
            if (n >= kAhead) await_phase(tile_read + n % kAhead, n / kAhead - 1), release_shared();
            if (lane == 0) part == 0 ? announce_bytes(full, copies.all_bytes(first_row(n))) : arrive(full);  // each, so that none falls behind
            copies.order(first_row(n), part, [&](int place, const void* from, uint32_t bytes) { copy_bulk(to + place, from, bytes, full); });
            __syncwarp();
        };
        // Four tokens of a sum and where it goes: products and squares to the block whose turn it is, a norm's to every block.
        const auto add_up = [&](uint32_t n) {
            const uint32_t norm_slot = n % kNormSlots<S>, slot = n / C % kGateSlots<C>, read = n - (kReuse<C> - 2 * S);
            if (part == 0 && lane == 0) expect_sums<C>(norms_full + norm_slot, 1);
            if (columns.mixes() && n >= kReuse<C> - 2 * S && read % C == rank)
                await_phase(gates_read + read / C % kGateSlots<C>, read / kReuse<C>);
            await_phase(partials_full, n);
            constexpr uint32_t kItems = 2 * (C + kGateSums), kWarpItems = (kItems + kCopyWarps - 1) / kCopyWarps;
            static_assert(kWarpItems <= kWarp, "a lane has one item");
            const uint32_t item = part * kWarpItems + lane, half = item % 2 * 4;
            const bool gate = item < 2 * kGateSums;
            if (lane < kWarpItems && item < kItems && (!gate || columns.mixes())) {
                const uint32_t sum = gate ? item / 2 : kNormSquares;
                float4 total = {};
#pragma unroll
                for (uint32_t w = 0; w < kMostWarps; ++w) {
                    if (w >= warps) break;
                    const float4 x = *reinterpret_cast<const float4*>(partials + w * kPartial + sum * kTokens + half);
                    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
                }
                float* to = gate ? gates + ((slot * C + rank) * kGateSums + sum) * kTokens + half
                                 : norms + (norm_slot * C + rank) * kTokens + half;
                send_sums<C>(to, gate ? gates_full + slot : norms_full + norm_slot, gate ? n % C : item / 2 - kGateSums, total);
            }
            __syncwarp();
            if (lane == 0) arrive(partials_read);
        };
        for (uint32_t n = 0; n < kAnnounced; ++n) announce(n);
        await_launch();
        for (uint32_t n = 0; n < kAhead; ++n) copy(n);
        await_cluster();
        for (uint32_t n = 0; n < count; ++n) {
            if (n % S == 0)  // the step's tiles are read before any is added up
                for (uint32_t j = 0; j < S; ++j) copy(n + kAhead + j);
            add_up(n);
        }
    } else if (warp == warps) {  // the coefficients of every C-th tile of the cluster
        if (kHidden > 0 || a.fn != nullptr) {
            const int i = lane % 4, token = lane / 4;
            const GateScales scales(a, i);
            await_launch();
            await_cluster();
            for (uint32_t use = 0; use * C + rank < count; ++use) {
                const uint32_t slot = use % kGateSlots<C>, phase = use / kGateSlots<C>;
                if (lane == 0) expect_sums<C>(gates_full + slot, kGateSums);
                await_phase(gates_full + slot, phase);
                const float* parts = gates + slot * C * kGateSums * kTokens + token;
                float sums[2 + kStreams] = {}, square = 0.0f;
#pragma unroll
                for (int block = 0; block < C; ++block, parts += kGateSums * kTokens) {
#pragma unroll
                    for (int n = 0; n < 2 + kStreams; ++n) sums[n] += parts[GateScales::output(n, i) * kTokens];
                    square += parts[kSquares * kTokens];
                }
                arrive_after_reads(gates_read + slot);
                const uint32_t row = row_of(use * C + rank);
                write_gates(a, row, row < uint32_t(a.rows), scales, sums, square, i);
            }
        } else {
            await_cluster();
        }
    } else {
        const uint32_t unit = rank * warps + warp;
        const Columns<kHidden> columns{a, unit * kUnit + lane % 4 * kVector, lane, kHidden > 0 || unit * kUnit < uint32_t(a.hidden)};
        const float inverse = 1.0f / float(columns.hidden()), norm_eps = float(a.norm_eps);
        unsigned char* const fn = memory + warp * kFnBytes;
        float* const partial = partials + warp * kPartial;
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
            if (columns.mixes() && columns.inside)
                fetch_fn(a.fn + i * columns.hidden() + unit * kUnit, columns.hidden(), fn + i * kFnStream, lane);
            close_copies();
        }
        float weight[kVector] = {};
        if (columns.norms() && columns.inside) load_pack(a.norm_weight + columns.column, weight);
        const uint32_t columns_at = stage.token(lane / 4) + (warp * kUnit + lane % 4 * kVector) * uint32_t(sizeof(Bf16));  // the lane's
        uint4 streams[S][kStreams] = {}, before[S] = {}, collapsed[S] = {};  // before: of the step that is not finished yet
        Sums sums[S] = {};
        const auto take = [&](uint32_t step) {  // the tiles that have come
#pragma unroll
            for (uint32_t j = 0; j < S; ++j) {
                const uint32_t n = step * S + j;
                if (n >= count) break;
                const unsigned char* const from = stage_of(n);
                float pre[kStreams] = {};
                Written written;
                await_phase(tile_full + n % kAhead, n / kAhead);
                columns.read(stage, from, from + columns_at, streams[j], pre, written);
                if (S > 1 || n + kAhead < count) arrive_after_reads(tile_read + n % kAhead);  // a block's only tile saves the fence
                columns.expand(row_of(n), streams[j], written);
                columns.collapse(streams[j], pre, collapsed[j], sums[j]);
            }
        };
        const auto split = [&](int i) {
            __syncwarp();
            if (columns.mixes() && columns.inside) split_fn(fn + i * kFnStream, lane);
        };
        await_copies<3>(), split(0);
        await_copies<2>(), split(1);
        await_copies<1>(), split(2);
        await_copies<0>(), split(3);
        __syncwarp();
        await_cluster();
        take(0);

        const auto finish = [&](uint32_t n, uint4 normed) {
            const uint32_t slot = n % kNormSlots<S>;
            await_phase(norms_full + slot, n / kNormSlots<S>);
            if (!columns.norms()) return;
            constexpr uint32_t kLanes = C < 4 ? 1 : 4, kParts = C / kLanes;  // of a token: each has parts to add
            const float* parts = norms + (slot * C + lane % kLanes * kParts) * kTokens + lane / 4;
            float total = parts[0];
#pragma unroll
            for (uint32_t part = 1; part < kParts; ++part) total += parts[part * kTokens];
            total = sum_lanes(total, kLanes);
            columns.write_normed(row_of(n), normed, weight, rsqrtf(fmaf(total, inverse, norm_eps)));
        };
        const uint32_t steps = (count + S - 1) / S;
        for (uint32_t step = 0; step <= steps; ++step) {
            const uint32_t n = step * S;
            if (n < count) columns.multiply(streams, fn, sums);
#pragma unroll
            for (uint32_t j = 0; j < S; ++j) {
                if (n + j < count) {
                    if (n + j > 0) await_phase(partials_read, n + j - 1);  // the tile before has been added up
                    columns.store_sums(partial, sums[j]);
                    __syncwarp();
                    if (lane == 0) arrive(partials_full);
                }
                if (step > 0 && n - S + j < count) finish(n - S + j, before[j]);
                before[j] = collapsed[j];
            }
            take(step + 1);
        }
    }
    __syncwarp();
    arrive_at_cluster();  // nobody leaves before what was sent to it has come, nor while others send
    await_cluster();
}

// ---- host ----

// Clusters that the device runs at once, asked once.
template <int C, int kHidden, int S>
cudaError_t clusters_at_once(int warps, int& clusters) {
    constexpr int kMostDevices = 64;
    static std::atomic<int> known[kMostDevices][kMostWarps + 1];
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    std::atomic<int>& place = known[device % kMostDevices][warps];
    clusters = place.load(std::memory_order_relaxed);
    if (clusters > 0) return cudaSuccess;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = C;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(C);
    config.blockDim = dim3(threads_of(warps));
    config.dynamicSmemBytes = size_t(Layout<C, S>{warps}.bytes());
    config.attrs = &attribute;
    config.numAttrs = 1;
    const auto kernel = cross<C, kHidden, S>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.dynamicSmemBytes));
    if (error == cudaSuccess && C > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error == cudaSuccess) place.store(clusters, std::memory_order_relaxed);
    return error;
}

template <int C, int kHidden, int S = 1>
int run(const cedar_mega_mhc_args& a, void* stream) {
    const int warps = warps_of<C>(int(a.hidden));
    const int64_t tiles = (a.rows + kTokens - 1) / kTokens;
    int clusters = kMostAlone;
    if (C > 1)
        if (const cudaError_t error = clusters_at_once<C, kHidden, S>(warps, clusters); error != cudaSuccess) return finish("mega_mhc", error);
    if (clusters == 0) return fail(CEDAR_UNSUPPORTED, "mega_mhc: this GPU has no room for a cluster of %d blocks", C);
    if constexpr (kHidden > 0 && S == 1)
        if (tiles > clusters) return run<C, kHidden, kTwoTiles>(a, stream);
    const dim3 grid(unsigned(tiles < clusters ? tiles : clusters) * C);
    const size_t shared = size_t(Layout<C, S>{warps}.bytes());
    return finish("mega_mhc", launch(cross<C, kHidden, S>, grid, threads_of(warps), shared, C, true, stream, a, warps));
}

}  // namespace

int64_t mega_mhc_workspace(const cedar_mega_mhc_args&) { return 0; }

int mega_mhc(const cedar_mega_mhc_args& a, void* stream) {
    constexpr int kMostHidden = kMostBlocks * kMostWarps * kUnit;
    if (a.type != CEDAR_BF16 || a.hc != kStreams || a.hidden % kUnit != 0 || a.hidden > kMostHidden)
        return fail(CEDAR_UNSUPPORTED, "mega_mhc: on a GPU type bf16, hc 4 and hidden a multiple of %d up to %d; got type %lld, hc %lld, hidden %lld",
                    kUnit, kMostHidden, (long long)a.type, (long long)a.hc, (long long)a.hidden);
    const bool whole = a.output != nullptr && a.fn != nullptr && a.norm_weight != nullptr;
    if (a.hidden == kMostHidden && whole) return run<kMostBlocks, kMostHidden>(a, stream);
    return a.hidden <= kMostWarps * kUnit ? run<1, 0>(a, stream) : run<kMostBlocks, 0>(a, stream);
}

}  // namespace cedar::cuda
