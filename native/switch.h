// Whether cLLM's kernels are used, and what the library shows to programs. attention.cpp has the
// functions that change and report the first.
#pragma once

#include <atomic>

struct ggml_compute_params;
struct ggml_tensor;

#if defined(_WIN32)
#define CLLM_HIDDEN
#define CLLM_API extern "C" __declspec(dllexport)
#else
#define CLLM_HIDDEN __attribute__((visibility("hidden")))
#define CLLM_API extern "C" __attribute__((visibility("default")))
#endif

namespace cllm {
extern CLLM_HIDDEN std::atomic<bool> enabled;

// Returns whether quantized.cpp computes products with weights of a type, as llama.cpp loads them.
CLLM_HIDDEN bool has_own_product(int type);
}
