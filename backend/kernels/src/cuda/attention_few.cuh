// SPDX-License-Identifier: Apache-2.0
// mega_attention of few rows: a cluster of eight blocks takes a row and 64 of its heads.
//
// Sums are those of the cluster of two, to the bit: a part, here four blocks, has every other tile of 64 keys, and adds up its
// tiles in their order. Block c of a part multiplies the query by keys 16 c .. of all its tiles, and has of the values of all its
// keys the dimensions 128 c .. Blocks give each other maxima, then probabilities; at the end, a block of each part with the same
// dimensions finishes half of them. Two warpgroups multiply; while they wait for other blocks, the other two decode values.
#pragma once

#include "attention_few_parts.cuh"

namespace cedar::cuda::attention {

// References of rows g and g + 8 of 16 heads, and what sums are multiplied by before a tile is added.
struct References {
    Softmax last;
    float factors[kFewTiles][2], reference[kFewTiles][2];

    __device__ References(int count, int slot, int quad, float scale, const FewMemory& memory) {
        float highest[kFewTiles][2], others[kFewTiles][2];
        memory.highest[2 * quad].take(slot, highest);
        memory.highest[2 * quad + 1].take(slot, others);
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float most = max_lanes(fmaxf(highest[t][half], others[t][half]), 4) * scale;
                factors[t][half] = t < count ? last.follow(half, most) : 1.0f;
                reference[t][half] = last.reference[half];
            }
    }
};

// The scores of this block's keys, each group's half of the dimensions.
__device__ inline void multiply_keys(float (&s)[kKeyColumns][4], int count, int group, FewMemory& memory) {
    constexpr int kHalf = kFewDim / kReaders / kChunkDims;
    const uint32_t query = shared_address(memory.query) + group * kHalf * kChunkBytes;
    const uint32_t keys = shared_address(memory.keys) + group * kHalf * kKeyChunk;
    const auto multiply = [&](auto& c) {
        settle(c);
        open_products();
        multiply_few<kHalf>(c, query, keys);
        close_products();
        await_products();
        settle(c);
    };
    if (count > 1) {
        multiply(s);
    } else {
        float one[2][4];
        multiply(one);
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = one[i / 4][i % 4];
    }
}

// Both groups' halves together: a group goes on with 8 of a tile's 16 keys, masked ones having no score.
__device__ inline void add_halves(const float (&s)[kKeyColumns][4], float (&mine)[kFewTiles][4], const PartTiles& tiles, int slice,
                                  int group, int thread, FewMemory& memory) {
    meet<kGroupThreads>(kWriterBarrier + 1 + group);  // no warp of the group reads its half of the query any more
    const auto half_of = [&](int t, int of, int i) { return of == 0 ? s[2 * t][i] : s[2 * t + 1][i]; };
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t)
        if (t < tiles.count)
            memory.exchange[group][t * kGroupThreads + thread] =
                make_float4(half_of(t, 1 - group, 0), half_of(t, 1 - group, 1), half_of(t, 1 - group, 2), half_of(t, 1 - group, 3));
    meet<2 * kWarp>(kPairBarrier + thread / kWarp);
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t) {
        if (t < tiles.count) {
            const float4 v = memory.exchange[1 - group][t * kGroupThreads + thread];
            const float other[4] = {v.x, v.y, v.z, v.w};
            const uint2 index = *reinterpret_cast<const uint2*>(&memory.index[tiles.tile[t]][slice * 16 + group * 8 + thread % 4 * 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mine[t][i] = (i % 2 == 0 ? index.x : index.y) != 0 ? half_of(t, group, i) + other[i] : -INFINITY;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) mine[t][i] = -INFINITY;
        }
    }
}

