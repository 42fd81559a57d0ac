// Products of weights in Q4_K, as ggml repacks them, and in Q6_K.
//
// ggml unpacks weights anew for each row of the input, or for each 4 or 16. Here, a block of
// weights is unpacked once for up to MAX_ROWS rows. As in ggml, the input is rounded to 8-bit values
// with a scale for each 256. Their products are added as integers, which is exact, and the float32
// sums of a row in an order that does not depend on the other rows. So a row has the same bits
// whatever shares the product.

#include <algorithm>
#include <cmath>
#include <utility>

#define GGML_COMMON_DECL_CPP
#include "ggml-backend-impl.h"
#include "ggml-common.h"
#include "ggml-cpu-impl.h"
#include "ops.h"
#include "repack.h"
#include "switch.h"
#include "vectors.h"

#if defined(CLLM_VECTORS) && defined(__AVX2__)

// Sums of all rows must be in registers, so loops over rows must not remain.
#if defined(__clang__)
#define CLLM_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define CLLM_UNROLL _Pragma("GCC unroll 12")
#else
#define CLLM_UNROLL
#endif

namespace cllm {
namespace {

// A block of 256 values of the input, as large as ggml's block_q8_K. For Q4_K, whose weights are not
// negative, sums has the sums of 32 values in the order of MIN_ORDER. For Q6_K, 128 is added to each
// value, so that they are not negative.
struct Values {
    float scale;
    int8_t values[QK_K];
    int16_t sums[16];
};
static_assert(sizeof(Values) == sizeof(block_q8_K), "ggml plans memory for its own blocks");

constexpr int MIN_ORDER[8] = {0, 1, 4, 5, 2, 3, 6, 7};

// ---------------------------------------------------------------------------- integers

#if defined(CLLM_AVX512)

typedef __m512i Integers;
constexpr int MAX_ROWS = 12;  // whose sums fit into registers, beside a block of weights

CLLM_INLINE Integers load_bytes(const void *p) { return _mm512_loadu_si512(p); }
CLLM_INLINE Integers zeros() { return _mm512_setzero_si512(); }
CLLM_INLINE Integers spread_8_bytes(const void *p) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)p));
}
CLLM_INLINE Integers low_4_bits(Integers v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
CLLM_INLINE Integers high_4_bits(Integers v) { return low_4_bits(_mm512_srli_epi16(v, 4)); }
CLLM_INLINE Vector to_float(Integers v) { return _mm512_cvtepi32_ps(v); }
#if defined(__AVX512VNNI__)
#define CLLM_DOT_PRODUCTS
CLLM_INLINE Integers add_products(Integers sum, Integers weights, Integers values) {
    return _mm512_dpbusd_epi32(sum, weights, values);
}
CLLM_INLINE Integers add_scaled(Integers sum, Integers products, Integers scales) {
    return _mm512_dpwssd_epi32(sum, products, scales);
}
#else
CLLM_INLINE Integers add_products(Integers sum, Integers weights, Integers values) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(weights, values));
}
CLLM_INLINE Integers add_scaled(Integers sum, Integers products, Integers scales) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(products, scales));
}
#endif

#else

typedef __m256i Integers;
constexpr int MAX_ROWS = 4;

CLLM_INLINE Integers load_bytes(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
CLLM_INLINE Integers zeros() { return _mm256_setzero_si256(); }
CLLM_INLINE Integers spread_8_bytes(const void *p) {
    return _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)p));
}
CLLM_INLINE Integers low_4_bits(Integers v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
CLLM_INLINE Integers high_4_bits(Integers v) { return low_4_bits(_mm256_srli_epi16(v, 4)); }
CLLM_INLINE Vector to_float(Integers v) { return _mm256_cvtepi32_ps(v); }
#if defined(__AVXVNNI__)
#define CLLM_DOT_PRODUCTS
CLLM_INLINE Integers add_products(Integers sum, Integers weights, Integers values) {
    return _mm256_dpbusd_avx_epi32(sum, weights, values);
}
CLLM_INLINE Integers add_scaled(Integers sum, Integers products, Integers scales) {
    return _mm256_dpwssd_avx_epi32(sum, products, scales);
}
#else
CLLM_INLINE Integers add_products(Integers sum, Integers weights, Integers values) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, values));
}
CLLM_INLINE Integers add_scaled(Integers sum, Integers products, Integers scales) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products, scales));
}
#endif

