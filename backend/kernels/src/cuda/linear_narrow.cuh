// SPDX-License-Identifier: Apache-2.0
// y[t, n] = x_t . w_n on Hopper, of E4M3 and some tens of tokens, where widening the weight is most of the work: a warp does little
// else. A block has all tokens; one warp keeps a ring full, by the copy engine, each of G warp groups widens 64 rows in registers, from
// where the matrix instruction takes them. Stages have 128 values of k.
//
// What a cluster's blocks and a block's groups share, kRows: two blocks share the tokens; groups have rows of their own, and k whole.
// The order of sums is that of wide.cuh. kParts: blocks have parts of k, groups rows of their own; the order is that of
// linear_group.cuh. kDeep: two blocks share the tokens; groups take the stages of the same 64 rows by turns, so that four warps
// of a scheduler and not one wait for what is widened and multiplied. Their sums are added in the order of the groups.
#pragma once

#include "linear_group.cuh"
#include "wide.cuh"

namespace cedar::cuda {

enum class NarrowWay { kRows, kParts, kDeep };

constexpr int kNarrowTokens = 64, kNarrowDepth = 128, kNarrowGroups = 4, kNarrowSteps = 32;  // a warp's lanes keep the scales of a step each
constexpr int kNarrowStride = 68;  // floats of a token's 64 sums: a warp's stores meet all banks

template <int N, int G, NarrowWay kWay>
struct NarrowStage {
    static constexpr bool kDeep = kWay == NarrowWay::kDeep, kParts = kWay == NarrowWay::kParts;
    static constexpr int kRows = kDeep ? 64 : G * 64, kThreads = G * 128 + kWarp, kReaders = kDeep ? 4 : G * 4;  // warps
    static constexpr int kTokenBytes = N * 128, kWeights = 2 * kTokenBytes, kBytes = kWeights + kRows * kNarrowDepth;
    static constexpr int kSums = kParts ? G * N * kSumsBlock * int(sizeof(float)) : 0;  // of all parts; others are sent before the ring is free
    static constexpr int kFitting = (kWideShared - 1024 - kSums) / kBytes, kCount = kFitting < 16 ? kFitting : 16;
    static constexpr int kAhead = stages_ahead(kRows * kNarrowDepth, kCount);
    static constexpr size_t kShared = size_t(kCount) * kBytes + kSums + 1024;  // to begin at a multiple of 1024
    static_assert(kCount >= 3 && kCount >= (kDeep ? G : 1) && kCount * kBytes >= G * N * kNarrowStride * int(sizeof(float)));
};

// Two codes of shared memory.
__device__ inline uint32_t load_two(uint32_t from) {
    uint16_t two;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(from) : "memory");
    return two;
}

