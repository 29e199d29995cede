// SPDX-License-Identifier: Apache-2.0
// Threads of the CPU bodies: one pool per process, made on the first parallel call, asleep between calls.
#pragma once

#include <cstdint>

namespace cedar {

using Task = void (*)(void* context, int64_t task, int64_t worker);

// Run tasks [0, tasks) on at most `threads` threads, this one included, and wait for all. worker is in [0, threads). While
// another call uses the pool, or when there is nothing to share, this thread runs them alone.
void run_tasks(int64_t tasks, int64_t threads, Task task, void* context);

}  // namespace cedar