#endif

constexpr int BYTES = sizeof(Integers);

// add_products leaves 32-bit sums of 4 products, which all fit into 16 bits, or 16-bit sums of 2.
// A scale is a pair of 16-bit numbers for 4 products: in the first case, the second one is 0.
#if defined(CLLM_DOT_PRODUCTS)
constexpr int SECOND = 0;
#else
constexpr int SECOND = 1;
#endif

// ---------------------------------------------------------------------------- Q4_K

// 8 rows of weights in one block: 8 bytes (low and high 4 bits) of each row in turn. A vector has
// ROWS_OF_VECTOR of the rows, and two 32-bit sums for each.
constexpr int ROWS_OF_VECTOR = BYTES / 8, PARTS = 8 / ROWS_OF_VECTOR;

// The scales and minima of a block's 8 groups of 32 values, 8 rows of weights each.
struct Scales {
    alignas(32) uint8_t scales[8][8], mins[8][8];
};

CLLM_INLINE void unpack_scales(const uint8_t *packed, Scales &to) {
    // A group has 3 numbers of 32 bits: for rows 0 to 3 scales and minima in 6 bits, and in the rest
    // of these numbers and in the third one those for rows 4 to 7.
    const __m256i at = _mm256_setr_epi32(0, 12, 24, 36, 48, 60, 72, 84);
    const __m256i a = _mm256_i32gather_epi32((const int *)packed, at, 1);
    const __m256i b = _mm256_i32gather_epi32((const int *)(packed + 4), at, 1);
    const __m256i c = _mm256_i32gather_epi32((const int *)(packed + 8), at, 1);
    const __m256i six = _mm256_set1_epi8(63), four = _mm256_set1_epi8(15), high = _mm256_set1_epi8(48);
    const __m256i scales[2] = {
        _mm256_and_si256(a, six),
        _mm256_or_si256(_mm256_and_si256(c, four),
                        _mm256_and_si256(_mm256_srli_epi16(a, 2), high))};
    const __m256i mins[2] = {
        _mm256_and_si256(b, six),
        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(c, 4), four),
                        _mm256_and_si256(_mm256_srli_epi16(b, 2), high))};
    const auto interleave = [](const __m256i (&halves)[2], uint8_t (&rows)[8][8]) {
        const __m256i even = _mm256_unpacklo_epi32(halves[0], halves[1]);  // groups 0 1 4 5
        const __m256i odd = _mm256_unpackhi_epi32(halves[0], halves[1]);   // groups 2 3 6 7
        _mm256_store_si256((__m256i *)rows[0], _mm256_permute2x128_si256(even, odd, 0x20));
        _mm256_store_si256((__m256i *)rows[4], _mm256_permute2x128_si256(even, odd, 0x31));
    };
    interleave(scales, to.scales);
    interleave(mins, to.mins);
}

// Returns the scales of one group for the rows of part ``part``.
CLLM_INLINE Integers spread_scales(const uint8_t (&scales)[8], int part) {
    alignas(64) static constexpr auto order = [] {
        struct { int8_t bytes[8][8]; } table{};
        for (int row = 0; row < 8; row++)
            for (int i = 0; i < 8; i++)
                table.bytes[row][i] = int8_t(i % 4 == 0 || (SECOND && i % 4 == 2) ? row : -1);
        return table;
    }();
#if defined(CLLM_AVX512)
    return _mm512_shuffle_epi8(spread_8_bytes(scales), load_bytes(order.bytes[part * ROWS_OF_VECTOR]));
#else
    return _mm256_shuffle_epi8(spread_8_bytes(scales), load_bytes(order.bytes[part * ROWS_OF_VECTOR]));
#endif
}

