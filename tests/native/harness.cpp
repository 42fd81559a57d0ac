// Runs one attention operation, by the kernel in native/ or by ggml, for tests and measurements.
//
// attention.cpp is compiled with other names for the functions of ggml that this file replaces, so
// that the library of ggml that is linked keeps its own.
#include <time.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "repack.h"

struct Spec {
    void *data;  // null: there is no such tensor
    int type;
    int64_t ne[4];
    size_t nb[4];
};

struct Pool {
    int threads;
    std::atomic<int> arrived{0}, rounds{0}, chunk{0};
};

// The switch of the linked library, if our kernels are in it.
extern "C" __attribute__((weak)) void enable_linked(int on) __asm__("cllm_kernels_enable");

extern "C" {

static std::atomic<int> fallbacks{0};

void test_attention(const ggml_compute_params *params, ggml_tensor *dst);
void test_fallback(const ggml_compute_params *params, ggml_tensor *) {
    if (params->ith == 0) fallbacks++;
}
bool test_original_extra(ggml_compute_params *, ggml_tensor *) { return false; }
void test_barrier(ggml_threadpool *pool) {
    Pool &p = *(Pool *)pool;
    const int round = p.rounds;
    if (p.arrived.fetch_add(1) + 1 == p.threads) {
        p.arrived = 0;
        p.rounds++;
    } else {
        for (int i = 0; p.rounds == round; i++)
            if (i > 10000) std::this_thread::yield();
    }
}
void test_chunk_set(ggml_threadpool *pool, int value) { ((Pool *)pool)->chunk = value; }
int test_chunk_add(ggml_threadpool *pool, int value) { return ((Pool *)pool)->chunk.fetch_add(value); }

static double now(int clock) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fill(ggml_tensor &tensor, const Spec &spec) {
    tensor = {};
    tensor.data = spec.data;
    tensor.type = (ggml_type)spec.type;
    for (int i = 0; i < 4; i++) tensor.ne[i] = spec.ne[i], tensor.nb[i] = spec.nb[i];
}

// Computes specs[5] from q, k, v, mask and sinks. Returns 1 if the kernel passed it on to ggml.
// seconds: the shortest time of one of the repetitions; of the processor if there is one thread.
int run_kernel(const Spec *specs, const float *op_params, int threads, size_t work_size, int repeat,
               double *seconds) {
    ggml_tensor tensors[6];
    for (int i = 0; i < 6; i++) fill(tensors[i], specs[i]);
    ggml_tensor &dst = tensors[5];
    dst.op = GGML_OP_FLASH_ATTN_EXT;
    for (int i = 0; i < 5; i++) dst.src[i] = specs[i].data ? &tensors[i] : nullptr;
    memcpy(dst.op_params, op_params, 3 * sizeof(float));

    Pool pool;
    pool.threads = threads;
    void *work = malloc(work_size);  // exactly as much, for AddressSanitizer
    fallbacks = 0;
    *seconds = std::numeric_limits<double>::infinity();
    const int clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    const auto compute = [&](int ith) {
        const ggml_compute_params params = {ith,  threads, work_size,
                                            work, (ggml_threadpool *)&pool, false};
        for (int i = 0; i < repeat; i++) {
            test_barrier((ggml_threadpool *)&pool);
            const double start = now(clock);
            test_attention(&params, &dst);
            test_barrier((ggml_threadpool *)&pool);
            if (ith == 0) *seconds = std::min(*seconds, now(clock) - start);
        }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(compute, i);
    compute(0);
    for (std::thread &each : others) each.join();
    free(work);
    return fallbacks > 0;
}

// The same by the linked library of ggml, with our kernel in it turned off.
void run_ggml(const Spec *specs, const float *op_params, int threads, int repeat, double *seconds) {
    if (enable_linked) enable_linked(0);
    ggml_cpu_init();
    ggml_context *context = ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true});
    ggml_tensor *tensors[5];
    for (int i = 0; i < 5; i++) {
        tensors[i] = nullptr;
        if (!specs[i].data) continue;
        tensors[i] = ggml_new_tensor(context, (ggml_type)specs[i].type, 4, specs[i].ne);
        tensors[i]->data = specs[i].data;
        for (int j = 0; j < 4; j++) tensors[i]->nb[j] = specs[i].nb[j];
    }
    ggml_tensor *dst = ggml_flash_attn_ext(context, tensors[0], tensors[1], tensors[2], tensors[3],
                                           op_params[0], op_params[1], op_params[2]);
    if (tensors[4]) ggml_flash_attn_ext_add_sinks(dst, tensors[4]);
    dst->data = specs[5].data;
    ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, dst);
    ggml_cplan plan = ggml_graph_plan(graph, threads, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    const int clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    *seconds = std::numeric_limits<double>::infinity();
    for (int i = 0; i < repeat; i++) {
        const double start = now(clock);
        ggml_graph_compute(graph, &plan);
        *seconds = std::min(*seconds, now(clock) - start);
    }
    ggml_free(context);
    if (enable_linked) enable_linked(1);
}

