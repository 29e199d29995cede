// SPDX-License-Identifier: Apache-2.0
// The kernel library's interface with the CUDA bodies, emulated, for tensors of a CPU.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

#include "check.h"
#include "cuda/bodies.h"
#include "machine.h"

namespace {

char last_error[512] = "";

// A call's workspace: what has to be zero, and else bytes of NaNs, whatever calls before it left.
struct Workspace {
    static constexpr size_t kAlignment = 256;
    size_t bytes;
    unsigned char* data = nullptr;

    explicit Workspace(int64_t needed) : bytes(size_t(needed)) {
        if (bytes == 0) return;
        data = static_cast<unsigned char*>(operator new(bytes, std::align_val_t(kAlignment)));
        std::memset(data, 0xff, bytes);
        std::memset(data, 0, counters());
    }
    Workspace(const Workspace&) = delete;
    ~Workspace() { operator delete(data, std::align_val_t(kAlignment)); }
    size_t counters() const { return std::min(bytes, size_t(CEDAR_COUNTER_BYTES)); }
    bool is_as_before() const { return std::all_of(data, data + counters(), [](unsigned char x) { return x == 0; }); }
};

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
        const Workspace workspace(plain ? cuda::plain::op##_workspace(args) : cuda::op##_workspace(args));            \
        args.workspace = workspace.data, args.workspace_bytes = int64_t(workspace.bytes);                             \
        const int status = plain ? cuda::plain::op(args, stream) : cuda::op(args, stream);                            \
        if (!emulated::finish()) return fail(CEDAR_FAILED, #op ": %s", emulated::last_failure());                     \
        if (status != CEDAR_OK) return status;                                                                        \
        return workspace.is_as_before() ? CEDAR_OK : fail(CEDAR_FAILED, #op ": its counters are not zero behind it"); \
    }                                                                                                                 \
    int64_t cedar_##op##_workspace(const cedar_##op##_args*) { return 0; }
CEDAR_OPS(CEDAR_DEFINE)
