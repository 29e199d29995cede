// SPDX-License-Identifier: Apache-2.0
// Row-major weights of linears. A block of k is 16 bytes of a row for each of the four lanes that share it.
#pragma once

#include "ptx.cuh"

namespace cedar::cuda {

// The bf16 pair of a scale 2^(byte - 127) times 2^120, which E4M3 codes widened by moving their bits lack. Scales end at 2^7.
__device__ inline uint32_t lifted_scale(uint32_t byte) { return byte * 0x00800080u + (120u << 7) * 0x00010001u; }

__device__ inline uint32_t scaled_pair(uint32_t bits, uint32_t scale) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&scale));
    return *reinterpret_cast<const uint32_t*>(&product);
}

// E4M3 codes in bytes kFirst and kFirst + 1 of a word times a lifted scale, as bf16 pair: exact. A shift to the left is a multiply-add to
// ptxas, which spares the units that permute and mask.
template <int kFirst>
__device__ inline uint32_t widen_e4m3(uint32_t word, uint32_t scale) {
    uint32_t codes;  // in the low bytes of both halves, above them their signs eight times
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(codes) : "r"(word), "n"(kFirst == 0 ? 0x9180 : 0xb3a2));
    return scaled_pair(codes << 4 & 0x87f087f0, scale);  // signs come along; what enters the other half is masked
}

// A weight of row-major bf16: a block of k is 32 wide, a lane's 16 bytes are 8 values.
struct Bf16Weight {
    static constexpr int kBlock = 32, kSteps = 2;
    const Bf16* values;
    int64_t stride;
    struct Loaded {
        uint4 bytes;
    };
    // The pairs (2 tid, 2 tid + 1) and (2 tid + 8, 2 tid + 9) of step s.
    __device__ static uint2 fragment(const Loaded& x, int s) {
        return s == 0 ? make_uint2(x.bytes.x, x.bytes.y) : make_uint2(x.bytes.z, x.bytes.w);
    }
};

// E4M3 codes with a UE8M0 scale per tile of 32 x 32: a block of k is 64 wide, a lane's 16 bytes are 16 values of one tile.
struct Fp8Weight {
    static constexpr int kBlock = 64, kSteps = 4;
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t stride, scale_stride;
    struct Loaded {
        uint4 bytes;
        uint32_t scale;
    };
    __device__ const uint8_t* scale_at(int64_t row, int64_t k) const { return scales + row / 32 * scale_stride + k / 32; }
    __device__ static uint2 fragment(const Loaded& x, int s) {
        const uint32_t four = s == 0 ? x.bytes.x : s == 1 ? x.bytes.y : s == 2 ? x.bytes.z : x.bytes.w;
        return make_uint2(widen_e4m3<0>(four, x.scale), widen_e4m3<2>(four, x.scale));
    }
};

}  // namespace cedar::cuda
