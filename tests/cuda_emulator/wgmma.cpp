// SPDX-License-Identifier: Apache-2.0
#include "wgmma.h"

#include <algorithm>
#include <array>
#include <limits>

#include "include/cuda_runtime.h"

namespace emulated {

// 64 rows of sums whose registers products change: in the registers' place while any is under way.
struct Sums {
    int columns, under_way = 0;
    float* registers[128];
    float values[64][256];

    template <class Change>
    void each(Change change) {
        for (int t = 0; t < 128; ++t)
            for (int n = 0; n < columns / 2; ++n)
                change(registers[t][n], values[t / 32 * 16 + t % 32 / 4 + n % 4 / 2 * 8][n / 4 * 8 + t % 4 * 2 + n % 2]);
    }
};

namespace {

Group& group_of(const Thread& t) { return t.block->groups[t.index.x / 128]; }

float e5m2(uint32_t code) {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> all{};
        for (uint32_t i = 0; i < 256; ++i) all[i] = float_of_half(i << 8);
        return all;
    }();
    return values[code & 0xff];
}

// A matrix of bf16 or E5M2 in shared memory, 128 bytes a row, whose 16-byte units are exchanged by the address.
struct Matrix {
    bool bytes;
    uint32_t start, leading, stride;
    Block* block;

    Matrix(uint64_t descriptor, bool bytes) : bytes(bytes), start(uint32_t(descriptor & 0x3fff) << 4), leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
                                           stride(uint32_t(descriptor >> 32 & 0x3fff) << 4), block(current->block) {
        if (descriptor >> 62 != 1) failed("wgmma: the emulator reads matrices whose units of 128 bytes are exchanged, and no others");
        if (start / 128 % 8 != (descriptor >> 49 & 7)) failed("wgmma: a matrix whose rows begin at no multiple of 1024 bytes");
    }
    double at(uint32_t address) const {
        address ^= (address >> 7 & 7) << 4;
        if (address + 2 > kReserved + kMostShared + kReserved) failed("wgmma: a matrix outside of shared memory");
        if (bytes) return e5m2(block->memory[address]);
        uint16_t bits;
        std::memcpy(&bits, block->memory + address, 2);
        return __uint_as_float(uint32_t(bits) << 16);
    }
    double by_row(int row, int k) const {
        return at(start + uint32_t(row / 8) * stride + uint32_t(row % 8) * 128 + uint32_t(k) * (bytes ? 1 : 2));
    }
    double by_column(int k, int n) const {
        return at(start + uint32_t(n / 64) * leading + uint32_t(k / 8) * stride + uint32_t(k % 8) * 128 + uint32_t(n % 64) * 2);
    }
};

// Sums of a row as Hopper's FP8 units make them: what is below the 14th bit of the largest term is cut off, and of the sum.
void add_cut(float* sums, int columns, const double* row, const double (*b)[256]) {
    constexpr int kDepth = 32, kLess = 13 << 23;
    float terms[kDepth + 1][256], largest[256];
    for (int n = 0; n < columns; ++n) terms[kDepth][n] = sums[n], largest[n] = std::fabs(sums[n]);
    for (int k = 0; k < kDepth; ++k) {
        const float a = float(row[k]);
        for (int n = 0; n < columns; ++n) terms[k][n] = a * float(b[k][n]), largest[n] = std::max(largest[n], std::fabs(terms[k][n]));
    }
    for (int n = 0; n < columns; ++n) {
        float plain = 0.0f;
        int cut = 0;
        const float unit = __uint_as_float((__float_as_uint(largest[n]) & 0x7f800000u) - kLess), units = 1.0f / unit;
        for (int k = 0; k <= kDepth; ++k) plain += terms[k][n], cut += int(terms[k][n] * units);
        int dropped = 0;
        while (std::abs(cut) >> dropped >= 1 << 14) ++dropped;
        sums[n] = plain == plain && largest[n] > 0x1p-100f ? float(cut / (1 << dropped) * (1 << dropped)) * unit : plain;
    }
}

// What an instruction's threads gave, and its right side, read when it is carried out.
struct Job {
    bool a_in_registers, adds, b_transposed;
    int depth;
    double a[64][32];
    Matrix a_matrix, b_matrix;
    std::shared_ptr<Sums> sums;

