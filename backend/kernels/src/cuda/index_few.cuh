// SPDX-License-Identifier: Apache-2.0
// A search among few entries by a cluster of blocks: each scores its share of the row's entries into its shared memory, and they choose
// together, so that no launch and no memory of the device stands between a score and what is chosen.
#pragma once

#include "index_few_choice.cuh"

namespace cedar::cuda::index {

// Cluster (0, row) searches for a row.
template <int D, class W>
__global__ void __launch_bounds__(W::kThreads, W::kPerSm) search_few(const Search s) {
    constexpr int T = W::kThreads;
    extern __shared__ __align__(1024) unsigned char few_memory[];
    FewMemory<D, W>& memory = *reinterpret_cast<FewMemory<D, W>*>(few_memory);
    const cedar_mqa_logits_topk_args& a = s.a;
    const FewSearch<D, W> few{memory, int(blockIdx.x)};
    const int64_t row = s.first + blockIdx.y, width = a.width;
    const int self = int(blockIdx.x * T + threadIdx.x), all = int(gridDim.x) * T, wanted = int(a.top_k);
    release_launch();
    prefetch_row(s, row, T);
    few.start();
    await_launch();
    const Sight sight(s, row);
    const QueryPart<D, W> part(s, row);
    if (a.candidates == nullptr && sight.visible <= wanted) {
        __syncwarp();
        await_cluster();
        for (int i = self; i < width; i += all) write_entry(s, row, sight.base, i, i < sight.visible ? i : -1);
        return;
    }
    uint32_t highest = 0, second = 0;
    const Share share = score_rows(s, row, 1, sight, part, memory.score, [&](int, int, int here, bool is_entry, float score) {
        const uint32_t bits = is_entry ? ordered_bits(score) : 0;
        const int lane = int(threadIdx.x) % kWarp;
        memory.keys[(here + lane % 4) * kBlockRows + lane / 4] = bits;
        second = max(second, min(highest, bits));
        highest = max(highest, bits);
    });
    __syncwarp();
    const int count = (share.end - share.begin) * kBlockRows;
    const Range range = few.range_of(highest, second, wanted);
    const auto place = [&](int i, int item) {
        const int block = item / kBlockRows, inside = item % kBlockRows;
        a.index[row * width + i] = int64_t(memory.score.numbers[block]) * kBlockRows + inside;
        a.slots[row * width + i] = int64_t(memory.score.places[block]) * kBlockRows + inside;
    };
    uint32_t total = 0;
    if (wanted > 0) {
        if (few.exchange_lists(count, range.least)) {
            total = few.choose_listed(uint32_t(wanted), range, place);
        } else {
            __syncwarp();
            publish_to_cluster();  // nobody's lists land on counts
            await_cluster();
            const Choice choice = few.choose(count, uint32_t(wanted), range);
            few.gather(count, choice, place);
            total = choice.total;
        }
    }
    for (int i = int(total) + self; i < width; i += all) write_entry(s, row, 0, i, -1);
}

}  // namespace cedar::cuda::index
