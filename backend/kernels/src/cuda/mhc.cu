// SPDX-License-Identifier: Apache-2.0
// mega_mhc in one launch. A cluster takes 8 tokens at a time; each of its warps has 32 columns of them for good, and the share of
// fn that belongs to these columns in shared memory. One more warp orders the tiles' copies as soon as all have read what lay there,
// others add up what the warps of columns give, so that none of these waits for another; the sums go to the blocks that need them.
// One makes the coefficients meanwhile. Where clusters have several tiles, the warps of columns take two at a time: one look at fn
// serves both, which else is half of what shared memory gives.
// What no launch writes, fn and the weights of norm and coefficients, is read while the launch before still runs.
//
// A sum is that of the blocks' parts in an order of theirs, a part that of its warps' in theirs: for one dimension one order,
// whatever the number of rows.
#include <atomic>
#include <type_traits>

#include "bodies.h"
#include "mhc_columns.cuh"
#include "wgmma.cuh"

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
template <int C, int S, bool kPairs>
struct Layout {
    int warps;
    __host__ __device__ int ring() const { return warps * kFnBytes; }
    __host__ __device__ int partials() const { return ring() + kAhead * Stage<kPairs>{warps}.bytes(); }
    __host__ __device__ int norms() const { return partials() + warps * kPartial * int(sizeof(float)); }
    __host__ __device__ int gates() const { return norms() + kNormSlots<S> * C * kTokens * int(sizeof(float)); }
    __host__ __device__ int barriers() const { return gates() + kReuse<C> * kGateSums * kTokens * int(sizeof(float)); }
    __host__ __device__ int bytes() const { return barriers() + (kNormSlots<S> + 2 * (kGateSlots<C> + 1 + kAhead)) * int(sizeof(uint64_t)); }
};

// ---- a block ----

// Two tiles at a time: of a block's ten parts of 32 columns, eight have a warp each, for both tiles, and two have two warps each, of
// one tile. So each of the four schedulers has the same to do, five tiles of a part; ten warps would be six tiles for two of them.
constexpr uint32_t kOtherWarps = 6, kBothWarps = 8, kSplitParts = kMostWarps - kBothWarps;
template <int S>
constexpr uint32_t kMoreWarps = S > 1 ? kSplitParts : 0;  // than parts
template <int S>
constexpr uint32_t kSumWarps = kOtherWarps - 2 - kMoreWarps<S>;

// Of a warp with two tiles, pieces of fn that stay in registers, which warp groups with less to do give away.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(CEDAR_WIDE_WGMMA)
constexpr int kKept = 6;
#else
constexpr int kKept = 0;
#endif
constexpr int kBothRegisters = 160, kOneRegisters = 104, kOtherRegisters = 88;  // of 128 each

constexpr int threads_of(int warps) { return (warps + kOtherWarps) * kWarp; }

