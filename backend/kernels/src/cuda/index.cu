// SPDX-License-Identifier: Apache-2.0
// mqa_logits_topk: of few entries a row's cluster of blocks scores and chooses; else there are two launches: scores of the rows' entries
// into the workspace, then a cluster per row that chooses.
#include <algorithm>
#include <cstddef>

#include "bodies.h"
#include "index_few.cuh"

namespace cedar::cuda {
namespace index {

constexpr int64_t kMostScores = int64_t(1) << 26;  // of the workspace, while one row does not need more
constexpr int kMostRun = 24 * 1024;                // items of a block of a cluster
constexpr int kMostShared = 227 * 1024;            // of its blocks
static_assert(sizeof(Selection) + (kMostRun + 4) * (sizeof(uint32_t) + sizeof(uint16_t)) <= kMostShared);
constexpr int kShortRun = 8192;                    // items of a block that need no more blocks
constexpr int64_t kMostRows = 65535;               // of a pass: blocks of a grid in y

// A block's run of a row's items, which are numbered over the cluster.
struct Run {
    __device__ Run(const Cluster& cluster, int items) {
        const int each = (items + int(cluster.num_blocks()) - 1) / int(cluster.num_blocks());
        first = min(each * int(cluster.block_rank()), items);
        count = min(each, items - first);
    }
    int first, count;
};

// The dynamic shared memory behind the selection: the run's maxima, then which of them lead to keys.
__device__ inline uint32_t* run_maxima() { return reinterpret_cast<uint32_t*>(&selection() + 1); }
constexpr int kRunMaxima = sizeof(Selection) / sizeof(uint32_t), kKept = offsetof(Selection, keys) / sizeof(uint32_t);

// Keys of the listed blocks, where they were written.
struct ListedKeys {
    const uint32_t* scores;  // of the run
    const uint16_t* list;
    __device__ int column(int i) const { return int(list[i / kBlockRows]) * kBlockRows + i % kBlockRows; }
    __device__ uint32_t operator()(int i) const { return __ldcg(scores + column(i)); }
};

// Puts the highest keys of items of `each` key blocks there. Between what they all are: see bounds.
__device__ Range load_maxima(const Cluster& cluster, const Run& run, int items, const uint32_t* maxima, int each, int wanted) {
    uint32_t* const own = run_maxima();
    uint32_t highest = 0, lowest = 0xffffffffu;
    const auto take = [&](int i, uint32_t key) {
        own[i] = key;
        highest = max(highest, key);
        lowest = min(lowest, key);
    };
    if (each == 1) {
#pragma unroll 4
        for (int i = threadIdx.x; i < run.count; i += kSelectThreads) take(i, __ldcg(maxima + run.first + i));
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < run.count; i += kSelectThreads) {
            uint32_t key = 0;
#pragma unroll 1
            for (int b = 0; b < each; ++b) key = max(key, __ldcg(maxima + int64_t(run.first + i) * each + b));
            take(i, key);
        }
    }
    return bounds(cluster, highest, lowest, items, wanted);
}

// list[0, result): the items of the run that reach `least`, ascending.
__device__ int list_blocks_above(const Run& run, uint32_t least, uint16_t* list) {
    const uint32_t* const own = run_maxima();
    Selection& memory = selection();
    const int each = (run.count + kSelectThreads - 1) / kSelectThreads | 1;  // odd: threads read from different banks
    const int first = min(int(threadIdx.x) * each, run.count), last = min(first + each, run.count);
    uint32_t mine = 0;
    for (int i = first; i < last; ++i) mine += own[i] >= least;
    const uint32_t through = prefix_sum(mine, memory.sums);
    if (threadIdx.x == kSelectThreads - 1) memory.total = through;
    uint32_t place = through - mine;
    for (int i = first; i < last; ++i)
        if (own[i] >= least) list[place++] = uint16_t(i);
    __syncthreads();
    return int(memory.total);
}

__device__ void select_entries(const Search& s, const Cluster& cluster, int64_t row, const uint32_t* scores, const uint32_t* maxima,
                               int most_items) {
    const cedar_mqa_logits_topk_args& a = s.a;
    const int64_t visible = a.visible[row], base = a.base[row];
    const int self = int(cluster.block_rank() * kSelectThreads + threadIdx.x), all = int(cluster.num_blocks()) * kSelectThreads;
    if (a.candidates == nullptr && visible <= a.top_k) {
        for (int i = self; i < a.width; i += all) write_entry(s, row, base, i, i < visible ? i : -1);
        return;
    }
    Selection& memory = selection();
    const int blocks = key_blocks(s, visible), wanted = int(a.top_k);
    const Run run(cluster, blocks);
    clear_bins();
    await_launch();
    Range range = load_maxima(cluster, run, blocks, maxima, 1, wanted);
    if (blocks > kMostKept / kBlockRows * int(cluster.num_blocks()))  // not all keys may be kept
        range.least = narrow(cluster, SharedKeys{kRunMaxima}, run.count, uint32_t(wanted), range);
    uint16_t* const list = reinterpret_cast<uint16_t*>(run_maxima() + most_items);
    const int count = list_blocks_above(run, range.least, list) * kBlockRows;
    const ListedKeys keys{scores + int64_t(run.first) * kBlockRows, list};
    const bool kept = count <= kMostKept;
    if (kept) {
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += kSelectThreads) memory.keys[i] = keys(i);
        __syncthreads();
    }
    const Part part =
        kept ? choose(cluster, SharedKeys{kKept}, count, wanted, range) : choose(cluster, keys, count, wanted, range);
    for (int i = threadIdx.x; i < part.count; i += kSelectThreads) {
        const int chosen = run.first * kBlockRows + keys.column(int(memory.chosen[i])), block = int(a.block);
        int64_t position = chosen;
        if (a.candidates != nullptr) position = a.candidates[row * a.candidate_blocks + chosen / block] * block + chosen % block;
        write_entry(s, row, base, part.start + i, position);
    }
    for (int i = part.total + self; i < a.width; i += all) write_entry(s, row, base, i, -1);
}