// Returns the minima of groups 2 i, 2 i + 1, 2 i + 4 and 2 i + 5, as 16-bit numbers.
CLLM_INLINE Integers gather_mins(const uint8_t (&mins)[8][8], int i, int part) {
    const auto group = [&](int at) { return _mm_loadl_epi64((const __m128i *)mins[at]); };
    const __m128i first = _mm_unpacklo_epi8(group(2 * i), group(2 * i + 1));
    const __m128i second = _mm_unpacklo_epi8(group(2 * i + 4), group(2 * i + 5));
    const __m128i low = _mm_unpacklo_epi16(first, second), high = _mm_unpackhi_epi16(first, second);
#if defined(CLLM_AVX512)
    return _mm512_cvtepu8_epi16(_mm256_set_m128i(high, low));
#else
    return _mm256_cvtepu8_epi16(part == 0 ? low : high);
#endif
}

// Returns each of 8 (or of part 4) float16 numbers twice.
CLLM_INLINE Vector load_twice(const ggml_half *p, int part) {
    const __m256 v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#if defined(CLLM_AVX512)
    const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(order, _mm512_castps256_ps512(v));
#else
    const __m256i order = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_ps(v, _mm256_add_epi32(order, _mm256_set1_epi32(4 * part)));
#endif
}

// Stores the sum of each two neighbours.
CLLM_INLINE void store_pairs(float *to, Vector v) {
#if defined(CLLM_AVX512)
    const Vector sums = add(v, _mm512_permute_ps(v, 0xb1));
    _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, sums)));
#else
    const __m256 sums = _mm256_hadd_ps(v, v);
    _mm_storeu_ps(to, _mm_shuffle_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1), 0x44));
#endif
}

