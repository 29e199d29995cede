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

// References of rows g and g + 8 of 16 heads, and what sums are multiplied by before a tile is added. Of a part with at most `Most` tiles.
template <int Most>
struct References {
    Softmax last;
    float factors[Most][2], reference[Most][2];

    __device__ References(int count, int slot, int quad, float scale, const FewMemory& memory) {
        float highest[Most][2], others[Most][2];
        memory.highest[2 * quad].take(slot, highest);
        memory.highest[2 * quad + 1].take(slot, others);
#pragma unroll
        for (int t = 0; t < Most; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float most = max_lanes(fmaxf(highest[t][half], others[t][half]), 4) * scale;
                factors[t][half] = t < count ? last.follow(half, most) : 1.0f;
                reference[t][half] = last.reference[half];
            }
    }
};

// The scores of this block's keys, each group's half of the dimensions.
template <int N>
__device__ inline void multiply_keys(float (&s)[N][4], const QueryHalf& query, int group, const FewMemory& memory) {
    settle(s);
    open_products();
    multiply_few(s, query.steps, shared_address(memory.keys) + group * (kFewDim / kReaders / kChunkDims) * kKeyChunk);
    close_products();
    await_products();
    settle(s);
}

// Both groups' halves together: a group goes on with 8 of a tile's 16 keys, masked ones having no score.
template <int Most>
__device__ inline void add_halves(const float (&s)[Most * 2][4], float (&mine)[Most][4], const PartTiles& tiles, int slice,
                                  int group, int thread, FewMemory& memory) {
    const auto half_of = [&](int t, int of, int i) { return of == 0 ? s[2 * t][i] : s[2 * t + 1][i]; };
#pragma unroll
    for (int t = 0; t < Most; ++t)
        if (t < tiles.count)
            memory.exchange[group][t][thread] =
                make_float4(half_of(t, 1 - group, 0), half_of(t, 1 - group, 1), half_of(t, 1 - group, 2), half_of(t, 1 - group, 3));
    meet<2 * kWarp>(kPairBarrier + thread / kWarp);
#pragma unroll
    for (int t = 0; t < Most; ++t) {
        if (t < tiles.count) {
            const float4 v = memory.exchange[1 - group][t][thread];
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
template <int Most>
__device__ inline void give_maxima(const float (&s)[Most][4], int count, int part, int from, int thread, FewMemory& memory) {
    float highest[Most][2];
#pragma unroll
    for (int t = 0; t < Most; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) highest[t][half] = max_lanes(fmaxf(s[t][2 * half], s[t][2 * half + 1]), 4);
    const int to = part * kSlices + thread % 4;
    memory.highest[from].give(to, thread / 4, highest, count, memory.landed[kMaxima]);
}

// The probabilities of this group's keys to all blocks of the part, two tiles at a time, so that sums begin with the first of them;
// the probabilities' sums to the block that adds up these heads'.
template <int Most>
__device__ inline void give_probabilities(const float (&s)[Most][4], int count, const References<Most>& references, float scale, int part,
                                          int slice, int group, int thread, FewMemory& memory) {
    auto& place = memory.arrivals.p[slice][group];
    float pairs[Most][2];
#pragma unroll
    for (int i = 0; 2 * i < Most; ++i) {
        if (count <= 2 * i) break;
        float rounded[Most][2] = {};
#pragma unroll
        for (int t = 2 * i; t < min(2 * i + 2, Most); ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float a = power_of_two(fmaf(s[t][2 * half], scale, -references.reference[t][half]));
                const float b = power_of_two(fmaf(s[t][2 * half + 1], scale, -references.reference[t][half]));
                const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
                rounded[t][half] = __uint_as_float(*reinterpret_cast<const uint32_t*>(&both));
                pairs[t][half] = a + b;
            }
        const float4 two = place.two_of(rounded, i);
#pragma unroll
        for (int step = 1; step < kSlices; ++step)  // each block in turn another one
            place.give(part * kSlices + (slice + step) % kSlices, thread, i, two, memory.probabilities[i]);
        place.keep(thread, i, two);
        __syncwarp();
        if (thread % kWarp == 0) arrive(&memory.probabilities[i]);
    }
    memory.arrivals.pairs[slice * kReaders + group].give(part * kSlices + thread / kWarp, thread % kWarp, pairs, count,
                                                         memory.landed[kTotals]);
}

// The sums of the probabilities of 16 heads, with their references, to all blocks of the cluster. A warp.
__device__ inline void give_notes(int count, float scale, int part, int slice, FewMemory& memory) {
    const int lane = thread_now() % kWarp, quad = lane % 4, slot = slice * 8 + lane / 4;
    const References<kFewTiles> references(count, slot, quad, scale, memory);
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
template <int Most>
__device__ inline void mix_values(float (&sums)[kColumnsFew][4], int count, const References<Most>& references, int group, int thread,
                                  FewMemory& memory) {
    uint32_t p[2][kTileSteps][4];
#pragma unroll
    for (int j = 0; j < kColumnsFew; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
#pragma unroll
    for (int t = 0; t < Most; ++t) {
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
            await_phase(&memory.probabilities[t / 2], 0);
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
        mix_tile(sums, p[t % 2], shared_address(memory.values[t]) + group * kChunkBytes);
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

// The part's sums of this block's dimensions: a warpgroup has half of them. Of a part with at most `Most` tiles.
template <int Most>
__device__ inline void sum_part(float (&sums)[kColumnsFew][4], const QueryHalf& query, float scale, const PartTiles& mine, int part, int slice,
                                int group, int thread, FewMemory& memory) {
    float scores[Most * 2][4], halves[Most][4];
    if (mine.count > 0) multiply_keys(scores, query, group, memory);
    add_halves(scores, halves, mine, slice, group, thread, memory);
    give_maxima(halves, mine.count, part, slice * kReaders + group, thread, memory);
    if (thread % kWarp == 0) arrive_at(address_in(shared_address(&memory.free), (1 - part) * kSlices + slice));
    await_phase(&memory.landed[kMaxima], 0);
    const References<Most> references(mine.count, thread / 4, thread % 4, scale, memory);
    give_probabilities(halves, mine.count, references, scale, part, slice, group, thread, memory);
    await_phase(&memory.values_there, 0);
    mix_values(sums, mine.count, references, group, thread, memory);
}

// The groups that multiply.
__device__ inline void multiply_part(const cedar_mega_attention_args& a, const Unit& at, const float (&sinks)[2], const QueryHalf& query,
                                     const PartTiles& mine, int part, int slice, FewMemory& memory) {
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, other = (1 - part) * kSlices + slice;
    const float scale = float(a.scale) * 1.44269504f * kShrunk;
    float sums[kColumnsFew][4];
    if (mine.count > 1)
        sum_part<kFewTiles>(sums, query, scale, mine, part, slice, group, thread, memory);
    else
        sum_part<1>(sums, query, scale, mine, part, slice, group, thread, memory);
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

    // what no earlier launch writes, before it ends
    release_launch();
    float sinks[2] = {};
    if (warp / 4 == part)
        for (int half = 0; half < 2; ++half) sinks[half] = raw_sink(a, at, threadIdx.x % kGroupThreads, half);
    if (threadIdx.x == kThreads - 1) {
        for (uint64_t& barrier : memory.landed) init_barrier(&barrier, 1);
        for (uint64_t& barrier : memory.probabilities) init_barrier(&barrier, 1 + kReaderThreads / kWarp);
        make_barrier(&memory.free, kReaderThreads / kWarp);
        make_barrier(&memory.values_there, kWriterWarps);
        publish_barriers();
    }
    __syncwarp();
    arrive_at_cluster();
    const int64_t* places[2] = {};
    if (warp < tiles.all)
#pragma unroll
        for (int half = 0; half < 2; ++half) places[half] = place_of_index(a, tiles, at.row, warp, lane + half * kWarp);
    const Guess guess(a, tiles, at.row, part, slice * 16 + warp);  // a warp has one of the block's keys in each tile
    const bool turns = int(threadIdx.x) < a.pairs;
    const int64_t pair = turns ? at.row * a.pairs + threadIdx.x : 0;
    const float *cosine = a.cos + pair, *sine = a.sin + pair;
    asm volatile("" : "+l"(places[0]), "+l"(places[1]), "+l"(cosine), "+l"(sine));  // computed here, not when they are waited for

    // The groups that multiply need more registers from here on, so what all do is there twice.
    const auto gather = [&](Pieces& keys, const auto& fetch_more) {
        await_launch();
        uint32_t guessed[kFewTiles];
        guess.take(a, guessed);
        uint32_t index[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) index[half] = load_word(a, places[half], places[half] != nullptr);
        const float2 turn = make_float2(__uint_as_float(load_word(a, cosine, turns)), __uint_as_float(load_word(a, sine, turns)));
        fetch_more();
        if (warp < tiles.all) {
#pragma unroll
            for (int half = 0; half < 2; ++half) memory.index[warp][lane + half * kWarp] = index[half];
            const bool any = __any_sync(kAllLanes, index[0] != 0 || index[1] != 0);
            if (lane == 0) memory.some[warp] = any;
        }
        if (turns) memory.turns[4 + threadIdx.x] = turn;
        keys.load(a, guessed, guess.count, guess.window, lane);
        meet<kThreads>(kBlockBarrier);
        const PartTiles mine(tiles, part, memory);
        if (!mine.in_order) keys.load(a, mine, slice * 16 + warp, lane, memory);
        return mine;
    };
    const auto decode_keys = [&](const Pieces& keys, const PartTiles& mine) {
        const KeyPlace place(warp, lane);
#pragma unroll
        for (int t = 0; t < kFewTiles; ++t)
            if (t < mine.count) keys.store(t, mine, shared_address(memory.keys) + t * 16 * kRowBytes, place);
        publish_tiles();
        meet<kThreads>(kBlockBarrier);
        await_cluster();  // all blocks have started
    };
    Pieces keys;
    if (multiplies) {
        take_registers<kFewRegisters>();
        const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
        QueryHalf query;
        const PartTiles mine = gather(keys, [&] { query.load(a, at, group, thread); });
        query.finish(memory.turns + 4);
        decode_keys(keys, mine);
        multiply_part(a, at, sinks, query, mine, part, slice, memory);
        return;
    }
    give_registers<2 * 128 - kFewRegisters>();
    const PartTiles mine = gather(keys, [] {});
    if (threadIdx.x == kThreads - 1) {
        announce_bytes(&memory.landed[kMaxima], kSlices * kReaders * Parcel<kWarp>::bytes(mine.count));
        announce_bytes(&memory.landed[kTotals], kSlices * kReaders * Parcel<kWarp>::bytes(mine.count));
#pragma unroll
        for (int i = 0; i < kTwos; ++i)
            if (2 * i < mine.count)
                announce_bytes(&memory.probabilities[i], kReaders * (kSlices - 1) * Parcel<kGroupThreads>::bytes_of_two(i));
        announce_bytes(&memory.landed[kSums], sizeof(memory.arrivals.sums) + sizeof(memory.notes));
    }
    Pieces values[kValueKeys];
#pragma unroll
    for (int half = 0; half < kValueKeys; ++half)
        values[half].load(a, mine, value_key(half), slice * kValuePieces + value_piece(), memory);
    decode_keys(keys, mine);
    const ValuePlace value_place(value_key(0), value_piece());
#pragma unroll
    for (int t = 0; t < kFewTiles; ++t) {
        if (t >= mine.count) break;
#pragma unroll
        for (int half = 0; half < kValueKeys; ++half)
            values[half].store(t, mine, shared_address(memory.values[t]) + half * (kTileRows / kValueKeys) * kRowBytes, value_place);
    }
    publish_tiles();
    __syncwarp();
    if (lane == 0) arrive(&memory.values_there);
    if (warp != kReaderThreads / kWarp) return;
    await_phase(&memory.landed[kMaxima], 0);
    await_phase(&memory.landed[kTotals], 0);
    give_notes(mine.count, float(a.scale) * 1.44269504f * kShrunk, part, slice, memory);
}

}  // namespace cedar::cuda::attention
