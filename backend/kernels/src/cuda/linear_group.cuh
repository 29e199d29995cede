// SPDX-License-Identifier: Apache-2.0
// y[t, n] = x_t . w_n on Hopper, of up to some hundreds of tokens: mostly a matter of streaming the weight. A block has 64 rows of
// it for each of its warp groups and up to 128 tokens. The copy engine fills a ring; the last warp that has read a stage orders
// what is next, so that no warp's registers are spent on that. Weights are widened in registers, once for all the block's tokens,
// from where the matrix instruction takes them; tokens are its columns.
//
// The blocks of a cluster share k. Each owns a part of the outputs: the others send it their sums, which it adds in the order
// of the parts. A part is summed over its k in rising order. Parts depend on the dimensions alone, so a token's bits do not depend
// on the other tokens.
#pragma once

#include <type_traits>

#include "linear_split.cuh"
#include "linear_tensor.cuh"
#include "wgmma.cuh"

namespace cedar::cuda {

constexpr int kMostGroupParts = 4;  // blocks that share k
constexpr int kOwnSumsTokens = 48;  // up to so many, sums have a place of their own beside the ring
static_assert(kMostGroupParts <= 8, "a warp group's 64 rows are owned in eights");
constexpr int kMostGroups = 4, kGroupDepth = 64, kMostGroupTokens = 128, kMostGroupStages = 8;
constexpr size_t kMostGroupShared = 226 * 1024;  // static shared memory is besides
constexpr int kSumsBlock = 72;  // floats of 8 rows times 8 tokens: four blocks' values of a row meet all banks

// A stage has two blocks of 64 values of k: 64 rows for each of the block's warp groups, E4M3 of 128 bytes or twice bf16 of 128; then
// the tokens, twice N rows of 128 bytes. All are swizzled by the copy engine.
template <int N, class Weight>
struct GroupStage {
    static constexpr bool kFp8 = Weight::kSteps == 4, kOwnSums = N <= kOwnSumsTokens;
    static constexpr int kHalves = kFp8 ? 1 : 2, kBoxBytes = 64 * 128, kRowsBytes = kBoxBytes * kHalves, kTokenBytes = N * 128;
    __host__ __device__ static constexpr int bytes(int groups) { return groups * kRowsBytes + 2 * kTokenBytes; }
    __host__ __device__ static constexpr int sums_bytes(int groups) { return groups * N * kSumsBlock * int(sizeof(float)); }  // of all parts
    __host__ __device__ static constexpr int scale_bytes(int blocks) { return kFp8 ? (blocks * 2 + 15) / 16 * 16 : 0; }  // of a warp
    static size_t shared_bytes(int groups, int stages, int blocks) {
        const size_t ring = size_t(stages) * bytes(groups), scales = size_t(groups) * 4 * scale_bytes(blocks), sums = sums_bytes(groups);
        return 1024 + (kOwnSums ? ring + sums + scales : ring + scales > sums ? ring + scales : sums);  // 1024: to begin at a multiple
    }
};

// Four matrices of 8 x 8 bf16; lane 8 j + i has the address of row i of matrix j.
__device__ inline void load_rows(const void* row, uint32_t (&a)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// How a product is divided: 2^parts_bits blocks share k, each has `length` blocks of it; `each` tokens and `stages` of a block.
struct GroupPlan {
    int parts_bits, length, each, stages;
};

// Which part of k a block of a cluster has, of which outputs of which tokens. Of each part's sums it owns so many blocks of 8 rows by 8
// tokens.
struct GroupPart {
    int parts, part, own_bits, sums_blocks, groups, columns, first_row, first_token, tokens;
};

// The parts' sums to their owners, and what the block owns in the order of the parts to y; by the block's first threads, its warp groups.
template <int N>
__device__ __forceinline__ void add_parts(const Product& p, const float (&c)[N / 2], unsigned char* sums, uint64_t* added, const GroupPart& of,
                                          bool vectors) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = warp / 4;
    const auto [parts, part, own_bits, sums_blocks, groups, columns, first_row, first_token, tokens] = of;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // a warp's 8 rows have one owner
        const int eight = warp % 4 * 2 + half, owner = eight >> own_bits, own = eight & (1 << own_bits) - 1;
        unsigned char* const place = sums + ((part * sums_blocks + (group << own_bits) + own) * kSumsBlock + lane * 2) * int(sizeof(float));
        const uint32_t to = address_in(shared_address(place), owner), barrier = address_in(shared_address(added), owner);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
            if (n < columns) {
                const uint32_t step = uint32_t(n * (groups << own_bits) * kSumsBlock) * uint32_t(sizeof(float));
                const float a = c[n * 4 + half * 2], b = c[n * 4 + half * 2 + 1];
                if (parts > 1) send_pair(to + step, barrier, a, b);
                else *reinterpret_cast<float2*>(place + step) = make_float2(a, b);  // a block without a cluster cannot send
            }
    }
    if (parts > 1) await_barrier(added, 0);
    else __syncthreads();
    for (int i = threadIdx.x; i < sums_blocks * 8; i += groups * 128) {
        const int at_block = i / 8, own = at_block & (1 << own_bits) - 1, at_group = (at_block >> own_bits) % groups;
        const int column = (at_block >> own_bits) / groups * 8 + i % 8;
        const int row = first_row + at_group * 64 + ((part << own_bits) + own) * 8;
        if (column >= tokens || row >= p.out_dim) continue;
        const float* at = reinterpret_cast<const float*>(sums) + at_block * kSumsBlock + i % 8;
        float total[8];
#pragma unroll
        for (int r = 0; r < 8; ++r) total[r] = at[r * 8];
        for (int s = 1; s < parts; ++s) {
            at += sums_blocks * kSumsBlock;
#pragma unroll
            for (int r = 0; r < 8; ++r) total[r] += at[r * 8];
        }
        store_four(p, first_token + column, row, make_float4(total[0], total[1], total[2], total[3]), vectors);
        store_four(p, first_token + column, row + 4, make_float4(total[4], total[5], total[6], total[7]), vectors);
    }
}

