// Whether cLLM's kernels are used, and what the library shows to programs. attention.cpp has the
// functions that change and report the first.
#pragma once

#include <atomic>

#if defined(_WIN32)
#define CLLM_HIDDEN
#define CLLM_API extern "C" __declspec(dllexport)
#else
#define CLLM_HIDDEN __attribute__((visibility("hidden")))
#define CLLM_API extern "C" __attribute__((visibility("default")))
#endif

namespace cllm {
extern CLLM_HIDDEN std::atomic<bool> enabled;
}
