// SPDX-License-Identifier: Apache-2.0
// mega_mhc in one launch. A cluster takes 8 tokens at a time; each of its warps has 32 columns of them for good, and the share of
// fn that belongs to these columns in shared memory. Other warps order the tiles' copies, as soon as all have read what lay there into
// registers. What a token's columns add up to goes to the blocks that need it; a warp of its own makes the coefficients meanwhile.
// Where clusters have several tiles of tokens, two groups of warps take them in turn and share fn: one computes while the other waits.
// What no launch writes, fn and the weights of norm and coefficients, is read while the launch before still runs.
//
// A sum is that of the blocks' parts in an order of theirs, a part that of its warps' in theirs: for one dimension one order,
// whatever the number of rows and groups.
#include <atomic>

#include "bodies.h"
#include "mhc_columns.cuh"

namespace cedar::cuda {
namespace {

constexpr int kMostWarps = 10, kMostBlocks = 16;
constexpr int kMostAlone = 512;           // blocks of a launch without clusters
constexpr int kAhead = 3;                 // tiles of tokens on their way
constexpr uint32_t kAnnounced = 2;        // tiles whose data L2 fetches while the launch before still runs
constexpr int kManyGroups = 2;
constexpr int kGateSums = kNormSquares;   // sums that the coefficients need: the products and the squares
constexpr int kNormSlots = 4;             // a group's tiles whose norms may be on their way; see cross
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

// Shared memory of a block of C with G groups of `warps` warps of columns.
template <int C, int G>
struct Layout {
    int warps;
    __host__ __device__ int ring() const { return warps * kFnBytes; }
    __host__ __device__ int partials() const { return ring() + kAhead * Stage{warps}.bytes(); }
    __host__ __device__ int norms() const { return partials() + warps * kPartial * int(sizeof(float)); }
    __host__ __device__ int gates() const { return norms() + G * kNormSlots * C * kTokens * int(sizeof(float)); }
    __host__ __device__ int weights() const { return gates() + kReuse<C> * kGateSums * kTokens * int(sizeof(float)); }
    __host__ __device__ int barriers() const { return weights() + warps * kUnit * int(sizeof(float)); }
    __host__ __device__ int bytes() const { return barriers() + (G * (kNormSlots + 1) + 2 * (kGateSlots<C> + kAhead)) * int(sizeof(uint64_t)); }
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

// Group g of G takes tiles g, g + G, ... of the cluster; the groups of the same number in its blocks go together, apart from others.
//
// Its tile n is finished after tile n + G has been sent. So a block sends its tile n + 4 G when tile n + 2 G of all blocks has come,
// and they have sent that after the last look at their norms of tile n: kNormSlots. Likewise kReuse for the coefficients, whose
// warp says when it has read them: a block sends tile n + kReuse - 2 G only then.
// kHidden: see Columns.
template <int C, int kHidden, int G>
__global__ void __launch_bounds__((G * kMostWarps + 1 + kCopyWarps) * kWarp, 1) cross(const cedar_mega_mhc_args a, const uint32_t most_warps) {
    static_assert(kReuse<C> % G == 0, "a place of coefficients is one group's");
    constexpr int kFnParts = kStreams / G;  // of a group
    extern __shared__ __align__(128) unsigned char memory[];
    release_launch();  // the next launch awaits this one
    const uint32_t warps = kHidden > 0 ? warps_of<C>(kHidden) : most_warps;
    const Layout<C, G> layout{int(warps)};
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = blockIdx.x % C, clusters = gridDim.x / C;
    float* gates = reinterpret_cast<float*>(memory + layout.gates());
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + layout.barriers());
    uint64_t *gates_full = barriers + G * kNormSlots, *gates_read = gates_full + kGateSlots<C>, *partials_read = gates_read + kGateSlots<C>;
    uint64_t *const tile_full = partials_read + G, *const tile_read = tile_full + kAhead;
    const uint32_t tiles = uint32_t((a.rows + kTokens - 1) / kTokens), first_tile = blockIdx.x / C;
    const uint32_t count = (tiles - first_tile + clusters - 1) / clusters;
    const auto first_row = [&](uint32_t n) { return (first_tile + n * clusters) * kTokens; };
    const auto row_of = [&](uint32_t n) { return first_row(n) + lane / 4; };
    const Stage stage{int(warps)};
    const auto stage_of = [&](uint32_t n) { return memory + layout.ring() + n % kAhead * stage.bytes(); };

    if (warp == G * warps) {
        if (lane == 0) {
            for (int i = 0; i < G * kNormSlots; ++i) init_barrier(barriers + i, arrivals<C>(1));
            for (int i = 0; i < kGateSlots<C>; ++i) init_barrier(gates_full + i, arrivals<C>(kGateSums)), init_barrier(gates_read + i, 1);
            for (int i = 0; i < G; ++i) init_barrier(partials_read + i, warps);
            for (int i = 0; i < kAhead; ++i) init_barrier(tile_full + i, kCopyWarps), init_barrier(tile_read + i, warps);
            publish_barriers();
        }
        __syncwarp();
    }
    __syncthreads();
    arrive_at_cluster();