    void carry_out(Group& group) {
        Sums& s = *sums;
        double b[32][256];
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < s.columns; ++n) b[k][n] = b_transposed ? b_matrix.by_column(k, n) : b_matrix.by_row(n, k);
        for (int row = 0; row < 64; ++row) {
            if (!a_in_registers)
                for (int k = 0; k < depth; ++k) a[row][k] = a_matrix.by_row(row, k);
            if (b_matrix.bytes) {
                if (!adds) std::fill_n(s.values[row], s.columns, 0.0f);
                add_cut(s.values[row], s.columns, a[row], b);
                continue;
            }
            double total[256] = {};
            for (int k = 0; k < depth; ++k)
                for (int n = 0; n < s.columns; ++n) total[n] += a[row][k] * b[k][n];
            for (int n = 0; n < s.columns; ++n) s.values[row][n] = float((adds ? double(s.values[row][n]) : 0.0) + total[n]);
        }
        if (--s.under_way > 0) return;
        s.each([](float& mine, float value) { mine = value; });
        group.sums.erase(s.registers[0]);
    }
};

void carry_out_until(Group& group, uint64_t number) {
    while (group.carried_out < number) {
        const auto product = std::move(group.products.front());
        group.products.pop_front(), ++group.carried_out;
        product();
    }
}

void start_together(Product* const* threads) {
    const Product& first = *threads[0];
    Group& group = group_of(*current);
    std::shared_ptr<Sums>& sums = group.sums[first.c];
    if (sums == nullptr) {
        sums = std::make_shared<Sums>();
        sums->columns = first.columns;
        for (int t = 0; t < 128; ++t) sums->registers[t] = threads[t]->c;
        sums->each([](float& mine, float& value) { value = mine, mine = std::numeric_limits<float>::quiet_NaN(); });
    }
    if (sums->columns != first.columns) failed("wgmma: sums of two sizes in the same registers");
    ++sums->under_way;
    const auto job = std::make_shared<Job>(Job{first.a_in_registers, first.adds, first.b_transposed, first.e5m2 ? 32 : 16, {},
                                               Matrix(first.a_in_registers ? first.b_matrix : first.a_matrix, first.e5m2), Matrix(first.b_matrix, first.e5m2), sums});
    for (int t = 0; t < 128; ++t) {
        const Product& p = *threads[t];
        if (p.adds != first.adds || p.e5m2 != first.e5m2 || p.b_matrix != first.b_matrix || p.a_matrix != first.a_matrix) failed("wgmma: threads of a warp group give different operands");
        for (int i = 0; first.e5m2 && i < 4; ++i)
            for (int k = 0; k < 4; ++k) job->a[t / 32 * 16 + t % 32 / 4 + i % 2 * 8][t % 4 * 4 + i / 2 * 16 + k] = e5m2(p.a[i] >> (8 * k));
        for (int i = 0; !first.e5m2 && first.a_in_registers && i < 4; ++i)
            for (int half = 0; half < 2; ++half)
                job->a[t / 32 * 16 + t % 32 / 4 + i % 2 * 8][t % 4 * 2 + i / 2 * 8 + half] = __uint_as_float(half ? p.a[i] & 0xffff0000u : p.a[i] << 16);
    }
    group.products.push_back([job, &group] { job->carry_out(group); });
    if (lands_early()) carry_out_until(group, group.carried_out + group.products.size());
}

}  // namespace

void start_product(Product& mine) {
    ++current->products;
    meet_group("wgmma.mma_async", &mine, [](void* const* threads) { start_together(reinterpret_cast<Product* const*>(threads)); });
}

void close_products() { current->closed_products.push_back(current->products); }

void await_products(size_t left) {
    auto& closed = current->closed_products;
    if (closed.size() <= left) return;
    const auto last = closed.end() - long(left) - 1;
    carry_out_until(group_of(*current), *last);
    closed.erase(closed.begin(), last + 1);
}

}  // namespace emulated