// The maxima of this group's keys to all blocks of the part, of which a quad has four lanes.
__device__ inline void give_maxima(const float (&s)[kFewTiles][4], int count, int part, int from, int thread, FewMemory& memory) {
    float highest[kFewTiles][2];
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) highest[t][half] = max_lanes(fmaxf(s[t][2 * half], s[t][2 * half + 1]), 4);
    const int to = part * kSlices + thread % 4;
    memory.highest[from].give(to, thread / 4, highest, count, memory.landed[kMaxima]);
}

// The probabilities of this group's keys to all blocks of the part; their sums to the one that adds up these heads'.
__device__ inline void give_probabilities(const float (&s)[kFewTiles][4], int count, const References& references, float scale, int part,
                                          int slice, int group, int thread, FewMemory& memory) {
    float rounded[kFewTiles][2], pairs[kFewTiles][2];
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float a = power_of_two(fmaf(s[t][2 * half], scale, -references.reference[t][half]));
            const float b = power_of_two(fmaf(s[t][2 * half + 1], scale, -references.reference[t][half]));
            const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
            rounded[t][half] = __uint_as_float(*reinterpret_cast<const uint32_t*>(&both));
            pairs[t][half] = a + b;
        }
#pragma unroll
    for (int to = 0; to < kSlices; ++to)
        memory.arrivals.p[slice][group].give(part * kSlices + to, thread, rounded, count, memory.landed[kProbabilities]);
    memory.arrivals.pairs[slice * kReaders + group].give(part * kSlices + thread / kWarp, thread % kWarp, pairs, count,
                                                         memory.landed[kProbabilities]);
}

// The sums of the probabilities of 16 heads, with their references, to all blocks of the cluster. A warp.
__device__ inline void give_notes(int count, float scale, int part, int slice, FewMemory& memory) {
    const int lane = thread_now() % kWarp, quad = lane % 4, slot = slice * 8 + lane / 4;
    const References references(count, slot, quad, scale, memory);
    float totals[kFewTiles][2] = {}, sum[2] = {};
#pragma unroll
    for (int from = 0; from < kSlices * kReaders; ++from) {
        float pairs[kFewTiles][2];
        memory.arrivals.pairs[from].take(lane, pairs);
#pragma unroll
        for (int i = 0; i < 2 * kFewTiles; ++i) totals[i / 2][i % 2] += pairs[i / 2][i % 2];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t)
            if (t < count) sum[half] = fmaf(sum[half], references.factors[t][half], totals[t][half]);
        sum[half] = sum_lanes(sum[half], 4);
    }
    const float4 note = make_float4(references.last.reference[0], references.last.reference[1], sum[0], sum[1]);
#pragma unroll
    for (int to = 0; to < kFewBlocks; to += 4)
        send(address_in(shared_address(&memory.notes[part][slot]), to + quad),
             address_in(shared_address(&memory.landed[kSums]), to + quad), note);
}

