// Whether cLLM's kernels are used. attention.cpp has the functions that change and report it.
#pragma once

#include <atomic>

#if defined(_WIN32)
#define CLLM_HIDDEN
#else
#define CLLM_HIDDEN __attribute__((visibility("hidden")))
#endif

namespace cllm {
extern CLLM_HIDDEN std::atomic<bool> enabled;
}
