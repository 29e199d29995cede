// SPDX-License-Identifier: Apache-2.0
// y[t, n] = x_t . w_n of few tokens and E4M3 on Hopper. The copy engine brings boxes of R rows and 128 values of k to a warp's own ring,
// ahead of x as far as that pays; its lanes widen them as rows of the matrix instruction, whose last tile may be half empty, so that R is
// what divides the work evenly. A warp waits for no other until all is added.
//
// Sums of the warps' parts of k are added in their order.
#pragma once

#include "linear_split.cuh"
#include "wide.cuh"

namespace cedar::cuda {

constexpr int kStreamDepth = 128, kStreamSteps = 32;  // a warp's lanes keep the scales of a step each

template <int R>
struct StreamBox {
    static constexpr int kBytes = R * kStreamDepth, kEights = R / 8;
    static constexpr bool kOneScale = 32 % R == 0;  // for a box's rows
    static constexpr int kTiles = (kEights + 1) / 2;  // of the matrix instruction; the last may be half empty
    static constexpr int kStride = R % 16 == 0 ? R + 4 : R % 32 == 8 ? R + 12 : R + 28;  // floats of a token's sums: stores of a warp meet all banks
    static_assert(kBytes % 1024 == 0 && R % 8 == 0 && 16 * kStride * int(sizeof(float)) <= kBytes);
    static size_t shared_bytes(int slots) { return size_t(slots) * (kBytes + sizeof(uint64_t)) + 1024; }  // to begin at a multiple of 1024
};

// Block i: the i-th rows, R for each kParts of its warps, which share k by turns. depth: boxes of a ring; ahead: of them, how many are
// ordered before x, which they would delay.
template <int R, int NT, int W, int kParts, int kResident>
__global__ void __launch_bounds__(W* kWarp, kResident)
    stream_product(const Product p, const Fp8Weight weight, int steps, int depth, int ahead, bool vectors, const __grid_constant__ CUtensorMap map) {
    using Box = StreamBox<R>;
    constexpr int kSets = W / kParts;
    extern __shared__ __align__(16) unsigned char memory[];
    unsigned char* const boxes = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int lane = threadIdx.x % kWarp, group = lane / 4, quad = lane % 4, tokens = int(p.tokens);
    const int own_row = group / 2 + group % 2 * 4;  // of eight: the swizzle brings rows r and r + 4, which are read together, to all banks
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / kWarp, 0);  // known to be the same in all lanes
    const int part = warp % kParts, first_row = int(blockIdx.x) * kSets * R;
    const int row = first_row + warp / kParts * R;
    unsigned char* const ring = boxes + warp * depth * Box::kBytes;
    uint64_t* const full = reinterpret_cast<uint64_t*>(boxes + W * depth * Box::kBytes) + warp * depth;
    const auto fetch = [&](int step, int slot) {
        announce_bytes(full + slot, Box::kBytes);
        copy_box(ring + slot * Box::kBytes, &map, (step * kParts + part) * kStreamDepth, row, full + slot, read_once_policy());
    };
    release_launch();    // the next launch awaits this one
    prefetch_tokens(p);  // before the weight, behind which it would wait
    if (lane < depth) {  // the weight does not wait for x
        init_barrier(full + lane, 1);
        publish_barriers();
        if (lane < ahead) fetch(lane, lane);
    }
    uint32_t scales[2] = {};
    if (lane < steps) {
        const auto load = [&](int n) {
            const uint8_t* const at = weight.scale_at(n < p.out_dim ? n : p.out_dim - 1, (lane * kParts + part) * kStreamDepth);
            return __ldg(reinterpret_cast<const uint32_t*>(at));
        };
        scales[0] = load(row);
        if (!Box::kOneScale) scales[1] = load(row + R - 1);
    }
    __syncwarp();  // the barriers are there
    await_launch();

    uint4 next[NT][4];
    int x[NT];  // where a column's values are; a column behind the last token is the last token's
#pragma unroll
    for (int n = 0; n < NT; ++n) x[n] = min(n * 8 + group, tokens - 1) * int(p.x_stride) + part * kStreamDepth + quad * 16;
    const auto load_tokens = [&](int step) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                next[n][i] = *reinterpret_cast<const uint4*>(p.x + x[n] + step * kParts * kStreamDepth + i / 2 * (kStreamDepth / 2) + i % 2 * 8);
    };
    load_tokens(0);
    if (lane >= ahead && lane < depth) fetch(lane, lane);
    float c[Box::kTiles][NT][4] = {};
    int slot = 0;
    uint32_t round = 0;