// The products that ggml would compute: -rows for a tiled one, rows for the other.
static std::vector<int> products;

bool test_mul_mat_tiled(const ggml_compute_params *params, ggml_tensor *dst);
bool test_mul_mat_id_tiled(const ggml_compute_params *params, ggml_tensor *dst, int64_t expert,
                           int64_t rows, const int32_t *expert_rows, char *scratch);
bool test_original_tiled(const ggml_compute_params *, ggml_tensor *dst) {
    products.push_back(-(int)dst->ne[1]);
    return dst->src[0]->type != GGML_TYPE_Q8_0;  // as for a type without tiles
}
bool test_original_id_tiled(const ggml_compute_params *, ggml_tensor *, int64_t, int64_t rows,
                            const int32_t *, char *) {
    products.push_back(-(int)rows);
    return true;
}
void test_mul_mat(const ggml_compute_params *, ggml_tensor *dst) {
    products.push_back((int)dst->ne[1]);
}

// Tells how a product of so many rows is divided. Returns the number of products, 0 if it is passed
// on whole, to ggml's other product.
int divide_product(int type, int rows, int batches, bool expert, int *sizes) {
    Pool pool;
    pool.threads = 1;
    ggml_tensor weights = {}, input = {}, dst = {};
    weights.type = (ggml_type)type;
    dst.src[0] = &weights, dst.src[1] = &input;
    input.ne[1] = dst.ne[1] = rows;
    input.ne[2] = dst.ne[2] = batches;
    input.ne[3] = dst.ne[3] = 1;
    const ggml_compute_params params = {0, 1, 0, nullptr, (ggml_threadpool *)&pool, false};
    const std::vector<int32_t> slots(2 * rows);
    products.clear();
    const bool done = expert ? test_mul_mat_id_tiled(&params, &dst, 0, rows, slots.data(), nullptr)
                             : test_mul_mat_tiled(&params, &dst);
    std::copy(products.begin(), products.end(), sizes);
    return done ? (int)products.size() : 0;
}

// Multiplies by the linked library of ggml: out (tokens x used experts x rows) from weights
// (experts x rows x columns), input (tokens x columns) and ids (tokens x used experts); without ids
// for the only matrix. ours: as cLLM divides the work. repacked: with weights as llama.cpp loads them;
// below 0: they say that they are stored in another order, which only ggml knows.
void run_product(int type, const int64_t *sizes, const void *weights, const float *input,
                 const int32_t *ids, float *out, int threads, int ours, int repacked,
                 double *seconds) {
    const int64_t columns = sizes[0], rows = sizes[1], experts = sizes[2], tokens = sizes[3],
                  used = sizes[4], sequences = sizes[5];
    if (enable_linked) enable_linked(ours);
    ggml_cpu_init();
    ggml_context *context = ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true});
    ggml_tensor *w = ggml_new_tensor_3d(context, (ggml_type)type, columns, rows, experts);
    ggml_tensor *x = ids ? ggml_new_tensor_3d(context, GGML_TYPE_F32, columns, 1, tokens)
                         : ggml_new_tensor_3d(context, GGML_TYPE_F32, columns, tokens / sequences, sequences);
    ggml_tensor *chosen = ggml_new_tensor_2d(context, GGML_TYPE_I32, used, tokens);
    ggml_tensor *dst = ids ? ggml_mul_mat_id(context, w, x, chosen) : ggml_mul_mat(context, w, x);
    w->data = (void *)weights, x->data = (void *)input, chosen->data = (void *)ids, dst->data = out;
    ggml_backend_buffer_t buffer = nullptr;
    if (repacked < 0) w->extra = context;
    if (repacked > 0) {
        buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_repack_buffer_type(), ggml_nbytes(w));
        w->data = nullptr;
        ggml_backend_tensor_alloc(buffer, w, ggml_backend_buffer_get_base(buffer));
        ggml_backend_tensor_set(w, weights, 0, ggml_nbytes(w));
    }
    ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, dst);
    ggml_cplan plan = ggml_graph_plan(graph, threads, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    const double start = now(CLOCK_THREAD_CPUTIME_ID);
    ggml_graph_compute(graph, &plan);
    *seconds = now(CLOCK_THREAD_CPUTIME_ID) - start;
    ggml_free(context);
    ggml_backend_buffer_free(buffer);
    if (enable_linked) enable_linked(1);
}

// The work memory that ggml has for the operation alone.
size_t work_size(int key_size, int value_size, int heads, int threads) {
    const size_t tiles = 64 * (2 * key_size + 2 * value_size + 2 * 64) * threads;
    const size_t chunks = heads * threads * (2 + value_size) + threads * (key_size + 2 * value_size);
    return sizeof(float) * std::max(tiles, chunks) + 64 * threads;
}
}
