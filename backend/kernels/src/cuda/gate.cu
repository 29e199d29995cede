// SPDX-License-Identifier: Apache-2.0
// mega_gate in one launch: on Hopper gate_group.cuh, gate_whole.cuh and gate_many.cuh, and here what runs anywhere and for other
// dimensions. A cluster shares k for a tile of experts and of tokens: a block's share of both is on its way to shared memory from the
// start, or all but its last part where not all has room. Experts are the rows of the matrix instruction (m16n8k16), tokens its
// columns. Each block adds up the logits of some tokens over the cluster and stores their scores; of the blocks with scores of a
// token, the last to come chooses.
//
// A logit is the sum of the blocks' parts in their order, a part a chain over its k: for one dimension one order, whatever the
// tiles, which depend on the number of rows.
#include "bodies.h"
#include "gate_group.cuh"
#include "gate_many.cuh"
#include "gate_whole.cuh"

namespace cedar::cuda {
namespace {

constexpr int kMostBlocks = 16, kBlockK = 32;       // k of a lane's 16 bytes and its three neighbours'
constexpr int kBlockBytes = kBlockK * int(sizeof(Bf16));
constexpr int kCopyGroups = 5, kRowThreads = 8;     // parts of k that are waited for in turn; threads that copy a row
constexpr int64_t kMany = 1792;  // from so many rows on, tiles of all experts; no fewer than 641, as they add in an order of their own

// Blocks of k of a part of the `blocks` that a block of threads has.
__host__ __device__ constexpr int64_t part_of(int64_t blocks) { return (blocks + kCopyGroups - 1) / kCopyGroups; }

// A warp has EM * 16 experts and NT * 8 tokens, a block EW x NW warps and shared memory for kBuffers parts of k: a part takes the
// place of the one that was multiplied kBuffers before.
template <int EM, int EW, int NT, int NW, int kBuffers>
struct Tile {
    static constexpr int kExperts = EM * EW * 16, kTokens = NT * NW * 8, kThreads = EW * NW * kWarp;
    static constexpr int kFoldStride = kExperts + 4;  // floats of a token's logits: 2 tokens further is 8 banks further
    static int64_t shared(int64_t length) {
        const int64_t staged = kBuffers * (kExperts + kTokens) * part_of(length / kBlockK) * kBlockBytes;
        const int64_t folded = kTokens * kFoldStride * int64_t(sizeof(float));
        return staged > folded ? staged : folded;
    }
};

// As many blocks of the cluster as share k evenly in whole blocks of k.
__host__ __device__ constexpr int cluster_of(int64_t hidden) {
    int blocks = kMostBlocks;
    while (blocks > 1 && hidden % (int64_t(blocks) * kBlockK) != 0) blocks /= 2;
    return blocks;
}

// kHidden: 0 where only the call knows it.
template <int EM, int EW, int NT, int NW, int kBuffers, int kHidden>
__global__ void __launch_bounds__(EW* NW* kWarp, 1) route(const Gate gate) {
    using T = Tile<EM, EW, NT, NW, kBuffers>;
    release_launch();
    await_launch();
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ __align__(16) uint32_t words[EW * NW][kChoiceWords];
    __shared__ bool is_last;
    const cedar_mega_gate_args& a = gate.a;
    const int blocks = kHidden > 0 ? cluster_of(kHidden) : gate.blocks, hidden = kHidden > 0 ? kHidden : int(a.hidden);
    const int rank = int(blockIdx.x) % blocks, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int group = lane / 4, quad = lane % 4;
    const int64_t first_expert = int64_t(blockIdx.x) / blocks * T::kExperts, first_token = int64_t(blockIdx.y) * T::kTokens;
    const int tokens = int(a.rows - first_token < T::kTokens ? a.rows - first_token : T::kTokens);
    const int length = hidden / blocks, k_blocks = length / kBlockK, k_each = int(part_of(k_blocks));
    // Where a row of a part is an even number of blocks of 64 bytes, odd rows have them swapped in pairs: two rows' blocks then lie
    // in different banks.
    const int stride = k_each * kBlockBytes, part_bytes = (T::kExperts + T::kTokens) * stride, swap = 1 - k_each % 2;

    // Rows: the experts, of which one behind the last is the last, then the tokens, of which one behind the last is not copied.
    constexpr int kAtOnce = T::kThreads / kRowThreads, kPasses = (T::kExperts + T::kTokens + kAtOnce - 1) / kAtOnce;
    static_assert(T::kExperts % kAtOnce == 0);
    const int row = threadIdx.x / kRowThreads, chunks = k_blocks * 4, chunks_each = k_each * 4, flip = row % 2 * swap * 4;
    static_assert(kAtOnce % 2 == 0);
    const Bf16* from[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int of_tile = row + pass * kAtOnce;
        const int64_t expert = first_expert + of_tile < a.experts ? first_expert + of_tile : a.experts - 1;
        from[pass] = (pass * kAtOnce < T::kExperts ? static_cast<const Bf16*>(a.weight) + expert * hidden
                                                   : static_cast<const Bf16*>(a.x) + (first_token + of_tile - T::kExperts) * hidden) +
                     rank * length;
    }
    const auto copy = [&](int part) {
        unsigned char* to = memory + part % kBuffers * part_bytes + row * stride;
        const int begin = part * chunks_each, end = part < kCopyGroups ? min(begin + chunks_each, chunks) : 0;
#pragma unroll 1
        for (int chunk = begin + threadIdx.x % kRowThreads; chunk < end; chunk += kRowThreads) {
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass)
                if (pass * kAtOnce < T::kExperts || row + pass * kAtOnce < T::kExperts + tokens)
                    copy_16(to + pass * kAtOnce * stride + ((chunk - begin) ^ flip) * 16, from[pass] + chunk * 8);
        }
        close_copies();
    };
#pragma unroll
    for (int part = 0; part < kBuffers; ++part) copy(part);

