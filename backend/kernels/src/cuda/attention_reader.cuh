// SPDX-License-Identifier: Apache-2.0
// The warpgroups of an attention block that multiply tiles, and how two blocks finish a row together.
#pragma once

#include <cooperative_groups.h>
#include <type_traits>

#include "attention_query.cuh"
#include "attention_softmax.cuh"

namespace cedar::cuda::attention {

namespace cg = cooperative_groups;

// Where a thread's outputs go. A lane has the dimensions first + 8 quad .. of every 32, of two heads.
template <int D>
struct Outputs {
    template <class Shared>
    __device__ Outputs(const cedar_mega_attention_args& a, const Unit& at, int first, int thread, const Shared& memory) {
        const int lane = thread % kWarp, head = at.first_head + thread / kWarp * 16 + lane / 4, dim = first + lane % 4 * 8;
        left = dim - (D - 2 * int(a.pairs));
        turns = memory.turns + 4 + left / 2;
        out = static_cast<Bf16*>(a.out) + (at.row * a.heads + head) * D + dim;
        heads = int(a.heads) - head;
    }

    // A group's four blocks of 8 columns, `to` dimensions behind the first. The columns of a lane in block i are its dimensions i and i + 4.
    template <bool Turned = true>
    __device__ void put(const float (&c)[4][4], int to) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float two[2] = {c[i % 2 * 2][2 * half + i / 2], c[i % 2 * 2 + 1][2 * half + i / 2]};
                v[i] = bf16_pair(two);
            }
            if constexpr (Turned) turn(v, to);
            if (heads > half * 8) *place(half, to) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }

    // The same dimensions rotated that have been put.
    __device__ void turn_put(int to) const {
        for (int half = 0; half < 2; ++half) {
            if (heads <= half * 8) break;
            const uint4 from = *place(half, to);
            uint32_t v[4] = {from.x, from.y, from.z, from.w};
            turn(v, to);
            *place(half, to) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }

    __device__ void turn(uint32_t (&v)[4], int to) const {
        if (left + to <= -8) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 by = turns[to / 2 + i];
            v[i] = turn_pair_if(left + to + 2 * i >= 0, v[i], by.x, -by.y);
        }
    }
    __device__ uint4* place(int half, int to) const { return reinterpret_cast<uint4*>(out + half * 8 * D + to); }

    Bf16* out;
    const float2* turns;
    int left, heads;
};

// The sink of head g + 8 half of a warp, and what makes it one in units of the exponent.
constexpr float kSinkUnit = 1.44269504f;
__device__ inline float raw_sink(const cedar_mega_attention_args& a, const Unit& at, int thread, int half) {
    const int head = at.first_head + thread / kWarp * 16 + thread % kWarp / 4 + half * 8;
    return head < a.heads ? a.sink[head] : 0.0f;
}

// What the sums of `Parts` blocks of heads g and g + 8 of a warp are multiplied by: one for all references, over the sum with the sink.
template <int Parts>
__device__ void weigh_parts(const float (&sinks)[2], const float (&reference)[Parts][2], const float (&sum)[Parts][2],
                            float (&weights)[Parts][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = sinks[half];
#pragma unroll
        for (int part = 0; part < Parts; ++part) most = fmaxf(most, reference[part][half]);
        float total = sinks[half] == most ? 1.0f : exp2f(sinks[half] - most);
#pragma unroll
        for (int part = 0; part < Parts; ++part) {
            weights[part][half] = reference[part][half] == -INFINITY ? 0.0f : exp2f(reference[part][half] - most);
            total += sum[part][half] * weights[part][half];
        }
#pragma unroll
        for (int part = 0; part < Parts; ++part) weights[part][half] *= kShrunk / total;
    }
}

template <int Parts, int D>
__device__ void weigh_parts(const RowValues<D>& values, int thread, const float (&reference)[Parts][2], const float (&sum)[Parts][2],
                            float (&weights)[Parts][2]) {
    const float* first = values.sinks + thread / kWarp * 16 + thread % kWarp / 4;
    const float sinks[2] = {first[0] * kSinkUnit, first[8] * kSinkUnit};
    weigh_parts<Parts>(sinks, reference, sum, weights);
}