// Computes N rows (values, with ``blocks`` blocks each) times 8 rows of weights.
template <int N>
void multiply_q4(const void *data, int blocks, const Values *values, float *to, size_t stride) {
    const block_q4_Kx8 *weights = (const block_q4_Kx8 *)data;
    Vector sums[N][PARTS];
    for (auto &row : sums)
        for (auto &sum : row) sum = zero();
    for (int i = 0; i < blocks; i++) {
        const block_q4_Kx8 &block = weights[i];
        Scales scales;
        unpack_scales(block.scales, scales);
        for (int part = 0; part < PARTS; part++) {
            Integers products[N];
            for (auto &each : products) each = zeros();
            for (int pair = 0; pair < 4; pair++) {  // of groups: low and high bits
                Integers low[4], high[4];
                for (int j = 0; j < 4; j++) {
                    const Integers both = load_bytes(block.qs + (4 * pair + j) * 64 + part * BYTES);
                    low[j] = low_4_bits(both);
                    high[j] = high_4_bits(both);
                }
                const Integers low_scales = spread_scales(scales.scales[2 * pair], part);
                const Integers high_scales = spread_scales(scales.scales[2 * pair + 1], part);
                CLLM_UNROLL
                for (int n = 0; n < N; n++) {
                    const int8_t *from = values[n * blocks + i].values + 64 * pair;
                    Integers sum = zeros();
                    for (int j = 0; j < 4; j++)
                        sum = add_products(sum, low[j], spread_8_bytes(from + 8 * j));
                    products[n] = add_scaled(products[n], sum, low_scales);
                    sum = zeros();
                    for (int j = 0; j < 4; j++)
                        sum = add_products(sum, high[j], spread_8_bytes(from + 32 + 8 * j));
                    products[n] = add_scaled(products[n], sum, high_scales);
                }
            }
            const Integers mins[2] = {gather_mins(scales.mins, 0, part),
                                      gather_mins(scales.mins, 1, part)};
            const Vector d = load_twice(block.d, part), dmin = load_twice(block.dmin, part);
            CLLM_UNROLL
            for (int n = 0; n < N; n++) {
                const Values &row = values[n * blocks + i];
                Integers least = add_scaled(zeros(), mins[0], spread_8_bytes(row.sums));
                least = add_scaled(least, mins[1], spread_8_bytes(row.sums + 4));
                const Vector scale = spread(row.scale);
                Vector sum = fma(to_float(products[n]), mul(d, scale), sums[n][part]);
                sums[n][part] = sub(sum, mul(to_float(least), mul(dmin, scale)));
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int part = 0; part < PARTS; part++)
            store_pairs(to + n * stride + part * ROWS_OF_VECTOR, sums[n][part]);
}

// ---------------------------------------------------------------------------- Q6_K

#if defined(CLLM_AVX512)  // with AVX2, ggml's own products are as fast
#define CLLM_OWN_Q6

constexpr int VECTORS = QK_K / BYTES;  // of a block's weights

// The weights of a block, -32 to 31, the scales of each 16 of them, and what must be added because
// the values are 128 too large.
struct Unpacked {
    Integers weights[VECTORS], scales[VECTORS], offset;
};

CLLM_INLINE Unpacked unpack_q6(const block_q6_K &block) {
    Unpacked to;
    const __m512i shifts = _mm512_inserti64x4(zeros(), _mm256_set1_epi16(2), 1);
    const __m512i two_bits = _mm512_set1_epi8(48), half_range = _mm512_set1_epi8(32);
    for (int half = 0; half < 2; half++) {
        const __m512i low = load_bytes(block.ql + 64 * half);
        const __m512i high = _mm512_broadcast_i64x4(
            _mm256_loadu_si256((const __m256i *)(block.qh + 32 * half)));
        const __m512i first = _mm512_srlv_epi16(high, shifts);
        const __m512i six_bits[2] = {
            _mm512_or_si512(low_4_bits(low), _mm512_and_si512(_mm512_slli_epi16(first, 4), two_bits)),
            _mm512_or_si512(high_4_bits(low), _mm512_and_si512(first, two_bits))};
        for (int i = 0; i < 2; i++)
            to.weights[2 * half + i] = _mm512_sub_epi8(six_bits[i], half_range);
    }
    const __m128i scales = _mm_loadu_si128((const __m128i *)block.scales);
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_cvtepi8_epi16(scales));
    if (SECOND) wide = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    Integers excess = zeros();
    for (int i = 0; i < VECTORS; i++) {
        to.scales[i] = _mm512_permutexvar_epi32(_mm512_add_epi32(order, _mm512_set1_epi32(4 * i)), wide);
        const Integers sums = add_products(zeros(), _mm512_set1_epi8(-128), to.weights[i]);
        excess = add_scaled(excess, sums, to.scales[i]);
    }
    to.offset = _mm512_sub_epi32(zeros(), excess);
    return to;
}

// Computes N rows (values, with ``blocks`` blocks each) times one row of weights.
template <int N>
void multiply_q6(const void *data, int blocks, const Values *values, float *to, size_t stride) {
    const block_q6_K *weights = (const block_q6_K *)data;
    Vector sums[(N + 3) / 4 * 4];
    for (auto &sum : sums) sum = zero();
    for (int i = 0; i < blocks; i++) {
        const Unpacked block = unpack_q6(weights[i]);
        const Vector d = spread_f16(&weights[i].d);
        CLLM_UNROLL
        for (int n = 0; n < N; n++) {
            const Values &row = values[n * blocks + i];
            Integers products = block.offset;
            for (int j = 0; j < VECTORS; j++) {
                const Integers sum =
                    add_products(zeros(), load_bytes(row.values + j * BYTES), block.weights[j]);
                products = add_scaled(products, sum, block.scales[j]);
            }
            sums[n] = fma(to_float(products), mul(d, spread(row.scale)), sums[n]);
        }
    }
    CLLM_UNROLL
    for (int n = 0; n < N; n += 4) {
        float parts[4];
        store_sums(parts, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]);
        for (int i = 0; i < std::min(4, N - n); i++) to[(n + i) * stride] = parts[i];
    }
}

#endif

// ---------------------------------------------------------------------------- input

CLLM_INLINE void store_bytes(int8_t *to, Vector v) {
#if defined(CLLM_AVX512)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
#else
    const __m256i words = _mm256_cvtps_epi32(v);
    const __m128i shorts =
        _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(shorts, shorts));
#endif
}