    const int first_chosen = rank + warp * blocks;  // the warp's, should the block choose
    const float* bias = bias_of(a, first_token + min(first_chosen, tokens - 1));

    const int expert = warp / NW * EM * 16, token = warp % NW * NT * 8, columns = min(NT, (tokens - token + 7) / 8);
    const unsigned char* experts_at = memory + (expert + group) * stride + quad * 16;
    const unsigned char* tokens_at = memory + (T::kExperts + token + group) * stride + quad * 16;
    const int swapped = group % 2 * swap;
    float c[EM][NT][4] = {};
    const auto multiply = [&](int part) {
        const int buffer = part % kBuffers * part_bytes, count = min(k_each, k_blocks - part * k_each);
#pragma unroll 1
        for (int block = 0; block < count; ++block) {
            const int at = buffer + (block ^ swapped) * kBlockBytes;
            uint4 low[EM], high[EM];
#pragma unroll
            for (int m = 0; m < EM; ++m) {
                low[m] = *reinterpret_cast<const uint4*>(experts_at + m * 16 * stride + at);
                high[m] = *reinterpret_cast<const uint4*>(experts_at + (m * 16 + 8) * stride + at);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                if (n >= columns) break;
                const uint4 b = *reinterpret_cast<const uint4*>(tokens_at + n * 8 * stride + at);
#pragma unroll
                for (int m = 0; m < EM; ++m) multiply_bf16(c[m][n], low[m].x, high[m].x, low[m].y, high[m].y, b.x, b.y);
#pragma unroll
                for (int m = 0; m < EM; ++m) multiply_bf16(c[m][n], low[m].z, high[m].z, low[m].w, high[m].w, b.z, b.w);
            }
        }
    };
    static_assert(kBuffers >= 2 && kBuffers <= kCopyGroups);
    await_copies<kBuffers - 1>();
    __syncthreads();
    multiply(0);
#pragma unroll
    for (int part = 1; part < kCopyGroups; ++part) {
        await_copies<kBuffers - 2>();
        __syncthreads();  // the part is complete, and the one before has been read
        copy(part - 1 + kBuffers);
        multiply(part);
    }
    __syncthreads();  // over what was staged

