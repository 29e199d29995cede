// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"
#include "gemm.h"
#include "records.h"
#include "workspace.h"

namespace cedar::CEDAR_ISA {
namespace {

constexpr int kHeadBlock = 4, kChunk = 2 * kLanes;

struct Plan {
    explicit Plan(const cedar_mega_attention_args& a) : workspace(a.workspace) {
        const int64_t threads = larger(a.threads, int64_t(1)), most = a.window_width + a.entry_width;
        keys_size = most * a.dim;
        heads_size = a.heads * a.dim;
        scores_size = a.heads * most;
        keys = workspace.take<float>(threads * keys_size);
        query = workspace.take<float>(threads * heads_size);
        out = workspace.take<float>(threads * heads_size);
        scores = workspace.take<float>(threads * scores_size);
    }
    Workspace workspace;
    int64_t keys_size, heads_size, scores_size;
    float *keys, *query, *out, *scores;
};

// The keys that a row sees, decoded, window first; masked ones are left out, so no other row decides the order of the sums.
int64_t gather(const cedar_mega_attention_args& a, int64_t row, float* keys) {
    int64_t count = 0;
    const int64_t* index = a.window_index + row * a.window_width;
    for (int64_t n = 0; n < a.window_width; ++n)
        if (index[n] != 0) decode_record(a.window_record, a.window, index[n], a.dim, keys + count++ * a.dim);
    if (a.entries == nullptr) return count;
    index = a.entry_index + row * a.entry_width;
    for (int64_t n = 0; n < a.entry_width; ++n)
        if (index[n] != 0) decode_record(a.entry_record, a.entries, index[n], a.dim, keys + count++ * a.dim);
    return count;
}

// Scores to probabilities of the keys; the sink takes its share of the denominator.
void softmax(float* scores, int64_t count, float scale, float sink) {
    for (int64_t n = 0; n < count; ++n) scores[n] *= scale;
    const float most = larger(sink, maximum(scores, count));
    for (int64_t n = 0; n < count; ++n) scores[n] = exponential(scores[n] - most);
    // an infinite sink takes everything
    const float factor = 1.0f / (sum(scores, count) + (sink == most ? 1.0f : exponential(sink - most)));
    for (int64_t n = 0; n < count; ++n) scores[n] *= factor;
}

// out[h, d] = sum_n p[h, n] keys[n, d], n ascending, for H heads and one chunk of `lanes` dimensions.
template <int H, int C>
void mix_chunk(const float* p, int64_t stride, const float* keys, int64_t count, int64_t dim, float* out) {
    V total[H][C];
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) total[h][c] = zero();
    for (int64_t n = 0; n < count; ++n) {
        V key[C];
        for (int c = 0; c < C; ++c) key[c] = load(keys + n * dim + c * kLanes);
        for (int h = 0; h < H; ++h) {
            const V weight = broadcast(p[h * stride + n]);
            for (int c = 0; c < C; ++c) total[h][c] = fma(weight, key[c], total[h][c]);
        }
    }
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) store(out + h * dim + c * kLanes, total[h][c]);
}

template <int H>
void mix_heads(const float* p, int64_t stride, const float* keys, int64_t count, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + kChunk <= dim; d += kChunk) mix_chunk<H, kChunk / kLanes>(p, stride, keys + d, count, dim, out + d);
    for (; d + kLanes <= dim; d += kLanes) mix_chunk<H, 1>(p, stride, keys + d, count, dim, out + d);
    for (; d < dim; ++d)
        for (int h = 0; h < H; ++h) {
            float total = 0.0f;
            for (int64_t n = 0; n < count; ++n) total = fused(p[h * stride + n], keys[n * dim + d], total);
            out[h * dim + d] = total;
        }
}

void attend(const cedar_mega_attention_args& a, const Plan& plan, int64_t row, int64_t worker) {
    float* keys = plan.keys + worker * plan.keys_size;
    float* query = plan.query + worker * plan.heads_size;
    float* out = plan.out + worker * plan.heads_size;
    float* scores = plan.scores + worker * plan.scores_size;
    const float *cos = a.cos + row * a.pairs, *sin = a.sin + row * a.pairs;
    const int64_t count = gather(a, row, keys);
    read_values(a.query, a.type, row * plan.heads_size, plan.heads_size, query);
    for (int64_t h = 0; h < a.heads; ++h) rotate(query + h * a.dim, cos, sin, 1.0f, a.type, a.dim, a.pairs);
    gemm(a.heads, count, a.dim, [&](int64_t h) { return query + h * a.dim; }, DenseWeight<float>{keys, a.dim}, 0,
         [&](int64_t h, int64_t n, float value) { scores[h * count + n] = value; });
    for (int64_t h = 0; h < a.heads; ++h) softmax(scores + h * count, count, float(a.scale), a.sink[h]);
    int64_t h = 0;
    for (; h + kHeadBlock <= a.heads; h += kHeadBlock)
        mix_heads<kHeadBlock>(scores + h * count, count, keys, count, a.dim, out + h * a.dim);
    for (; h < a.heads; ++h) mix_heads<1>(scores + h * count, count, keys, count, a.dim, out + h * a.dim);
    round_to(a.type, plan.heads_size, out);
    for (int64_t n = 0; n < a.heads; ++n) rotate(out + n * a.dim, cos, sin, -1.0f, a.type, a.dim, a.pairs);
    write_values(a.out, a.type, row * plan.heads_size, plan.heads_size, out);
}

}  // namespace

int64_t mega_attention_workspace(const cedar_mega_attention_args& a) { return Plan(a).workspace.used(); }

void mega_attention(const cedar_mega_attention_args& a) {
    const Plan plan(a);
    const int64_t work = a.rows * a.heads * (a.window_width + a.entry_width) * a.dim * 2;
    parallel(a.rows, a.threads, work, [&](int64_t row, int64_t worker) { attend(a, plan, row, worker); });
}

}  // namespace cedar::CEDAR_ISA
