// SPDX-License-Identifier: Apache-2.0
// Scores of index keys: products of the matrix instruction with the keys as rows. Of a key, the four lanes of a quad hold a
// quarter of the dimensions each, straight from memory, which is the order that the queries' fragments in shared memory have too.
// A block of 8 rows of the pool is one aligned run of bytes, and 4 of them are what a warp scores at a time. A score's bits
// depend on its row and entry alone.
#pragma once

#include "ptx.cuh"
#include "records.cuh"

namespace cedar::cuda::index {

constexpr int kScoreThreads = 128, kScoreWarps = kScoreThreads / kWarp;
constexpr int kRunBlocks = 4, kRun = kRunBlocks * kBlockRows;  // keys of a warp at a time
constexpr int kBlocksPerSm = 4;
constexpr int kMostHeads = 32;
constexpr int kQueryShift = 32;  // queries are 2^32 too large and keys 2^32 too small, so that the keys' scales stay in range

struct Search {
    cedar_mqa_logits_topk_args a;
    float* scores;   // [rows of this pass, stride]
    int64_t stride;  // columns, a multiple of 32
    int64_t first;   // row
    int rows;
    int page_shift;  // log2 of per_page, or -1
};

__device__ inline int64_t pool_row(const Search& s, int64_t base, int64_t entry) {
    if (s.page_shift >= 0) return (__ldg(s.a.pages + base + (entry >> s.page_shift)) << s.page_shift) + (entry & (s.a.per_page - 1));
    const uint32_t page = uint32_t(entry) / uint32_t(s.a.per_page);
    return __ldg(s.a.pages + base + page) * s.a.per_page + (entry - int64_t(page) * s.a.per_page);
}

__host__ __device__ inline bool is_scored(const cedar_mqa_logits_topk_args& a, int64_t visible) {
    return visible > a.top_k || (a.published != nullptr && visible > a.published_blocks * a.block);
}

// The first entry of run block `number` of a row; negative: there is none.
__device__ inline int64_t entry_of(const cedar_mqa_logits_topk_args& a, int64_t row, int64_t number) {
    if (a.candidates == nullptr) return number * kBlockRows;
    const int64_t per_block = a.block / kBlockRows, column = number / per_block;
    if (column >= a.candidate_blocks) return -1;
    const int64_t block = __ldg(a.candidates + row * a.candidate_blocks + column);
    return block < 0 ? -1 : block * a.block + number % per_block * kBlockRows;
}

template <int D, int NT, int G>
struct ScoreMemory {
    uint4 query[G][NT][D / 32][kWarp];  // both steps' pairs of a word
    float weight[G][NT * 8];
};

// Queries and weights are bf16 or float32: which of them is asked at run time, once per block, for the sake of fewer kernels.
__device__ inline void load_values(const Search& s, int64_t at, float (&x)[8]) {
    if (s.a.type == CEDAR_F32)
        load_pack(static_cast<const float*>(s.a.query) + at, x);
    else
        load_pack(static_cast<const Bf16*>(s.a.query) + at, x);
}

__device__ inline float load_weight(const Search& s, int64_t at) {
    return s.a.type == CEDAR_F32 ? static_cast<const float*>(s.a.weight)[at] : to_float(static_cast<const Bf16*>(s.a.weight)[at]);
}

// Rotates, rounds and lays out the queries of `count` rows from `row` on; zeros where there is no head.
template <int D, int NT, int G>
__device__ void prepare(const Search& s, int64_t row, int count, ScoreMemory<D, NT, G>& memory) {
    const cedar_mqa_logits_topk_args& a = s.a;
    constexpr int kChunks = D / 8;  // words of codes in a head
    const bool exact = a.type == CEDAR_F32;
    // whole warps: NT * 8 * kChunks is a multiple of 32
    for (int i = threadIdx.x; i < count * NT * 8 * kChunks; i += kScoreThreads) {
        const int chunk = i % kChunks, head = i / kChunks % (NT * 8), token = i / kChunks / (NT * 8);
        float x[8] = {};
        if (head < a.heads) load_values(s, ((row + token) * a.heads + head) * D + chunk * 8, x);
        const int tail = chunk * 8 - (D - 2 * int(a.pairs));
#pragma unroll
        for (int p = 0; p < 8; p += 2) {
            if (tail + p < 0) continue;
            const int64_t angle = (row + token) * a.pairs + (tail + p) / 2;
            const float c = a.cos[angle], sine = a.sin[angle], even = x[p], odd = x[p + 1];
            x[p] = __fsub_rn(__fmul_rn(even, c), __fmul_rn(odd, sine));
            x[p + 1] = __fadd_rn(__fmul_rn(even, sine), __fmul_rn(odd, c));
            if (!exact) x[p] = rounded<Bf16>(x[p]), x[p + 1] = rounded<Bf16>(x[p + 1]);
        }
        if (a.quantise) {
            float amax = 0.0f;
#pragma unroll
            for (int p = 0; p < 8; ++p) amax = fmaxf(amax, fabsf(x[p]));
            const float scale = power_of_two_scale(max_lanes(amax, kMxGroup / 8), 6.0f * 0x1p-126f, float(1.0 / 6.0));
#pragma unroll
            for (int p = 0; p < 8; ++p) {
                const uint32_t code = encode_e2m1(x[p] / scale), magnitude = code & 7;
                const float value = magnitude < 2 ? 0.5f * float(magnitude) : __uint_as_float((magnitude << 22) + (126u << 23));
                x[p] = (code & 8 ? -value : value) * scale;
            }
        }
        uint32_t pairs[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const __nv_bfloat162 both = __floats2bfloat162_rn(x[p] * 0x1p32f, x[p + 4] * 0x1p32f);
            pairs[p] = *reinterpret_cast<const uint32_t*>(&both);
        }
        // chunk = quad * (D / 32) + word
        const int quad = chunk / (D / 32), word = chunk % (D / 32);
        memory.query[token][head / 8][word][head % 8 * 4 + quad] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    for (int i = threadIdx.x; i < count * NT * 8; i += kScoreThreads) {
        const int head = i % (NT * 8), token = i / (NT * 8);
        const float w = head < a.heads ? load_weight(s, (row + token) * a.heads + head) : 0.0f;
        memory.weight[token][head] = w * float(a.weight_scale);
    }
}

// A lane's part of the keys of a run: of block m its key lane / 4, of that a quarter of the dimensions.
template <int D>
struct Keys {
    uint32_t words[kRunBlocks][D / 32];
    uint32_t scale[kRunBlocks];
};

template <int D>
__device__ Keys<D> load_keys(const Search& s, int64_t row, int64_t base, int64_t number, int64_t most, int lane) {
    constexpr int kValues = D / 2, kBytes = kBlockRows * (kValues + D / kMxGroup), kWords = D / 32;
    // lane m of four finds block m
    int64_t at = -1;
    if (lane < kRunBlocks) {
        const int64_t entry = entry_of(s.a, row, number + lane);
        if (entry >= 0 && entry < most) at = pool_row(s, base, entry) / kBlockRows * kBytes;
    }
    Keys<D> keys;
    const int key = lane / 4, quad = lane % 4;
#pragma unroll
    for (int m = 0; m < kRunBlocks; ++m) {
        const int64_t block = __shfl_sync(kAllLanes, at, m);
        const uint8_t* bytes = static_cast<const uint8_t*>(s.a.keys) + block;
#pragma unroll
        for (int j = 0; j < kWords; ++j) keys.words[m][j] = 0;
        keys.scale[m] = 0;
        if (block < 0) continue;
        const uint8_t* values = bytes + key * kValues + quad * (D / 8);
        if constexpr (kWords == 4) {
            const uint4 v = load_once(values);
            keys.words[m][0] = v.x, keys.words[m][1] = v.y, keys.words[m][2] = v.z, keys.words[m][3] = v.w;
        } else {
#pragma unroll
            for (int j = 0; j < kWords; ++j) keys.words[m][j] = __ldg(reinterpret_cast<const uint32_t*>(values) + j);
        }
        keys.scale[m] = __ldg(bytes + kBlockRows * kValues + key * (D / kMxGroup) + quad * (D / 4) / kMxGroup);
    }
    return keys;
}

// 2^(byte - 127 - 32) times the 2^126 that the codes' bits as bf16 lack; NaN for 255.
__device__ inline __nv_bfloat162 key_scale(uint32_t byte) {
    const int exponent = int(byte) + 126 - kQueryShift;
    const uint32_t bits = byte == 255 ? 0x7fc0u : uint32_t(max(exponent, 0)) << 7;
    const uint32_t both = bits | bits << 16;
    return *reinterpret_cast<const __nv_bfloat162*>(&both);
}

// Of the codes 0..7 of a word, the pairs (i, i + 4) as bf16.
__device__ inline void widen_word(uint32_t word, __nv_bfloat162 scale, uint32_t (&pairs)[4]) {
    pairs[0] = ((word << 12) & 0x80008000u) | ((word << 6) & 0x01c001c0u);
    pairs[1] = ((word << 8) & 0x80008000u) | ((word << 2) & 0x01c001c0u);
    pairs[2] = ((word << 4) & 0x80008000u) | ((word >> 2) & 0x01c001c0u);
    pairs[3] = (word & 0x80008000u) | ((word >> 6) & 0x01c001c0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pairs[i]), scale);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
    }
}