// Cluster (g, i): of group g the i-th rows.
template <int N, int G, NarrowWay kWay>
__global__ void __launch_bounds__(G * 128 + kWarp, 1)
    narrow_product(const Product p, const Fp8Weight weight, int parts_bits, int steps, bool vectors, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap weight_map) {
    using Stage = NarrowStage<N, G, kWay>;
    constexpr bool kShares = !Stage::kParts;  // tokens
    constexpr int kTurns = Stage::kDeep ? G : 1;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[Stage::kCount], empty[Stage::kCount], added;
    unsigned char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    [[maybe_unused]] unsigned char* const sums = stages + Stage::kCount * Stage::kBytes;
    const int rank = int(blockIdx.x), lane = threadIdx.x % kWarp, tokens = int(p.tokens);
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / kWarp, 0);  // known to be the same in all lanes
    const int first_row = (kShares ? int(blockIdx.z) * kWideCluster + rank : int(blockIdx.z)) * Stage::kRows;
    const int first_step = kShares ? 0 : rank * steps;
    const int eights = (tokens + 7) / 8;
    [[maybe_unused]] const GroupPart of{1 << parts_bits, rank, 3 - parts_bits, (eights * G) << (3 - parts_bits), G, eights, first_row, 0, tokens};
    const auto fetch_rows = [&](int step, int slot) {  // and announce the tokens
        announce_bytes(full + slot, Stage::kBytes);
        copy_box(stages + slot * Stage::kBytes + Stage::kWeights, &weight_map, (first_step + step) * kNarrowDepth,
                 int(blockIdx.y * p.out_dim) + first_row, full + slot, read_once_policy());
    };
    const auto fetch_tokens = [&](int step, int slot) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            unsigned char* const to = stages + slot * Stage::kBytes + block * Stage::kTokenBytes;
            const int k = (first_step + step) * kNarrowDepth + block * kWideDepth;
            if constexpr (kShares)
                copy_box_to_all(to + rank * (Stage::kTokenBytes / 2), &x_map, k, int(blockIdx.y), rank * (N / 2), full + slot, 3);
            else
                copy_box(to, &x_map, k, int(blockIdx.y), 0, full + slot);
        }
    };
    release_launch();  // the next launch awaits this one
    if (threadIdx.x == G * 128) {
        for (int slot = 0; slot < Stage::kCount; ++slot)
            init_barrier(full + slot, 1), init_barrier(empty + slot, (kShares ? kWideCluster : 1) * Stage::kReaders);
        init_barrier(&added, 1);
        publish_barriers();
        if (Stage::kParts) announce_bytes(&added, uint32_t(of.parts * of.sums_blocks) * 64 * uint32_t(sizeof(float)));
        // the weight waits neither for x nor for other blocks
        for (int step = 0; step < min(steps, Stage::kAhead); ++step) fetch_rows(step, step);
    }
    const int group = warp / 4, quad = lane % 4, own = (Stage::kDeep ? 0 : group * 64) + warp % 4 * 16;  // the warp's first row
    const int count = (steps - (Stage::kDeep ? group : 0) + kTurns - 1) / kTurns;                        // of its steps
    uint32_t own_scales = 0;
    if (warp < G * 4 && lane < count) {
        const int64_t row = first_row + own < p.out_dim ? first_row + own : p.out_dim - 1;
        const uint8_t* const at = weight.scale_at(blockIdx.y * p.out_dim + row, int64_t(first_step) * kNarrowDepth);
        own_scales = __ldg(reinterpret_cast<const uint32_t*>(at) + (Stage::kDeep ? lane * G + group : lane));
    }
    prefetch_tokens(p);
    if constexpr (kShares) {
        leave_together();  // the barriers are there
    } else {
        __syncthreads();
        __syncwarp();
        arrive_at_cluster();
    }

    if (warp == G * 4) {  // the ring's
        if (lane == 0) {
            await_launch();
            int slot = 0;
            uint32_t round = 1;  // the first waits find the stages empty
            for (int step = 0; step < steps; ++step) {
                if (step >= Stage::kCount) await_barrier(empty + slot, round);
                if (step >= Stage::kAhead) fetch_rows(step, slot);
                fetch_tokens(step, slot);
                if (++slot == Stage::kCount) slot = 0, round ^= 1;
            }
        }
        __syncwarp();
        if constexpr (!kShares) await_cluster();
    } else {
        const uint32_t address = __shfl_sync(~0u, shared_address(stages), 0), filled = __shfl_sync(~0u, shared_address(full), 0);
        const uint32_t emptied = kShares ? address_in(shared_address(empty), lane % kWideCluster) : shared_address(empty);
        // where a lane's codes lie: two of row lane / 4, the next 16 values of k 16 bytes on but for the swizzle
        const uint32_t codes = address + Stage::kWeights + (own + lane / 4) * 128 + lane / 4 * 16 + quad * 2;
        const uint64_t columns = matrix_of(stages);
        float c[N / 2] = {};
        uint32_t a[2][4][4] = {};  // by turns, so that half of a stage is widened while the half before it is multiplied
        int slot = Stage::kDeep ? group : 0;
        uint32_t round = 0;
        const auto release = [&](int stage) {
            __syncwarp();
            if constexpr (kShares) {
                if (lane < kWideCluster) arrive_there(emptied + stage * 8);
            } else {
                if (lane == 0) arrive(emptied + stage * 8);
            }
        };
        const auto multiply_step = [&](int step, auto last) __attribute__((always_inline)) {
            const uint32_t four = __shfl_sync(~0u, own_scales, step);
            const uint32_t at = codes + slot * Stage::kBytes;
            await_barrier(filled + slot * 8, round);
            uint32_t two[8][4];
#pragma unroll
            for (int s = 0; s < 8; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i)  // rows +0, +8, then the same 8 values of k on
                    two[s][i] = load_two((at ^ s * 16) + i % 2 * 8 * 128 + i / 2 * 8);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const uint32_t scale = lifted_scale(__byte_perm(four, 0, 0x4440 + half * 2 + t / 2));
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[half][t][i] = widen_e4m3<0>(two[half * 4 + t][i], scale);
                }
                begin_group();
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const int units = slot * (Stage::kBytes / 16) + half * (Stage::kTokenBytes / 16) + t * kMatrixStep;
                    multiply_group(c, a[half][t], matrix_behind(columns, units));
                }
                close_group();
                if (decltype(last)::value && half == 1)
                    await_groups<0>();
                else
                    await_groups<1>();  // the half before has been multiplied, and its registers are free
#pragma unroll
                for (int t = 0; t < 4; ++t) settle(a[1 - half][t]);
                if (half == 0 && step > 0) release(slot < kTurns ? slot + Stage::kCount - kTurns : slot - kTurns);
            }
            if constexpr (decltype(last)::value) release(slot);
            if ((slot += kTurns) >= Stage::kCount) slot -= Stage::kCount, round ^= 1;
        };
