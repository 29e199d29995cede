// SPDX-License-Identifier: Apache-2.0
// Rows of a table far larger than any cache: each is a miss in the caches and in the address translation, so that a thread asks for
// rows long before it copies them.
#include <algorithm>
#include <cstring>

#include "cedar_kernels.h"
#include "check.h"
#include "pool.h"

namespace cedar {
namespace {

constexpr int64_t kTaskRows = 64;
constexpr int64_t kThreadTasks = 4;  // with fewer, waking one more thread takes longer than they do
constexpr int64_t kAhead = 8;        // rows; more lines than these have are not on their way at a time
constexpr int64_t kLine = 64;

struct Packing {
    const int64_t* ids;
    int64_t count;
    const uint8_t *table, *scales;
    int64_t rows, table_width, dim;
    uint8_t* out;
    int64_t width;

    static void request(const uint8_t* bytes, int64_t size) {
        const uint8_t* line = bytes - reinterpret_cast<uintptr_t>(bytes) % kLine;
        for (; line < bytes + size; line += kLine) __builtin_prefetch(line);
    }

    bool has(int64_t id) const { return uint64_t(id) < uint64_t(rows); }

    void request(int64_t id) const {
        if (!has(id)) return;
        const int64_t behind = dim / 32;
        request(table + id * table_width, scales == nullptr ? dim + behind : dim);
        if (scales != nullptr) request(scales + id * behind, behind);
    }

    void copy(int64_t id, uint8_t* to) const {
        const int64_t behind = dim / 32;
        if (!has(id)) {
            std::memset(to, 0, size_t(dim + behind));
        } else if (scales == nullptr) {
            std::memcpy(to, table + id * table_width, size_t(dim + behind));
        } else {
            std::memcpy(to, table + id * table_width, size_t(dim));
            std::memcpy(to + dim, scales + id * behind, size_t(behind));
        }
    }

    void run(int64_t task) const {
        const int64_t first = task * kTaskRows, end = std::min(first + kTaskRows, count);
        for (int64_t n = first; n < std::min(first + kAhead, end); ++n) request(ids[n]);
        for (int64_t n = first; n < end; ++n) {
            if (n + kAhead < end) request(ids[n + kAhead]);
            copy(ids[n], out + n * width);
        }
    }
};

}  // namespace
}  // namespace cedar

int cedar_pack_rows(const int64_t* ids, int64_t count, const uint8_t* table, int64_t table_rows, int64_t table_width,
                    const uint8_t* table_scale, int64_t dim, uint8_t* out, int64_t width, int64_t threads) {
    using namespace cedar;
    if (count <= 0) return CEDAR_OK;
    const int64_t least = dim + dim / 32;
    if (!ids || !table || !out || dim <= 0 || dim % 32 != 0 || table_rows < 0 || width < least || table_width < (table_scale ? dim : least))
        return fail(CEDAR_INVALID, "pack_rows: rows of %lld bytes, %s scales, to %lld bytes; dim is %lld", (long long)table_width,
                    table_scale ? "without" : "with", (long long)width, (long long)dim);
    const Packing packing{ids, count, table, table_scale, table_rows, table_width, dim, out, width};
    const int64_t tasks = (count + kTaskRows - 1) / kTaskRows;
    run_tasks(tasks, std::min(threads, tasks / kThreadTasks),
              [](void* context, int64_t task, int64_t) { static_cast<const Packing*>(context)->run(task); },
              const_cast<Packing*>(&packing));
    return CEDAR_OK;
}
