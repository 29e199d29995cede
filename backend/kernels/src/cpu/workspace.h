// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace cedar::CEDAR_ISA {

// Hands out parts of the caller's workspace, or with none only counts, so that the size and the layout cannot disagree.
class Workspace {
  public:
    explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}

    template <class T>
    T* take(int64_t count) {
        T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return part;
    }

    int64_t used() const { return used_; }

  private:
    char* base_;
    int64_t used_ = 0;
};

}  // namespace cedar::CEDAR_ISA
