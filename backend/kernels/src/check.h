// SPDX-License-Identifier: Apache-2.0
// What the arguments of each operation must satisfy before a body may trust them.
#pragma once

#include "cedar_kernels.h"

namespace cedar {

// Remember the text for cedar_last_error and return the status.
int fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

#define CEDAR_CHECK(op)                       \
    int check(const cedar_##op##_args* args); \
    int check_cpu(const cedar_##op##_args& args);
CEDAR_OPS(CEDAR_CHECK)
#undef CEDAR_CHECK

}  // namespace cedar
