// SPDX-License-Identifier: Apache-2.0
#include "bodies.h"

#include "kernels.h"

#define CEDAR_STRING(x) #x
#define CEDAR_NAME(x) CEDAR_STRING(x)

namespace cedar::CEDAR_ISA {

#define CEDAR_BODY(op) op, op##_workspace,
extern const CpuBodies bodies = {CEDAR_NAME(CEDAR_ISA), CEDAR_OPS(CEDAR_BODY)};
#undef CEDAR_BODY

}  // namespace cedar::CEDAR_ISA