// The sums of a block that has all keys of the row to outputs.
template <int D>
__device__ void finish_alone(const cedar_mega_attention_args& a, const Unit& at, int group, int thread, const Softmax& softmax,
                             const float (&sums)[D / 16][4], const RowValues<D>& values) {
    const float reference[1][2] = {{softmax.reference[0], softmax.reference[1]}}, sum[1][2] = {{softmax.sum[0], softmax.sum[1]}};
    float weights[1][2];
    weigh_parts<1>(values, thread, reference, sum, weights);
    const Outputs<D> outputs(a, at, group * (D / 2), thread, values);
    // Code for each group that might be rotated would be more than is at hand: what is seldom rotated is read again.
    constexpr int kGroups = kUnitStep<D>, kTurned = kGroups - 2;
    const auto put = [&](int group, auto turned) {
        float c[4][4];
#pragma unroll
        for (int k = 0; k < 16; ++k) c[k / 4][k % 4] = sums[k / 4 * kGroups + group][k % 4] * weights[0][k % 4 / 2];
        outputs.template put<decltype(turned)::value>(c, group * 32);
    };
#pragma unroll
    for (int i = 0; i < kTurned; ++i) put(i, std::false_type());
#pragma unroll
    for (int i = kTurned; i < kGroups; ++i) put(i, std::true_type());
    if (2 * a.pairs > 64) {
#pragma unroll 1
        for (int i = 0; i < kTurned; ++i) outputs.turn_put(i * 32);
    }
}

// The sums of the cluster's blocks to outputs: block r finishes the r'th part of the dimensions. All readers of all blocks.
template <int D, int Parts>
__device__ void finish_together(const cedar_mega_attention_args& a, const Unit& at, unsigned rank, int group, int thread,
                                const Softmax& softmax, const float (&sums)[D / 16][4], Memory<D, Parts>& memory) {
    constexpr int kSlice = D / 8 / Parts;  // blocks of 8 columns
    static_assert(Parts == kReaders, "a group has what one block finishes");
    const cg::cluster_group cluster = cg::this_cluster();
    float4 *inbox = reinterpret_cast<float4*>(memory.keys), *notes = &memory.exchange[0][0][0];
    meet_cluster();  // nobody needs its tiles any more
    float4* remote = cluster.map_shared_rank(inbox, group) + int(rank) * kSlice * kGroupThreads + thread;
#pragma unroll
    for (int j = 0; j < kSlice; ++j) remote[j * kGroupThreads] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
    cluster.map_shared_rank(notes, group)[rank * kGroupThreads + thread] =
        make_float4(softmax.reference[0], softmax.reference[1], softmax.sum[0], softmax.sum[1]);
    meet_cluster();
    float reference[Parts][2], sum[Parts][2], weights[Parts][2];
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
        const float4 note = notes[part * kGroupThreads + thread];
        reference[part][0] = note.x, reference[part][1] = note.y, sum[part][0] = note.z, sum[part][1] = note.w;
    }
    weigh_parts<Parts>(memory.values[0], thread, reference, sum, weights);
    const Outputs<D> outputs(a, at, int(rank) * kSlice * 8, thread, memory.values[0]);
#pragma unroll 1
    for (int i = group; i < kUnitStep<D>; i += kReaders) {
        float c[4][4] = {};
#pragma unroll
        for (int part = 0; part < Parts; ++part)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float4 v = inbox[(part * kSlice + k * kUnitStep<D> + i) * kGroupThreads + thread];
                c[k][0] += v.x * weights[part][0], c[k][1] += v.y * weights[part][0];
                c[k][2] += v.z * weights[part][1], c[k][3] += v.w * weights[part][1];
            }
        outputs.put(c, i * 32);
    }
}

