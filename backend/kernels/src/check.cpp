// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <cstdio>

namespace cedar {
namespace {

bool is_type(int64_t type) { return type == CEDAR_F32 || type == CEDAR_BF16; }

bool is_weight(int64_t type, const uint8_t* scale) { return is_type(type) || (type == CEDAR_FP8_TILES && scale != nullptr); }

int64_t group_of(int64_t record) {
    switch (record) {
        case CEDAR_RECORD_FP8:
        case CEDAR_RECORD_MXFP4: return 32;
        case CEDAR_RECORD_NVFP4: return 16;
        default: return 1;
    }
}

bool is_record(int64_t record) { return record >= CEDAR_RECORD_F32 && record <= CEDAR_RECORD_MXFP4; }

// E2M1 pairs of planar blocks and a record's groups must come out even.
bool fits(int64_t record, int64_t dim) { return is_record(record) && dim > 0 && dim % group_of(record) == 0; }

bool rotates(int64_t pairs, int64_t dim) { return pairs >= 0 && 2 * pairs <= dim; }

}  // namespace

// The first condition of an operation that does not hold is its error.
#define REQUIRE(condition) \
    if (!(condition)) return fail(CEDAR_INVALID, "%s: must hold: %s", name, #condition)

#define CEDAR_BEGIN(op)                                                                                             \
    int check(const cedar_##op##_args* args) {                                                                      \
        static const char* const name = #op;                                                                        \
        if (args == nullptr) return fail(CEDAR_INVALID, "%s: args is NULL", name);                                  \
        const cedar_##op##_args& a = *args;                                                                         \
        if (a.size != sizeof a)                                                                                     \
            return fail(CEDAR_INVALID, "%s: size is %lld, this library's is %zu", name, (long long)a.size, sizeof a); \
        REQUIRE(a.device == CEDAR_CPU || a.device == CEDAR_CUDA);                                                   \
        REQUIRE(a.rows >= 0);                                                                                       \
        REQUIRE(is_type(a.type));                                                                                   \
        if (a.rows == 0) return CEDAR_OK; // and its tensors have no addresses
#define CEDAR_END     \
    return CEDAR_OK;  \
    }

CEDAR_BEGIN(mega_mhc)
REQUIRE(a.hc > 0 && a.hidden > 0 && a.iterations >= 1);
REQUIRE(a.streams);
REQUIRE(a.output == nullptr || (a.post && a.comb && a.new_streams && a.new_streams != a.streams));
REQUIRE(a.fn == nullptr || (a.scale && a.base && a.new_pre && a.new_post && a.new_comb));
REQUIRE(a.norm_weight == nullptr || (a.pre && a.normed));
CEDAR_END

CEDAR_BEGIN(mega_gate)
REQUIRE(is_type(a.weight_type));
REQUIRE(a.hidden > 0 && a.top_k > 0 && a.top_k <= a.experts);
REQUIRE(a.x && a.weight && a.bias && a.ids && a.weights);
REQUIRE(a.image == nullptr || a.image_bias);
CEDAR_END

CEDAR_BEGIN(moe_fp4)
REQUIRE(is_type(a.weight_type) || (a.weight_type == CEDAR_MXFP4 && a.w13_scale && a.w2_scale));
REQUIRE(a.shared_type == a.weight_type || a.weight_type == CEDAR_MXFP4);
REQUIRE(is_type(a.shared_type) || (a.shared_type == CEDAR_FP8_TILES && a.shared_w13_scale && a.shared_w2_scale));
REQUIRE(a.hidden > 0 && a.inner > 0 && a.experts > 0 && a.top_k > 0);
REQUIRE(a.act_quant == 0 || (a.hidden % 32 == 0 && a.inner % 32 == 0));
REQUIRE(a.x && a.ids && a.weights && a.w13 && a.w2 && a.shared_w13 && a.shared_w2 && a.out);
CEDAR_END

CEDAR_BEGIN(mxfp8_linear)
REQUIRE(is_type(a.out_type) && is_weight(a.weight_type, a.weight_scale));
REQUIRE(a.in_dim > 0 && a.out_dim > 0);
REQUIRE(a.act_quant == 0 || a.in_dim % 32 == 0);
REQUIRE(a.x && a.weight && a.y);
CEDAR_END

CEDAR_BEGIN(wo_a)
REQUIRE(is_weight(a.weight_type, a.weight_scale));
REQUIRE(a.groups > 0 && a.in_dim > 0 && a.rank > 0);
REQUIRE(a.x && a.weight && a.y);
CEDAR_END

CEDAR_BEGIN(window_store)
REQUIRE(fits(a.record, a.dim) && a.record != CEDAR_RECORD_MXFP4);
REQUIRE(rotates(a.pairs, a.dim));
REQUIRE(a.history_rows >= 0 && a.stores >= 0);
REQUIRE(a.kv && a.norm_weight && a.ring && a.table);
REQUIRE(a.pairs == 0 || (a.cos && a.sin));
REQUIRE(a.history_rows == 0 || a.history);
REQUIRE(a.stores == 0 || a.store_to);
REQUIRE(a.store_from || a.stores <= a.rows);
CEDAR_END

CEDAR_BEGIN(compress_store)
REQUIRE(a.ratio == 1 || a.ratio == 2);
REQUIRE(fits(a.record, a.dim) && fits(a.index_record, a.index_dim));
REQUIRE(rotates(a.pairs, a.dim) && rotates(a.pairs, a.index_dim));
REQUIRE(a.groups >= 0 && a.groups <= a.rows && a.opens >= 0 && a.leaves_open >= 0);
REQUIRE(a.projected && a.norm_weight && a.wk && a.index_norm_weight && a.kv_pool && a.index_pool);
REQUIRE(a.groups == 0 || (a.slots && (a.pairs == 0 || (a.cos && a.sin))));
REQUIRE(a.ratio == 1 || a.open);
REQUIRE(a.ratio == 2 || (a.opens == 0 && a.leaves_open == 0));
REQUIRE(a.ratio == 1 || a.groups == 0 || (a.group_rows && a.first));
REQUIRE(a.opens == 0 || a.open_from);
REQUIRE(a.leaves_open == 0 || (a.open_rows && a.open_to));
CEDAR_END

CEDAR_BEGIN(mqa_logits_topk)
REQUIRE(fits(a.record, a.dim));
REQUIRE(rotates(a.pairs, a.dim));
REQUIRE(a.quantise == 0 || a.dim % 32 == 0);
REQUIRE(a.heads > 0 && a.per_page > 0 && a.top_k > 0 && a.width >= 0 && a.max_visible >= 0);
REQUIRE(a.pairs == 0 || (a.cos && a.sin));
REQUIRE(a.query && a.weight && a.keys && a.pages && a.base && a.visible && a.index && a.slots);
REQUIRE(a.candidates == nullptr || (a.candidate_blocks >= 0 && a.block > 0 && a.published == nullptr));
REQUIRE(a.published == nullptr || (a.published_blocks > 0 && a.block > 0));
CEDAR_END

CEDAR_BEGIN(mega_attention)
REQUIRE(fits(a.window_record, a.dim) && a.window_record != CEDAR_RECORD_MXFP4);
REQUIRE(rotates(a.pairs, a.dim));
REQUIRE(a.heads > 0 && a.window_width >= 0 && a.entry_width >= 0);
REQUIRE(a.query && a.sink && a.out);
REQUIRE(a.pairs == 0 || (a.cos && a.sin));
REQUIRE(a.window_width == 0 || (a.window && a.window_index));
REQUIRE(a.entries == nullptr || a.entry_width == 0 || (fits(a.entry_record, a.dim) && a.entry_index));
CEDAR_END

CEDAR_BEGIN(engram_gather)
REQUIRE(a.columns > 0 && a.dim > 0 && a.dim % 32 == 0 && a.table_rows > 0 && a.width % 8 == 0);
REQUIRE(a.table_scale == nullptr ? a.width >= a.dim + a.dim / 32 : a.width == a.dim);
REQUIRE(a.ids && a.table && a.out);
CEDAR_END

CEDAR_BEGIN(engram_gate)
REQUIRE(a.hc > 0 && a.hidden > 0);
REQUIRE(a.streams && a.keys_value && a.qk_weight && a.new_streams);
CEDAR_END

// ---- what only a host may look at: the content of index tensors ----

namespace {

// Numbers in [least, end), least >= 0; negative ones too where they mean that there is nothing.
struct Allowed {
    int64_t least, end;
    bool or_negative = false;

    bool has(int64_t n) const { return n < 0 ? or_negative : n >= least && n < end; }
};

// Sign bits alone and no branch, so that a compiler vectorises it: a small part of what reading even one record costs.
bool all_allowed(const int64_t* numbers, int64_t count, Allowed allowed) {
    uint64_t wrong = 0, negative = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t n = uint64_t(numbers[i]);
        wrong |= ((n - uint64_t(allowed.least)) | (uint64_t(allowed.end) - 1 - n)) & ~n;
        negative |= n;
    }
    return ((allowed.or_negative ? wrong : wrong | negative) >> 63) == 0;
}

// numbers: [count / columns, columns], named from number `first` on.
int check_numbers(const char* name, const int64_t* numbers, int64_t count, Allowed allowed, int64_t columns = 1,
                  int64_t first = 0) {
    if (all_allowed(numbers, count, allowed)) return CEDAR_OK;
    int64_t i = 0;
    while (allowed.has(numbers[i])) ++i;
    char place[48];
    if (columns == 1)
        std::snprintf(place, sizeof place, "%lld", (long long)(first + i));
    else
        std::snprintf(place, sizeof place, "%lld, %lld", (long long)(i / columns), (long long)(i % columns));
    return fail(CEDAR_INVALID, "%s[%s] is %lld; allowed: at least %lld and less than %lld%s", name, place, (long long)numbers[i],
                (long long)allowed.least, (long long)allowed.end, allowed.or_negative ? ", or negative" : "");
}

int64_t parts_of(int64_t n, int64_t size) { return n / size + (n % size != 0); }

}  // namespace

#define CHECK(...) \
    if (const int status = check_numbers(__VA_ARGS__)) return status

int check_cpu(const cedar_moe_fp4_args& a) {
    if (a.weight_type == CEDAR_MXFP4) return fail(CEDAR_UNSUPPORTED, "moe_fp4: packed E2M1 experts are for a GPU");
    for (int64_t i = 0; i < a.rows * a.top_k; ++i)
        if (a.ids[i] < 0 || a.ids[i] >= a.experts)
            return fail(CEDAR_INVALID, "moe_fp4: ids[%lld] is %lld, there are %lld experts", (long long)i, (long long)a.ids[i],
                        (long long)a.experts);
    return CEDAR_OK;
}

int check_cpu(const cedar_engram_gather_args& a) {
    for (int64_t i = 0; i < a.rows * a.columns; ++i)
        if (a.ids[i] >= a.table_rows)
            return fail(CEDAR_INVALID, "engram_gather: ids[%lld] is %lld, the table has %lld rows", (long long)i, (long long)a.ids[i],
                        (long long)a.table_rows);
    return CEDAR_OK;
}

namespace {

// Rows of one sequence, which are neighbours, share their pages: each is looked at once.
int check_pages(const cedar_mqa_logits_topk_args& a) {
    int64_t seen = 0;
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t pages = parts_of(a.visible[row], a.per_page), base = a.base[row];
        if (base < 0 || base > a.page_count - pages)
            return fail(CEDAR_INVALID,
                        "mqa_logits_topk: base[%lld] is %lld and its row sees %lld pages; allowed: 0 to %lld, of %lld pages",
                        (long long)row, (long long)base, (long long)pages, (long long)(a.page_count - pages),
                        (long long)a.page_count);
        if (row > 0 && base != a.base[row - 1]) seen = 0;
        if (pages <= seen) continue;
        CHECK("mqa_logits_topk: pages", a.pages + base + seen, pages - seen, {0, a.key_rows / a.per_page}, 1, base + seen);
        seen = pages;
    }
    return CEDAR_OK;
}

// Ascending, so none twice: a row then cannot select more than it sees.
int check_candidates(const cedar_mqa_logits_topk_args& a) {
    const int64_t end = parts_of(a.max_visible, a.block);
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t* blocks = a.candidates + row * a.candidate_blocks;
        for (int64_t n = 0, least = 0; n < a.candidate_blocks && blocks[n] >= 0; least = blocks[n++] + 1)
            if (blocks[n] < least || blocks[n] >= end)
                return fail(CEDAR_INVALID,
                            "mqa_logits_topk: candidates[%lld, %lld] is %lld; allowed: at least %lld and less than %lld",
                            (long long)row, (long long)n, (long long)blocks[n], (long long)least, (long long)end);
    }
    return CEDAR_OK;
}

}  // namespace

