// SPDX-License-Identifier: Apache-2.0
// Operations that have no CUDA body.
#include "bodies.h"

#include <cstring>

#include "check.h"

namespace cedar::cuda {

#define CEDAR_WITHOUT_BODY(X) X(moe_fp4) X(mqa_logits_topk) X(mega_attention) X(engram_gather) X(engram_gate)

#define CEDAR_REFUSE(op)                                                                                               \
    int op(const cedar_##op##_args&, void*) { return fail(CEDAR_UNSUPPORTED, #op ": this library has no body for a GPU"); } \
    int64_t op##_workspace(const cedar_##op##_args&) { return 0; }
CEDAR_WITHOUT_BODY(CEDAR_REFUSE)

bool has_body(const char* op) {
#define CEDAR_IS(name) \
    if (std::strcmp(op, #name) == 0) return false;
    CEDAR_WITHOUT_BODY(CEDAR_IS)
    return true;
}

}  // namespace cedar::cuda