// The scores of a run for one token: lane 4 g + q gets that of key g of block q.
template <int D, int NT, class Fragment>
__device__ float score_run(const Fragment& fragment, const uint4 (&query)[NT][D / 32][kWarp], const float (&weight)[NT * 8], int lane) {
    float c[kRunBlocks / 2][NT][4] = {};
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
        uint32_t k[kRunBlocks][4];
        fragment(j, k);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint4 b = query[n][j][lane];
#pragma unroll
            for (int m = 0; m < kRunBlocks / 2; ++m) {
                const uint32_t(&low)[4] = k[2 * m], (&high)[4] = k[2 * m + 1];
                multiply_bf16(c[m][n], low[0], high[0], low[1], high[1], b.x, b.y);
                multiply_bf16(c[m][n], low[2], high[2], low[3], high[3], b.z, b.w);
            }
        }
    }
    const int quad = lane % 4;
    float sums[kRunBlocks] = {};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const float2 w = *reinterpret_cast<const float2*>(&weight[n * 8 + quad * 2]);
#pragma unroll
        for (int m = 0; m < kRunBlocks; ++m) {
            const float* products = &c[m / 2][n][m % 2 * 2];
            sums[m] = fmaf(w.y, fmaxf(products[1], 0.0f), fmaf(w.x, fmaxf(products[0], 0.0f), sums[m]));
        }
    }
    // the quad's sums, of block q in lane q
    const bool odd = quad & 1, upper = quad & 2;
    const float even0 = odd ? sums[1] : sums[0], give0 = odd ? sums[0] : sums[1];
    const float even1 = odd ? sums[3] : sums[2], give1 = odd ? sums[2] : sums[3];
    const float pair0 = even0 + __shfl_xor_sync(kAllLanes, give0, 1), pair1 = even1 + __shfl_xor_sync(kAllLanes, give1, 1);
    return (upper ? pair1 : pair0) + __shfl_xor_sync(kAllLanes, upper ? pair0 : pair1, 2);
}

