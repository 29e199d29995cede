// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"
#include "parallel.h"
#include "records.h"
#include "workspace.h"

namespace cedar::CEDAR_ISA {
namespace {

struct GatherPlan {
    explicit GatherPlan(const cedar_engram_gather_args& a) : workspace(a.workspace) {
        row = a.type == CEDAR_F32 ? nullptr : workspace.take<float>(larger(a.threads, int64_t(1)) * a.dim);
    }
    Workspace workspace;
    float* row;
};

}  // namespace

int64_t engram_gather_workspace(const cedar_engram_gather_args& a) { return GatherPlan(a).workspace.used(); }

void engram_gather(const cedar_engram_gather_args& a) {
    const GatherPlan plan(a);
    const int64_t groups = a.dim / kMxGroup;
    const bool apart = a.table_scale != nullptr;
    const uint8_t* all_scales = apart ? a.table_scale : a.table + a.dim;
    parallel(a.rows * a.columns, a.threads, a.rows * a.columns * a.dim * 8, [&](int64_t n, int64_t worker) {
        float* out = plan.row == nullptr ? static_cast<float*>(a.out) + n * a.dim : plan.row + worker * a.dim;
        const int64_t id = a.ids[n];
        if (id < 0) {
            for (int64_t d = 0; d < a.dim; ++d) out[d] = 0.0f;
        } else {
            const uint8_t *codes = a.table + id * a.width, *scales = all_scales + id * (apart ? groups : a.width);
            for (int64_t g = 0; g < groups; ++g) decode_fp8(codes + g * kMxGroup, scales[g], out + g * kMxGroup);
        }
        if (plan.row != nullptr) write_values(a.out, a.type, n * a.dim, a.dim, out);
    });
}

namespace {

struct GatePlan {
    explicit GatePlan(const cedar_engram_gate_args& a) : workspace(a.workspace) {
        size = a.type == CEDAR_F32 ? 0 : (2 * a.hc + 1) * a.hidden;
        row = size == 0 ? nullptr : workspace.take<float>(larger(a.threads, int64_t(1)) * size);
    }
    Workspace workspace;
    int64_t size;
    float* row;
};

// sum_d a_d b_d c_d
float triple(const float* x, const float* y, const float* z, int64_t n) {
    V total = zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) total = fma(mul(load(x + i), load(y + i)), load(z + i), total);
    if (i < n) {
        const int left = int(n - i);
        total = fma(mul(load_first(x + i, left), load_first(y + i, left)), load_first(z + i, left), total);
    }
    return sum(total);
}

}  // namespace

int64_t engram_gate_workspace(const cedar_engram_gate_args& a) { return GatePlan(a).workspace.used(); }

void engram_gate(const cedar_engram_gate_args& a) {
    const GatePlan plan(a);
    const int64_t n = a.hidden, width = a.hc * n;
    const float eps = float(a.norm_eps), scale = 1.0f / square_root(float(n));
    parallel(a.rows, a.threads, a.rows * width * 8, [&](int64_t r, int64_t worker) {
        float* scratch = plan.row + worker * plan.size;
        const float* streams = floats_of(a.streams, a.type, r * width, width, scratch);
        const float* keys = floats_of(a.keys_value, a.type, r * (width + n), width + n, scratch + width);
        float* out = a.type == CEDAR_F32 ? static_cast<float*>(a.new_streams) + r * width : scratch;
        for (int64_t i = 0; i < a.hc; ++i) {
            const float *stream = streams + i * n, *key = keys + i * n, *value = keys + width;
            const float statistic = inverse_sqrt((sum_of_squares(stream, n) / float(n) + eps) * (sum_of_squares(key, n) / float(n) + eps));
            const float dot = triple(stream, a.qk_weight + i * n, key, n) * statistic * scale;
            const float magnitude = square_root(larger(from_bits(to_bits(dot) & 0x7fffffff), 1e-6f));
            const float gate = sigmoid(from_bits(to_bits(magnitude) | (to_bits(dot) & 0x80000000)));
            for (int64_t d = 0; d < n; ++d) out[i * n + d] = fused(gate, value[d], stream[d]);
        }
        if (a.type != CEDAR_F32) write_values(a.new_streams, a.type, r * width, width, out);
    });
}

}  // namespace cedar::CEDAR_ISA
