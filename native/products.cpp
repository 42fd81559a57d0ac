// How many rows of a matrix product ggml's tiled product takes, for weights that are not repacked.
//
// ggml has two products: one that takes each row alone, so that its time grows with the rows, and a
// tiled one for 16 rows at a time, which takes as long for one row as for 16. ggml uses the tiled
// one from 8 rows on, for all types and CPUs. With plain AVX2, a product of 8 rows then takes up to
// twice as long as one of 7, and one of 17 half as long again as one of 16. Here, rows go to the
// tiled product only where it is measured to be faster, and those beyond full tiles to the other
// one if they are few.

#include <time.h>

#include <algorithm>
#include <vector>

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ops.h"
#include "switch.h"
#include "tiled/tiled.h"

// ggml's own functions, whose names are changed where tiled.cpp is compiled (llama.cmake).
extern "C" {
bool ggml_original_mul_mat_tiled(const ggml_compute_params *params, ggml_tensor *dst);
bool ggml_original_mul_mat_id_tiled(const ggml_compute_params *params, ggml_tensor *dst,
                                    int64_t expert, int64_t rows, const int32_t *expert_rows,
                                    char *scratch);
}
CLLM_API int cllm_tiled_rows(int type, int rows);
CLLM_API int cllm_time_products(int type, double *seconds);

// The least rows for which a tile is faster than the other product: alone, and after full tiles,
// whose weights are unpacked already.
struct Least {
    int alone, after;
};

static const int TILE = 16;
static const Least OF_GGML = {8, 1};

// Returns what was measured on Zen 5 for CPUs with AVX-512 and VNNI, and on Zen 3 for those with
// plain AVX2, and what ggml does for others.
static Least least_rows(ggml_type type) {
#if defined(__AVX512VNNI__)
    switch (type) {
        case GGML_TYPE_Q6_K: return {9, 4};
        case GGML_TYPE_Q2_K: return {8, 5};
        case GGML_TYPE_Q4_K: return {7, 4};
        case GGML_TYPE_Q3_K: return {7, 3};
        case GGML_TYPE_IQ1_M: return {7, 2};
        default: return {5, 3};
    }
#elif defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
    switch (type) {
        case GGML_TYPE_Q6_K: return {13, 7};
        case GGML_TYPE_Q2_K: return {12, 9};
        case GGML_TYPE_Q4_K: return {11, 7};
        case GGML_TYPE_Q3_K: return {11, 7};
        case GGML_TYPE_Q5_K: return {8, 6};
        case GGML_TYPE_IQ4_XS: return {8, 6};
        default: return {8, 4};
    }
#else
    (void)type;
    return OF_GGML;
#endif
}

// What a measurement wants instead: all rows to the tiled product, or none.
enum class Wanted { RULE, TILES, NONE };
static thread_local Wanted wanted = Wanted::RULE;

// Returns how many of the first rows go to the tiled product.
static int64_t tiled_rows(ggml_type type, int64_t rows) {
    if (wanted != Wanted::RULE) return wanted == Wanted::TILES ? rows : 0;
    const Least least = cllm::enabled ? least_rows(type) : OF_GGML;
    if (rows < least.alone) return 0;
    const int64_t rest = rows % TILE;
    return rows < TILE || rest >= least.after ? rows : rows - rest;
}

// Returns how many of the rows of a product with weights of the type go to tiles of 16.
CLLM_API int cllm_tiled_rows(int type, int rows) { return (int)tiled_rows((ggml_type)type, rows); }

// A product of some of an operation's rows.
struct Part {
    ggml_tensor input, dst;

    Part(const ggml_tensor &whole, int64_t first, int64_t rows) : input(*whole.src[1]), dst(whole) {
        dst.src[1] = &input;
        for (ggml_tensor *each : {&input, &dst}) {
            each->data = (char *)each->data + first * each->nb[1];
            each->ne[1] = rows;
            each->nb[2] = each->nb[3] = rows * each->nb[1];
        }
    }
};

// Both return false for ggml's other product.
bool ggml_compute_forward_mul_mat_tiled(const ggml_compute_params *params, ggml_tensor *dst) {
    const int64_t rows = dst->ne[1];
    const int64_t tiled = tiled_rows(dst->src[0]->type, rows);
    if (tiled == 0) return false;
    if (tiled == rows || dst->ne[2] * dst->ne[3] != 1) return ggml_original_mul_mat_tiled(params, dst);
    Part full(*dst, 0, tiled), rest(*dst, tiled, rows - tiled);
    if (!ggml_original_mul_mat_tiled(params, &full.dst)) return false;
    ggml_barrier(params->threadpool);  // both use the work memory, and the counter of chunks
    ggml_compute_forward_mul_mat(params, &rest.dst);
    return true;
}

