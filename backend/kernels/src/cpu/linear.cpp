// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"
#include "gemm.h"
#include "records.h"
#include "workspace.h"

namespace cedar::CEDAR_ISA {
namespace {

// Rows of a tensor as floats, in place where they are floats already.
const float* float_rows(const void* data, int64_t type, int64_t rows, int64_t dim, bool quantise, int64_t threads, float* scratch) {
    if (scratch == nullptr) return static_cast<const float*>(data);
    parallel(rows, threads, rows * dim, [&](int64_t row, int64_t) {
        read_values(data, type, row * dim, dim, scratch + row * dim);
        if (quantise) quantise_fp8(scratch + row * dim, type, dim);
    });
    return scratch;
}

struct LinearPlan {
    explicit LinearPlan(const cedar_mxfp8_linear_args& a) : workspace(a.workspace) {
        const bool copied = a.type != CEDAR_F32 || a.act_quant;
        x = copied ? workspace.take<float>(a.rows * a.in_dim) : nullptr;
        row = a.norm_weight == nullptr ? nullptr : workspace.take<float>(larger(a.threads, int64_t(1)) * a.out_dim);
    }
    Workspace workspace;
    float *x, *row;
};

}  // namespace

int64_t mxfp8_linear_workspace(const cedar_mxfp8_linear_args& a) { return LinearPlan(a).workspace.used(); }

void mxfp8_linear(const cedar_mxfp8_linear_args& a) {
    const LinearPlan plan(a);
    const float* x = float_rows(a.x, a.type, a.rows, a.in_dim, a.act_quant != 0, a.threads, plan.x);
    const auto multiply = [&](auto&& put) {
        with_weight(a.weight_type, a.weight, a.weight_scale, a.in_dim, [&](const auto& weight) {
            parallel_gemm(a.threads, a.rows, a.out_dim, a.in_dim, [&](int64_t r) { return x + r * a.in_dim; }, weight, 0, put);
        });
    };
    if (a.out_type == CEDAR_F32) {
        float* y = static_cast<float*>(a.y);
        multiply([&](int64_t r, int64_t n, float value) { y[r * a.out_dim + n] = value; });
    } else {
        uint16_t* y = static_cast<uint16_t*>(a.y);
        multiply([&](int64_t r, int64_t n, float value) { y[r * a.out_dim + n] = narrow(value); });
    }
    if (a.norm_weight == nullptr) return;
    parallel(a.rows, a.threads, a.rows * a.out_dim, [&](int64_t r, int64_t worker) {
        float* values = plan.row + worker * a.out_dim;
        read_values(a.y, a.out_type, r * a.out_dim, a.out_dim, values);
        rms_norm(values, a.norm_weight, float(a.norm_eps), a.out_type, a.out_dim, values);
        write_values(a.y, a.out_type, r * a.out_dim, a.out_dim, values);
    });
}

namespace {

struct WoAPlan {
    explicit WoAPlan(const cedar_wo_a_args& a) : workspace(a.workspace) {
        x = a.type == CEDAR_F32 ? nullptr : workspace.take<float>(a.rows * a.groups * a.in_dim);
    }
    Workspace workspace;
    float* x;
};

}  // namespace

int64_t wo_a_workspace(const cedar_wo_a_args& a) { return WoAPlan(a).workspace.used(); }

void wo_a(const cedar_wo_a_args& a) {
    const WoAPlan plan(a);
    const int64_t width = a.groups * a.in_dim, out = a.groups * a.rank;
    const float* x = float_rows(a.x, a.type, a.rows, width, false, a.threads, plan.x);
    with_weight(a.weight_type, a.weight, a.weight_scale, a.in_dim, [&](const auto& weight) {
        for (int64_t g = 0; g < a.groups; ++g)
            parallel_gemm(a.threads, a.rows, a.rank, a.in_dim, [&](int64_t r) { return x + r * width + g * a.in_dim; }, weight,
                          g * a.rank,
                          [&](int64_t r, int64_t n, float value) { write_values(a.y, a.type, r * out + g * a.rank + n, 1, &value); });
    });
}

}  // namespace cedar::CEDAR_ISA
