// SPDX-License-Identifier: Apache-2.0
// Operations that have no CUDA body.
#include "bodies.h"
#include "check.h"

namespace cedar::cuda {

#define CEDAR_NO_BODY(op)                                                                                              \
    int op(const cedar_##op##_args&, void*) { return fail(CEDAR_UNSUPPORTED, #op ": this library has no body for a GPU"); } \
    int64_t op##_workspace(const cedar_##op##_args&) { return 0; }

CEDAR_NO_BODY(moe_fp4)
CEDAR_NO_BODY(mqa_logits_topk)
CEDAR_NO_BODY(mega_attention)
CEDAR_NO_BODY(engram_gather)
CEDAR_NO_BODY(engram_gate)

}  // namespace cedar::cuda