// The part's sums of 64 dimensions of the block's.
__device__ inline void mix_values(float (&sums)[kColumnsFew][4], int count, const References& references, int group, int thread,
                                  FewMemory& memory) {
    uint32_t p[2][kTileSteps][4];
#pragma unroll
    for (int j = 0; j < kColumnsFew; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t) {
        if (t >= count) break;
        if (t > 0) {
            await_products();
            settle(sums);
            if (__any_sync(kAllLanes, references.factors[t][0] != 1.0f || references.factors[t][1] != 1.0f)) {
#pragma unroll
                for (int j = 0; j < kColumnsFew; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[j][i] *= references.factors[t][i / 2];
            }
        }
        if (t % 2 == 0) {
#pragma unroll
            for (int step = 0; step < kTileSteps; ++step)
#pragma unroll
                for (int i = 0; i < kReaders; ++i) {
                    const float4 v = memory.arrivals.p[step][i].two(t, thread);
                    p[0][step][2 * i] = __float_as_uint(v.x), p[0][step][2 * i + 1] = __float_as_uint(v.y);
                    p[1][step][2 * i] = __float_as_uint(v.z), p[1][step][2 * i + 1] = __float_as_uint(v.w);
                }
        }
        settle(sums);
        open_products();
        mix_tile(sums, p[t % 2], shared_address(memory.values_of(t)) + group * kChunkBytes);
        close_products();
    }
    await_products();
    settle(sums);
}

// Both parts' sums of this block's 64 dimensions to outputs. raw_sinks: as they were loaded.
__device__ inline void finish_parts(const cedar_mega_attention_args& a, const Unit& at, const float (&raw_sinks)[2],
                                    const float (&sums)[kColumnsFew][4], int part, int slice, int thread, const FewMemory& memory) {
    float reference[kFewParts][2], sum[kFewParts][2], weights[kFewParts][2];
#pragma unroll
    for (int i = 0; i < kFewParts; ++i) {
        const float4 note = memory.notes[i][thread / 4];
        reference[i][0] = note.x, reference[i][1] = note.y, sum[i][0] = note.z, sum[i][1] = note.w;
    }
    const float sinks[2] = {raw_sinks[0] * kSinkUnit, raw_sinks[1] * kSinkUnit};
    weigh_parts<kFewParts>(sinks, reference, sum, weights);
    const Outputs<kFewDim> outputs(a, at, (slice * kReaders + part) * kChunkDims, thread, memory);
#pragma unroll
    for (int j = 0; j < kColumnsFew; j += 4) {
        float c[4][4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float4 v = memory.arrivals.sums[j + k][thread];
            const float other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < kFewParts; ++i)
#pragma unroll
                for (int n = 0; n < 4; ++n) c[k][n] += (i == part ? sums[j + k][n] : other[n]) * weights[i][n / 2];
        }
        outputs.put(c, j * 8);
    }
}

// The groups that multiply.
__device__ inline void multiply_part(const cedar_mega_attention_args& a, const Unit& at, const float (&sinks)[2], const PartTiles& mine,
                                     int part, int slice, FewMemory& memory) {
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
    const float scale = float(a.scale) * 1.44269504f * kShrunk;
    const int other = (1 - part) * kSlices + slice;
    float scores[kKeyColumns][4], halves[kFewTiles][4], sums[kColumnsFew][4];
    if (mine.count > 0) multiply_keys(scores, mine.count, group, memory);
    add_halves(scores, halves, mine, slice, group, thread, memory);
    give_maxima(halves, mine.count, part, slice * kReaders + group, thread, memory);
    if (thread % kWarp == 0) arrive_at(address_in(shared_address(&memory.free), other));
    await_phase(&memory.landed[kMaxima], 0);
    const References references(mine.count, thread / 4, thread % 4, scale, memory);
    give_probabilities(halves, mine.count, references, scale, part, slice, group, thread, memory);
    await_phase(&memory.values_there, 0);
    await_phase(&memory.landed[kProbabilities], 0);
    mix_values(sums, mine.count, references, group, thread, memory);
    if (group == part) {
        await_phase(&memory.landed[kSums], 0);
        finish_parts(a, at, sinks, sums, part, slice, thread, memory);
    } else {
        await_phase(&memory.free, 0);
        const uint32_t to = address_in(shared_address(&memory.arrivals.sums[0][thread]), other);
        const uint32_t landed = address_in(shared_address(&memory.landed[kSums]), other);
#pragma unroll
        for (int j = 0; j < kColumnsFew; ++j)
            send(to + j * sizeof(memory.arrivals.sums[0]), landed, make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]));
    }
}

__global__ void __launch_bounds__(kThreads, 1) attend_few(const cedar_mega_attention_args a) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    FewMemory& memory = *reinterpret_cast<FewMemory*>(bytes);
    static_assert(sizeof(FewMemory) <= 227 * 1024, "what a block of sm_90 may have");
    const int rank = int(blockIdx.x) % kFewBlocks, part = rank / kSlices, slice = rank % kSlices;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const bool multiplies = threadIdx.x < kReaderThreads;
    const Unit at(int(blockIdx.x) / kFewBlocks, int(blockIdx.y) * kHeads);
    const Tiles tiles(a);

    // what depends on nothing
    int64_t index[2] = {};
    if (warp < tiles.all)