// Rows [row, row + count) of one sequence. Warps take runs in turn; the next run's keys are on their way while one is scored, the
// first one's while the queries are prepared. All threads of the block.
template <int D, int NT, int G>
__device__ void score_rows(const Search& s, int64_t row, int count, ScoreMemory<D, NT, G>& memory) {
    const cedar_mqa_logits_topk_args& a = s.a;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int64_t base = a.base[row];
    int64_t most = 0;
    for (int t = 0; t < count; ++t) {
        const int64_t visible = a.visible[row + t];
        if (is_scored(a, visible)) most = max(most, visible);
    }
    const int64_t columns = most == 0 ? 0 : a.candidates != nullptr ? a.candidate_blocks * a.block : most;
    const int64_t step = int64_t(gridDim.x) * kScoreWarps * kRun;
    int64_t column = (int64_t(blockIdx.x) * kScoreWarps + warp) * kRun;
    Keys<D> next;
    if (column < columns) next = load_keys<D>(s, row, base, column / kBlockRows, most, lane);
    __syncthreads();
    if (most > 0) prepare(s, row, count, memory);
    __syncthreads();
    while (column < columns) {
        const Keys<D> keys = next;
        const int64_t here = column;
        column += step;
        if (column < columns) next = load_keys<D>(s, row, base, column / kBlockRows, most, lane);
        __nv_bfloat162 scale[kRunBlocks];
#pragma unroll
        for (int m = 0; m < kRunBlocks; ++m) scale[m] = key_scale(keys.scale[m]);
        const int64_t mine = here + lane % 4 * kBlockRows + lane / 4;
        const auto store = [&](int t, float score) {
            if (mine < (a.candidates != nullptr ? columns : a.visible[row + t])) s.scores[(row + t - s.first) * s.stride + mine] = score;
        };
        if constexpr (G == 1) {
            const auto widened = [&](int j, uint32_t(&k)[kRunBlocks][4]) {
#pragma unroll
                for (int m = 0; m < kRunBlocks; ++m) widen_word(keys.words[m][j], scale[m], k[m]);
            };
            store(0, score_run<D, NT>(widened, memory.query[0], memory.weight[0], lane));
        } else {
            uint32_t wide[D / 32][kRunBlocks][4];
#pragma unroll
            for (int j = 0; j < D / 32; ++j)
#pragma unroll
                for (int m = 0; m < kRunBlocks; ++m) widen_word(keys.words[m][j], scale[m], wide[j][m]);
            const auto widened = [&](int j, uint32_t(&k)[kRunBlocks][4]) {
#pragma unroll
                for (int m = 0; m < kRunBlocks; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) k[m][i] = wide[j][m][i];
            };
#pragma unroll 1
            for (int t = 0; t < count; ++t) store(t, score_run<D, NT>(widened, memory.query[t], memory.weight[t], lane));
        }
    }
}

template <int D, int NT, int G>
__global__ void __launch_bounds__(kScoreThreads, G == 1 ? kBlocksPerSm : kBlocksPerSm - 1) score(const Search s) {
    __shared__ ScoreMemory<D, NT, G> memory;
    const int64_t end = s.first + s.rows;
    int64_t row = s.first + int64_t(blockIdx.y) * G;
    const int64_t stop = min(row + G, end);
    while (row < stop) {
        int count = 1;
        while (row + count < stop && s.a.base[row + count] == s.a.base[row]) ++count;
        score_rows(s, row, count, memory);
        row += count;
    }
}

}  // namespace cedar::cuda::index