// Rounds 256 values as ggml does, to the same bits. If one is not finite, neither is the scale.
void round_block(const float *from, Values &to, bool is_q4) {
    Vector most = load(from), least = most, broken = zero();
    for (int i = 0; i < QK_K; i += WIDTH) {
        const Vector v = load(from + i);
        most = max(v, most);
        least = min(v, least);
        broken = fma(v, spread(0), broken);
    }
    const float highest = largest(most), lowest = -largest(sub(spread(0), least));
    float farthest = highest > -lowest ? highest : lowest;
    if (highest == -lowest)  // the first one counts
        farthest = *std::find_if(from, from + QK_K - 1, [&](float x) { return std::fabs(x) == highest; });
    const float nothing = sum(broken);  // 0, or not a number
    if (farthest == 0 || nothing != 0) {
        memset(&to, 0, sizeof to);
        to.scale = nothing;
        if (!is_q4) memset(to.values, 128, sizeof to.values);
        return;
    }
    const float inverse = -127.0f / farthest;
    to.scale = 1 / inverse;
    for (int i = 0; i < QK_K; i += WIDTH) store_bytes(to.values + i, mul(load(from + i), spread(inverse)));
    if (is_q4)
        for (int i = 0; i < 8; i++) {
            const __m256i *group = (const __m256i *)to.values + MIN_ORDER[i];
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256(group));
            const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
            sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
            to.sums[i] = int16_t(_mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1))));
        }
    else
        for (int8_t &value : to.values) value = int8_t(value ^ 0x80);
}

// ---------------------------------------------------------------------------- product

constexpr int ROWS_AT_A_TIME = 36;       // of the input, which then stay in the caches
constexpr size_t CHUNK_BYTES = 1 << 17;  // of weights, for the same reason

typedef void (*Multiply)(const void *, int, const Values *, float *, size_t);

template <int... N>
CLLM_INLINE Multiply choose(bool is_q4, int rows, std::integer_sequence<int, N...>) {
    static const Multiply q4[] = {multiply_q4<N + 1>...};
#if defined(CLLM_OWN_Q6)
    static const Multiply q6[] = {multiply_q6<N + 1>...};
    if (!is_q4) return q6[rows - 1];
#endif
    return q4[rows - 1];
}

// How the weights of a product lie: ``units`` of 8 rows (Q4_K) or one (Q6_K), of ``size`` bytes.
struct Weights {
    const char *data;
    bool is_q4;
    int blocks, units;
    size_t size;

    explicit Weights(const ggml_tensor &tensor)
        : data((const char *)tensor.data),
          is_q4(tensor.type == GGML_TYPE_Q4_K),
          blocks(int(tensor.ne[0] / QK_K)),
          units(int(tensor.ne[1] / (is_q4 ? 8 : 1))),
          size(blocks * (is_q4 ? sizeof(block_q4_Kx8) : sizeof(block_q6_K))) {}
};

// Computes all rows times some units of weights. A row of the output is ``stride`` values long.
void multiply_units(const Weights &weights, int first, int end, const Values *values, int rows,
                    float *to, size_t stride) {
    for (int start = 0; start < rows; start += ROWS_AT_A_TIME)
        for (int unit = first; unit < end; unit++)
            for (int row = start; row < std::min(rows, start + ROWS_AT_A_TIME); row += MAX_ROWS) {
                const Multiply multiply =
                    choose(weights.is_q4, std::min(MAX_ROWS, rows - row),
                           std::make_integer_sequence<int, MAX_ROWS>());
                multiply(weights.data + unit * weights.size, weights.blocks,
                         values + row * weights.blocks,
                         to + row * stride + unit * (weights.is_q4 ? 8 : 1), stride);
            }
}

// Returns whether the weights lie as a product here needs them.
bool are_usable(const ggml_tensor &weights) {
    if (!has_own_product(weights.type) || ggml_n_dims(&weights) != 2) return false;
    const ggml_backend_buffer_type_t repack = ggml_backend_cpu_repack_buffer_type();
    const bool repacked = weights.buffer != nullptr && weights.buffer->buft == repack;
    if (weights.type == GGML_TYPE_Q4_K) return repacked && weights.extra != nullptr;
    // Weights that are not as in the file have an extra, in AMX's buffers, too.
    return !repacked && weights.extra == nullptr && ggml_is_contiguous(&weights);
}

}  // namespace