#pragma unroll 1
        for (int step = 0; step + 1 < count; ++step) multiply_step(step, std::false_type());
        // The last wait stands right behind the instructions it is for, as in wide.cuh.
        multiply_step(count - 1, std::true_type());
        settle(c);

        if constexpr (Stage::kParts) {
            __syncwarp();
            await_cluster();  // where all can take sums
            add_parts<N>(p, c, sums, &added, of, vectors);
        } else {
            sync_groups(1, G);  // nobody reads the ring any more, nor is anything to come
            if constexpr (Stage::kDeep) {
                float* const from = reinterpret_cast<float*>(stages);
#pragma unroll
                for (int n = 0; n < N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        from[(group * N + n * 8 + quad * 2 + i % 2) * kNarrowStride + own + lane / 4 + i / 2 * 8] = c[n * 4 + i];
                sync_groups(1, G);
                for (int i = threadIdx.x; i < tokens * 16; i += G * 128) {
                    const float4 total = add_parts(from + i / 16 * kNarrowStride + i % 16 * 4, G, N * kNarrowStride);
                    if (const int row = first_row + i % 16 * 4; row < p.out_dim) store_four(p, i / 16, row, total, vectors);
                }
            } else {
                unsigned char* const outputs = stages + group * Stage::kTokenBytes;
                gather_sums<N>(c, outputs, warp);
                sync_group(2 + group);
                store_sums<N>(p, outputs, {first_row + group * 64, 0, int(blockIdx.y)});
            }
        }
    }
    if constexpr (kShares) leave_together();  // nobody ends while the other block's arrivals at its barriers are on their way
}

// ---- host ----

// Tokens of a block: so few as there are to be.
inline int narrow_tokens(const Product& p) { return p.tokens <= 32 ? 32 : p.tokens <= 48 ? 48 : 64; }

// Nanoseconds, about, of warp groups that have rows of their own.
inline int64_t narrow_cost(const Product& p, int64_t groups) {
    const WideTile tile{narrow_tokens(p), kNarrowGroups};
    const int64_t rounds = (units_of(p, groups, tile).count() + kWideClusters - 1) / kWideClusters;
    return rounds * (p.in_dim / kWideDepth * tile.groups * (tile.tokens + 60) + 500) + 4000;
}

// Do the dimensions suit it, with so many parts of k, and the copy engine?
inline bool fits_narrow(const Product& p, const Fp8Weight& weight, int parts, int turns) {
    const int64_t steps = p.in_dim / kNarrowDepth / parts;
    return p.tokens <= kNarrowTokens && steps * kNarrowDepth * parts == p.in_dim && steps % turns == 0 && steps / turns <= kNarrowSteps &&
           fits_wide(p, weight) && reinterpret_cast<uintptr_t>(weight.scales) % 4 == 0;
}

template <int N, int G, NarrowWay kWay>
cudaError_t run_narrow(const Product& p, const Fp8Weight& weight, int64_t groups, int parts_bits, void* stream) {
    using Stage = NarrowStage<N, G, kWay>;
    constexpr bool kShares = !Stage::kParts;
    const int cluster = kShares ? kWideCluster : 1 << parts_bits, rows = (kShares ? kWideCluster : 1) * Stage::kRows;
    CUtensorMap x_map, weight_map;
    if (!describe_tokens(x_map, p, groups, kShares ? N / 2 : N) || !describe_rows(weight_map, p, weight, groups, kNarrowDepth, Stage::kRows))
        return cudaErrorNotSupported;
    const dim3 grid(unsigned(cluster), unsigned(groups), unsigned((p.out_dim + rows - 1) / rows));
    return launch(narrow_product<N, G, kWay>, grid, Stage::kThreads, Stage::kShared, cluster, p.early, stream, p, weight, parts_bits,
                  int(p.in_dim / kNarrowDepth >> (kShares ? 0 : parts_bits)), stores_fours(p), x_map, weight_map);
}

template <int G, NarrowWay kWay>
cudaError_t run_narrow(const Product& p, const Fp8Weight& weight, int64_t groups, int parts_bits, void* stream) {
    switch (narrow_tokens(p)) {
        case 32: return run_narrow<32, G, kWay>(p, weight, groups, parts_bits, stream);
        case 48: return run_narrow<48, G, kWay>(p, weight, groups, parts_bits, stream);
        default: return run_narrow<64, G, kWay>(p, weight, groups, parts_bits, stream);
    }
}

// With parts of k for the blocks of a cluster; groups of rows as for linear_group.cuh.
inline cudaError_t run_narrow_parts(const Product& p, const Fp8Weight& weight, int64_t groups, int parts, void* stream) {
    int parts_bits = 0;
    while (1 << parts_bits < parts) ++parts_bits;
    switch (group_split(p, groups, parts, narrow_tokens(p), 1, 3).groups) {
        case 1: return run_narrow<1, NarrowWay::kParts>(p, weight, groups, parts_bits, stream);
        case 2: return run_narrow<2, NarrowWay::kParts>(p, weight, groups, parts_bits, stream);
        default: return run_narrow<3, NarrowWay::kParts>(p, weight, groups, parts_bits, stream);
    }
}

}  // namespace cedar::cuda
