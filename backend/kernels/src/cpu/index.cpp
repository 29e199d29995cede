// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"
#include "gemm.h"
#include "order.h"
#include "records.h"
#include "workspace.h"

namespace cedar::CEDAR_ISA {
namespace {

constexpr int64_t kGroupRows = 8, kKeyBlock = 64;

struct Plan {
    explicit Plan(const cedar_mqa_logits_topk_args& a) : workspace(a.workspace) {
        const int64_t threads = larger(smaller(a.threads, a.rows), int64_t(1));  // no more of them than groups of rows
        const bool sparse = a.candidates != nullptr;
        together = sparse ? 1 : smaller(kGroupRows, a.rows);
        most_keys = sparse ? a.candidate_blocks * a.block : a.max_visible;
        query_size = together * a.heads * a.dim;
        groups = workspace.take<int64_t>(a.rows + 1);
        query = workspace.take<float>(threads * query_size);
        weight = workspace.take<float>(threads * together * a.heads);
        keys = workspace.take<float>(threads * kKeyBlock * a.dim);
        scores = workspace.take<float>(threads * together * most_keys);
        best = workspace.take<float>(threads * tiles_of(most_keys, larger(a.block, int64_t(1))));
        positions = workspace.take<int64_t>(threads * (sparse ? most_keys : 0));
    }
    Workspace workspace;
    int64_t together, most_keys, query_size;
    int64_t *groups, *positions;
    float *query, *weight, *keys, *scores, *best;
};

int64_t pool_row(const cedar_mqa_logits_topk_args& a, int64_t row, int64_t entry) {
    return a.pages[a.base[row] + entry / a.per_page] * a.per_page + entry % a.per_page;
}

// Runs of at most `together` rows of one sequence, which decode their keys together. Returns their number.
int64_t make_groups(const cedar_mqa_logits_topk_args& a, const Plan& plan) {
    int64_t count = 0;
    for (int64_t row = 0; row < a.rows; ++row)
        if (count == 0 || a.base[row] != a.base[row - 1] || row - plan.groups[count - 1] == plan.together) plan.groups[count++] = row;
    plan.groups[count] = a.rows;
    return count;
}

bool is_scored(const cedar_mqa_logits_topk_args& a, int64_t visible) {
    return visible > a.top_k || (a.published != nullptr && tiles_of(visible, a.block) > a.published_blocks);
}

void prepare_query(const cedar_mqa_logits_topk_args& a, int64_t row, float* query, float* weight) {
    read_values(a.query, a.type, row * a.heads * a.dim, a.heads * a.dim, query);
    for (int64_t h = 0; h < a.heads; ++h) {
        rotate(query + h * a.dim, a.cos + row * a.pairs, a.sin + row * a.pairs, 1.0f, a.type, a.dim, a.pairs);
        if (a.quantise) quantise_mxfp4(query + h * a.dim, a.type, a.dim);
    }
    read_values(a.weight, a.type, row * a.heads, a.heads, weight);
    for (int64_t h = 0; h < a.heads; ++h) weight[h] *= float(a.weight_scale);
}

// scores[n] = sum_h weight_h relu(query_h . keys_n), h ascending.
void score(const cedar_mqa_logits_topk_args& a, const float* query, const float* weight, const float* keys, int64_t count, float* scores) {
    for (int64_t n = 0; n < count; ++n) scores[n] = 0.0f;
    gemm(a.heads, count, a.dim, [&](int64_t h) { return query + h * a.dim; }, DenseWeight<float>{keys, a.dim}, 0,
         [&](int64_t h, int64_t n, float value) { scores[n] = fused(weight[h], value < 0.0f ? 0.0f : value, scores[n]); });
}

// The selection of a row from n scores of ascending positions (positions NULL: 0, 1, …).
void write_selection(const cedar_mqa_logits_topk_args& a, int64_t row, const float* scores, int64_t n, const int64_t* positions) {
    int64_t *index = a.index + row * a.width, *slots = a.slots + row * a.width;
    const int64_t chosen = smaller(a.top_k, n);
    top_k_ascending(scores, n, chosen, index);
    for (int64_t i = 0; i < a.width; ++i) {
        index[i] = i >= chosen ? -1 : positions == nullptr ? index[i] : positions[index[i]];
        slots[i] = i >= chosen ? 0 : pool_row(a, row, index[i]);
    }
}

// The blocks with the best maxima; the newest, which is last, always.
void write_published(const cedar_mqa_logits_topk_args& a, int64_t row, const float* scores, int64_t visible, float* best) {
    const int64_t blocks = tiles_of(visible, a.block), chosen = smaller(a.published_blocks, blocks);
    int64_t* out = a.published + row * a.published_blocks;
    if (chosen < blocks) {
        for (int64_t b = 0; b + 1 < blocks; ++b) best[b] = maximum(scores + b * a.block, a.block);
        best[blocks - 1] = from_bits(0x7f800000);
    }
    top_k_ascending(best, blocks, chosen, out);
    for (int64_t i = chosen; i < a.published_blocks; ++i) out[i] = -1;
}

void search_all(const cedar_mqa_logits_topk_args& a, const Plan& plan, int64_t first, int64_t rows, int64_t worker) {
    float* query = plan.query + worker * plan.query_size;
    float* weight = plan.weight + worker * plan.together * a.heads;
    float* keys = plan.keys + worker * kKeyBlock * a.dim;
    float* scores = plan.scores + worker * plan.together * plan.most_keys;
    float* best = plan.best + worker * tiles_of(plan.most_keys, larger(a.block, int64_t(1)));
    int64_t most = 0;
    for (int64_t r = 0; r < rows; ++r) {
        if (!is_scored(a, a.visible[first + r])) continue;
        prepare_query(a, first + r, query + r * a.heads * a.dim, weight + r * a.heads);
        most = larger(most, a.visible[first + r]);
    }
    for (int64_t from = 0; from < most; from += kKeyBlock) {
        const int64_t decoded = smaller(kKeyBlock, most - from);
        for (int64_t n = 0; n < decoded; ++n) decode_record(a.record, a.keys, pool_row(a, first, from + n), a.dim, keys + n * a.dim);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t visible = a.visible[first + r];
            if (is_scored(a, visible) && visible > from)
                score(a, query + r * a.heads * a.dim, weight + r * a.heads, keys, smaller(decoded, visible - from),
                      scores + r * plan.most_keys + from);
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        write_selection(a, first + r, scores + r * plan.most_keys, a.visible[first + r], nullptr);
        if (a.published != nullptr) write_published(a, first + r, scores + r * plan.most_keys, a.visible[first + r], best);
    }
}

void search_candidates(const cedar_mqa_logits_topk_args& a, const Plan& plan, int64_t row, int64_t worker) {
    float* query = plan.query + worker * plan.query_size;
    float* weight = plan.weight + worker * a.heads;
    float* keys = plan.keys + worker * kKeyBlock * a.dim;
    float* scores = plan.scores + worker * plan.most_keys;
    int64_t* positions = plan.positions + worker * plan.most_keys;
    const int64_t* blocks = a.candidates + row * a.candidate_blocks;
    int64_t count = 0;
    for (int64_t b = 0; b < a.candidate_blocks && blocks[b] >= 0; ++b)
        for (int64_t j = blocks[b] * a.block; j < smaller((blocks[b] + 1) * a.block, a.visible[row]); ++j) positions[count++] = j;
    if (count > a.top_k) {
        prepare_query(a, row, query, weight);
        for (int64_t from = 0; from < count; from += kKeyBlock) {
            const int64_t decoded = smaller(kKeyBlock, count - from);
            for (int64_t n = 0; n < decoded; ++n)
                decode_record(a.record, a.keys, pool_row(a, row, positions[from + n]), a.dim, keys + n * a.dim);
            score(a, query, weight, keys, decoded, scores + from);
        }
    }
    write_selection(a, row, scores, count, positions);
}

}  // namespace

int64_t mqa_logits_topk_workspace(const cedar_mqa_logits_topk_args& a) { return Plan(a).workspace.used(); }

void mqa_logits_topk(const cedar_mqa_logits_topk_args& a) {
    const Plan plan(a);
    const int64_t groups = make_groups(a, plan);
    parallel(groups, a.threads, a.rows * a.heads * plan.most_keys * a.dim, [&](int64_t group, int64_t worker) {
        const int64_t first = plan.groups[group];
        if (a.candidates != nullptr)
            search_candidates(a, plan, first, worker);
        else
            search_all(a, plan, first, plan.groups[group + 1] - first, worker);
    });
}

}  // namespace cedar::CEDAR_ISA
