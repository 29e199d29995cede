// SPDX-License-Identifier: Apache-2.0
// Matrix instructions of a warp, by the layouts of the PTX manual, and copies of boxes of a tensor.
#include "include/cuda_runtime.h"

#include "include/cuda.h"

namespace emulated {
namespace {

double low_of(uint32_t pair, bool halves) { return halves ? float_of_half(pair & 0xffff) : __uint_as_float(pair << 16); }
double high_of(uint32_t pair, bool halves) { return halves ? float_of_half(pair >> 16) : __uint_as_float(pair & 0xffff0000u); }

// 8 x 8 values of 16 bits, of a register of each lane: row lane / 4, columns 2 (lane % 4) and the next.
struct Matrix {
    uint16_t v[8][8];
    uint32_t pair(int lane) const { return v[lane / 4][lane % 4 * 2] | uint32_t(v[lane / 4][lane % 4 * 2 + 1]) << 16; }
    uint32_t transposed_pair(int lane) const { return v[lane % 4 * 2][lane / 4] | uint32_t(v[lane % 4 * 2 + 1][lane / 4]) << 16; }
    void set(int lane, uint32_t pair) { v[lane / 4][lane % 4 * 2] = uint16_t(pair), v[lane / 4][lane % 4 * 2 + 1] = uint16_t(pair >> 16); }
};

void need_all(const void* const* lanes) {
    for (int i = 0; i < kWarpLanes; ++i)
        if (lanes[i] == nullptr) failed("a matrix instruction of a warp that lacks lanes");
}

uint16_t* row_at(uint32_t address) {
    struct alignas(16) Row { uint16_t v[8]; };
    return place<Row>(address)->v;
}

}  // namespace

// Sums of 16 products are exact but for a double's rounding, then rounded once to what the sum is kept in.
void multiply_fragments(Fragments* const* lanes) {
    need_all(reinterpret_cast<const void* const*>(lanes));
    double a[16][16], b[16][8];
    for (int lane = 0; lane < kWarpLanes; ++lane) {
        const int g = lane / 4, q = lane % 4;
        const Fragments& f = *lanes[lane];
        for (int i = 0; i < 4; ++i) {
            a[g + i % 2 * 8][2 * q + i / 2 * 8] = low_of(f.a[i], f.halves);
            a[g + i % 2 * 8][2 * q + i / 2 * 8 + 1] = high_of(f.a[i], f.halves);
        }
        for (int i = 0; i < 2; ++i) b[2 * q + 8 * i][g] = low_of(f.b[i], f.halves), b[2 * q + 8 * i + 1][g] = high_of(f.b[i], f.halves);
    }
    for (int row = 0; row < 16; ++row) {
        double sums[8] = {};
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 8; ++n) sums[n] += a[row][k] * b[k][n];
        for (int n = 0; n < 8; ++n) {
            float* c = lanes[row % 8 * 4 + n / 2]->c[row / 8 * 2 + n % 2];
            *c = float(double(*c) + sums[n]);
        }
    }
}

void load_matrices(Matrices* const* lanes, bool transposed) {
    need_all(reinterpret_cast<const void* const*>(lanes));
    for (int m = 0; m < 4; ++m) {
        Matrix matrix;
        for (int row = 0; row < 8; ++row) std::memcpy(matrix.v[row], row_at(lanes[8 * m + row]->address), 16);
        for (int lane = 0; lane < kWarpLanes; ++lane) lanes[lane]->values[m] = transposed ? matrix.transposed_pair(lane) : matrix.pair(lane);
    }
}

void store_matrices_transposed(Matrices* const* lanes) {
    need_all(reinterpret_cast<const void* const*>(lanes));
    for (int m = 0; m < 4; ++m) {
        Matrix matrix;
        for (int lane = 0; lane < kWarpLanes; ++lane) matrix.set(lane, lanes[lane]->values[m]);
        for (int column = 0; column < 8; ++column)
            for (int row = 0; row < 8; ++row) row_at(lanes[8 * m + column]->address)[row] = matrix.v[row][column];
    }
}

