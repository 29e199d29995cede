// SPDX-License-Identifier: Apache-2.0
// Index keys on their way to a warp, as rows of the matrix instruction, and what its products are weighed by.
//
// A code under its scale is an E5M2 number as long as the scale is at least 2^-16 of the largest one of its key, or of its head's query;
// the largest are factors of the key's score and of the head's weight. A head's sum with a key keeps 14 bits of its largest part on
// Hopper, and 11 where it is weighed, so that a score is commonly within 2^-10 of its heads' sums.
#pragma once

#include "index_query.cuh"

namespace cedar::cuda::index {

// A lane's part of the keys of a run: of each block its key lane / 4, of that a quarter of the dimensions. A lane copies what it will
// itself widen to the warp's ring in shared memory, and the scales of that key of block lane % 4, of which others read a byte.
template <int D>
struct Keys {
    static constexpr int kValues = D / 2, kScales = D / kMxGroup, kBytes = kBlockRows * (kValues + kScales), kWords = D / 32;
    static constexpr int kPart = kValues / 4, kStage = kWarp * (kRunBlocks * kPart + 4);  // bytes
    const uint8_t *values, *scales;            // this lane's of the pool's first block
    uint8_t *ring, *ring_words, *ring_scales;  // of the first stage: of its first block, all scales, of its first block

    // ring: of the warp.
    __device__ Keys(const Search& s, uint8_t* ring, int lane) : ring(ring + lane * kPart) {
        values = static_cast<const uint8_t*>(s.a.keys) + lane / 4 * kValues + lane % 4 * kPart;
        scales = static_cast<const uint8_t*>(s.a.keys) + kBlockRows * kValues + lane / 4 * kScales / 4 * 4;
        ring_words = ring + kRunBlocks * kWarp * kPart;
        ring_scales = ring_words + lane / 4 * 16 + lane % 4;
        // sums of an argument and a lane's part, which the compiler would otherwise do at each load
        asm("" : "+l"(values), "+l"(scales));
    }

    // Starts the copies of the run of the pool's blocks `places`. stage: its place in the ring, a multiple of kStage.
    __device__ void fetch(int stage, const uint32_t* places, int lane) const {
        const uint4 four = *reinterpret_cast<const uint4*>(places);
        const uint32_t numbers[kRunBlocks] = {four.x, four.y, four.z, four.w}, own = places[lane % 4];
        uint8_t* const to = ring + stage;
#pragma unroll
        for (int m = 0; m < kRunBlocks; ++m) {
            const uint8_t* const from = values + uint64_t(numbers[m]) * kBytes;
            if constexpr (kPart == 16) {
                copy_16(to + m * kWarp * kPart, from);
            } else {
#pragma unroll
                for (int i = 0; i < kPart; i += 4) copy_4(to + m * kWarp * kPart + i, from + i);
            }
        }
        copy_4(to + kRunBlocks * kWarp * kPart + lane * (4 - kPart), scales + uint64_t(own) * kBytes);
    }

    __device__ void load(int stage, int m, uint32_t (&words)[kWords]) const {
        const Pack<uint32_t, kWords> pack = *reinterpret_cast<const Pack<uint32_t, kWords>*>(ring + stage + m * kWarp * kPart);
#pragma unroll
        for (int j = 0; j < kWords; ++j) words[j] = pack.v[j];
    }

    // Puts in the place of the scales of this lane's own key of the stage how far each is below the largest, which is the result: its
    // exponent, which is that of 255, a NaN, too. Others read them after the warp's next barrier.
    __device__ float measure(int stage, int lane) const {
        uint32_t* const own = reinterpret_cast<uint32_t*>(ring_words + stage) + lane;
        uint32_t scales = *own;  // below: of the quad's four lanes
        if constexpr (kScales == 2) scales = permute(scales, 0, 0x1100 + lane / 4 % 2 * 0x2222);
        if constexpr (kScales == 1) scales = permute(scales, 0, lane / 4 % 4 * 0x1111);
        const uint32_t even = permute(scales, 0, 0x4240), odd = permute(scales, 0, 0x4341), pairs = __vmaxu2(even, odd);
        const uint32_t most = __vmaxu2(pairs, permute(pairs, 0, 0x1032)), furthest = uint32_t(kKeyScales - 1) * 0x10001u;
        *own = permute(__vminu2(most - even, furthest), __vminu2(most - odd, furthest), 0x6240);
        const uint32_t exponent = most << 23;
        return __uint_as_float(exponent == 0 || exponent == 0x7f800000u ? exponent | 0x00400000u : exponent);
    }

