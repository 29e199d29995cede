// SPDX-License-Identifier: Apache-2.0
// Where a row's key blocks are in the pool.
#pragma once

#include "index_query.cuh"

namespace cedar::cuda::index {

// A row's key blocks that a block of threads looks up at a time.
struct Listed {
    int64_t row, base, most;  // most: entries
    int first, count;         // of the row's key blocks
};

// Where a thread's blocks of a list are, from its number `from` on: block 0, whose scores nobody uses, where there is none. It looks up
// several at once, since each look-up waits for memory, with candidates twice.
template <class W, int Batch, int Threads = W::kThreads>
struct Lookup {
    static constexpr int kBatch = Batch, kThreads = Threads;
    uint32_t block[kBatch], page[kBatch], inside[kBatch], live[kBatch];  // block: of the sequence

    __device__ Lookup(const Search& s, const Listed& list, int from) {
        const cedar_mqa_logits_topk_args& a = s.a;
        const uint32_t per_page = uint32_t(a.per_page), most = uint32_t(list.most);
        const uint32_t per_block = uint32_t(a.block) / kBlockRows, candidates = candidates_of(s, most);
        uint32_t number[kBatch];  // of the block's candidate, then of its page; the block is first the row's, then the sequence's
        uint64_t candidate[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            block[i] = uint32_t(list.first + min(from + i * kThreads, list.count - 1));
            number[i] = quotient(block[i], per_block, s.block_shift);
            if (a.candidates != nullptr) candidate[i] = uint64_t(__ldcg(a.candidates + list.row * a.candidate_blocks + number[i]));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (a.candidates != nullptr) {
                const uint32_t part = block[i] - number[i] * per_block;
                block[i] = candidate[i] < candidates ? uint32_t(candidate[i]) * per_block + part : kEvery / kBlockRows;
            }
            const uint32_t entry = block[i] * kBlockRows;
            live[i] = from + i * kThreads >= list.count || entry >= most ? 0 : min(most - entry, uint32_t(kBlockRows));
            number[i] = quotient(entry, per_page, s.page_shift);
            inside[i] = (entry - number[i] * per_page) / kBlockRows;
            page[i] = 0;
            if (live[i] > 0) page[i] = uint32_t(__ldcg(a.pages + list.base + number[i]));
        }
    }

    template <int D>
    __device__ void store(const Search& s, const Listed& list, int from, ScoreMemory<D, W>& memory) const {
        const int padded = (list.count + W::kStep - 1) / W::kStep * W::kStep;
        const uint32_t per_page = uint32_t(s.a.per_page) / kBlockRows;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = from + i * kThreads;
            if (at >= padded) break;
            memory.places[at] = live[i] == 0 ? 0u : page[i] * per_page + inside[i];
            memory.numbers[at] = block[i];
            memory.live[at] = uint8_t(live[i]);
        }
    }
};

constexpr int kFirstBatch = 2;

// All of a list but what threads look up first.
template <int D, class W>
__device__ void look_up_rest(const Search& s, const Listed& list, ScoreMemory<D, W>& memory) {
    using Rest = Lookup<W, 4>;
    static_assert(kFirstBatch * W::kThreads % W::kStep == 0, "a list that ends there has no more to pad");
#pragma unroll 1
    for (int first = kFirstBatch * W::kThreads; first < list.count; first += Rest::kBatch * W::kThreads)
        Rest(s, list, first + int(threadIdx.x)).store(s, list, first + int(threadIdx.x), memory);
}

// All of a list by the block's last threads.
template <int Threads, int D, class W>
__device__ void look_up(const Search& s, const Listed& list, ScoreMemory<D, W>& memory) {
    static_assert(kFirstBatch * Threads % W::kStep == 0, "a list that ends there has no more to pad");
    const int self = int(threadIdx.x) - (W::kThreads - Threads);
    if (s.a.candidates != nullptr) {  // of the row's pages, which only candidates tell apart, each block asks for some while these come
        const int64_t page = (int64_t(self) * W::kShares + blockIdx.x) * (128 / int(sizeof(int64_t)));
        if (page * s.a.per_page < list.most) prefetch_line(s.a.pages + list.base + page);
    }
#pragma unroll 1
    for (int first = 0; first < list.count; first += kFirstBatch * Threads)
        Lookup<W, kFirstBatch, Threads>(s, list, first + self).store(s, list, first + self, memory);
}

}  // namespace cedar::cuda::index