// Cluster (i, g, r): of group g the outputs of row block r times the i-th tokens, so that neighbours read the same weights.
template <int N, class Weight>
__global__ void __launch_bounds__(kMostGroups * 128, 1)
    group_product(const Product p, const Weight weight, const GroupPlan plan, bool vectors,
                  const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map) {
    using Stage = GroupStage<N, Weight>;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint64_t full[kMostGroupStages], added;
    __shared__ int used[kMostGroupStages];  // by so many warps
    unsigned char* const ring = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int parts = 1 << plan.parts_bits, part = int(blockIdx.x) % parts, groups = int(blockDim.x) / 128, stages = plan.stages;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int first_row = int(blockIdx.z) * groups * 64, first_token = (int(blockIdx.x) >> plan.parts_bits) * plan.each;
    const int tokens = min(int(p.tokens) - first_token, plan.each), columns = (tokens + 7) / 8;
    const int all = int(p.in_dim / kGroupDepth), first = part * plan.length, blocks = min(plan.length, all - first), steps = (blocks + 1) / 2;
    const int stage_bytes = Stage::bytes(groups), ahead = stages_ahead(groups * Stage::kRowsBytes, stages);
    unsigned char* const behind_ring = ring + stages * stage_bytes;
    unsigned char* const sums = Stage::kOwnSums ? behind_ring : ring;
    unsigned char* const scales = behind_ring + (Stage::kOwnSums ? Stage::sums_bytes(groups) : 0);
    const int own_bits = 3 - plan.parts_bits, sums_blocks = columns * groups << own_bits;  // of each part's sums: 8 rows by 8 tokens

    const auto fetch_rows = [&](int slot, int step) {  // and announce the tokens
        announce_bytes(full + slot, uint32_t(stage_bytes));
        const int from = (first + step * 2) * kGroupDepth, row = int(blockIdx.y * p.out_dim) + first_row;
        for (int half = 0; half < Stage::kHalves; ++half) {
            unsigned char* const to = ring + slot * stage_bytes + half * groups * Stage::kBoxBytes;
            if (gridDim.x == unsigned(parts))  // nobody else has these rows
                copy_box(to, &weight_map, from + half * kGroupDepth, row, full + slot, read_once_policy());
            else
                copy_box(to, &weight_map, from + half * kGroupDepth, row, full + slot);
        }
    };
    const auto fetch_tokens = [&](int slot, int step) {
        copy_box(ring + slot * stage_bytes + groups * Stage::kRowsBytes, &x_map, 0, first_token, int(blockIdx.y) * all + first + step * 2, full + slot);
    };
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < stages; ++slot) init_barrier(full + slot, 1), used[slot] = 0;
        init_barrier(&added, 1);
        publish_barriers();
        if (parts > 1) announce_bytes(&added, uint32_t(parts * sums_blocks) * 64 * uint32_t(sizeof(float)));
        for (int step = 0; step < min(ahead, steps); ++step) fetch_rows(step, step);  // the weight does not wait for x
    }
    if constexpr (Stage::kFp8) {
        const int64_t row = first_row + warp * 16;
        const uint8_t* const from = weight.scale_at(blockIdx.y * p.out_dim + (row < p.out_dim ? row : p.out_dim - 1), first * kGroupDepth);
        for (int i = lane; i < blocks * 2; i += kWarp) scales[warp * Stage::scale_bytes(plan.length) + i] = __ldg(from + i);
    }
    prefetch_tokens(p);
    release_launch();  // the next launch awaits this one
    await_launch();
    if (threadIdx.x == 0)
        for (int step = 0; step < min(stages, steps); ++step) {
            if (step >= ahead) fetch_rows(step, step);
            fetch_tokens(step, step);
        }
    __syncthreads();
    if constexpr (Stage::kOwnSums) arrive_at_cluster();  // the barriers have been published

    // where a lane's codes of a step lie: two of row lane / 4, 16 s bytes on but for the swizzle
    const int codes = (warp * 16 + lane / 4) * 128 + lane / 4 * 16 + lane % 4 * 2;
    const int rows = (warp * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
    const unsigned char* const own_scales = scales + warp * Stage::scale_bytes(plan.length);
    float c[N / 2] = {};
    uint32_t a[2][4][4] = {};  // by turns, so that one block's rows are widened while the last one's are multiplied
    int slot = 0;
    uint32_t round = 0;
    const auto release = [&](int stage, int step) {  // who is the last to have read it fills it again
        if (step + stages >= steps) return;
        __syncwarp();
        if (lane != 0) return;
        __threadfence_block();
        if (atomicAdd(used + stage, 1) != groups * 4 - 1) return;
        used[stage] = 0;
        __threadfence_block();
        fetch_rows(stage, step + stages);
        fetch_tokens(stage, step + stages);
    };
    const auto multiply_block = [&](int block, auto half, auto last) __attribute__((always_inline)) {
        constexpr int kHalf = decltype(half)::value;
        constexpr bool kLast = decltype(last)::value;
        if constexpr (kHalf == 0) await_barrier(full + slot, round);
        const unsigned char* const stage = ring + slot * stage_bytes;
        const uint64_t staged = matrix_of(stage + groups * Stage::kRowsBytes + kHalf * Stage::kTokenBytes);
        [[maybe_unused]] uint32_t scale[2] = {};
        if constexpr (Stage::kFp8) {
            const uint32_t pair = *reinterpret_cast<const uint16_t*>(own_scales + block * 2);
            scale[0] = lifted_scale(pair & 0xff), scale[1] = lifted_scale(pair >> 8);
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            if constexpr (Stage::kFp8) {
                const unsigned char* const at = stage + (codes ^ (kHalf * 4 + s) * 16);
#pragma unroll
                for (int i = 0; i < 4; ++i)  // rows +0, +8, then the same 8 values of k on
                    a[kHalf][s][i] = widen_e4m3<0>(*reinterpret_cast<const uint16_t*>(at + i % 2 * 8 * 128 + i / 2 * 8), scale[s / 2]);
            } else {
                load_rows(stage + kHalf * groups * Stage::kBoxBytes + (rows ^ s * 32), a[kHalf][s]);
            }
        }
        begin_group();
#pragma unroll
        for (int s = 0; s < 4; ++s) multiply_group(c, a[kHalf][s], staged + s * kMatrixStep);
        close_group();
        if constexpr (kLast)
            await_groups<0>();
        else
            await_groups<1>();  // the block before has been multiplied, and its registers are free
#pragma unroll
        for (int s = 0; s < 4; ++s) settle(a[1 - kHalf][s]);
        if constexpr (!kLast && kHalf == 0)
            if (block > 0) release(slot == 0 ? stages - 1 : slot - 1, block / 2 - 1);
        if constexpr (kHalf == 1)
            if (++slot == stages) slot = 0, round ^= 1;
    };
    using First = std::integral_constant<int, 0>;
    using Second = std::integral_constant<int, 1>;
    int block = 0;
    for (; block + 2 < blocks; block += 2)
        multiply_block(block, First(), std::false_type()), multiply_block(block + 1, Second(), std::false_type());
    // The last wait stands right behind the instructions it is for: ptxas moves what reads c ahead of a wait that is in another
    // block of code than they are.
    if (block + 2 == blocks) {
        multiply_block(block, First(), std::false_type());
        multiply_block(block + 1, Second(), std::true_type());
        settle(c);
    } else {
        multiply_block(block, First(), std::true_type());
        settle(c);
    }

    __syncwarp();
    if constexpr (!Stage::kOwnSums) publish_to_cluster();
    await_cluster();  // where all can take sums
    add_parts<N>(p, c, sums, &added, {parts, part, own_bits, sums_blocks, groups, columns, first_row, first_token, tokens}, vectors);
}