void transpose_matrix(uint32_t* const* lanes) {
    need_all(reinterpret_cast<const void* const*>(lanes));
    Matrix matrix;
    for (int lane = 0; lane < kWarpLanes; ++lane) matrix.set(lane, *lanes[lane]);
    for (int lane = 0; lane < kWarpLanes; ++lane) *lanes[lane] = matrix.transposed_pair(lane);
}

// ---- boxes of a tensor ----

void copy_box(uint32_t shared, const CUtensorMap* given, std::array<int, 3> at, uint32_t barrier, uint32_t blocks) {
    const CUtensorMap map = *given;
    const size_t row_bytes = map.box[0] * size_t(map.value_bytes), rows = size_t(map.box[1]) * (map.rank > 2 ? map.box[2] : 1);
    if (shared % (map.swizzle ? 1024 : 128) != 0) failed("a box's place in shared memory is not aligned");
    const bool to_all = blocks != 0;
    for (uint32_t rank = 0; rank < current->block->cluster->blocks.size(); ++rank) {
        if (to_all ? !(blocks >> rank & 1) : rank != uint32_t(current->block->rank)) continue;
        const uint32_t window = (rank + 1) * kClusterWindow, to = window + shared % kClusterWindow, there = window + barrier % kClusterWindow;
        shared_at(to, rows * row_bytes), phases_at(there);
        Copy copy{};
        copy.box = [=] {
            for (size_t row = 0; row < rows; ++row) {
                const int64_t y = at[1] + int64_t(row % map.box[1]), z = at[2] + int64_t(row / map.box[1]);
                const bool inside = y >= 0 && y < int64_t(map.sizes[1]) && (map.rank < 3 || (z >= 0 && z < int64_t(map.sizes[2])));
                for (size_t i = 0; i < row_bytes; ++i) {
                    const int64_t x = at[0] + int64_t(i) / map.value_bytes;
                    uint32_t offset = uint32_t(to + row * row_bytes + i);
                    if (map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B) offset ^= (offset >> 7 & 7) << 4;
                    if (map.swizzle == CU_TENSOR_MAP_SWIZZLE_64B) offset ^= (offset >> 7 & 3) << 4;
                    if (map.swizzle == CU_TENSOR_MAP_SWIZZLE_32B) offset ^= (offset >> 7 & 1) << 4;
                    const unsigned char* from = map.data + x * map.value_bytes + int64_t(i) % map.value_bytes + y * int64_t(map.strides[0]) + (map.rank > 2 ? z * int64_t(map.strides[1]) : 0);
                    *shared_at(offset, 1) = inside && x >= 0 && x < int64_t(map.sizes[0]) ? *from : 0;
                }
            }
            arrive_phase(there, 0, -int64_t(rows * row_bytes));
        };
        start_announced_copy(std::move(copy));
    }
}

}  // namespace emulated

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const int bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_UINT64 ? 8 : type == CU_TENSOR_MAP_DATA_TYPE_UINT32 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    if (rank < 2 || rank > 3 || reinterpret_cast<uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    const uint64_t row = uint64_t(box[0]) * uint64_t(bytes);
    if (row % 16 != 0 || (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && row > (16u << swizzle))) return CUDA_ERROR_INVALID_VALUE;
    *map = {};
    map->data = static_cast<const unsigned char*>(data), map->rank = int32_t(rank), map->value_bytes = bytes, map->swizzle = swizzle;
    for (cuuint32_t i = 0; i < rank; ++i) {
        if (box[i] == 0 || box[i] > 256 || steps[i] != 1 || (i > 0 && strides[i - 1] % 16 != 0)) return CUDA_ERROR_INVALID_VALUE;
        map->sizes[i] = sizes[i], map->box[i] = box[i];
        if (i > 0) map->strides[i - 1] = strides[i - 1];
    }
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled), *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
