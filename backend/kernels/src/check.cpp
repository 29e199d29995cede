// SPDX-License-Identifier: Apache-2.0
#include "check.h"

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
REQUIRE(a.columns > 0 && a.dim > 0 && a.dim % 32 == 0 && a.table_rows > 0);
REQUIRE(a.ids && a.table && a.table_scale && a.out);
CEDAR_END

CEDAR_BEGIN(engram_gate)
REQUIRE(a.hc > 0 && a.hidden > 0);
REQUIRE(a.streams && a.keys_value && a.qk_weight && a.new_streams);
CEDAR_END

// ---- what only a host may look at: the content of index tensors ----

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

int check_cpu(const cedar_mqa_logits_topk_args& a) {
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t visible = a.visible[row], chosen = visible < a.top_k ? visible : a.top_k;
        if (visible < 0 || visible > a.max_visible || (a.candidates == nullptr && chosen > a.width))
            return fail(CEDAR_INVALID, "mqa_logits_topk: row %lld sees %lld entries; at most %lld, selected into %lld columns",
                        (long long)row, (long long)visible, (long long)a.max_visible, (long long)a.width);
    }
    if (a.candidates != nullptr && a.width < a.top_k && a.width < a.max_visible)
        return fail(CEDAR_INVALID, "mqa_logits_topk: width %lld is less than top_k and than what rows see", (long long)a.width);
    return CEDAR_OK;
}

#define CEDAR_NOTHING_MORE(op) \
    int check_cpu(const cedar_##op##_args&) { return CEDAR_OK; }
CEDAR_NOTHING_MORE(mega_mhc)
CEDAR_NOTHING_MORE(mega_gate)
CEDAR_NOTHING_MORE(mxfp8_linear)
CEDAR_NOTHING_MORE(wo_a)
CEDAR_NOTHING_MORE(window_store)
CEDAR_NOTHING_MORE(compress_store)
CEDAR_NOTHING_MORE(mega_attention)
CEDAR_NOTHING_MORE(engram_gate)

}  // namespace cedar
