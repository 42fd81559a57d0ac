// From how many rows on ggml's tiled matrix product is used, for weights that are not repacked.
//
// ggml begins at 8 rows for all types and CPUs. With plain AVX2, a product of 8 rows then takes up
// to twice as long as one of 7. What is measured slower is left to ggml's other product.

#include "ggml-cpu-impl.h"
#include "switch.h"

// ggml's own functions, whose names are changed where tiled.cpp is compiled (llama.cmake).
extern "C" {
bool ggml_original_mul_mat_tiled(const ggml_compute_params *params, ggml_tensor *dst);
bool ggml_original_mul_mat_id_tiled(const ggml_compute_params *params, ggml_tensor *dst,
                                    int64_t expert, int64_t rows, const int32_t *expert_rows,
                                    char *scratch);
bool ggml_compute_forward_mul_mat_tiled(const ggml_compute_params *params, ggml_tensor *dst);
bool ggml_compute_forward_mul_mat_id_tiled(const ggml_compute_params *params, ggml_tensor *dst,
                                           int64_t expert, int64_t rows,
                                           const int32_t *expert_rows, char *scratch);
}

// Returns whether the tiled product is the faster one, as measured on Zen 3 (AVX2).
static bool tiled_pays(ggml_type type, int64_t rows) {
    if (!cllm::enabled) return true;
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
    if (type == GGML_TYPE_Q6_K) return rows >= 16;
    if (type == GGML_TYPE_Q4_K) return rows >= 12;
#else
    (void)type, (void)rows;
#endif
    return true;
}

// Both return false for ggml's other product.
bool ggml_compute_forward_mul_mat_tiled(const ggml_compute_params *params, ggml_tensor *dst) {
    return tiled_pays(dst->src[0]->type, dst->src[1]->ne[1]) &&
           ggml_original_mul_mat_tiled(params, dst);
}

bool ggml_compute_forward_mul_mat_id_tiled(const ggml_compute_params *params, ggml_tensor *dst,
                                           int64_t expert, int64_t rows,
                                           const int32_t *expert_rows, char *scratch) {
    return tiled_pays(dst->src[0]->type, rows) &&
           ggml_original_mul_mat_id_tiled(params, dst, expert, rows, expert_rows, scratch);
}
