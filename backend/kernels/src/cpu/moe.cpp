// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"
#include "gemm.h"
#include "order.h"
#include "records.h"
#include "workspace.h"

namespace cedar::CEDAR_ISA {
namespace {

struct GatePlan {
    explicit GatePlan(const cedar_mega_gate_args& a) : workspace(a.workspace) {
        x = a.type == CEDAR_F32 ? nullptr : workspace.take<float>(a.rows * a.hidden);
        scores = workspace.take<float>(a.rows * a.experts);
        keys = workspace.take<uint32_t>(a.rows * a.experts);
    }
    Workspace workspace;
    float *x, *scores;
    uint32_t* keys;
};

// a = sqrt(softplus(logit)), as torch computes it: linear above 20
float gate_score(float logit) {
    const float softplus = logit > 20.0f ? logit : __builtin_log1pf(exponential(logit));
    return square_root(softplus);
}

void choose(const cedar_mega_gate_args& a, int64_t row, float* scores, uint32_t* keys) {
    const bool in_image = a.image != nullptr && a.image[row] != 0;
    const float* bias = in_image ? a.image_bias : a.bias;
    for (int64_t e = 0; e < a.experts; ++e) {
        scores[e] = gate_score(scores[e]);
        keys[e] = ordered(scores[e] + bias[e]);
    }
    int64_t* ids = a.ids + row * a.top_k;
    float* weights = a.weights + row * a.top_k;
    float total = 0.0f;
    for (int64_t k = 0; k < a.top_k; ++k) {
        int64_t best = -1;
        for (int64_t e = 0; e < a.experts; ++e) {
            bool taken = false;
            for (int64_t earlier = 0; earlier < k; ++earlier) taken |= ids[earlier] == e;
            if (!taken && (best < 0 || keys[e] > keys[best])) best = e;
        }
        ids[k] = best;
        weights[k] = scores[best];
        total += weights[k];
    }
    for (int64_t k = 0; k < a.top_k; ++k) weights[k] = weights[k] / (total + 1e-20f) * float(a.scaling);
}

}  // namespace

int64_t mega_gate_workspace(const cedar_mega_gate_args& a) { return GatePlan(a).workspace.used(); }

void mega_gate(const cedar_mega_gate_args& a) {
    const GatePlan plan(a);
    if (plan.x != nullptr) read_values(a.x, a.type, 0, a.rows * a.hidden, plan.x);
    const float* x = plan.x != nullptr ? plan.x : static_cast<const float*>(a.x);
    with_weight(a.weight_type, a.weight, nullptr, a.hidden, [&](const auto& weight) {
        parallel_gemm(a.threads, a.rows, a.experts, a.hidden, [&](int64_t r) { return x + r * a.hidden; }, weight, 0,
                      [&](int64_t r, int64_t e, float value) { plan.scores[r * a.experts + e] = value; });
    });
    parallel(a.rows, a.threads, a.rows * a.experts * a.top_k,
             [&](int64_t r, int64_t) { choose(a, r, plan.scores + r * a.experts, plan.keys + r * a.experts); });
}

namespace {

// Pairs are (row, choice). Routed pairs come first, sorted by expert; then one pair a row for the shared expert.
struct MoePlan {
    explicit MoePlan(const cedar_moe_fp4_args& a) : workspace(a.workspace), routed(a.rows * a.top_k), pairs(routed + a.rows) {
        const bool copied = a.type != CEDAR_F32 || a.act_quant;
        x = copied ? workspace.take<float>(a.rows * a.hidden) : nullptr;
        hidden = workspace.take<float>(pairs * 2 * a.inner);
        inner = workspace.take<float>(pairs * a.inner);
        outputs = workspace.take<float>(pairs * a.hidden);
        starts = workspace.take<int64_t>(a.experts + 2);
        order = workspace.take<int64_t>(pairs);
    }
    Workspace workspace;
    int64_t routed, pairs;
    float *x, *hidden, *inner, *outputs;
    int64_t *starts, *order;  // starts: of each expert's run in order, the shared expert last
};

// A stable counting sort.
void sort_by_expert(const cedar_moe_fp4_args& a, const MoePlan& plan) {
    for (int64_t e = 0; e <= a.experts + 1; ++e) plan.starts[e] = 0;
    for (int64_t p = 0; p < plan.routed; ++p) ++plan.starts[a.ids[p] + 1];
    for (int64_t e = 0; e < a.experts; ++e) plan.starts[e + 1] += plan.starts[e];
    for (int64_t p = 0; p < plan.routed; ++p) plan.order[plan.starts[a.ids[p]]++] = p;
    for (int64_t e = a.experts; e > 0; --e) plan.starts[e] = plan.starts[e - 1];
    plan.starts[0] = 0;
    plan.starts[a.experts + 1] = plan.pairs;
    for (int64_t p = plan.routed; p < plan.pairs; ++p) plan.order[p] = p;
}

// out[place, :] = row(pair) times the pair's expert, for all pairs; weight(e) is expert e's matrix, out_dim x in_dim.
template <class Row, class Weight>
void grouped(const cedar_moe_fp4_args& a, const MoePlan& plan, int64_t out_dim, int64_t in_dim, Row&& row, Weight&& weight, float* out) {
    const int64_t across = tiles_of(out_dim, kTileColumns);
    parallel((a.experts + 1) * across, a.threads, plan.pairs * out_dim * in_dim, [&](int64_t task, int64_t) {
        const int64_t e = task / across, c = task % across * kTileColumns;
        const int64_t first = plan.starts[e], count = plan.starts[e + 1] - first, columns = smaller(kTileColumns, out_dim - c);
        if (count == 0) return;
        const auto at = [&](int64_t i) { return row(plan.order[first + i]); };
        const auto put = [&](int64_t i, int64_t n, float value) { out[plan.order[first + i] * out_dim + c + n] = value; };
        with_weight(a.weight_type, weight(e), nullptr, in_dim, [&](const auto& matrix) { gemm(count, columns, in_dim, at, matrix, c, put); });
    });
}

const void* expert(const void* routed, const void* shared, int64_t e, const cedar_moe_fp4_args& a, int64_t elements) {
    if (e == a.experts) return shared;
    return static_cast<const char*>(routed) + e * elements * width_of(a.weight_type);
}

}  // namespace

int64_t moe_fp4_workspace(const cedar_moe_fp4_args& a) { return MoePlan(a).workspace.used(); }

void moe_fp4(const cedar_moe_fp4_args& a) {
    const MoePlan plan(a);
    sort_by_expert(a, plan);
    if (plan.x != nullptr)
        parallel(a.rows, a.threads, a.rows * a.hidden, [&](int64_t r, int64_t) {
            read_values(a.x, a.type, r * a.hidden, a.hidden, plan.x + r * a.hidden);
            if (a.act_quant) quantise_fp8(plan.x + r * a.hidden, a.type, a.hidden);
        });
    const float* x = plan.x != nullptr ? plan.x : static_cast<const float*>(a.x);
    const auto row_of = [&](int64_t pair) { return pair < plan.routed ? pair / a.top_k : pair - plan.routed; };
    grouped(a, plan, 2 * a.inner, a.hidden, [&](int64_t pair) { return x + row_of(pair) * a.hidden; },
            [&](int64_t e) { return expert(a.w13, a.shared_w13, e, a, 2 * a.inner * a.hidden); }, plan.hidden);
    parallel(plan.pairs, a.threads, plan.pairs * a.inner * 32, [&](int64_t pair, int64_t) {
        float *hidden = plan.hidden + pair * 2 * a.inner, *inner = plan.inner + pair * a.inner;
        const float weight = pair < plan.routed ? a.weights[pair] : 1.0f, limit = float(a.limit);
        round_to(a.type, 2 * a.inner, hidden);
        for (int64_t i = 0; i < a.inner; ++i) inner[i] = swiglu(hidden[i], hidden[a.inner + i], limit) * weight;
        round_to(a.type, a.inner, inner);
        if (a.act_quant) quantise_fp8(inner, a.type, a.inner);
    });
    grouped(a, plan, a.hidden, a.inner, [&](int64_t pair) { return plan.inner + pair * a.inner; },
            [&](int64_t e) { return expert(a.w2, a.shared_w2, e, a, a.hidden * a.inner); }, plan.outputs);
    parallel(a.rows, a.threads, plan.pairs * a.hidden, [&](int64_t r, int64_t) {
        float* total = plan.outputs + r * a.top_k * a.hidden;
        float* shared = plan.outputs + (plan.routed + r) * a.hidden;
        round_to(a.type, a.top_k * a.hidden, total);
        round_to(a.type, a.hidden, shared);
        for (int64_t k = 1; k < a.top_k; ++k)
            for (int64_t d = 0; d < a.hidden; ++d) total[d] += total[k * a.hidden + d];
        for (int64_t d = 0; d < a.hidden; ++d) total[d] += shared[d];
        write_values(a.out, a.type, r * a.hidden, a.hidden, total);
    });
}

}  // namespace cedar::CEDAR_ISA