// The warps of columns take S tiles of the cluster at a time, so that one look at fn serves S.
//
// Step s is finished while the sums of step s + 1 are stored. So a block sends a tile of step s + 4 when step s + 2 of all blocks has
// come, and they have sent that after the last look at their norms of step s: kNormSlots. Likewise kReuse for the coefficients, whose
// warp says when it has read them: a block sends tile n + kReuse - 2 S only then.
// kHidden: see Columns.
template <int C, int kHidden, int S>
__global__ void __launch_bounds__(threads_of(kMostWarps), 1)
    cross(const cedar_mega_mhc_args a, const uint32_t most_warps, const float norm_eps, const __grid_constant__ CUtensorMap streams_map,
          const __grid_constant__ CUtensorMap output_map) {
    extern __shared__ __align__(1024) unsigned char memory[];
    release_launch();  // the next launch awaits this one
    const uint32_t warps = kHidden > 0 ? warps_of<C>(kHidden) : most_warps;
    const Layout<C, S, (kHidden > 0)> layout{int(warps)};
    const uint32_t crossing = warps + kMoreWarps<S>;  // warps of columns
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
    const Stage<(kHidden > 0)> stage{int(warps)};
    const auto stage_of = [&](uint32_t n) { return memory + layout.ring() + n % kAhead * stage.bytes(); };

    if (warp == crossing) {
        if (lane == 0) {
            for (uint32_t i = 0; i < kNormSlots<S>; ++i) init_barrier(norms_full + i, arrivals<C>(1));
            for (int i = 0; i < kGateSlots<C>; ++i) init_barrier(gates_full + i, arrivals<C>(kGateSums)), init_barrier(gates_read + i, 1);
            init_barrier(partials_full, crossing), init_barrier(partials_read, kSumWarps<S>);
            for (int i = 0; i < kAhead; ++i) init_barrier(tile_full + i, 1), init_barrier(tile_read + i, crossing);
            publish_barriers();
        }
        __syncwarp();
    }
    __syncthreads();
    arrive_at_cluster();

    const auto copy_tiles = [&] {
        const Columns<kHidden> columns{a, rank * warps * kUnit, lane, true};
        const TileCopies<kHidden> copies{columns, stage, &streams_map, &output_map};
        if (lane == 0) prefetch_map(&streams_map);
        if (lane == 1 && columns.expands()) prefetch_map(&output_map);
        for (uint32_t n = 0; n < min(kAnnounced, count); ++n)
            copies.order(
                first_row(n), [](int, const CUtensorMap* map, uint32_t y, uint32_t z) { prefetch_box(map, 0, y, z); },
                [](int, const void* from, uint32_t bytes) { prefetch_bulk(from, bytes); });
        await_launch();
        for (uint32_t n = 0; n < count; ++n) {
            unsigned char* const to = stage_of(n);
            uint64_t* const full = tile_full + n % kAhead;
            if (n >= kAhead) await_phase(tile_read + n % kAhead, n / kAhead - 1), release_shared();  // all have read what lay there
            if (lane == 0) announce_bytes(full, copies.all_bytes(first_row(n)));
            __syncwarp();
            copies.order(
                first_row(n), [&](int place, const CUtensorMap* map, uint32_t y, uint32_t z) { copy_box(to + place, map, 0, y, z, full); },
                [&](int place, const void* from, uint32_t bytes) { copy_bulk(to + place, from, bytes, full); });
        }
        __syncwarp();
        await_cluster();
    };
    const auto add_sums = [&](uint32_t part) {
        const bool mixes = kHidden > 0 || a.fn != nullptr;
        await_cluster();
        // Four tokens of a sum and where it goes: products and squares to the block whose turn it is, a norm's to every block.
        for (uint32_t n = 0; n < count; ++n) {
            const uint32_t norm_slot = n % kNormSlots<S>, slot = n / C % kGateSlots<C>, read = n - (kReuse<C> - 2 * S);
            if (part == 0 && lane == 0) expect_sums<C>(norms_full + norm_slot, 1);
            if (mixes && n >= kReuse<C> - 2 * S && read % C == rank) await_phase(gates_read + read / C % kGateSlots<C>, read / kReuse<C>);
            await_phase(partials_full, n);
            constexpr uint32_t kNormItems = 2 * C, kItems = kNormItems + 2 * kGateSums;  // norms first: all blocks wait for them
#pragma unroll
            for (uint32_t begin = 0; begin < kItems; begin += kSumWarps<S> * kWarp) {
                const uint32_t item = begin + part * kWarp + lane, half = item % 2 * 4;
                const bool gate = item >= kNormItems;
                if (item >= kItems || gate && !mixes) continue;
                const uint32_t sum = gate ? (item - kNormItems) / 2 : kNormSquares;
                float4 total = {};
#pragma unroll
                for (uint32_t w = 0; w < kMostWarps; ++w) {
                    if (w >= warps) break;
                    const float4 x = *reinterpret_cast<const float4*>(partials + w * kPartial + sum * kTokens + half);
                    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
                }
                float* const first = (gate ? gates + (rank * kGateSums + sum) * kTokens : norms + rank * kTokens) + half;
                float* const to = first + (gate ? slot * kGateSums : norm_slot) * (C * kTokens);
                send_sums<C>(to, gate ? gates_full + slot : norms_full + norm_slot, gate ? n % C : item / 2, total);
            }
            __syncwarp();
            if (lane == 0) arrive(partials_read);
        }
    };
    const auto make_gates = [&] {  // the coefficients of every C-th tile of the cluster
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
    };
    // All S tiles of a step, or the one of number `first`; part: of the block's columns.
    const auto cross_columns = [&](auto taken, uint32_t part, uint32_t first) {
        constexpr uint32_t J = decltype(taken)::value;
        constexpr bool kAll = J == S;
        const uint32_t unit = rank * warps + part;
        const Columns<kHidden> columns{a, unit * kUnit + lane % 4 * kVector, lane, kHidden > 0 || unit * kUnit < uint32_t(a.hidden)};
        unsigned char* const fn = memory + part * kFnBytes;
        float* const partial = partials + part * kPartial;
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
            if (columns.mixes() && columns.inside && (kAll || i % 2 == first))
                fetch_fn(a.fn + i * columns.hidden() + unit * kUnit, columns.hidden(), fn + i * kFnStream, lane);
            close_copies();
        }
        float weight[kVector] = {};
        if (columns.norms() && columns.inside) load_pack(a.norm_weight + columns.column, weight);
        uint4 streams[J][kStreams] = {}, before[J] = {}, collapsed[J] = {};  // before: of the step that is not finished yet
        Sums sums[J] = {};
        const auto take = [&](uint32_t n, uint32_t j) {  // a tile that has come, as the step's j-th
            if (n >= count) return;
            float pre[kStreams] = {};
            Written written;
            await_phase(tile_full + n % kAhead, n / kAhead);
            columns.read(stage, stage_of(n), part, streams[j], pre, written);
            if constexpr (kHidden == 0) arrive_after_reads(tile_read + n % kAhead);
            columns.expand(row_of(n), streams[j], written);
            if constexpr (kHidden > 0) arrive_after_use(tile_read + n % kAhead, pre[0]);  // it stored what else it read
            columns.collapse(streams[j], pre, collapsed[j], sums[j]);
        };
        const auto split = [&](int i) {
            __syncwarp();
            if (columns.mixes() && columns.inside && (kAll || i % 2 == first)) split_fn(fn + i * kFnStream, lane);
        };
        await_copies<3>(), split(0);
        await_copies<2>(), split(1);
        await_copies<1>(), split(2);
        await_copies<0>(), split(3);
        kAll ? __syncwarp() : sync_pair(1 + part % kSplitParts);
        await_cluster();
        constexpr int kMine = kAll && S > 1 ? kKept : 0;
        uint4 kept[kMine + 1];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            kept[i] = reinterpret_cast<const uint4*>(fn)[lane + i * kWarp];
            asm volatile("" : "+r"(kept[i].x), "+r"(kept[i].y), "+r"(kept[i].z), "+r"(kept[i].w));  // or the compiler loads them again
        }

        const auto finish = [&](uint32_t n, uint4 normed) {
            const uint32_t slot = n % kNormSlots<S>;
            await_phase(norms_full + slot, n / kNormSlots<S>);
            if (!columns.norms()) return;
            constexpr uint32_t kLanes = C < 4 ? 1 : 4, kParts = C / kLanes;  // of a token: each has parts to add
            const float* parts = norms + (slot * C + lane % kLanes * kParts) * kTokens + lane / 4;
            float total = parts[0];
#pragma unroll
            for (uint32_t i = 1; i < kParts; ++i) total += parts[i * kTokens];
            total = sum_lanes(total, kLanes);
            columns.write_normed(row_of(n), normed, weight, rsqrtf(fmaf(total, 1.0f / float(columns.hidden()), norm_eps)));
        };
        const auto hand_on = [&](uint32_t n, const auto& store) {  // when the tile before has been added up
            if (n >= count) return;
            if (n > 0) await_phase(partials_read, n - 1);
            store();
            __syncwarp();
            if (lane == 0) arrive(partials_full);
        };
        // The next step's tile is taken while others add up the sums of tile n.
        const auto pass = [&](uint32_t n, uint32_t j) {
            hand_on(n, [&] { columns.store_sums(partial, sums[j]); });
            if (n >= S && n - S < count) finish(n - S, before[j]);
            before[j] = collapsed[j];
            take(n + S, j);
        };
        if constexpr (kAll) {
#pragma unroll
            for (uint32_t j = 0; j < J; ++j) take(j, j);
            for (uint32_t n = 0; n < count + S; n += S) {
                if (n < count) columns.template multiply<J, kMine>(streams, fn, kept, sums);
#pragma unroll
                for (uint32_t j = 0; j < J; ++j) pass(n + j, j);
            }
        } else {
            const auto leave = [&](uint32_t n) {  // to the other warp: the barriers count both
                if (n >= count) return;
                await_phase(tile_full + n % kAhead, n / kAhead);
                __syncwarp();
                if (lane == 0) arrive(tile_read + n % kAhead);
            };
            for (uint32_t n = 0; n < S; ++n) n == first ? take(n, 0) : leave(n);
            for (uint32_t n = 0; n < count + S; ++n) {
                if (n % S == first) {
                    if (n < count) columns.template multiply<J, kMine>(streams, fn, kept, sums);
                    pass(n, 0);
                } else {
                    hand_on(n, [] {});
                    leave(n + S);
                }
            }
        }
    };
    if constexpr (S > 1) {
        static_assert(warps_of<C>(kHidden) == kMostWarps && kBothWarps % 4 == 0 && kSplitParts * S == 4, "warp groups have one thing to do");
        if (warp < kBothWarps) {
            if constexpr (kKept > 0) grow_registers<kBothRegisters>();
            cross_columns(std::integral_constant<uint32_t, S>{}, warp, 0);
        } else if (warp < crossing) {
            if constexpr (kKept > 0) shrink_registers<kOneRegisters>();
            cross_columns(std::integral_constant<uint32_t, 1>{}, kBothWarps + warp % kSplitParts, (warp - kBothWarps) / kSplitParts);
        } else if constexpr (kKept > 0) {
            shrink_registers<kOtherRegisters>();
        }
    } else if (warp < crossing) {
        cross_columns(std::integral_constant<uint32_t, 1>{}, warp, 0);
    }
    if (warp == crossing)
        copy_tiles();
    else if (warp == crossing + 1)
        make_gates();
    else if (warp > crossing)
        add_sums(warp - crossing - 2);
    __syncwarp();
    arrive_at_cluster();  // nobody leaves before what was sent to it has come, nor while others send
    await_cluster();
}