    if (warp > G * warps) {  // the tiles' copies
        const uint32_t column = rank * warps * kUnit, part = warp - G * warps - 1;
        const uint32_t width = column < uint32_t(a.hidden) ? min(warps * kUnit, uint32_t(a.hidden) - column) : 0;
        const Columns<kHidden> columns{a, column, lane, true};
        const TileCopies<kHidden> copies{columns, stage, width * uint32_t(sizeof(Bf16))};
        const auto announce = [&](uint32_t n) {  // to L2
            if (n < count) copies.order(first_row(n), part, [](int, const void* from, uint32_t bytes) { prefetch_bulk(from, bytes); });
        };
        for (uint32_t n = 0; n < kAnnounced; ++n) announce(n);
        await_launch();
        for (uint32_t n = 0; n < count; ++n) {
            unsigned char* const to = stage_of(n);
            uint64_t* const full = tile_full + n % kAhead;
            if (n >= kAhead) await_phase(tile_read + n % kAhead, n / kAhead - 1), release_shared();
            if (lane == 0) part == 0 ? announce_bytes(full, copies.all_bytes(first_row(n))) : arrive(full);  // each, so that none falls behind
            copies.order(first_row(n), part, [&](int place, const void* from, uint32_t bytes) { copy_bulk(to + place, from, bytes, full); });
            __syncwarp();
        }
        await_cluster();
    } else if (warp == G * warps) {  // the coefficients of every C-th tile of the cluster
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
        const uint32_t group = G == 1 ? 0 : warp / warps, group_warp = warp - group * warps, unit = rank * warps + group_warp;
        const uint32_t thread = threadIdx.x - group * warps * kWarp, threads = warps * kWarp;  // the group's
        const Columns<kHidden> columns{a, unit * kUnit + lane % 4 * kVector, lane, kHidden > 0 || unit * kUnit < uint32_t(a.hidden)};
        const float inverse = 1.0f / float(columns.hidden()), norm_eps = float(a.norm_eps);
        unsigned char* const fn = memory + group_warp * kFnBytes;
        float* const norms = reinterpret_cast<float*>(memory + layout.norms()) + group * kNormSlots * C * kTokens;
        uint64_t* const norms_full = barriers + group * kNormSlots;
#pragma unroll
        for (int part = 0; part < kFnParts; ++part) {
            const int i = group * kFnParts + part;
            if (columns.mixes() && columns.inside)
                fetch_fn(a.fn + i * columns.hidden() + unit * kUnit, columns.hidden(), fn + i * kFnStream, lane);
            close_copies();
        }
        float* const weights = reinterpret_cast<float*>(memory + layout.weights()) + group_warp * kUnit;
        if (group == 0 && columns.norms() && columns.inside) weights[lane] = a.norm_weight[unit * kUnit + lane];
        uint4 streams[kStreams] = {};
        float pre[kStreams] = {};
        const uint32_t rounds = (count + G - 1 - group) / G;  // of this group; in round r it has tile r G + group
        const uint32_t columns_at = stage.token(lane / 4) + (group_warp * kUnit + lane % 4 * kVector) * uint32_t(sizeof(Bf16));  // the lane's
        const auto slot_of = [&](uint32_t round) { return (round * G + group) % kAhead; };
        const auto row_in = [&](uint32_t round) { return row_of(round * G + group); };
        const auto take = [&](uint32_t round) {  // the tile that has come
            const uint32_t slot = slot_of(round);
            const unsigned char* const from = memory + layout.ring() + slot * stage.bytes();
            Written written;
            await_phase(tile_full + slot, (round * G + group) / kAhead);
            columns.read(stage, from, from + columns_at, streams, pre, written);
            arrive_after_reads(tile_read + slot);
            columns.expand(row_in(round), streams, written);
        };
        const auto split = [&](int part) {
            __syncwarp();
            if (columns.mixes() && columns.inside) split_fn(fn + (group * kFnParts + part) * kFnStream, lane);
        };
        await_copies<kFnParts - 1>(), split(0);
        await_copies<kFnParts - 2>(), split(1);
        if constexpr (G == 1)
            await_copies<1>(), split(2), await_copies<0>(), split(3);
        else
            meet(G * threads, G + 1);
        if (rounds > 0) take(0);
        await_cluster();

        uint4 before = {}, collapsed = {};  // of the tile that is not finished yet
        const auto finish = [&](uint32_t round) {
            const uint32_t slot = round % kNormSlots;
            await_phase(norms_full + slot, round / kNormSlots);
            if (!columns.norms()) return;
            constexpr uint32_t kLanes = C < 4 ? 1 : 4, kParts = C / kLanes;  // of a token: each has parts to add
            const float* parts = norms + (slot * C + lane % kLanes * kParts) * kTokens + lane / 4;
            float total = parts[0];
#pragma unroll
            for (uint32_t part = 1; part < kParts; ++part) total += parts[part * kTokens];
            total = sum_lanes(total, kLanes);
            float weight[kVector];  // each time: registers are scarce
            load_pack(weights + lane % 4 * kVector, weight);
            columns.write_normed(row_in(round), before, weight, rsqrtf(fmaf(total, inverse, norm_eps)));
        };
        for (uint32_t round = 0; round <= rounds; ++round) {
            if (round < rounds) {
                const uint32_t n = round * G + group, norm_slot = round % kNormSlots;
                float* partials = reinterpret_cast<float*>(memory + layout.partials());  // of all tiles in turn: the ring needs the room
                columns.add_up(streams, pre, fn, partials + group_warp * kPartial, collapsed, [&] {
                    if (n > 0) await_phase(partials_read + (n - 1) % G, (n - 1) / G);  // the tile before has been added up
                });
                if (thread == 0) {
                    expect_sums<C>(norms_full + norm_slot, 1);
                    const uint32_t read = n - (kReuse<C> - 2 * G);
                    if (columns.mixes() && n >= kReuse<C> - 2 * G && read % C == rank)
                        await_phase(gates_read + read / C % kGateSlots<C>, read / kReuse<C>);
                }
                meet(threads, 1 + group);
                // Four tokens of a sum and where it goes: products and squares to the block whose turn it is, a norm's to every block.
#pragma unroll 1
                for (uint32_t item = thread; item < 2 * (C + kGateSums); item += threads) {
                    const bool gate = item < 2 * kGateSums;
                    const uint32_t half = item % 2 * 4, sum = gate ? item / 2 : kNormSquares;
                    if (gate && !columns.mixes()) continue;
                    float4 total = {};
#pragma unroll
                    for (uint32_t w = 0; w < kMostWarps; ++w) {
                        if (w >= warps) break;
                        const float4 x = *reinterpret_cast<const float4*>(partials + w * kPartial + sum * kTokens + half);
                        total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
                    }
                    const uint32_t slot = n / C % kGateSlots<C>;
                    float* to = gate ? gates + ((slot * C + rank) * kGateSums + sum) * kTokens + half
                                     : norms + (norm_slot * C + rank) * kTokens + half;
                    send_sums<C>(to, gate ? gates_full + slot : norms_full + norm_slot, gate ? n % C : item / 2 - kGateSums, total);
                }
                __syncwarp();
                if (lane == 0) arrive(partials_read + group);
            }
            if (round > 0) finish(round - 1);
            before = collapsed;
            if (round + 1 < rounds) take(round + 1);
        }
    }
    __syncwarp();
    arrive_at_cluster();  // nobody leaves before what was sent to it has come, nor while others send
    await_cluster();
}

// ---- host ----

template <int G>
constexpr int threads_of(int warps) {
    return (G * warps + 1 + kCopyWarps) * kWarp;
}

// Clusters that the device runs at once, asked once.
template <int C, int kHidden, int G>
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
    config.blockDim = dim3(threads_of<G>(warps));
    config.dynamicSmemBytes = size_t(Layout<C, G>{warps}.bytes());
    config.attrs = &attribute;
    config.numAttrs = 1;
    const auto kernel = cross<C, kHidden, G>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.dynamicSmemBytes));
    if (error == cudaSuccess && C > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error == cudaSuccess) place.store(clusters, std::memory_order_relaxed);
    return error;
}

template <int C, int kHidden, int G = 1>
int run(const cedar_mega_mhc_args& a, void* stream) {
    const int warps = warps_of<C>(int(a.hidden));
    const int64_t tiles = (a.rows + kTokens - 1) / kTokens;
    int clusters = kMostAlone;
    if (C > 1)
        if (const cudaError_t error = clusters_at_once<C, kHidden, G>(warps, clusters); error != cudaSuccess) return finish("mega_mhc", error);
    if (clusters == 0) return fail(CEDAR_UNSUPPORTED, "mega_mhc: this GPU has no room for a cluster of %d blocks", C);
    if constexpr (kHidden > 0 && G == 1)
        if (tiles > clusters) return run<C, kHidden, kManyGroups>(a, stream);
    const dim3 grid(unsigned(tiles < clusters ? tiles : clusters) * C);
    const size_t shared = size_t(Layout<C, G>{warps}.bytes());
    return finish("mega_mhc", launch(cross<C, kHidden, G>, grid, threads_of<G>(warps), shared, C, true, stream, a, warps));
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