// The blocks with the best maxima, and the newest.
__device__ void select_blocks(const Search& s, const Cluster& cluster, int64_t row, const uint32_t* maxima) {
    const cedar_mqa_logits_topk_args& a = s.a;
    int64_t* const out = a.published + row * a.published_blocks;
    const int blocks = (int(a.visible[row]) + int(a.block) - 1) / int(a.block), wanted = int(a.published_blocks) - 1;
    const int self = int(cluster.block_rank() * kSelectThreads + threadIdx.x), all = int(cluster.num_blocks()) * kSelectThreads;
    if (blocks <= a.published_blocks) {
        for (int i = self; i < a.published_blocks; i += all) out[i] = i < blocks ? i : -1;
        return;
    }
    const Run run(cluster, blocks - 1);
    clear_bins();
    await_launch();
    const Range range = load_maxima(cluster, run, blocks - 1, maxima, int(a.block / kBlockRows), wanted);
    const Part part = choose(cluster, SharedKeys{kRunMaxima}, run.count, wanted, range);
    for (int i = threadIdx.x; i < part.count; i += kSelectThreads) out[part.start + i] = run.first + int64_t(selection().chosen[i]);
    if (self == 0) out[wanted] = blocks - 1;
}

// Clusters (row, 0) choose entries, clusters (row, 1) the candidate blocks. They start before the scores are there, but after all that
// came before these.
__global__ void __launch_bounds__(kSelectThreads) select_rows(const Search s, int most_items) {
    release_launch();
    const Cluster cluster = cooperative_groups::this_cluster();
    const int64_t place = blockIdx.x / cluster.num_blocks();
    const uint32_t* const maxima = s.maxima + place * (s.stride / kBlockRows);
    if (blockIdx.y == 0)
        select_entries(s, cluster, s.first + place, s.scores + place * s.stride, maxima, most_items);
    else
        select_blocks(s, cluster, s.first + place, maxima);
    await_launch();  // of rows without scores too: what comes after this launch comes after that of the scores
    __syncwarp();
    arrive_at_cluster();
    await_cluster();  // no block ends while others read its shared memory
}

// ---- host ----

// log2 of a power of two, -1 of what is none.
int shift_of(int64_t x) {
    if (x <= 0 || (x & (x - 1)) != 0) return -1;
    int shift = 0;
    while (int64_t(1) << shift < x) ++shift;
    return shift;
}

