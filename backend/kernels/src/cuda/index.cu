// SPDX-License-Identifier: Apache-2.0
// mqa_logits_topk in two launches: scores of the rows' entries into the workspace, then a block per row that chooses.
#include "bodies.h"
#include "index_score.cuh"
#include "select.cuh"

namespace cedar::cuda {
namespace index {

constexpr int64_t kMostScores = int64_t(1) << 26;  // floats of the workspace, while one row does not need more

// Columns with an entry, of a row with candidates: they come first.
__device__ int count_candidates(const Search& s, int64_t row, int64_t visible, uint32_t* sums) {
    const int64_t* blocks = s.a.candidates + row * s.a.candidate_blocks;
    uint32_t mine = 0;
    for (int64_t i = threadIdx.x; i < s.a.candidate_blocks; i += kSelectThreads) {
        const int64_t begin = blocks[i] * s.a.block;
        if (begin >= 0 && begin < visible) mine += uint32_t(min(s.a.block, visible - begin));
    }
    const uint32_t sum = prefix_sum(mine, sums);
    if (threadIdx.x == kSelectThreads - 1) sums[0] = sum;
    __syncthreads();
    const int count = int(sums[0]);
    __syncthreads();
    return count;
}

__device__ void select_entries(const Search& s, int64_t row, const float* scores) {
    Selection& memory = selection();
    const cedar_mqa_logits_topk_args& a = s.a;
    const int64_t visible = a.visible[row], base = a.base[row];
    const int n = a.candidates == nullptr ? int(visible) : count_candidates(s, row, visible, memory.sums);
    const int chosen = min(n, int(a.top_k));
    if (chosen < n) choose([=](int i) { return ordered_bits(__ldcg(scores + i)); }, n, chosen);
    for (int64_t i = threadIdx.x; i < a.width; i += kSelectThreads) {
        int64_t position = -1, slot = 0;
        if (i < chosen) {
            position = chosen < n ? int64_t(memory.chosen[i]) : i;
            if (a.candidates != nullptr)
                position = a.candidates[row * a.candidate_blocks + position / a.block] * a.block + position % a.block;
            slot = pool_row(s, base, position);
        }
        a.index[row * a.width + i] = position;
        a.slots[row * a.width + i] = slot;
    }
}

// The blocks with the best maxima, and the newest. cache: where the maxima are kept, or NULL.
__device__ void select_blocks(const Search& s, int64_t row, const float* scores, uint32_t* cache) {
    const Selection& memory = selection();
    const cedar_mqa_logits_topk_args& a = s.a;
    const int block = int(a.block), blocks = int((a.visible[row] + block - 1) / block), chosen = min(blocks, int(a.published_blocks));
    const auto best = [=](int b) {
        uint32_t key = 0;
        for (int i = 0; i < block; ++i) key = max(key, ordered_bits(__ldcg(scores + int64_t(b) * block + i)));
        return key;
    };
    if (chosen < blocks && chosen > 1) {
        if (cache != nullptr) {
            for (int b = threadIdx.x; b < blocks - 1; b += kSelectThreads) cache[b] = best(b);
            __syncthreads();
            choose([=](int b) { return cache[b]; }, blocks - 1, chosen - 1);
        } else {
            choose(best, blocks - 1, chosen - 1);
        }
    }
    for (int64_t i = threadIdx.x; i < a.published_blocks; i += kSelectThreads) {
        int64_t number = chosen == blocks ? i : i < chosen - 1 ? int64_t(memory.chosen[i]) : blocks - 1;
        if (i >= chosen) number = -1;
        a.published[row * a.published_blocks + i] = number;
    }
}

constexpr size_t kMostShared = 220 * 1024;

// Blocks (row, 0) choose entries, blocks (row, 1) the candidate blocks.
__global__ void __launch_bounds__(kSelectThreads) select_rows(const Search s, int bitmap_words, bool cached) {
    const int64_t row = s.first + blockIdx.x;
    const float* scores = s.scores + int64_t(blockIdx.x) * s.stride;
    if (blockIdx.y == 0)
        select_entries(s, row, scores);
    else
        select_blocks(s, row, scores, cached ? chosen_bitmap() + bitmap_words : nullptr);
}

// ---- host ----

int64_t columns_of(const cedar_mqa_logits_topk_args& a) { return a.candidates != nullptr ? a.candidate_blocks * a.block : a.max_visible; }

int64_t stride_of(const cedar_mqa_logits_topk_args& a) { return (columns_of(a) + kRun - 1) / kRun * kRun; }

// Rows whose scores the workspace holds at a time.
int64_t rows_together(const cedar_mqa_logits_topk_args& a) {
    const int64_t stride = stride_of(a), most = stride > 0 ? kMostScores / stride : a.rows;
    return most < 1 ? 1 : most < a.rows ? most : a.rows;
}

template <int D, int NT>
cudaError_t run_scores(const Search& s, int multiprocessors, void* stream) {
    const bool together = s.a.candidates == nullptr && s.rows >= 256;  // a chunk's rows share their keys
    constexpr int kTogether = 4;
    const int64_t groups = together ? (s.rows + kTogether - 1) / kTogether : s.rows;
    const int64_t slots = int64_t(multiprocessors) * (together ? kBlocksPerSm - 1 : kBlocksPerSm);
    const int64_t runs = s.stride / (kScoreWarps * kRun) + 1;
    int64_t splits = groups * 4 <= slots ? slots / groups : (2 * slots + groups - 1) / groups;
    splits = splits < runs ? splits : runs;
    const dim3 grid{unsigned(splits), unsigned(groups)};
    if (together) return launch(score<D, NT, kTogether>, grid, kScoreThreads, 0, 1, stream, s);
    return launch(score<D, NT, 1>, grid, kScoreThreads, 0, 1, stream, s);
}

template <int D>
cudaError_t run_heads(const Search& s, int multiprocessors, void* stream) {
    return s.a.heads <= 16 ? run_scores<D, 2>(s, multiprocessors, stream) : run_scores<D, 4>(s, multiprocessors, stream);
}

cudaError_t run_dims(const Search& s, int multiprocessors, void* stream) {
    if (s.a.dim == 128) return run_heads<128>(s, multiprocessors, stream);
    if (s.a.dim == 64) return run_heads<64>(s, multiprocessors, stream);
    return run_heads<32>(s, multiprocessors, stream);
}

}  // namespace index

int64_t mqa_logits_topk_workspace(const cedar_mqa_logits_topk_args& a) {
    return CEDAR_COUNTER_BYTES + index::rows_together(a) * index::stride_of(a) * int64_t(sizeof(float));
}

int mqa_logits_topk(const cedar_mqa_logits_topk_args& a, void* stream) {
    static const char* const name = "mqa_logits_topk";
    if (a.record != CEDAR_RECORD_MXFP4 || (a.type == CEDAR_F32 && !a.quantise))
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU MXFP4 keys, and queries of bf16 or rounded to MXFP4", name);
    if ((a.dim != 32 && a.dim != 64 && a.dim != 128) || a.heads > index::kMostHeads || a.per_page % kBlockRows != 0)
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU dim 32, 64 or 128, at most %d heads, pages of blocks of 8; not %lld, %lld, %lld", name,
                    index::kMostHeads, (long long)a.dim, (long long)a.heads, (long long)a.per_page);
    if (a.top_k > kMostChosen || (a.published != nullptr && a.published_blocks > kMostChosen) ||
        (a.candidates != nullptr && a.block % kBlockRows != 0))
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU at most %d of each kind are chosen, among blocks of a multiple of 8", name,
                    kMostChosen);
    const int64_t columns = index::columns_of(a), blocks = a.published != nullptr ? (a.max_visible + a.block - 1) / a.block : 0;
    const size_t bitmap_words = size_t(columns + 31) / 32;
    size_t shared = sizeof(Selection) + bitmap_words * 4;
    if (shared > index::kMostShared || columns >= 1 << kColumnBits)
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU at most %zu entries a row, not %lld", name,
                    (index::kMostShared - sizeof(Selection)) * 8, (long long)columns);
    if (a.workspace_bytes < mqa_logits_topk_workspace(a))
        return fail(CEDAR_WORKSPACE, "%s: workspace has %lld bytes", name, (long long)a.workspace_bytes);
    const bool cached = blocks > 0 && shared + size_t(blocks) * 4 <= index::kMostShared;
    if (cached) shared += size_t(blocks) * 4;
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    index::Search s{a, reinterpret_cast<float*>(static_cast<char*>(a.workspace) + CEDAR_COUNTER_BYTES), index::stride_of(a), 0, 0, -1};
    if ((a.per_page & (a.per_page - 1)) == 0)
        for (s.page_shift = 0; int64_t(1) << s.page_shift < a.per_page;) ++s.page_shift;
    const int64_t together = index::rows_together(a);
    for (; s.first < a.rows && error == cudaSuccess; s.first += together) {
        s.rows = int(together < a.rows - s.first ? together : a.rows - s.first);
        if (a.candidates != nullptr || index::is_scored(a, a.max_visible))
            error = index::run_dims(s, multiprocessors, stream);
        if (error != cudaSuccess) break;
        const dim3 grid{unsigned(s.rows), a.published != nullptr ? 2u : 1u};
        error = launch(index::select_rows, grid, kSelectThreads, shared, 1, stream, s, int(bitmap_words), cached);
    }
    return finish(name, error);
}

}  // namespace cedar::cuda
