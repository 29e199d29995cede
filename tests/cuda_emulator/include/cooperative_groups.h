// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

struct cluster_group {
    unsigned num_blocks() const { return unsigned(::emulated::current->block->cluster->blocks.size()); }
    unsigned block_rank() const { return unsigned(::emulated::current->block->rank); }
    void sync() const { ::emulated::arrive_cluster(), ::emulated::await_cluster(); }
    template <class T>
    T* map_shared_rank(T* p, unsigned rank) const {
        return reinterpret_cast<T*>(::emulated::in_block(p, rank));
    }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