int check_cpu(const cedar_mqa_logits_topk_args& a) {
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t visible = a.visible[row], chosen = visible < a.top_k ? visible : a.top_k;
        if (visible < 0 || visible > a.max_visible || (a.candidates == nullptr && chosen > a.width))
            return fail(CEDAR_INVALID, "mqa_logits_topk: row %lld sees %lld entries; at most %lld, selected into %lld columns",
                        (long long)row, (long long)visible, (long long)a.max_visible, (long long)a.width);
    }
    if (a.candidates != nullptr && a.width < a.top_k && a.width < a.max_visible)
        return fail(CEDAR_INVALID, "mqa_logits_topk: width %lld is less than top_k and than what rows see", (long long)a.width);
    if (const int status = check_pages(a)) return status;
    return a.candidates == nullptr ? int(CEDAR_OK) : check_candidates(a);
}

int check_cpu(const cedar_window_store_args& a) {
    CHECK("window_store: history", a.history, a.history_rows, {0, a.ring_rows});
    if (a.store_from != nullptr) CHECK("window_store: store_from", a.store_from, a.stores, {0, a.rows});
    CHECK("window_store: store_to", a.store_to, a.stores, {1, a.ring_rows});
    return CEDAR_OK;
}

int check_cpu(const cedar_compress_store_args& a) {
    const int64_t pool_rows = a.kv_rows < a.index_rows ? a.kv_rows : a.index_rows;
    CHECK("compress_store: slots", a.slots, a.groups, {1, pool_rows, true});
    if (a.group_rows != nullptr) CHECK("compress_store: group_rows", a.group_rows, a.groups, {0, a.rows});
    if (a.ratio == 1) return CEDAR_OK;
    CHECK("compress_store: first", a.first, a.groups, {0, a.opens + a.rows});
    CHECK("compress_store: open_from", a.open_from, a.opens, {0, a.open_slots});
    CHECK("compress_store: open_rows", a.open_rows, a.leaves_open, {0, a.rows});
    CHECK("compress_store: open_to", a.open_to, a.leaves_open, {0, a.open_slots, true});
    return CEDAR_OK;
}

int check_cpu(const cedar_mega_attention_args& a) {
    CHECK("mega_attention: window_index", a.window_index, a.rows * a.window_width, {0, a.window_rows}, a.window_width);
    if (a.entries != nullptr)
        CHECK("mega_attention: entry_index", a.entry_index, a.rows * a.entry_width, {0, a.entry_rows}, a.entry_width);
    return CEDAR_OK;
}

#define CEDAR_NOTHING_MORE(op) \
    int check_cpu(const cedar_##op##_args&) { return CEDAR_OK; }
CEDAR_NOTHING_MORE(mega_mhc)
CEDAR_NOTHING_MORE(mega_gate)
CEDAR_NOTHING_MORE(mxfp8_linear)
CEDAR_NOTHING_MORE(wo_a)
CEDAR_NOTHING_MORE(engram_gate)

}  // namespace cedar
