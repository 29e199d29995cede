// SPDX-License-Identifier: Apache-2.0
// Exact choices among scores: a total order of floats, and the k best of many with ties to the lowest index.
#pragma once

#include "math.h"

namespace cedar::CEDAR_ISA {

// A float's bits as an unsigned number in the same order; zeros are equal, and a NaN is above or below everything by its sign.
inline uint32_t ordered(float score) {
    const uint32_t bits = to_bits(score + 0.0f);
    return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

// The indices of the k highest of n scores, ascending; k <= n. A radix selection finds the k-th key, one pass then collects.
inline void top_k_ascending(const float* scores, int64_t n, int64_t k, int64_t* out) {
    if (k == n) {
        for (int64_t i = 0; i < n; ++i) out[i] = i;
        return;
    }
    uint32_t prefix = 0, known = 0;  // bits of the k-th key that are decided, and their mask
    int64_t wanted = k;              // of the keys that share the prefix
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {};
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t key = ordered(scores[i]);
            if ((key & known) == prefix) ++counts[key >> shift & 255];
        }
        int digit = 255;
        for (; counts[digit] < wanted; --digit) wanted -= counts[digit];
        prefix |= uint32_t(digit) << shift;
        known |= 255u << shift;
    }
    for (int64_t i = 0, taken = 0; taken < k; ++i) {
        const uint32_t key = ordered(scores[i]);
        if (key > prefix || (key == prefix && wanted-- > 0)) out[taken++] = i;
    }
}

}  // namespace cedar::CEDAR_ISA
