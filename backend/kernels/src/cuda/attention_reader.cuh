// SPDX-License-Identifier: Apache-2.0
// The warpgroups of an attention block that multiply tiles, and how two blocks finish a row together.
#pragma once

#include <cooperative_groups.h>

#include "attention_block.cuh"

namespace cedar::cuda::attention {

namespace cg = cooperative_groups;

// The pair of dimensions that starts at dim, rotated; direction -1 undoes it.
__device__ inline float2 rotate_pair(const cedar_mega_attention_args& a, int64_t row, int dim, float direction, float2 x) {
    const int64_t angle = row * a.pairs + (dim - int(a.dim - 2 * a.pairs)) / 2;
    const float c = __ldg(a.cos + angle), s = direction * __ldg(a.sin + angle);
    return make_float2(__fsub_rn(__fmul_rn(x.x, c), __fmul_rn(x.y, s)), __fadd_rn(__fmul_rn(x.x, s), __fmul_rn(x.y, c)));
}

// 8 dimensions from dim on, some of which are rotary.
__device__ inline void rotate_unit(const cedar_mega_attention_args& a, int64_t row, int dim, uint4& unit) {
    uint32_t* words = &unit.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (dim + 2 * i < a.dim - 2 * a.pairs) continue;
        const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(words + i));
        const __nv_bfloat162 y = __float22bfloat162_rn(rotate_pair(a, row, dim + 2 * i, 1.0f, x));
        words[i] = *reinterpret_cast<const uint32_t*>(&y);
    }
}

template <int D>
__device__ void stage_query(const cedar_mega_attention_args& a, int64_t row, int first_head, Memory<D>& memory) {
    constexpr int kUnits = D / 8, kEach = kHeads * kUnits / kReaderThreads, kAtOnce = 8 < kEach ? 8 : kEach;
    const int tail = (D - 2 * int(a.pairs)) & ~7, unit = threadIdx.x % kUnits, dim = unit * 8;
    const Bf16* query = static_cast<const Bf16*>(a.query) + (row * a.heads + first_head) * D + dim;
    const int heads = min(kHeads, int(a.heads) - first_head);
#pragma unroll 1
    for (int from = 0; from < kEach; from += kAtOnce) {
        uint4 loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int head = ((from + i) * kReaderThreads + int(threadIdx.x)) / kUnits;
            loaded[i] = head < heads ? *reinterpret_cast<const uint4*>(query + head * D) : make_uint4(0, 0, 0, 0);
        }
        if (dim >= tail && a.pairs > 0) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) rotate_unit(a, row, dim, loaded[i]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int head = ((from + i) * kReaderThreads + int(threadIdx.x)) / kUnits;
            const uint4 v = loaded[i];
            store_unit(shared_address(memory.query) + unit / 8 * kChunkBytes + unit_at(head, unit % 8),
                       make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                                  __byte_perm(v.y, v.w, 0x7632)));
        }
    }
    publish_tiles();
    meet<kReaderThreads>(1);
}

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The online softmax of rows g and g + 8 of a warp's 16. Probabilities are relative to a reference that follows the maximum only
// when that has grown by more than kSlack: sums are seldom scaled anew, and lose nothing to it.
struct Softmax {
    static constexpr float kSlack = 8.0f;  // probabilities are at most 2^8
    float reference[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};

