// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cedar_kernels.h"

namespace cedar::CEDAR_ISA {

#define CEDAR_BODY(op)                       \
    void op(const cedar_##op##_args& args);  \
    int64_t op##_workspace(const cedar_##op##_args& args);
CEDAR_OPS(CEDAR_BODY)
#undef CEDAR_BODY

}  // namespace cedar::CEDAR_ISA
