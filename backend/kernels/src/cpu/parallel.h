// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pool.h"

namespace cedar::CEDAR_ISA {

// Multiply-adds below which a second thread costs more to wake than it saves.
constexpr int64_t kParallelWork = 1 << 18;

// body(task, worker) for every task; `work` is the multiply-adds of all of them together.
template <class Body>
inline void parallel(int64_t tasks, int64_t threads, int64_t work, Body&& body) {
    if (threads < 2 || work < kParallelWork) {
        for (int64_t n = 0; n < tasks; ++n) body(n, 0);
        return;
    }
    run_tasks(tasks, threads, [](void* context, int64_t task, int64_t worker) { (*static_cast<Body*>(context))(task, worker); },
              const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace cedar::CEDAR_ISA