// Multiplies an expert's rows one by one. They are in the work memory, as the type needs them.
static void multiply_rows(const ggml_compute_params &params, ggml_tensor &dst, int64_t expert,
                          int64_t rows, const int32_t *expert_rows) {
    const ggml_tensor &weights = *dst.src[0], &input = *dst.src[1];
    const ggml_type_traits_cpu &traits = *ggml_get_type_traits_cpu(weights.type);
    const bool converted = input.type != traits.vec_dot_type;
    const char *from = (const char *)(converted ? params.wdata : input.data);
    const size_t row_size =
        converted ? ggml_row_size(traits.vec_dot_type, input.ne[0]) : input.nb[1];
    const char *matrix = (const char *)weights.data + expert * weights.nb[2];
    const int64_t end = weights.ne[1] * (params.ith + 1) / params.nth;
    for (int64_t i = weights.ne[1] * params.ith / params.nth; i < end; i++) {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t slot = expert_rows[2 * row], token = expert_rows[2 * row + 1];
            const char *values = from + (slot % input.ne[1] + token * input.ne[1]) * row_size;
            float *to = (float *)((char *)dst.data + slot * dst.nb[1] + token * dst.nb[2]) + i;
            traits.vec_dot((int)weights.ne[0], to, 0, matrix + i * weights.nb[1], 0, values, 0, 1);
        }
    }
}

bool ggml_compute_forward_mul_mat_id_tiled(const ggml_compute_params *params, ggml_tensor *dst,
                                           int64_t expert, int64_t rows,
                                           const int32_t *expert_rows, char *scratch) {
    const int64_t tiled = tiled_rows(dst->src[0]->type, rows);
    if (tiled == 0 ||
        !ggml_original_mul_mat_id_tiled(params, dst, expert, tiled, expert_rows, scratch))
        return false;
    if (tiled < rows)
        multiply_rows(*params, *dst, expert, rows - tiled, expert_rows + 2 * tiled);
    return true;
}

// ---------------------------------------------------------------------------- measurement

static double now() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
    timespec time;  // of the processor, so that other programs do not count
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
#else
    return ggml_time_us() * 1e-6;
#endif
}

// A product of weights of any value with rows, by one thread.
struct Trial {
    ggml_tensor *product;
    ggml_cgraph *graph;
    ggml_cplan plan;
    std::vector<uint8_t> work;
    double seconds = 1e9;  // the shortest time

    Trial(ggml_context *context, ggml_tensor *weights, int rows) : graph(ggml_new_graph(context)) {
        ggml_tensor *input = ggml_new_tensor_2d(context, GGML_TYPE_F32, weights->ne[0], rows);
        for (int64_t i = 0; i < ggml_nelements(input); i++) ((float *)input->data)[i] = i % 19 - 9.0f;
        product = ggml_mul_mat(context, weights, input);
        ggml_build_forward_expand(graph, product);
        plan = ggml_graph_plan(graph, 1, nullptr);
        work.resize(plan.work_size);
        plan.work_data = work.data();
    }

    void run(Wanted which) {
        wanted = which;
        const double start = now();
        ggml_graph_compute(graph, &plan);
        seconds = std::min(seconds, now() - start);
        wanted = Wanted::RULE;
    }
};

// Measures weights of the type for some 50 ms: seconds[0] for a row by the product that takes each
// alone, seconds[1] for a tile, and seconds[2] for two tiles. Returns 0 if tiles do not take the type,
// or if quantized.cpp does.
CLLM_API int cllm_time_products(int type, double *seconds) {
    const int columns = 2048, rows = 512, few = 8;
    if (!ggml_is_quantized((ggml_type)type) || cllm::has_own_product(type)) return 0;
    ggml_cpu_init();
    ggml_context *context = ggml_init({8 << 20, nullptr, false});
    ggml_tensor *weights = ggml_new_tensor_2d(context, (ggml_type)type, columns, rows);
    for (size_t i = 0; i < ggml_nbytes(weights); i++) ((uint8_t *)weights->data)[i] = i * 167 % 251;
    Trial alone(context, weights, few), one(context, weights, TILE), two(context, weights, 2 * TILE);
    const bool tiles = ggml_tiled_wdata_size(1, one.product) > 0;
    for (int i = 0; tiles && i < 9; i++) {
        alone.run(Wanted::NONE);
        one.run(Wanted::TILES);
        two.run(Wanted::TILES);
    }
    seconds[0] = alone.seconds / few;
    seconds[1] = one.seconds;
    seconds[2] = two.seconds;
    ggml_free(context);
    return tiles;
}