// All rows of the block. While a row's last products are made, the next row's query is prepared; while its first scores are, this
// row is finished.
template <int D, int Parts>
__device__ void read_rows(const cedar_mega_attention_args& a, unsigned rank, int first, int units, int step, Memory<D, Parts>& memory) {
    constexpr int kHalf = D / 2, kHalfChunks = kHalf / kChunkDims, kColumns = kHalf / 8;
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, lane = thread % kWarp, quad = lane % 4;
    const float scale = float(a.scale) * 1.44269504f * kShrunk;
    uint32_t query = shared_address(memory.query) + group * kHalfChunks * kChunkBytes;
    const auto half_of = [&](int stage) { return shared_address(memory.keys[stage]) + group * kHalfChunks * kChunkBytes; };
    const auto release_tile = [&](int n) {
        __syncwarp();  // all lanes have read what they need of it
        if (lane == 0) arrive(&memory.empty[n % kStages]);
    };
    const auto fetch_row = [&](int unit, int parity) { Query<D>(memory).fetch(a, Unit(a, unit), memory.values[parity]); };
    const auto prepare_row = [&](int parity) {
        await_copies<0>();
        meet<kReaderThreads>(kReaderBarrier);
        Query<D>(memory).finish(int(a.pairs), memory.values[parity]);
    };
    float scores[8][4], sums[kColumns][4];
    uint32_t p[kTileSteps][4];
    int n = 0;  // tiles of the block so far
    const auto await_tile = [&](int n) {
        await(&memory.full[n % kStages], uint32_t(n / kStages) & 1);
    };
    // before: whether the sums' products of the tile before are on their way, which then gives its tile back.
    const auto score_tile = [&](int n, auto before) {
        settle(scores);
        open_products();
        asm volatile("" : "+r"(query));  // the descriptors of all its parts, kept across tiles, would cost too many registers
        constexpr int kSteps = kHalf / 16, kFirst = decltype(before)::value ? (kSteps + 3) / 4 : 0;
        const uint32_t keys = half_of(n % kStages);
        if constexpr (kFirst > 0) {
            // Those end before the first of these do: waited for behind all of these, their tile would be given back that much later.
            multiply_tiles<0, kFirst>(scores, query, keys);
            close_products();
            await_products<1>();
            release_tile(n - 1);
        }
        multiply_tiles<kFirst, kSteps>(scores, query, keys);
        close_products();
    };
    const auto mix = [&] {
        settle(sums);
        open_products();
        mix_tile(sums, p, half_of(n % kStages));
        close_products();
    };
    fetch_row(first, 0);
    prepare_row(0);
    meet<kReaderThreads>(kReaderBarrier);
    await_tile(0);
    score_tile(0, std::false_type());
    await_products();
    settle(scores);
    int parity = 0;
    for (int unit = first, next;; unit = next) {
        next = unit + step;
        const bool more = Parts == 1 && next < units;
        Softmax softmax;
        // The scores of tile n are there: its probabilities, and the sums as if they had been made with its maxima.
        const auto weigh = [&] {
            const uint64_t valid = *reinterpret_cast<const uint64_t*>(memory.valid[n % kStages]);
            float factors[2];
            if constexpr (Parts == 1) {
                if (group == 0)
                    share_tile<0>(softmax, scores, valid, scale, thread, p, factors, memory);
                else
                    share_tile<1>(softmax, scores, valid, scale, thread, p, factors, memory);
            } else {
                exchange_scores(scores, group, thread, memory);
                softmax.take(scores, valid, scale, quad, p, factors);
            }
            if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
                for (int j = 0; j < kColumns; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[j][i] *= factors[i / 2];
            }
        };
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
#pragma unroll 1
        while (!memory.last[n % kStages]) {
            weigh();
            mix();
            await_tile(n + 1);  // written while the products before it are made
            score_tile(n + 1, std::true_type());
            ++n;
            await_products();
            settle(scores);
            settle(sums);
        }
        if (more) {
            meet<kReaderThreads>(kReaderBarrier);  // the row's last scores are there: nobody needs its query any more
            fetch_row(next, parity ^ 1);
        }
        weigh();
        mix();
        if (more) prepare_row(parity ^ 1);
        await_products();
        settle(sums);
        release_tile(n);
#pragma unroll
        for (int half = 0; half < 2; ++half) softmax.sum[half] = sum_lanes(softmax.sum[half], 4);
        const Unit at(a, unit);
        if constexpr (Parts == 1) {
            if (more) {
                meet<kReaderThreads>(kReaderBarrier);
                await_tile(++n);
            }
            score_tile(n, std::false_type());  // or, behind the last row, what nobody needs: a branch would make the compiler wait
            finish_alone<D>(a, at, group, thread_now() % kGroupThreads, softmax, sums, memory.values[parity]);
            await_products();
            settle(scores);
            parity ^= 1;
        } else {
            finish_together<D, Parts>(a, at, rank, group, thread_now() % kGroupThreads, softmax, sums, memory);
        }
        if (!more) break;
    }
}

}  // namespace cedar::cuda::attention
