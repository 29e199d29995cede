// SPDX-License-Identifier: Apache-2.0
// What the emulator's own parts share.
#pragma once

#include "machine.h"

namespace emulated {

extern Cluster* cluster;  // that runs

uint32_t chance(uint32_t below);
// The thread waits until somebody wakes it; reason: for whoever reads about a deadlock.
void park(const char* reason);
void wake_all(std::vector<Thread*>& waiting);

size_t shared_bytes();  // of a block's memory, poison included
void check_guard(const Block& block);
void land(Copy& copy);

}  // namespace emulated