// ---- host ----

// A tensor of bf16 as rows of so many columns each, for boxes of so many tokens and columns.
bool describe_rows(CUtensorMap& map, const void* data, int64_t rows, int64_t hidden, int width, int box_rows, int box_columns) {
    const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(rows), cuuint64_t(hidden / width)};
    const cuuint64_t strides[] = {cuuint64_t(hidden) * sizeof(Bf16), cuuint64_t(width) * sizeof(Bf16)};
    const cuuint32_t box[] = {cuuint32_t(width), cuuint32_t(box_rows), cuuint32_t(box_columns / width)};
    return describe(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, sizes, strides, box,
                    width == kUnit ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B);
}

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
    config.dynamicSmemBytes = size_t(Layout<C, S, (kHidden > 0)>{warps}.bytes());
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
    CUtensorMap streams = {}, output = {};
    if (!describe_rows(streams, a.streams, a.rows * kStreams, a.hidden, Stage<(kHidden > 0)>::kWidth, kTokens * kStreams, warps * kUnit) ||
        a.output != nullptr && !describe_rows(output, a.output, a.rows, a.hidden, kUnit, kTokens, warps * kUnit))
        return finish("mega_mhc", cudaErrorNotSupported);
    const dim3 grid(unsigned(tiles < clusters ? tiles : clusters) * C);
    const size_t shared = size_t(Layout<C, S, (kHidden > 0)>{warps}.bytes());
    return finish("mega_mhc", launch(cross<C, kHidden, S>, grid, threads_of(warps), shared, C, true, stream, a, warps, float(a.norm_eps), streams,
                                     output));
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