// ---- host ----

// parts: blocks that share k; groups: warp groups of a block.
struct GroupSplit {
    int parts, groups;
    int64_t cost;
};

inline int group_length(const Product& p, int parts) { return int((p.in_dim / kGroupDepth + parts - 1) / parts); }

// So many clusters of one block a multiprocessor have places: a group of multiprocessors need not be a multiple of a cluster.
inline int64_t clusters_of(int parts) { return parts <= 2 ? kSms / parts : parts <= 4 ? 30 : 15; }

// What the busiest multiprocessor has to copy, in 128 bytes of E4M3 and tokens, with N tokens; what beginning and ending costs.
inline GroupSplit group_split(const Product& p, int64_t groups, int parts, int tokens, int64_t token_blocks, int most) {
    GroupSplit best{parts, 1, INT64_MAX};
    const int64_t length = group_length(p, parts);
    for (int wide = 1; wide <= most; ++wide) {
        const int64_t clusters = (p.out_dim + wide * 64 - 1) / (wide * 64) * groups * token_blocks;
        const int64_t cost = (clusters + clusters_of(parts) - 1) / clusters_of(parts) * (length * (wide * 32 + tokens) + 680 + (parts > 1 ? 200 : 0));
        if (cost < best.cost) best.cost = cost, best.groups = wide;
    }
    return best;
}

