// SPDX-License-Identifier: Apache-2.0
// The shared expert's weights, as the products of the routed ones read theirs.
#pragma once

#include "moe.cuh"
#include "tiles.cuh"

namespace cedar::cuda {

// The shared expert's row-major weight as tiles: of rows as they come, or of 8 of w1 and the 8 of w3 beside them.
template <class Weight, bool kFirst>
struct SharedRows : RowMajor<Weight> {
    __device__ int64_t row(int64_t tile, int half, int lane) const {
        const int64_t row = kFirst ? half * (this->last + 1) / 2 + tile * 8 + lane / 4 : tile * 16 + half * 8 + lane / 4;
        return row < this->last ? row : this->last;
    }
    __device__ const uint8_t* codes_of(int64_t tile, int half, int lane) const { return this->row_codes(row(tile, half, lane), lane); }
    __device__ const uint8_t* scales_of(int64_t tile, int half, int lane) const { return this->row_scales(row(tile, half, lane), lane); }
};

// body(weight) with the tiles of one of its matrices.
template <bool kFirst, class Body>
cudaError_t with_shared_rows(const SharedExpert& s, const Body& body) {
    if (s.type == CEDAR_BF16) {
        const Bf16Weight weight{static_cast<const Bf16*>(s.weight), s.in_dim};
        return body(SharedRows<Bf16Weight, kFirst>{{weight, 0, s.out_dim - 1}});
    }
    const Fp8Weight weight{static_cast<const uint8_t*>(s.weight), s.scale, s.in_dim, (s.in_dim + 31) / 32};
    return body(SharedRows<Fp8Weight, kFirst>{{weight, 0, s.out_dim - 1}});
}

}  // namespace cedar::cuda
