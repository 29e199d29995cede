// SPDX-License-Identifier: Apache-2.0
// The CUDA bodies. Each launches on the stream and returns; dimensions that it is not compiled for are CEDAR_UNSUPPORTED.
#pragma once

#include "cedar_kernels.h"

namespace cedar::cuda {

#define CEDAR_BODY(op)                                     \
    int op(const cedar_##op##_args& args, void* stream);   \
    int64_t op##_workspace(const cedar_##op##_args& args);
CEDAR_OPS(CEDAR_BODY)
#undef CEDAR_BODY

// The bodies for float32 activations: those of the operations whose others take bfloat16 alone, and else the same.
namespace plain {
using namespace cuda;

#define CEDAR_BODY(op)                                     \
    int op(const cedar_##op##_args& args, void* stream);   \
    int64_t op##_workspace(const cedar_##op##_args& args);
CEDAR_BODY(mega_mhc)
CEDAR_BODY(mega_gate)
CEDAR_BODY(mega_attention)
#undef CEDAR_BODY
}  // namespace plain

// Has the device Hopper's matrix instruction of warp groups, and the build its products (wgmma.cuh)? (linear.cu)
bool has_groups();

}  // namespace cedar::cuda