    // Scores of a tile to probabilities, as the rows of the matrix instruction; factors: of the sums so far.
    __device__ void take(float (&s)[8][4], uint64_t valid, float scale, int quad, uint32_t (&p)[kTileSteps][4], float (&factors)[2]) {
        if (valid != ~uint64_t(0)) {
            valid >>= 2 * quad;
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[j][i] = valid >> (8 * j + i % 2) & 1 ? s[j][i] : -INFINITY;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = s[0][2 * half];
#pragma unroll
            for (int j = 0; j < 8; ++j) highest = fmaxf(highest, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
            highest = max_lanes(highest, 4) * scale;
            const bool follow = highest > reference[half] + kSlack;
            factors[half] = follow ? power_of_two(reference[half] - highest) : 1.0f;
            reference[half] = follow ? highest : reference[half];
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    s[j][i] = power_of_two(fmaf(s[j][i], scale, -reference[half]));
                    total += s[j][i];
                }
            sum[half] = fmaf(sum[half], factors[half], total);
        }
#pragma unroll
        for (int step = 0; step < kTileSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* two = &s[2 * step + i / 2][i % 2 * 2];
                const __nv_bfloat162 both = __floats2bfloat162_rn(two[0], two[1]);
                p[step][i] = *reinterpret_cast<const uint32_t*>(&both);
            }
    }
};

// Adds the other warpgroup's half of the scores, which the same thread of it has.
template <int D>
__device__ void exchange_scores(float (&s)[8][4], int group, int thread, Memory<D>& memory) {
    const int barrier = 2 + thread / kWarp;  // between the two warps that exchange
#pragma unroll
    for (int j = 0; j < 8; ++j) memory.exchange[group][j][thread] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
    meet<2 * kWarp>(barrier);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float4 other = memory.exchange[1 - group][j][thread];
        s[j][0] += other.x, s[j][1] += other.y, s[j][2] += other.z, s[j][3] += other.w;
    }
    meet<2 * kWarp>(barrier);
}

// Writes the sums of a thread, whose columns are dimensions q and q + 4 of each 8. Neighbouring lanes swap them for pairs.
template <int N>
__device__ void finish_row(const cedar_mega_attention_args& a, int64_t row, int first_head, int first_dim, int thread, float (&c)[N][4]) {
    const int lane = thread % kWarp, quad = lane % 4, tail = int(a.dim - 2 * a.pairs), pair = first_dim + (quad & 1) * 4 + (quad & 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = first_head + thread / kWarp * 16 + lane / 4 + half * 8;
        Bf16* out = static_cast<Bf16*>(a.out) + (row * a.heads + head) * a.dim + pair;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float low = c[j][2 * half], high = c[j][2 * half + 1];
            const float got = __shfl_xor_sync(kAllLanes, quad & 1 ? low : high, 1);
            __nv_bfloat162 x = __floats2bfloat162_rn(quad & 1 ? got : low, quad & 1 ? high : got);
            if (pair + j * 8 >= tail) x = __float22bfloat162_rn(rotate_pair(a, row, pair + j * 8, -1.0f, __bfloat1622float2(x)));
            if (head < a.heads) *reinterpret_cast<__nv_bfloat162*>(out + j * 8) = x;
        }
    }
}

