// SPDX-License-Identifier: Apache-2.0
// From scores to probabilities, with the two multiplying warpgroups' halves of the dimensions together.
#pragma once

#include "attention_block.cuh"

namespace cedar::cuda::attention {

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Scores of 8 Columns keys that a row does not have, a bit each. Values are those of lane `quad` of a quad.
template <int Columns>
__device__ inline void mask_scores(float (&s)[Columns][4], uint64_t valid, int quad) {
    if (valid == ~uint64_t(0) >> (64 - 8 * Columns)) return;
    valid >>= 2 * quad;
#pragma unroll
    for (int j = 0; j < Columns; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = valid >> (8 * j + i % 2) & 1 ? s[j][i] : -INFINITY;
}

__device__ inline uint32_t bf16_pair(const float* two) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(two[0], two[1]);
    return *reinterpret_cast<const uint32_t*>(&both);
}

// What is subtracted of scores, which are all masked where there is no reference yet.
__device__ inline float base_of(float reference) { return reference == -INFINITY ? 0.0f : reference; }

// What becomes of 1 when its reference grows.
__device__ inline float lowered(float from, float to) { return from == to ? 1.0f : power_of_two(from - to); }

// The online softmax of rows g and g + 8 of a warp's 16. Probabilities are relative to a reference that follows the maximum only
// when that has grown by more than kSlack: sums are seldom scaled anew, and lose nothing to it.
struct Softmax {
    static constexpr float kSlack = 8.0f;  // probabilities are at most 2^8
    float reference[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};

    // The reference of row g + 8 half for a tile with this maximum, in units of the exponent; returns the factor of sums so far.
    __device__ float follow(int half, float highest) {
        const bool grows = highest > reference[half] + kSlack;
        const float factor = grows ? power_of_two(reference[half] - highest) : 1.0f;
        reference[half] = grows ? highest : reference[half];
        return factor;
    }

    // The same reference as a whole number, for a part of the tile's keys that may be empty.
    __device__ float wanted(int half, float highest) const {
        return highest > reference[half] + kSlack ? ceilf(highest) : reference[half];
    }

    // Scores of a tile to probabilities, as the rows of the matrix instruction; factors: of the sums so far.
    __device__ void take(float (&s)[8][4], uint64_t valid, float scale, int quad, uint32_t (&p)[kTileSteps][4], float (&factors)[2]) {
        mask_scores(s, valid, quad);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = s[0][2 * half];
#pragma unroll
            for (int j = 0; j < 8; ++j) highest = fmaxf(highest, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
            factors[half] = follow(half, max_lanes(highest, 4) * scale);
            const float base = base_of(reference[half]);
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) s[j][i] = power_of_two(fmaf(s[j][i], scale, -base));
                total += s[j][2 * half] + s[j][2 * half + 1];
            }
            sum[half] = fmaf(sum[half], factors[half], total);
        }
#pragma unroll
        for (int step = 0; step < kTileSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) p[step][i] = bf16_pair(&s[2 * step + i / 2][i % 2 * 2]);
    }
};

// Adds the other warpgroup's half of the scores, which the same thread of it has.
template <class Shared>
__device__ void exchange_scores(float (&s)[8][4], int group, int thread, Shared& memory) {
    const int barrier = kPairBarrier + thread / kWarp;  // between the two warps that exchange
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

// The probabilities of a tile where a block has all keys of a row. A group goes on with half of the keys: it gets the other's halves
// of their scores, and gives it their probabilities, relative to a reference of its own. References are whole numbers, so that
// probabilities of both become relative to the greater one without loss. Of what lies in `exchange` for thread t of a group, both
// groups' threads t alone know: each writes where it has read. factors: of the sums so far.
template <int Group, class Shared>
__device__ void share_tile(Softmax& softmax, const float (&s)[8][4], uint64_t valid, float scale, int thread,
                           uint32_t (&p)[kTileSteps][4], float (&factors)[2], Shared& memory) {
    constexpr int kColumns = 4, kMine = Group * kColumns, kOther = kColumns - kMine, kSteps = kTileSteps / 2, kFirst = Group * kSteps;
    const int barrier = kPairBarrier + thread / kWarp;  // between the two warps that exchange
    float4 *given = &memory.exchange[Group][0][thread], *got = &memory.exchange[1 - Group][0][thread];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
        const float(&v)[4] = s[kOther + j];
        given[j * kGroupThreads] = make_float4(v[0], v[1], v[2], v[3]);
    }
    meet<2 * kWarp>(barrier);
    float mine[kColumns][4], own[2], totals[2];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
        const float4 v = got[j * kGroupThreads];
        const float(&with)[4] = s[kMine + j];
        mine[j][0] = with[0] + v.x, mine[j][1] = with[1] + v.y, mine[j][2] = with[2] + v.z, mine[j][3] = with[3] + v.w;
    }
    mask_scores(mine, uint32_t(valid >> 8 * kMine), thread % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float highest = mine[0][2 * half];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) highest = fmaxf(highest, fmaxf(mine[j][2 * half], mine[j][2 * half + 1]));
        own[half] = softmax.wanted(half, max_lanes(highest, 4) * scale);
        const float base = base_of(own[half]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) mine[j][i] = power_of_two(fmaf(mine[j][i], scale, -base));
    }
    totals[0] = totals[1] = 0.0f;  // of what is multiplied: no probability of a whole-number reference is exactly 1
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t(&w)[4] = p[kFirst + step];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            w[i] = bf16_pair(&mine[2 * step + i / 2][i % 2 * 2]);
            totals[i % 2] += __uint_as_float(w[i] << 16) + __uint_as_float(w[i] & 0xffff0000u);
        }
        *reinterpret_cast<uint4*>(&got[step * kGroupThreads]) = make_uint4(w[0], w[1], w[2], w[3]);
    }
    got[kSteps * kGroupThreads] = make_float4(own[0], own[1], totals[0], totals[1]);
    meet<2 * kWarp>(barrier);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint4 v = *reinterpret_cast<const uint4*>(&given[step * kGroupThreads]);
        uint32_t(&w)[4] = p[kSteps - kFirst + step];
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
    const float4 theirs = given[kSteps * kGroupThreads];
    const float other[2] = {theirs.x, theirs.y}, other_totals[2] = {theirs.z, theirs.w};
    if (__any_sync(kAllLanes, own[0] != other[0] || own[1] != other[1])) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float most = fmaxf(own[i % 2], other[i % 2]);
            const __nv_bfloat162 by[2] = {__float2bfloat162_rn(lowered(own[i % 2], most)),
                                          __float2bfloat162_rn(lowered(other[i % 2], most))};
#pragma unroll
            for (int step = 0; step < kTileSteps; ++step) {
                const __nv_bfloat162 two = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&p[step][i]), by[step / kSteps != Group]);
                p[step][i] = *reinterpret_cast<const uint32_t*>(&two);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float most = fmaxf(own[half], other[half]);
        factors[half] = lowered(softmax.reference[half], most);
        const float mine_too = __fmul_rn(totals[half], lowered(own[half], most));
        const float both = __fadd_rn(mine_too, __fmul_rn(other_totals[half], lowered(other[half], most)));
        softmax.sum[half] = fmaf(softmax.sum[half], factors[half], both);
        softmax.reference[half] = most;
    }
}

}  // namespace cedar::cuda::attention
