// SPDX-License-Identifier: Apache-2.0
// Rows of activations as floats, and the transformations of a row that several operations share.
#pragma once

#include "cedar_kernels.h"
#include "math.h"

namespace cedar::CEDAR_ISA {

constexpr int kMxGroup = 32, kNvfp4Group = 16;

inline int64_t width_of(int64_t type) { return type == CEDAR_F32 ? 4 : 2; }

// Elements [0, n) of a tensor that starts at element `offset` of `data`.
inline void read_values(const void* data, int64_t type, int64_t offset, int64_t n, float* out) {
    if (type == CEDAR_F32) {
        std::memcpy(out, static_cast<const float*>(data) + offset, n * sizeof(float));
        return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = widen(from[i]);
}

// The same, in place where they are floats already.
inline const float* floats_of(const void* data, int64_t type, int64_t offset, int64_t n, float* scratch) {
    if (type == CEDAR_F32) return static_cast<const float*>(data) + offset;
    read_values(data, type, offset, n, scratch);
    return scratch;
}

inline void write_values(void* data, int64_t type, int64_t offset, int64_t n, const float* values) {
    if (type == CEDAR_F32) {
        std::memcpy(static_cast<float*>(data) + offset, values, n * sizeof(float));
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) to[i] = narrow(values[i]);
}

// What is left of values that are stored in `type`.
inline void round_to(int64_t type, int64_t n, float* values) {
    if (type == CEDAR_BF16)
        for (int64_t i = 0; i < n; ++i) values[i] = widen(narrow(values[i]));
}

inline float sum_of_squares(const float* x, int64_t n) {
    V total = zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const V v = load(x + i);
        total = fma(v, v, total);
    }
    if (i < n) {
        const V v = load_first(x + i, int(n - i));
        total = fma(v, v, total);
    }
    return sum(total);
}

inline float sum(const float* x, int64_t n) {
    V total = zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) total = add(total, load(x + i));
    if (i < n) total = add(total, load_first(x + i, int(n - i)));
    return sum(total);
}

// The largest of x; NaNs count as nothing, and of none it is -inf.
inline float maximum(const float* x, int64_t n) {
    float lanes[kLanes], most = from_bits(0xff800000);
    for (int l = 0; l < kLanes; ++l) lanes[l] = most;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] = larger(lanes[l], x[i + l]);
    for (; i < n; ++i) most = larger(most, x[i]);
    for (int l = 0; l < kLanes; ++l) most = larger(most, lanes[l]);
    return most;
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t type, int64_t n, float* out) {
    const float factor = inverse_sqrt(sum_of_squares(x, n) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
    round_to(type, n, out);
}

// Rotate the interleaved pairs at the end of a row; sign -1 undoes it.
inline void rotate(float* x, const float* cos, const float* sin, float sign, int64_t type, int64_t dim, int64_t pairs) {
    float* tail = x + dim - 2 * pairs;
    for (int64_t i = 0; i < pairs; ++i) {
        const float even = tail[2 * i], odd = tail[2 * i + 1], s = sign * sin[i];
        tail[2 * i] = even * cos[i] - odd * s;
        tail[2 * i + 1] = even * s + odd * cos[i];
    }
    round_to(type, 2 * pairs, tail);
}

}  // namespace cedar::CEDAR_ISA