// Both blocks' sums of half the dimensions to outputs: block r takes those of its warpgroup r. All readers of both blocks.
template <int D>
__device__ void finish_together(const cedar_mega_attention_args& a, int64_t row, int first_head, unsigned rank, int group, int thread,
                                const Softmax& softmax, float (&sums)[D / 16][4], Memory<D>& memory) {
    constexpr int kHalf = D / 2, kColumns = kHalf / 8;
    const int lane = thread % kWarp;
    meet_cluster();  // nobody needs its tiles any more
    float4* inbox = reinterpret_cast<float4*>(memory.keys[0]);
    if (unsigned(group) != rank) {
        const cg::cluster_group cluster = cg::this_cluster();
        float4* remote = cluster.map_shared_rank(inbox, int(1 - rank));
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
            remote[j * kGroupThreads + thread] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
        *cluster.map_shared_rank(&memory.exchange[0][0][thread], int(1 - rank)) =
            make_float4(softmax.reference[0], softmax.reference[1], softmax.sum[0], softmax.sum[1]);
    }
    meet_cluster();
    if (unsigned(group) != rank) return;
    const float4 other = memory.exchange[0][0][thread];
    const float others_reference[2] = {other.x, other.y}, others_sum[2] = {other.z, other.w};
    float mine[2], theirs[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = first_head + thread / kWarp * 16 + lane / 4 + half * 8;
        const float sink = head < a.heads ? a.sink[head] * 1.44269504f : 0.0f;
        const float most = fmaxf(sink, fmaxf(softmax.reference[half], others_reference[half]));
        mine[half] = softmax.reference[half] == -INFINITY ? 0.0f : exp2f(softmax.reference[half] - most);
        theirs[half] = others_reference[half] == -INFINITY ? 0.0f : exp2f(others_reference[half] - most);
        const float sum = softmax.sum[half] * mine[half] + others_sum[half] * theirs[half] + (sink == most ? 1.0f : exp2f(sink - most));
        mine[half] *= kShrunk / sum;
        theirs[half] *= kShrunk / sum;
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
        const float4 v = inbox[j * kGroupThreads + thread];
        sums[j][0] = sums[j][0] * mine[0] + v.x * theirs[0];
        sums[j][1] = sums[j][1] * mine[0] + v.y * theirs[0];
        sums[j][2] = sums[j][2] * mine[1] + v.z * theirs[1];
        sums[j][3] = sums[j][3] * mine[1] + v.w * theirs[1];
    }
    finish_row(a, row, first_head, group * kHalf, thread, sums);
}

template <int D>
__device__ void read_tiles(const cedar_mega_attention_args& a, int64_t row, int first_head, unsigned rank, int count, Memory<D>& memory) {
    constexpr int kHalf = D / 2, kHalfChunks = kHalf / kChunkDims, kColumns = kHalf / 8;
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, lane = thread % kWarp, quad = lane % 4;
    const float scale = float(a.scale) * 1.44269504f * kShrunk;
    uint32_t query = shared_address(memory.query) + group * kHalfChunks * kChunkBytes;
    const auto half_of = [&](int stage) { return shared_address(memory.keys[stage]) + group * kHalfChunks * kChunkBytes; };
    float scores[8][4], sums[kColumns][4];
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
    Softmax softmax;
    stage_query<D>(a, row, first_head, memory);
    // The scores of tile n are there: its probabilities, and the sums as if they had been made with its maxima.
    uint32_t p[kTileSteps][4];
    const auto weigh = [&](int n) {
        await_products();
        settle(scores);
        settle(sums);
        if (n > 0 && lane == 0) arrive(&memory.empty[(n - 1) % kStages]);
        exchange_scores(scores, group, thread, memory);
        const uint64_t valid = *reinterpret_cast<const uint64_t*>(memory.valid[n % kStages]);
        float factors[2];
        softmax.take(scores, valid, scale, quad, p, factors);
        if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[j][i] *= factors[i / 2];
        }
    };
    if (count > 0) {
        await(&memory.full[0], 0);
        settle(scores);
        settle(sums);
        open_products();
        multiply_tiles<kHalfChunks>(scores, query, half_of(0));
        close_products();
#pragma unroll 1
        for (int n = 0; n + 1 < count; ++n) {
            const int stage = n % kStages, next = (n + 1) % kStages;
            weigh(n);
            asm volatile("" : "+r"(query));  // the descriptors of all its parts, kept across tiles, would cost too many registers
            await(&memory.full[next], uint32_t((n + 1) / kStages) & 1);
            settle(scores);
            settle(sums);
            open_products();
            mix_tile(sums, p, half_of(stage));
            multiply_tiles<kHalfChunks>(scores, query, half_of(next));
            close_products();
        }
        weigh(count - 1);
        settle(sums);
        open_products();
        mix_tile(sums, p, half_of((count - 1) % kStages));
        close_products();
    }
    await_products();
    settle(sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax.sum[half] = sum_lanes(softmax.sum[half], 4);
    finish_together<D>(a, row, first_head, rank, group, thread, softmax, sums, memory);
}

}  // namespace cedar::cuda::attention