// Of the dimensions alone: some tens of tokens are assumed.
inline int group_parts(const Product& p, int64_t groups, int most_parts) {
    most_parts = std::min(most_parts, kMostGroupParts);
    GroupSplit best = group_split(p, groups, 1, 48, 1, kMostGroups);
    const int64_t blocks = p.in_dim / kGroupDepth;
    for (int parts = 2; parts <= most_parts && (blocks + parts - 1) / parts * (parts - 1) < blocks; parts *= 2) {  // none is to have nothing
        const GroupSplit split = group_split(p, groups, parts, 48, 1, kMostGroups);
        if (split.cost < best.cost) best = split;
    }
    return best.parts;
}

// Tokens are spread evenly over as few blocks as there must be, in eights.
struct GroupTokens {
    int each, count;
};
inline GroupTokens group_tokens(const Product& p) {
    const int64_t least = (p.tokens + kMostGroupTokens - 1) / kMostGroupTokens;
    const int each = int(((p.tokens + least - 1) / least + 7) / 8 * 8);
    return {each, int((p.tokens + each - 1) / each)};
}

// Nanoseconds, about.
inline int64_t group_cost(const Product& p, int64_t groups, int parts) {
    const GroupTokens tokens = group_tokens(p);
    return group_split(p, groups, parts, tokens.each, tokens.count, kMostGroups).cost * 21 / 5;
}