    // The codes of this lane's values of block m.
    __device__ uint4 codes_of(const uint4* codes, int stage, int m) const { return codes[ring_scales[stage + m * 4]]; }
};

// Of the codes 0..7 of a word, in E5M2: what is positive of the first four and of the last, and what is negative. A nibble of a selector
// that has its upper bit gives zero: the word has it where codes are negative, its complement where they are not.
__device__ inline void widen_word(uint32_t word, const uint4& codes, uint32_t minus_one, uint32_t (&positive)[2], uint32_t (&negative)[2]) {
    const uint32_t upper = word >> 16;
    positive[0] = permute(codes.x, codes.y, word);
    positive[1] = permute(codes.x, codes.y, upper);
    negative[0] = permute(codes.z, codes.w, word * minus_one + minus_one);  // ~word, in the multiplier, which is idle
    negative[1] = permute(codes.z, codes.w, upper * minus_one + minus_one);
}

// c += the products of two blocks of keys with the heads. On Hopper a product of the whole warp group, which is under way until it is
// awaited.
template <int D>
__device__ inline void start_products(float (&c)[kMostHeads / 2], const uint32_t (&keys)[D / 16][4], const uint32_t* query, int lane) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(CEDAR_WIDE_WGMMA)
    const uint64_t matrix = matrix_of(query);
    begin_group();
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
        multiply_group_e5m2(c, keys[step], matrix + uint64_t(step / 4 * (kMatrixWords / 4) + step % 4 * 2));
    close_group();
#else
    float(&parts)[kMostHeads / 8][4] = reinterpret_cast<float(&)[kMostHeads / 8][4]>(c);
    const uint32_t* const row = query + lane / 4 * 32 + lane % 4;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
        const uint32_t(&k)[4] = keys[step];
        const uint32_t *const lower = row + step / 4 * kMatrixWords + (step % 4 * 2 ^ lane / 4) * 4,
                       *const upper = row + step / 4 * kMatrixWords + (step % 4 * 2 + 1 ^ lane / 4) * 4;
#pragma unroll
        for (int n = 0; n < kMostHeads / 8; ++n)
            asm volatile(
                "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(parts[n][0]), "+f"(parts[n][1]), "+f"(parts[n][2]), "+f"(parts[n][3])
                : "r"(k[0]), "r"(k[1]), "r"(k[2]), "r"(k[3]), "r"(lower[n * 256]), "r"(upper[n * 256]));
    }
#endif
}

template <int D>
__device__ inline void await_products(float (&c)[kMostHeads / 2], const uint32_t (&keys)[D / 16][4]) {
    await_groups<0>();
    settle(c);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) settle(keys[step]);
}

// Blocks b and b + 1 of a stage: of a lane its key of the former in the rows' upper half, that of the latter in the lower.
template <int D>
__device__ inline void widen_keys(const Keys<D>& keys, const uint4* table, int stage, int b, uint32_t (&wide)[D / 16][4]) {
    const uint32_t minus_one = 0u - gridDim.z;  // which the compiler shall not know
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t words[D / 32];
        keys.load(stage, b + i, words);
        const uint4 codes = keys.codes_of(table, stage, b + i);
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
            uint32_t positive[2], negative[2];
            widen_word(words[j], codes, minus_one, positive, negative);
#pragma unroll
            for (int p = 0; p < 2; ++p) wide[2 * j + p][i] = positive[p], wide[2 * j + p][2 + i] = negative[p];
        }
    }
}

// The weights of a row's heads as columns, all the same, of a matrix instruction, which they are as large for as they may be; sums come
// with a factor.
struct Weights {
    uint32_t of[kMostHeads / 8];
    float factor;

    template <int D, class W>
    __device__ void load(const ScoreMemory<D, W>& memory, int token, float weight_scale, int lane) {
        const auto weight = [&](int head) { return memory.weight[token][head] * memory.scale[token][head]; };
        const uint32_t most = __reduce_max_sync(kAllLanes, __float_as_uint(weight(lane)) & 0x7fffffffu);
        const uint32_t exponent = min(254 + 14 - (most >> 23), 253u);  // the largest becomes less than 2^15
        const float enlarged = __uint_as_float(exponent << 23);
        factor = power_inverse(enlarged) * (weight_scale * (1.0f / (kQueryUnit * kKeyUnit)));
#pragma unroll
        for (int n = 0; n < kMostHeads / 8; ++n) {
            const int head = 8 * n + lane % 4 * 2;
            of[n] = half_pair(weight(head) * enlarged, weight(head + 1) * enlarged);
        }
    }
};

// The weighted sums of two keys over the heads, in all lanes of a quad.
__device__ inline void weigh(const float (&c)[kMostHeads / 2], const Weights& weights, float& first, float& second) {
    float sums[4] = {};
#pragma unroll
    for (int n = 0; n < kMostHeads / 8; n += 2) {
        const float* const x = c + 4 * n;
        multiply_f16(sums, positive_half_pair(x[0], x[1]), positive_half_pair(x[2], x[3]), positive_half_pair(x[4], x[5]),
                     positive_half_pair(x[6], x[7]), weights.of[n], weights.of[n + 1]);
    }
    first = sums[0], second = sums[2];
}

}  // namespace cedar::cuda::index