#pragma unroll 1
    for (int step = 0;; ++step) {
        uint4 v[NT][4];
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[n][i] = next[n][i];
        if (step + 1 < steps) load_tokens(step + 1);
        await_barrier(full + slot, round);
        const unsigned char* const box = ring + slot * Box::kBytes + own_row * kStreamDepth;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t lifted[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                lifted[i] = lifted_scale(__byte_perm(__shfl_sync(~0u, scales[i], step), 0, 0x4440 + half * 2 + quad / 2));
            uint4 bytes[Box::kEights];
#pragma unroll
            for (int j = 0; j < Box::kEights; ++j)
                bytes[j] = *reinterpret_cast<const uint4*>(box + j * 8 * kStreamDepth + ((half * 4 + quad) ^ own_row) * 16);
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                uint32_t low[NT], high[NT];  // of the token's four values
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 t = v[n][half * 2 + s / 2];
                    low[n] = s % 2 == 0 ? t.x : t.z, high[n] = s % 2 == 0 ? t.y : t.w;
                }
#pragma unroll
                for (int tile = 0; tile < Box::kTiles; ++tile) {
                    uint32_t a[4] = {};
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int j = tile * 2 + i;
                        if (j == Box::kEights) break;
                        const uint32_t four = s == 0 ? bytes[j].x : s == 1 ? bytes[j].y : s == 2 ? bytes[j].z : bytes[j].w;
                        const uint32_t scale = Box::kOneScale || row / 32 == (row + j * 8) / 32 ? lifted[0] : lifted[1];
                        a[i] = widen_e4m3<0>(four, scale), a[2 + i] = widen_e4m3<2>(four, scale);
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n) multiply_bf16(c[tile][n], a[0], a[1], a[2], a[3], low[n], high[n]);
                }
            }
        }
        __syncwarp();  // all lanes have used theirs
        if (step + 1 == steps) break;
        if (step + depth < steps && lane == 0) {
            release_shared();
            fetch(step + depth, slot);
        }
        if (++slot == depth) slot = 0, round ^= 1;
    }

    float* const own = reinterpret_cast<float*>(ring + slot * Box::kBytes);  // nobody has use for the warp's last box
#pragma unroll
    for (int j = 0; j < Box::kEights; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) own[(n * 8 + quad * 2 + i) * Box::kStride + j * 8 + own_row] = c[j / 2][n][j % 2 * 2 + i];
    __syncthreads();
    constexpr int kFours = kSets * (R / 4);
    const float* const sums = reinterpret_cast<float*>(boxes + (steps - 1) % depth * Box::kBytes);
    const int between = depth * (Box::kBytes / int(sizeof(float)));  // warps' sums
    for (int i = threadIdx.x; i < tokens * kFours; i += W * kWarp) {
        const int token = i / kFours, set = i % kFours / (R / 4), at = i % (R / 4) * 4;
        const int64_t n = first_row + set * R + at;
        if (n >= p.out_dim) continue;
        store_four(p, token, n, add_parts(sums + set * kParts * between + token * Box::kStride + at, kParts, between), vectors);
    }
}

// ---- host ----

template <int R, int W, int kParts, int kResident>
cudaError_t run_stream(const Product& p, const Fp8Weight& weight, int most, int ahead, void* stream) {
    CUtensorMap map;
    if (!describe_rows(map, p, weight, 1, kStreamDepth, R)) return cudaErrorNotSupported;
    const int rows = W / kParts * R, steps = int(p.in_dim / kStreamDepth / kParts), depth = std::min(steps, most);
    const dim3 grid(unsigned((p.out_dim + rows - 1) / rows));
    const auto run = [&](auto kernel) {
        return launch(kernel, grid, W * kWarp, StreamBox<R>::shared_bytes(W * depth), 1, p.early, stream, p, weight, steps, depth,
                      std::min(depth, ahead), stores_fours(p), map);
    };
    return p.tokens <= 8 ? run(stream_product<R, 1, W, kParts, kResident>) : run(stream_product<R, 2, W, kParts, kResident>);
}

// The ways to divide a product: k that is short among two warps and many rows among blocks; k that is long among all of a block's warps,
// and as many rows as there are for each multiprocessor, or few.
enum class StreamWay { kNone, kShort, kEven, kFew };

inline StreamWay stream_way(const Product& p) {
    const auto divides = [&](int parts, int most) { return p.in_dim % (kStreamDepth * parts) == 0 && p.in_dim / (kStreamDepth * parts) <= most; };
    const auto blocks = [&](int rows) { return (p.out_dim + rows - 1) / rows; };
    if (divides(2, 6) && blocks(128) >= kSms) return StreamWay::kShort;
    if (divides(16, kStreamSteps) && blocks(40) <= kSms && blocks(40) * 4 >= kSms * 3) return StreamWay::kEven;
    return divides(20, kStreamSteps) && blocks(16) <= kSms ? StreamWay::kFew : StreamWay::kNone;
}

// Do the dimensions suit it, and the copy engine?
inline bool fits_stream(const Product& p, const Fp8Weight& weight) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(weight.codes);
    return stream_way(p) != StreamWay::kNone && p.x_stride % 8 == 0 && addresses % 16 == 0 && reinterpret_cast<uintptr_t>(weight.scales) % 4 == 0;
}

inline cudaError_t run_stream(const Product& p, const Fp8Weight& weight, void* stream) {
    switch (stream_way(p)) {
        case StreamWay::kShort: return run_stream<32, 8, 2, 2>(p, weight, 3, 3, stream);
        case StreamWay::kEven: return run_stream<40, 16, 16, 1>(p, weight, 2, 1, stream);
        default: return run_stream<16, 20, 20, 1>(p, weight, 2, 1, stream);
    }
}

}  // namespace cedar::cuda