#pragma unroll
        for (int half = 0; half < 2; ++half) index[half] = index_at(a, tiles, at.row, warp, lane + half * kWarp);
    float2 turn = {};
    const bool turns = int(threadIdx.x) < a.pairs;
    if (turns) turn = make_float2(__ldg(a.cos + at.row * a.pairs + threadIdx.x), __ldg(a.sin + at.row * a.pairs + threadIdx.x));
    float sinks[2] = {};
    if (warp / 4 == part)
        for (int half = 0; half < 2; ++half) sinks[half] = raw_sink(a, at, threadIdx.x % kGroupThreads, half);
    if (multiplies) Query<kFewDim>(memory).fetch(a, at);
    if (threadIdx.x == kThreads - 1) {
        for (uint64_t& barrier : memory.landed) start_barrier(&barrier);
        make_barrier(&memory.free, kReaderThreads / kWarp);
        make_barrier(&memory.values_there, kWriterWarps);
        publish_barriers();
    }
    __syncwarp();
    arrive_at_cluster();
    if (warp < tiles.all) {
#pragma unroll
        for (int half = 0; half < 2; ++half) memory.index[warp][lane + half * kWarp] = uint32_t(index[half]);
        const bool any = __any_sync(kAllLanes, index[0] != 0 || index[1] != 0);
        if (lane == 0) memory.some[warp] = any;
    }
    if (turns) memory.turns[4 + threadIdx.x] = turn;
    __syncthreads();

    // a warp has one of the block's keys in each tile
    const PartTiles mine(tiles, part, memory);
    Pieces keys;
    Pieces values[kValueKeys];
    keys.load(a, mine, slice * 16 + warp, lane, memory);
    if (multiplies)
        Query<kFewDim>(memory).finish(a, [&](int pair) { return memory.turns[4 + pair]; });
    else
#pragma unroll
        for (int half = 0; half < kValueKeys; ++half)
            values[half].load(a, mine, value_key(half), slice * kValuePieces + value_piece(), memory);
    if (threadIdx.x == kThreads - 1) {
        expect_bytes(&memory.landed[kMaxima], kSlices * kReaders * Parcel<kWarp>::bytes(mine.count));
        expect_bytes(&memory.landed[kProbabilities],
                     kSlices * kReaders * (Parcel<kGroupThreads>::bytes(mine.count) + Parcel<kWarp>::bytes(mine.count)));
        expect_bytes(&memory.landed[kSums], sizeof(memory.arrivals.sums) + sizeof(memory.notes));
    }
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t)
        if (t < mine.count) keys.store<kKeyChunk>(t, mine, shared_address(memory.keys), t * 16 + warp, lane);
    publish_tiles();
    __syncthreads();
    await_cluster();  // all blocks have started
    if (multiplies) {
        take_registers<kFewRegisters>();
        multiply_part(a, at, sinks, mine, part, slice, memory);
        return;
    }
    give_registers<2 * 128 - kFewRegisters>();
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t) {
        if (t >= mine.count) break;
        if (t == kFewTiles - 1) await_phase(&memory.landed[kMaxima], 0);  // nobody in the block needs the query any more
#pragma unroll
        for (int half = 0; half < kValueKeys; ++half)
            values[half].store<kChunkBytes>(t, mine, shared_address(memory.values_of(t)), value_key(half), value_piece());
    }
    publish_tiles();
    __syncwarp();
    if (lane == 0) arrive(&memory.values_there);
    if (warp != kReaderThreads / kWarp) return;
    await_phase(&memory.landed[kMaxima], 0);
    await_phase(&memory.landed[kProbabilities], 0);
    give_notes(mine.count, float(a.scale) * 1.44269504f * kShrunk, part, slice, memory);
}

}  // namespace cedar::cuda::attention
