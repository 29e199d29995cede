// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"
#include "gemm.h"
#include "records.h"
#include "workspace.h"

namespace cedar::CEDAR_ISA {
namespace {

struct WindowPlan {
    explicit WindowPlan(const cedar_window_store_args& a) : workspace(a.workspace) {
        row = workspace.take<float>(larger(a.threads, int64_t(1)) * a.dim);
    }
    Workspace workspace;
    float* row;
};

}  // namespace

int64_t window_store_workspace(const cedar_window_store_args& a) { return WindowPlan(a).workspace.used(); }

void window_store(const cedar_window_store_args& a) {
    const WindowPlan plan(a);
    const int64_t bytes = record_bytes(a.record, a.dim);
    char *table = static_cast<char*>(a.table), *ring = static_cast<char*>(a.ring);
    for (int64_t i = 0; i < a.history_rows; ++i) std::memcpy(table + i * bytes, ring + a.history[i] * bytes, bytes);
    parallel(a.rows, a.threads, a.rows * a.dim * 16, [&](int64_t r, int64_t worker) {
        float* row = plan.row + worker * a.dim;
        read_values(a.kv, a.type, r * a.dim, a.dim, row);
        rms_norm(row, a.norm_weight, float(a.norm_eps), a.type, a.dim, row);
        rotate(row, a.cos + r * a.pairs, a.sin + r * a.pairs, 1.0f, a.type, a.dim, a.pairs);
        encode_record(a.record, a.table, a.history_rows + r, a.dim, row);
    });
    for (int64_t i = 0; i < a.stores; ++i) {
        const int64_t from = a.history_rows + (a.store_from == nullptr ? i : a.store_from[i]);
        std::memcpy(ring + a.store_to[i] * bytes, table + from * bytes, bytes);
    }
}

namespace {

struct CompressPlan {
    explicit CompressPlan(const cedar_compress_store_args& a) : workspace(a.workspace) {
        latents = workspace.take<float>(a.groups * a.dim);
        keys = workspace.take<float>(a.groups * a.index_dim);
    }
    Workspace workspace;
    float *latents, *keys;
};

// The group's tokens as one vector: sum_t kv_t softmax_t(gate_t) per channel, which for two is an interpolation.
void pool_pair(const float* first, const float* second, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; ++d) {
        const float share = sigmoid(second[dim + d] - first[dim + d]);
        out[d] = fused(share, second[d] - first[d], first[d]);
    }
}

void latent_of(const cedar_compress_store_args& a, int64_t group, float* latent) {
    const int64_t row = a.group_rows == nullptr ? group : a.group_rows[group], width = a.ratio * a.dim;
    if (a.ratio == 1) {
        read_values(a.projected, a.type, row * a.dim, a.dim, latent);
    } else {
        const float* rows = static_cast<const float*>(a.projected);
        const int64_t other = a.first[group];
        const float* first = other < a.opens ? a.open + a.open_from[other] * width : rows + (other - a.opens) * width;
        pool_pair(first, rows + row * width, a.dim, latent);
        round_to(a.type, a.dim, latent);
    }
    rms_norm(latent, a.norm_weight, float(a.norm_eps), a.type, a.dim, latent);
}

}  // namespace

int64_t compress_store_workspace(const cedar_compress_store_args& a) { return CompressPlan(a).workspace.used(); }

void compress_store(const cedar_compress_store_args& a) {
    const CompressPlan plan(a);
    parallel(a.groups, a.threads, a.groups * a.dim * 32,
             [&](int64_t group, int64_t) { latent_of(a, group, plan.latents + group * a.dim); });
    // only now: a group that ends in this step has read its open row
    for (int64_t i = 0; i < a.leaves_open; ++i) {
        if (a.open_to[i] < 0) continue;
        std::memcpy(a.open + a.open_to[i] * 2 * a.dim, static_cast<const float*>(a.projected) + a.open_rows[i] * 2 * a.dim,
                    2 * a.dim * sizeof(float));
    }
    with_weight(a.type, a.wk, nullptr, a.dim, [&](const auto& wk) {
        parallel_gemm(a.threads, a.groups, a.index_dim, a.dim, [&](int64_t g) { return plan.latents + g * a.dim; }, wk, 0,
                      [&](int64_t g, int64_t n, float value) { plan.keys[g * a.index_dim + n] = value; });
    });
    parallel(a.groups, a.threads, a.groups * (a.dim + a.index_dim) * 16, [&](int64_t group, int64_t) {
        if (a.slots[group] < 0) return;
        float *latent = plan.latents + group * a.dim, *key = plan.keys + group * a.index_dim;
        const float *cos = a.cos + group * a.pairs, *sin = a.sin + group * a.pairs;
        rotate(latent, cos, sin, 1.0f, a.type, a.dim, a.pairs);
        encode_record(a.record, a.kv_pool, a.slots[group], a.dim, latent);
        round_to(a.type, a.index_dim, key);
        rms_norm(key, a.index_norm_weight, float(a.norm_eps), a.type, a.index_dim, key);
        rotate(key, cos, sin, 1.0f, a.type, a.index_dim, a.pairs);
        encode_record(a.index_record, a.index_pool, a.slots[group], a.index_dim, key);
    });
}

}  // namespace cedar::CEDAR_ISA
