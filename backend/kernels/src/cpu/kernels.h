// SPDX-License-Identifier: Apache-2.0
// The CPU bodies of one instruction set. Each translation unit of the bodies is compiled once per set, in a namespace of its own.
#pragma once

#include "cedar_kernels.h"

namespace cedar {

#define CEDAR_BODY(op)                                    \
    void (*op)(const cedar_##op##_args& args);            \
    int64_t (*op##_workspace)(const cedar_##op##_args& args);

struct CpuBodies {
    const char* name;
    CEDAR_OPS(CEDAR_BODY)
};
#undef CEDAR_BODY

namespace baseline { extern const CpuBodies bodies; }
namespace avx2 { extern const CpuBodies bodies; }
namespace avx512 { extern const CpuBodies bodies; }

}  // namespace cedar