int64_t columns_of(const cedar_mqa_logits_topk_args& a) {
    if (a.candidates == nullptr) return a.max_visible;
    return std::min(a.candidate_blocks, (a.max_visible + a.block - 1) / a.block) * a.block;
}

int64_t stride_of(const cedar_mqa_logits_topk_args& a) { return (columns_of(a) + kRun - 1) / kRun * kRun; }

// Rows whose scores the workspace holds at a time.
int64_t rows_together(const cedar_mqa_logits_topk_args& a) {
    const int64_t stride = stride_of(a), most = stride > 0 ? std::min(kMostScores / stride, kMostRows) : kMostRows;
    return most < 1 ? 1 : most < a.rows ? most : a.rows;
}

// Rows that share keys, of a chunk: Together.
bool are_together(const Search& s) { return s.a.candidates == nullptr && s.rows >= 256; }

// Whether a launch scores and chooses.
bool are_few(const Search& s) { return s.a.published == nullptr && !are_together(s) && columns_of(s.a) <= kFewColumns; }

// How blocks of a cluster are placed: large clusters fit more often where they may share multiprocessors.
template <class W>
constexpr cudaClusterSchedulingPolicy kPlaced =
    W::kBlocks == 9 ? cudaClusterSchedulingPolicyLoadBalancing : cudaClusterSchedulingPolicyDefault;

