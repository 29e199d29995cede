// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"
#include "gemm.h"
#include "workspace.h"

namespace cedar::CEDAR_ISA {
namespace {

struct Plan {
    explicit Plan(const cedar_mega_mhc_args& a) : workspace(a.workspace) {
        const int64_t threads = larger(a.threads, int64_t(1));
        streams = a.type == CEDAR_F32 ? nullptr : workspace.take<float>(a.rows * a.hc * a.hidden);
        scratch_size = (a.type == CEDAR_F32 ? 1 : 1 + a.hc) * a.hidden;
        scratch = workspace.take<float>(threads * scratch_size);
        mixed = a.fn == nullptr ? nullptr : workspace.take<float>(a.rows * (2 + a.hc) * a.hc);
        lanes = a.fn == nullptr ? nullptr : workspace.take<float>(threads * a.hc * a.hc * kLanes);
    }
    Workspace workspace;
    float *streams, *scratch, *mixed, *lanes;
    int64_t scratch_size;
};

// stream j <- post_j output + sum_i comb_ij stream i, rounded to the streams' type; S and `to` are [hc, hidden].
void expand_row(const cedar_mega_mhc_args& a, int64_t row, const float* output, const float* from, float* to) {
    const float *post = a.post + row * a.hc, *comb = a.comb + row * a.hc * a.hc;
    for (int64_t j = 0; j < a.hc; ++j) {
        float* out = to + j * a.hidden;
        const float p = post[j];
        for (int64_t d = 0; d < a.hidden; ++d) out[d] = p * output[d];
        for (int64_t i = 0; i < a.hc; ++i) {
            const float c = comb[i * a.hc + j], *stream = from + i * a.hidden;
            for (int64_t d = 0; d < a.hidden; ++d) out[d] = fused(c, stream[d], out[d]);
        }
        round_to(a.type, a.hidden, out);
    }
}

void collapse_row(const cedar_mega_mhc_args& a, int64_t row, const float* streams, float* out) {
    const float* pre = a.pre + row * a.hc;
    for (int64_t d = 0; d < a.hidden; ++d) out[d] = pre[0] * streams[d];
    for (int64_t i = 1; i < a.hc; ++i) {
        const float p = pre[i], *stream = streams + i * a.hidden;
        for (int64_t d = 0; d < a.hidden; ++d) out[d] = fused(p, stream[d], out[d]);
    }
    round_to(a.type, a.hidden, out);
}

// Sixteen matrices at a time, one a lane: element (i, j) of all of them is one vector at m[(i hc + j) lanes].
void sinkhorn(float* m, int64_t hc, float eps, int64_t iterations) {
    const auto at = [&](int64_t i, int64_t j) { return m + (i * hc + j) * kLanes; };
    for (int64_t i = 0; i < hc; ++i) {
        float most[kLanes], total[kLanes];
        for (int l = 0; l < kLanes; ++l) most[l] = at(i, 0)[l];
        for (int64_t j = 1; j < hc; ++j)
            for (int l = 0; l < kLanes; ++l) most[l] = larger(most[l], at(i, j)[l]);
        for (int l = 0; l < kLanes; ++l) total[l] = 0.0f;
        for (int64_t j = 0; j < hc; ++j)
            for (int l = 0; l < kLanes; ++l) total[l] += at(i, j)[l] = exponential(at(i, j)[l] - most[l]);
        for (int64_t j = 0; j < hc; ++j)
            for (int l = 0; l < kLanes; ++l) at(i, j)[l] = at(i, j)[l] / total[l] + eps;
    }
    const auto normalise = [&](int64_t from, int64_t step) {
        float total[kLanes];
        for (int l = 0; l < kLanes; ++l) total[l] = eps;
        for (int64_t n = 0; n < hc; ++n)
            for (int l = 0; l < kLanes; ++l) total[l] += m[(from + n * step) * kLanes + l];
        for (int l = 0; l < kLanes; ++l) total[l] = 1.0f / total[l];
        for (int64_t n = 0; n < hc; ++n)
            for (int l = 0; l < kLanes; ++l) m[(from + n * step) * kLanes + l] *= total[l];
    };
    for (int64_t n = 0; n < iterations; ++n) {
        if (n > 0)
            for (int64_t i = 0; i < hc; ++i) normalise(i * hc, 1);
        for (int64_t j = 0; j < hc; ++j) normalise(j, hc);
    }
}

// The gates of a row and its comb logits, from the products with fn and the statistic of its streams.
void gates_row(const cedar_mega_mhc_args& a, int64_t row, const float* streams, float* mixed) {
    const int64_t outputs = (2 + a.hc) * a.hc, width = a.hc * a.hidden;
    const float factor = inverse_sqrt(sum_of_squares(streams, width) / float(width) + float(a.mix_eps));
    for (int64_t n = 0; n < outputs; ++n) mixed[n] = fused(mixed[n] * factor, a.scale[n], a.base[n]);
    for (int64_t i = 0; i < a.hc; ++i) {
        a.new_pre[row * a.hc + i] = sigmoid(mixed[i]) + float(a.hc_eps);
        a.new_post[row * a.hc + i] = sigmoid(mixed[a.hc + i]) * 2.0f;
    }
}

void combs(const cedar_mega_mhc_args& a, const float* mixed, int64_t first, int64_t count, float* lanes) {
    const int64_t cells = a.hc * a.hc, outputs = (2 + a.hc) * a.hc;
    for (int64_t cell = 0; cell < cells; ++cell)
        for (int l = 0; l < kLanes; ++l)
            lanes[cell * kLanes + l] = l < count ? mixed[(first + l) * outputs + 2 * a.hc + cell] : 0.0f;
    sinkhorn(lanes, a.hc, float(a.hc_eps), a.iterations);
    for (int64_t l = 0; l < count; ++l)
        for (int64_t cell = 0; cell < cells; ++cell) a.new_comb[(first + l) * cells + cell] = lanes[cell * kLanes + l];
}

}  // namespace

int64_t mega_mhc_workspace(const cedar_mega_mhc_args& a) { return Plan(a).workspace.used(); }

void mega_mhc(const cedar_mega_mhc_args& a) {
    const Plan plan(a);
    const int64_t width = a.hc * a.hidden, work = a.rows * width, outputs = (2 + a.hc) * a.hc;
    const bool expands = a.output != nullptr;
    // The new streams of a row as floats: themselves, or a copy in the workspace.
    const auto streams = [&](int64_t row) -> float* {
        if (plan.streams != nullptr) return plan.streams + row * width;
        return static_cast<float*>(expands ? a.new_streams : const_cast<void*>(a.streams)) + row * width;
    };
    parallel(a.rows, a.threads, work * (a.hc + 2), [&](int64_t row, int64_t worker) {
        float* scratch = plan.scratch + worker * plan.scratch_size;
        if (expands) {
            const float* output = floats_of(a.output, a.type, row * a.hidden, a.hidden, scratch);
            const float* from = floats_of(a.streams, a.type, row * width, width, scratch + a.hidden);
            expand_row(a, row, output, from, streams(row));
            if (a.type != CEDAR_F32) write_values(a.new_streams, a.type, row * width, width, streams(row));
        } else if (a.type != CEDAR_F32) {
            read_values(a.streams, a.type, row * width, width, streams(row));
        }
        if (a.norm_weight == nullptr) return;
        collapse_row(a, row, streams(row), scratch);
        rms_norm(scratch, a.norm_weight, float(a.norm_eps), a.type, a.hidden, scratch);
        write_values(a.normed, a.type, row * a.hidden, a.hidden, scratch);
    });
    if (a.fn == nullptr) return;
    parallel_gemm(a.threads, a.rows, outputs, width, streams, DenseWeight<float>{a.fn, width}, 0,
                  [&](int64_t r, int64_t n, float value) { plan.mixed[r * outputs + n] = value; });
    parallel(tiles_of(a.rows, kLanes), a.threads, work, [&](int64_t tile, int64_t worker) {
        const int64_t first = tile * kLanes, count = smaller(int64_t(kLanes), a.rows - first);
        for (int64_t r = first; r < first + count; ++r) gates_row(a, r, streams(r), plan.mixed + r * outputs);
        combs(a, plan.mixed, first, count, plan.lanes + worker * a.hc * a.hc * kLanes);
    });
}

}  // namespace cedar::CEDAR_ISA