// Do the dimensions suit the copy engine?
template <class Weight>
bool fits_groups(const Product& p, const Weight& weight) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(values_of(weight));
    return p.in_dim % kGroupDepth == 0 && p.in_dim <= 1 << 16 && p.x_stride % 8 == 0 && addresses % 16 == 0;
}

template <int N, class Weight>
cudaError_t run_groups(const Product& p, const Weight& weight, int64_t groups, const GroupSplit& split, int64_t token_blocks, int each, void* stream) {
    using Stage = GroupStage<N, Weight>;
    const int wide = split.groups, length = group_length(p, split.parts);
    int stages = std::min(kMostGroupStages, (length + 1) / 2), parts_bits = 0;
    while (Stage::shared_bytes(wide, stages, length) > kMostGroupShared) --stages;
    while (1 << parts_bits < split.parts) ++parts_bits;
    CUtensorMap x_map, weight_map;  // tokens by blocks of k, those of all groups
    const cuuint64_t x_sizes[] = {kGroupDepth, cuuint64_t(p.tokens), cuuint64_t(groups * p.in_dim / kGroupDepth)};
    const cuuint64_t x_strides[] = {cuuint64_t(p.x_stride) * sizeof(Bf16), kGroupDepth * sizeof(Bf16)};
    const cuuint32_t x_box[] = {kGroupDepth, N, 2};
    const cuuint64_t sizes[] = {cuuint64_t(p.in_dim), cuuint64_t(groups * p.out_dim)}, stride[] = {cuuint64_t(p.in_dim) * (Stage::kFp8 ? 1 : 2)};
    const cuuint32_t box[] = {Stage::kFp8 ? 128 : 64, cuuint32_t(wide * 64)};
    if (!describe(x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, p.x, x_sizes, x_strides, x_box, CU_TENSOR_MAP_SWIZZLE_128B) ||
        !describe(weight_map, Stage::kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, values_of(weight), sizes, stride, box,
                  CU_TENSOR_MAP_SWIZZLE_128B))
        return cudaErrorNotSupported;
    const dim3 grid(unsigned(token_blocks * split.parts), unsigned(groups), unsigned((p.out_dim + wide * 64 - 1) / (wide * 64)));
    return launch(group_product<N, Weight>, grid, wide * 128, Stage::shared_bytes(wide, stages, length), split.parts, p.early, stream,
                  p, weight, GroupPlan{parts_bits, length, each, stages}, stores_fours(p), x_map, weight_map);
}

template <class Weight>
cudaError_t run_groups(const Product& p, const Weight& weight, int64_t groups, int most_parts, void* stream) {
    const int parts = group_parts(p, groups, most_parts);
    const auto [each, token_blocks] = group_tokens(p);
    const auto run = [&, each = each, token_blocks = token_blocks](auto n) {
        constexpr int N = decltype(n)::value;
        const int length = group_length(p, parts), stages = std::min(3, (length + 1) / 2);  // so many at least
        int most = kMostGroups;
        while (most > 1 && GroupStage<N, Weight>::shared_bytes(most, stages, length) > kMostGroupShared) --most;
        const GroupSplit split = group_split(p, groups, parts, N, token_blocks, most);
        return run_groups<N>(p, weight, groups, split, token_blocks, each, stream);
    };
    if (each <= 8) return run(std::integral_constant<int, 8>());
    if (each <= 16) return run(std::integral_constant<int, 16>());
    if (each <= 32) return run(std::integral_constant<int, 32>());
    if (each <= 48) return run(std::integral_constant<int, 48>());
    if (each <= 64) return run(std::integral_constant<int, 64>());
    if (each <= 96) return run(std::integral_constant<int, 96>());
    return run(std::integral_constant<int, 128>());
}

}  // namespace cedar::cuda