bool has_own_product(int type) {
#if defined(CLLM_OWN_Q6)
    if (type == GGML_TYPE_Q6_K) return true;
#endif
    return type == GGML_TYPE_Q4_K;
}

// Computes a product if its weights are known here. Otherwise returns false.
static bool multiply_quantized(const ggml_compute_params *params, ggml_tensor *dst) {
    if (!enabled || params->use_ref || dst->op != GGML_OP_MUL_MAT || !are_usable(*dst->src[0]))
        return false;
    const ggml_tensor &input = *dst->src[1];
    const int64_t rows = input.ne[1];
    if (input.type != GGML_TYPE_F32 || input.ne[2] * input.ne[3] != 1 || input.nb[0] != sizeof(float))
        return false;
    const Weights weights(*dst->src[0]);
    Values *values = (Values *)params->wdata;
    if (params->wsize < rows * weights.blocks * sizeof(Values)) return false;
    const int64_t blocks = rows * weights.blocks;
    for (int64_t i = params->ith; i < blocks; i += params->nth) {
        const char *row = (const char *)input.data + i / weights.blocks * input.nb[1];
        round_block((const float *)row + i % weights.blocks * QK_K, values[i], weights.is_q4);
    }
    // A thread begins with the chunk of its number. Then, each takes the next one that is left.
    const int chunk = std::max(1, std::min(weights.units / (4 * params->nth), int(CHUNK_BYTES / weights.size)));
    if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
    ggml_barrier(params->threadpool);
    for (int i = params->ith; i * chunk < weights.units; i = ggml_threadpool_chunk_add(params->threadpool, 1))
        multiply_units(weights, i * chunk, std::min(weights.units, (i + 1) * chunk), values, int(rows),
                       (float *)dst->data, dst->nb[1] / sizeof(float));
    return true;
}

}  // namespace cllm

#else

bool cllm::has_own_product(int) { return false; }
namespace cllm {
static bool multiply_quantized(const ggml_compute_params *, ggml_tensor *) { return false; }
}  // namespace cllm

#endif

// ggml's own function, whose name is changed where traits.cpp is compiled (llama.cmake). It computes
// with weights that are not stored as in the file, such as repacked ones.
extern "C" bool ggml_original_extra_compute_forward(ggml_compute_params *params, ggml_tensor *op);

static bool multiply(ggml_compute_params *params, ggml_tensor *op) {
    return cllm::multiply_quantized(params, op) || ggml_original_extra_compute_forward(params, op);
}

// Returns whether the rows of all sequences, for which recurrent layers have an axis, become rows of
// one product. ggml unpacks the weights anew for each sequence, and with AMX reads behind them for
// all but the first. Python looks whether the library has this function (placement.py).
CLLM_API bool cllm_joins_sequences(const ggml_tensor *op) {
    return op->op == GGML_OP_MUL_MAT && op->src[0]->ne[2] * op->src[0]->ne[3] == 1 &&
           op->ne[2] * op->ne[3] != 1 && ggml_is_contiguous(op->src[1]) && ggml_is_contiguous(op);
}

extern "C" bool ggml_cpu_extra_compute_forward(ggml_compute_params *params, ggml_tensor *op) {
    if (!cllm_joins_sequences(op)) return multiply(params, op);
    ggml_tensor input = *op->src[1], joined = *op;
    joined.src[1] = &input;
    for (ggml_tensor *each : {&input, &joined}) {
        each->ne[1] = ggml_nrows(each);
        each->ne[2] = each->ne[3] = 1;
        each->nb[2] = each->nb[3] = ggml_nbytes(each);
    }
    if (!multiply(params, &joined)) ggml_compute_forward_mul_mat(params, &joined);
    return true;
}

// Returns whether products with AMX take these weights or this input. amx.cpp asks this instead of
// ggml_is_contiguous (llama.cmake). Our own products are faster, and AMX's take no third axis of weights.
extern "C" bool cllm_fits_amx(const ggml_tensor *tensor) {
    if (!ggml_is_contiguous(tensor)) return false;
    if (tensor->type == GGML_TYPE_F32) return true;  // an input
    return ggml_n_dims(tensor) == 2 && !cllm::has_own_product(tensor->type);
}
