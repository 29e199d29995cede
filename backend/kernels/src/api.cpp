// SPDX-License-Identifier: Apache-2.0
// The exported functions: check the arguments, choose the body, turn what goes wrong into a status and a text.
#include "cedar_kernels.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "cpu/kernels.h"
#ifdef CEDAR_WITH_CUDA
#include "cuda/bodies.h"
#endif

namespace cedar {
namespace {

thread_local char last_error[512] = "";

const CpuBodies& best_bodies() {
#if defined(__x86_64__)
    const char* most = std::getenv("CEDAR_CPU_ISA");  // for tests: "baseline" or "avx2" keeps a wider set from being used
    const bool any = most == nullptr;
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && (any || std::strcmp(most, "avx512") == 0)) return avx512::bodies;
    if (has_avx2 && (any || std::strcmp(most, "baseline") != 0)) return avx2::bodies;
#endif
    return baseline::bodies;
}

const CpuBodies& cpu() {
    static const CpuBodies& bodies = best_bodies();
    return bodies;
}

}  // namespace

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

const char* cedar_build_info(void) {
    static char text[128];
    static const int written = std::snprintf(text, sizeof text, "cpu: %s%s", cpu().name,
#ifdef CEDAR_WITH_CUDA
                                             "; cuda: " CEDAR_CUDA_TARGETS
#else
                                             ""
#endif
    );
    (void)written;
    return text;
}

int cedar_has_body(const char* op, int64_t device) {
#define CEDAR_IS(name) \
    if (std::strcmp(op, #name) == 0) return device == CEDAR_CPU || CEDAR_CUDA_BODY(name);
#ifdef CEDAR_WITH_CUDA
#define CEDAR_CUDA_BODY(name) (device == CEDAR_CUDA)
#else
#define CEDAR_CUDA_BODY(name) false
#endif
    CEDAR_OPS(CEDAR_IS)
#undef CEDAR_IS
    return 0;
}

int cedar_replay(const cedar_call* calls, int64_t count, void* stream) {
    for (int64_t n = 0; n < count; ++n)
        if (const int status = calls[n].function(calls[n].args, stream)) return status;
    return CEDAR_OK;
}

#ifdef CEDAR_WITH_CUDA
#define CEDAR_CUDA_CHOICE(function) (args->type == CEDAR_F32 ? cuda::plain::function : cuda::function)
#define CEDAR_ON_CUDA(op) CEDAR_CUDA_CHOICE(op)(*args, stream)
#define CEDAR_CUDA_WORKSPACE(op) CEDAR_CUDA_CHOICE(op##_workspace)(*args)
#else
#define CEDAR_ON_CUDA(op) ((void)stream, fail(CEDAR_UNSUPPORTED, #op ": this library was built without CUDA"))
#define CEDAR_CUDA_WORKSPACE(op) 0
#endif

#define CEDAR_DEFINE(op)                                                                                    \
    int cedar_##op(const cedar_##op##_args* args, void* stream) {                                           \
        if (const int status = check(args)) return status;                                                  \
        if (args->rows == 0) return CEDAR_OK;                                                               \
        if (args->device == CEDAR_CUDA) return CEDAR_ON_CUDA(op);                                           \
        if (const int status = check_cpu(*args)) return status;                                             \
        if (args->workspace_bytes < cpu().op##_workspace(*args))                                            \
            return fail(CEDAR_WORKSPACE, #op ": workspace has %lld bytes", (long long)args->workspace_bytes);\
        cpu().op(*args);                                                                                    \
        return CEDAR_OK;                                                                                    \
    }                                                                                                       \
    int64_t cedar_##op##_workspace(const cedar_##op##_args* args) {                                         \
        if (check(args)) return -1;                                                                         \
        return args->device == CEDAR_CUDA ? CEDAR_CUDA_WORKSPACE(op) : cpu().op##_workspace(*args);         \
    }
CEDAR_OPS(CEDAR_DEFINE)