template <int D, class W>
cudaError_t run_few(const Search& s, void* stream) {
    if (W::kBlocks > 8) {
        const cudaError_t error = cudaFuncSetAttribute(search_few<D, W>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    const dim3 grid{unsigned(W::kBlocks), unsigned(s.rows)};
    return launch_placed(kPlaced<W>, search_few<D, W>, grid, W::kThreads, sizeof(FewMemory<D, W>), W::kBlocks, true, stream, s);
}

// Rows that are searched at a time.
template <int D, class W>
int places_of_few() {
    static const int places = places_of(search_few<D, W>, W::kThreads, sizeof(FewMemory<D, W>), W::kBlocks, kPlaced<W>);
    return places;
}

template <int D, class W>
cudaError_t run_scores(const Search& s, int multiprocessors, void* stream) {
    const int64_t groups = (s.rows + W::kRows - 1) / W::kRows, slots = int64_t(multiprocessors) * W::kPerSm;
    const int64_t most = s.stride / (W::kWarps * kRun) + 1;
    int64_t splits = groups * 4 <= slots ? slots / groups : (2 * slots + groups - 1) / groups;
    splits = splits < most ? splits : most;
    return launch(score<D, W>, dim3{unsigned(splits), unsigned(groups)}, W::kThreads, sizeof(ScoreMemory<D, W>), 1, true, stream, s);
}

template <int D>
cudaError_t run_rows(const Search& s, int multiprocessors, void* stream) {
    if (are_few(s)) {  // all of a multiprocessor for a block, while there are as many
        if (s.rows * 16 <= multiprocessors) return run_few<D, FewWay<16, 256, 2>>(s, stream);
        if (s.rows * 8 <= multiprocessors) return run_few<D, FewWay<8, 256, 2>>(s, stream);
        // clusters of five fill multiprocessors with two fifths of a row, those of nine with four ninths; full groups of
        // multiprocessors are left some room, since a launch before may be in the way
        using Fives = FewWay<5, 256, 2>;
        using Nines = FewWay<9, 128, 4>;
        if (s.rows * Fives::kBlocks > multiprocessors) {
            if (s.rows * 16 <= places_of_few<D, Fives>() * 13) return run_few<D, Fives>(s, stream);
            if (s.rows * 16 <= places_of_few<D, Nines>() * 15) return run_few<D, Nines>(s, stream);
        }
        return run_few<D, FewWay<8, 128, 4>>(s, stream);
    }
    if (are_together(s)) return run_scores<D, Together>(s, multiprocessors, stream);
    return run_scores<D, Alone>(s, multiprocessors, stream);
}

cudaError_t run_dims(const Search& s, int multiprocessors, void* stream) {
    if (s.a.dim == 128) return run_rows<128>(s, multiprocessors, stream);
    if (s.a.dim == 64) return run_rows<64>(s, multiprocessors, stream);
    return run_rows<32>(s, multiprocessors, stream);
}

// Blocks of a cluster: no more than make a block's run short, and fewer where all clusters would not run at once.
int cluster_of(const cedar_mqa_logits_topk_args& a, int64_t rows, int multiprocessors) {
    const int64_t items = columns_of(a) / kBlockRows, clusters = rows * (a.published != nullptr ? 2 : 1);
    int cluster = 1;
    while (cluster < kMostBlocks && items > int64_t(kShortRun) * cluster) cluster *= 2;
    while (cluster > 1 && clusters * cluster > multiprocessors && items * 2 / cluster <= kMostRun) cluster /= 2;
    return cluster;
}

// after_scores: the launch before is that of these rows' scores.
cudaError_t run_selection(const Search& s, bool after_scores, int multiprocessors, void* stream) {
    const int cluster = cluster_of(s.a, s.rows, multiprocessors);
    const int most_items = (int(columns_of(s.a) / kBlockRows + 1 + cluster - 1) / cluster + 3) / 4 * 4;
    const size_t shared = sizeof(Selection) + size_t(most_items) * (sizeof(uint32_t) + sizeof(uint16_t));
    // one number for all calls: they are re-entrant, and others may launch in between
    const cudaError_t error = cudaFuncSetAttribute(select_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = unsigned(cluster);
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(s.rows * cluster), s.a.published != nullptr ? 2u : 1u);
    config.blockDim = dim3(kSelectThreads);
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = after_scores ? 2 : 1;
    return cudaLaunchKernelEx(&config, select_rows, s, most_items);
}

}  // namespace index

int64_t mqa_logits_topk_workspace(const cedar_mqa_logits_topk_args& a) {
    const int64_t scores = index::rows_together(a) * index::stride_of(a);
    return CEDAR_COUNTER_BYTES + (scores + scores / kBlockRows) * int64_t(sizeof(uint32_t));
}

int mqa_logits_topk(const cedar_mqa_logits_topk_args& a, void* stream) {
    static const char* const name = "mqa_logits_topk";
    if (a.record != CEDAR_RECORD_MXFP4 || !a.quantise)
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU MXFP4 keys, and queries rounded to MXFP4 (quantise)", name);
    if ((a.dim != 32 && a.dim != 64 && a.dim != 128) || a.heads > index::kMostHeads || a.per_page % kBlockRows != 0)
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU dim 32, 64 or 128, at most %d heads, pages of blocks of 8; not %lld, %lld, %lld", name,
                    index::kMostHeads, (long long)a.dim, (long long)a.heads, (long long)a.per_page);
    if (a.top_k > kMostChosen || (a.published != nullptr && a.published_blocks > kMostChosen) ||
        ((a.candidates != nullptr || a.published != nullptr) && a.block % kBlockRows != 0))
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU at most %d of each kind are chosen, among blocks of a multiple of 8", name,
                    kMostChosen);
    constexpr int64_t kMostColumns = int64_t(index::kMostRun) * kMostBlocks * kBlockRows;
    if (index::columns_of(a) > kMostColumns)
        return fail(CEDAR_UNSUPPORTED, "%s: on a GPU at most %lld entries a row, not %lld", name, (long long)kMostColumns,
                    (long long)index::columns_of(a));
    if (a.workspace_bytes < mqa_logits_topk_workspace(a))
        return fail(CEDAR_WORKSPACE, "%s: workspace has %lld bytes", name, (long long)a.workspace_bytes);
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const int64_t together = index::rows_together(a), stride = index::stride_of(a);
    uint32_t* const scores = reinterpret_cast<uint32_t*>(static_cast<char*>(a.workspace) + CEDAR_COUNTER_BYTES);
    index::Search s{a, scores, scores + together * stride, stride, 0, 0, index::shift_of(a.per_page), 0};
    if (a.candidates != nullptr) s.block_shift = index::shift_of(a.block / kBlockRows);
    for (; s.first < a.rows && error == cudaSuccess; s.first += together) {
        s.rows = int(together < a.rows - s.first ? together : a.rows - s.first);
        const bool scored = a.candidates != nullptr || index::is_scored(a, a.max_visible);
        const bool few = index::are_few(s);
        if (scored || few) error = index::run_dims(s, multiprocessors, stream);
        if (error == cudaSuccess && !few) error = index::run_selection(s, scored, multiprocessors, stream);
    }
    return finish(name, error);
}

}  // namespace cedar::cuda