    float* folded = reinterpret_cast<float*>(memory);  // [token][expert]
#pragma unroll
    for (int m = 0; m < EM; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                folded[(token + n * 8 + quad * 2 + i % 2) * T::kFoldStride + expert + m * 16 + group + i / 2 * 8] = c[m][n][i];
    __syncwarp();
    publish_to_cluster();
    await_cluster();
    constexpr int kFours = T::kExperts / 4;
    for (int item = threadIdx.x;; item += T::kThreads) {
        const int t = rank + item / kFours * blocks, e = item % kFours * 4;
        if (t >= tokens) break;
        if (first_expert + e >= a.experts) continue;  // a load that nobody uses could arrive when the other block has ended
        const uint32_t mine = shared_address(folded + t * T::kFoldStride + e);
        float4 parts[kMostBlocks];
#pragma unroll
        for (int block = 0; block < kMostBlocks; ++block)
            if (block < blocks) parts[block] = load_from(address_in(mine, block));
        float4 sum = {};
#pragma unroll
        for (int block = 0; block < kMostBlocks; ++block)
            if (block < blocks) sum.x += parts[block].x, sum.y += parts[block].y, sum.z += parts[block].z, sum.w += parts[block].w;
        sum = make_float4(score_of(sum.x), score_of(sum.y), score_of(sum.z), score_of(sum.w));
        __stcg(reinterpret_cast<float4*>(gate.scores + (first_token + t) * gate.score_stride + first_expert + e), sum);
    }
    __syncthreads();
    arrive_at_cluster();  // it has read the others' memory
    if (threadIdx.x == 0) {
        unsigned* arrivals = gate.arrivals + int64_t(blockIdx.y) * blocks + rank;
        is_last = count_arrival(arrivals) == gridDim.x / unsigned(blocks) - 1;
        if (is_last) *arrivals = 0;
    }
    __syncthreads();
    if (is_last)
        for (int t = first_chosen; t < tokens; t += EW * NW * blocks) {
            const float* scores = gate.scores + (first_token + t) * gate.score_stride;
            if (t != first_chosen) bias = bias_of(a, first_token + t);
            float score[kMostExperts / kWarp];
            uint32_t key[kMostExperts / kWarp];
#pragma unroll
            for (int i = 0; i < kMostExperts / kWarp; ++i) {
                const int e = expert_of(i, lane);
                score[i] = e < a.experts ? __ldcg(scores + e) : 0.0f;
                key[i] = e < a.experts ? ordered(score[i] + __ldg(bias + e)) : 0u;
            }
            const auto again = [&](int e) { return Scored{ordered(__ldcg(scores + e) + __ldg(bias + e)), __ldcg(scores + e)}; };
            choose(a, first_token + t, score, key, again, words[warp], lane);
        }
    __syncwarp();
    await_cluster();
}

template <int EM, int EW, int NT, int NW, int kBuffers, int kHidden>
int run(const Gate& all, void* stream) {
    using T = Tile<EM, EW, NT, NW, kBuffers>;
    const auto kernel = route<EM, EW, NT, NW, kBuffers, kHidden>;
    const int64_t shared = T::shared(all.a.hidden / all.blocks);
    const int64_t most_rows = CEDAR_COUNTER_BYTES / int64_t(sizeof(unsigned)) / all.blocks * T::kTokens;  // for which there are counters
    cudaError_t error = cudaSuccess;
    if (all.blocks > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    const unsigned width = unsigned((all.a.experts + T::kExperts - 1) / T::kExperts * all.blocks);
    for (int64_t first = 0; first < all.a.rows && error == cudaSuccess; first += most_rows) {
        Gate gate = all;
        cedar_mega_gate_args& a = gate.a;
        a.rows = a.rows - first < most_rows ? a.rows - first : most_rows;
        a.x = static_cast<const Bf16*>(a.x) + first * a.hidden;
        if (a.image != nullptr) a.image += first;
        a.ids += first * a.top_k;
        a.weights += first * a.top_k;
        gate.scores += first * gate.score_stride;
        const dim3 grid(width, unsigned((a.rows + T::kTokens - 1) / T::kTokens));
        error = launch(kernel, grid, T::kThreads, size_t(shared), all.blocks, true, stream, gate);
    }
    return finish("mega_gate", error);
}

// Up to 256 tokens by clusters of 16 blocks that share k, of which there are as many as a device has places for. Then by clusters that
// choose by themselves, as long as one wave of them has all tokens. Then by clusters of 8, in the tiles that need the least time: each
// wave of clusters takes as long as a block's rows.
cudaError_t run_groups(const Gate& gate, void* stream) {
    const int64_t rows = gate.a.rows;
    if (rows <= 8) return run_group<16, 1, 8>(gate, stream);
    if (rows <= 32) return run_group<16, 1, 32>(gate, stream);
    if (rows <= 64) return run_group<16, 1, 64>(gate, stream);
    if (rows <= 128) return run_group<16, 2, 64>(gate, stream);
    if (rows <= 256) return run_group<16, 2, 128>(gate, stream);
    static const int few = places_of_wholes<56>(), some = places_of_wholes<80>();
    if (rows <= 56 * few) return run_whole<56>(gate.a, stream);
    if (rows <= 80 * some) return run_whole<80>(gate.a, stream);
    static const int places = places_of_groups<8, 2, 128>();
    const auto time = [&](int64_t tokens) {
        const int64_t clusters = (gate.a.experts + 127) / 128 * ((rows + tokens - 1) / tokens);
        return (clusters + places - 1) / places * (128 + tokens);
    };
    const int64_t small = time(80), middle = time(112), large = time(128);
    if (small <= middle && small <= large) return run_group<8, 2, 80>(gate, stream);
    return middle <= large ? run_group<8, 2, 112>(gate, stream) : run_group<8, 2, 128>(gate, stream);
}

cudaError_t run_most(const cedar_mega_gate_args& a, void* stream) {
    static const int places = places_of(route_many<144>, kManyThreads, ManyTile<144>::kShared, kManyBlocks);
    const auto time = [&](int64_t tokens) {
        const int64_t clusters = (a.rows + 2 * tokens - 1) / (2 * tokens);
        return (clusters + places - 1) / places * tokens;
    };
    return time(144) <= time(160) ? run_many<144>(a, stream) : run_many<160>(a, stream);
}

int64_t score_stride(const cedar_mega_gate_args& a) { return (a.experts + 3) / 4 * 4; }

}  // namespace

int64_t mega_gate_workspace(const cedar_mega_gate_args& a) {
    return CEDAR_COUNTER_BYTES + a.rows * score_stride(a) * int64_t(sizeof(float));
}

int mega_gate(const cedar_mega_gate_args& a, void* stream) {
    if (a.type != CEDAR_BF16 || a.weight_type != CEDAR_BF16 || a.hidden % kBlockK != 0 || a.experts > kMostExperts || a.top_k > kMostK)
        return fail(CEDAR_UNSUPPORTED, "mega_gate: on a GPU bf16, hidden a multiple of 32, at most %d experts and %d chosen", kMostExperts, kMostK);
    if (a.workspace_bytes < mega_gate_workspace(a)) return fail(CEDAR_WORKSPACE, "mega_gate: workspace has %lld bytes", (long long)a.workspace_bytes);
    char* workspace = static_cast<char*>(a.workspace);
    const Gate gate{a, reinterpret_cast<float*>(workspace + CEDAR_COUNTER_BYTES), reinterpret_cast<unsigned*>(workspace), score_stride(a),
                    cluster_of(a.hidden)};
    const bool many = a.rows >= kMany;
    if (has_groups() && many && fits_many(a)) return finish("mega_gate", run_most(a, stream));
    if (has_groups() && !many && a.hidden == kRelease && a.experts <= kGroupExperts) return finish("mega_gate", run_groups(gate, stream));
    if (a.hidden == kRelease) {
        if (a.rows > 256) return run<2, 6, 11, 2, 4, kRelease>(gate, stream);
        if (a.rows > 64) return run<3, 2, 2, 4, kCopyGroups, kRelease>(gate, stream);
        if (a.rows > 16) return run<1, 2, 2, 4, kCopyGroups, kRelease>(gate, stream);
        return a.rows > 8 ? run<1, 2, 1, 2, kCopyGroups, kRelease>(gate, stream) : run<1, 2, 1, 1, kCopyGroups, kRelease>(gate, stream);
    }
    const int64_t length = a.hidden / gate.blocks;
    if (a.rows <= 8 && Tile<1, 2, 1, 1, kCopyGroups>::shared(length) <= kMostShared) return run<1, 2, 1, 1, kCopyGroups, 0>(gate, stream);
    if (a.rows > 8 && Tile<1, 2, 2, 4, 4>::shared(length) <= kMostShared) return run<1, 2, 2, 4, 4, 0>(gate, stream);
    return fail(CEDAR_UNSUPPORTED, "mega_gate: hidden %lld on a GPU", (long long)a.hidden);
}

}  // namespace cedar::cuda
