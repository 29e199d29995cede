// SPDX-License-Identifier: Apache-2.0
// The kernel library's interface with the CUDA bodies, emulated, for tensors of a CPU.
#include <cstdarg>
#include <cstdio>
#include <vector>

#include "check.h"
#include "cuda/bodies.h"

namespace {

char last_error[512] = "";

// A stream's workspace, zeros at first, as `cedar.ops.native` gives it.
std::vector<unsigned char> workspace;

unsigned char* workspace_of(int64_t bytes) {
    constexpr size_t kAlignment = 256;
    if (workspace.size() < size_t(bytes) + kAlignment) workspace.assign(size_t(bytes) * 2 + kAlignment, 0);
    return workspace.data() + (kAlignment - reinterpret_cast<uintptr_t>(workspace.data()) % kAlignment) % kAlignment;
}

}  // namespace

namespace cedar {

int fail(int status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

}  // namespace cedar

using namespace cedar;

int64_t cedar_abi_version(void) { return CEDAR_ABI_VERSION; }
const char* cedar_last_error(void) { return last_error; }
const char* cedar_build_info(void) { return "emulated cuda"; }
int cedar_has_body(const char*, int64_t) { return 1; }
int cedar_replay(const cedar_call* calls, int64_t count, void* stream) {
    for (int64_t n = 0; n < count; ++n)
        if (const int status = calls[n].function(calls[n].args, stream)) return status;
    return CEDAR_OK;
}

#define CEDAR_DEFINE(op)                                                                                              \
    int cedar_##op(const cedar_##op##_args* given, void* stream) {                                                    \
        if (const int status = check(given)) return status;                                                           \
        if (given->rows == 0) return CEDAR_OK;                                                                        \
        cedar_##op##_args args = *given;                                                                              \
        const bool plain = args.type == CEDAR_F32;                                                                    \
        args.workspace_bytes = plain ? cuda::plain::op##_workspace(args) : cuda::op##_workspace(args);                \
        args.workspace = workspace_of(args.workspace_bytes);                                                          \
        return plain ? cuda::plain::op(args, stream) : cuda::op(args, stream);                                        \
    }                                                                                                                 \
    int64_t cedar_##op##_workspace(const cedar_##op##_args*) { return 0; }
CEDAR_OPS(CEDAR_DEFINE)
