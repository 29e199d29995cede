// SPDX-License-Identifier: Apache-2.0
// Weights of E2M1 codes in the order in which the matrix instruction's lanes need them (`cedar.ops.fp4_tiles` packs them).
//
// A tile is 16 rows of 128 values, 1024 bytes: 512 of rows 0-7, then 512 of rows 8-15; lane 4 g + q has 16 bytes of row g (of 8),
// word w of them the values 32 w + 8 q + (0..7). A word's four pairs of neighbours lie scattered over its bits so that a rotation
// and a mask make bf16 of each (the bits of E2M1 as the low exponent and the high mantissa bit, 2^126 too small, which the scale
// makes up for). The tile's scales are 16 rows of 4 bytes, one per w: UE8M0 plus 126, so that a byte is the exponent of scale *
// 2^126 in bf16.
#pragma once

#include "ptx.cuh"

namespace cedar::cuda {

constexpr int kFp4Rows = 16, kFp4Depth = 128, kFp4Codes = 1024, kFp4Scales = 64;

// The four pairs of a word times the scale, each a bf16 pair: exact.
__device__ inline void widen_e2m1(uint32_t word, __nv_bfloat162 scale, uint32_t (&pairs)[4]) {
    // of the rotations only the one by 10 brings bits around: the others are shifts, which have another unit than the masks
    pairs[0] = word & 0x81c081c0;
    pairs[1] = (word << 6) & 0x81c081c0;
    pairs[2] = __funnelshift_l(word, word, 10) & 0x81c081c0;
    pairs[3] = ((word << 4) & 0x81808180) | (__funnelshift_l(word, word, 12) & 0x00400040);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pairs[i]), scale);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
    }
}

// Byte w of a row's scales: a half of two bytes' exponents, which the multiplication reads as both of its own.
__device__ inline __nv_bfloat162 fp4_scale(uint32_t bytes, int w) {
    const uint32_t bits = (w % 2 == 0 ? bytes << 7 : bytes >> 1) & 0x7f807f80;
    const __nv_bfloat162 two = *reinterpret_cast<const __nv_bfloat162*>(&bits);
    return w < 2 ? __low2bfloat162(two) : __high2bfloat162(two);
}

// The same word of all four words of a lane's 16 bytes.
__device__ inline uint32_t word_of(const uint4& v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }

}  // namespace cedar::cuda
