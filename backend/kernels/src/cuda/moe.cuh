// SPDX-License-Identifier: Apache-2.0
// What the products of moe_fp4 share: how pairs of token and expert are grouped, and where a result goes.
#pragma once

#include "common.cuh"

namespace cedar::cuda {

// With more rows the products are tiled, by Hopper's own matrix instruction where there is one, and the shared expert's fill the
// device alone.
constexpr int64_t kStreamRows = 640;
constexpr int kTileTokens = 64, kGroupTokens = 96;  // of a block, tiled; and by Hopper's own matrix instruction

// Pairs (token top_k + k) grouped by expert; block: (expert, first place, number of places, 0).
struct Groups {
    int* count;    // of blocks
    int* taken;    // of both products' units, by streamed ones
    int4* blocks;
    int* pairs;    // pair at each place; nullptr for a single row, whose pairs are blocks without a plan
    const int64_t* ids;

    __device__ int4 block(int number) const {
        if (pairs != nullptr) return __ldcg(&blocks[number]);
        const int64_t id = __ldcg(&ids[number]);
        return make_int4(id < 0 || id > 0x7fffffff ? -1 : int(id), number, 1, 0);
    }
    __device__ int pair(int place) const { return pairs != nullptr ? __ldcg(&pairs[place]) : place; }
};

// One of the experts' two products. The first (top_k > 0) has rows of w1 and w3 by turns of 8 and reads tokens; the second reads
// the first one's results, which lie in the order of places.
struct ExpertProduct {
    const uint8_t* codes;
    const uint8_t* scales;
    const Bf16* x;
    int tiles, depth;       // of 16 rows; of 128 values
    int64_t stride;         // between rows of x
    int top_k;
    float limit;
    const float* weights;   // [pairs]
    Bf16* out;
    int64_t out_stride;

    __device__ int64_t row_of(const Groups& groups, int place) const { return top_k > 0 ? groups.pair(place) / top_k : place; }
};

__device__ inline float swiglu(float g, float u, float limit) {
    const float least = g > limit ? limit : g;  // a NaN stays one
    return least * sigmoid(least) * (u > limit ? limit : u < -limit ? -limit : u);
}

// A warp group's matrix instruction wants k in memory as it is in a step's registers. Where value i of the quarter q of 32
// values, which is what a lane's word of codes has, then goes.
__host__ __device__ inline int order_for_groups(int q, int i) { return i / 2 * 8 + q * 2 + i % 2; }

// Rows `row` and 8 + `row` of a tile for a token, to where its results are. The first product's are a gate and its up.
template <bool kFirst>
__device__ inline void store_pair(Bf16* out, float weight, float limit, int tile, int row, float low, float high) {
    if constexpr (kFirst) {
        out[tile * 8 + row] = from_float<Bf16>(swiglu(rounded<Bf16>(low), rounded<Bf16>(high), limit) * weight);
    } else {
        out[tile * 16 + row] = from_float<Bf16>(low);
        out[tile * 16 + row + 8] = from_float<Bf16>(high);
    }
}

// The same for the token at a place.
template <bool kFirst>
__device__ inline void store_result(const ExpertProduct& p, const Groups& groups, int place, int tile, int row, float low, float high) {
    const int pair = groups.pair(place);
    const float weight = kFirst ? p.weights[pair] : 1.0f;
    store_pair<kFirst>(p.out + int64_t(kFirst ? place : pair) * p.out_stride, weight, p.limit, tile, row, low, high);
}

// One of the shared expert's matrices.
struct SharedExpert {
    const void* weight;
    const uint8_t* scale;
    int64_t type, in_dim, out_dim;
    int rows;               // tokens
};

// A product of the routed experts for many tokens each (moe_tiles.cu).
template <bool kFirst>
cudaError_t multiply_tiles(const ExpertProduct& p, const Groups& groups, int64_t most_blocks, void* stream);

// The same by Hopper's matrix instruction. x and the first product's results lie as moe_wide.cuh says; group_for_wide brings tokens
// there.
template <bool kFirst>
cudaError_t multiply_wide(const ExpertProduct& p, const Groups& groups, int64_t experts, void* stream);
cudaError_t group_for_wide(const Bf16* x, Bf16* out, const Groups& groups, int64_t most_blocks, int top_k, int64_t hidden, void* stream);

// Multiprocessors of the current device, or an error.
cudaError_t multiprocessors(int* count);

// y = x W^T in bf16, summed in rising order of k, for more than 64 rows (linear.cu). Returns a status.
struct Dense {
    const Bf16* x;
    int64_t rows, in_dim, out_dim;
    const void* weight;
    const uint8_t* scale;
    int64_t weight_type;
    Bf16* y;
};
int dense_product(const char* op, const Dense& d, void* stream);

// What MXFP8 leaves of so many values, groups of 32 in a row; `out` may be x. (linear.cu)
cudaError_t round_to_mxfp8(const Bf16* x, Bf16* out, int64_t values, void* stream);

}  // namespace cedar::cuda
