// Vectors of float32 for AVX2, AVX-512 and NEON, and how they are loaded from the types of a KV cache.
//
// The compiler's target decides: ggml compiles its CPU library once for each generation of CPUs.
// CLLM_VECTORS names the instructions; where it is not defined, ggml computes everything itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CLLM_VECTORS "AVX-512"
#define CLLM_AVX512
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CLLM_VECTORS "AVX2"
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define CLLM_VECTORS "NEON"
#include <arm_neon.h>
#endif

#ifdef CLLM_VECTORS

#if defined(_MSC_VER) && !defined(__clang__)
#define CLLM_INLINE static __forceinline
#else
#define CLLM_INLINE static inline __attribute__((always_inline))
#endif

namespace cllm {
namespace {

#if defined(CLLM_AVX512)

typedef __m512 Vector;
constexpr int WIDTH = 16;
constexpr int REGISTERS = 32;

CLLM_INLINE Vector load(const float *p) { return _mm512_loadu_ps(p); }
CLLM_INLINE void store(float *p, Vector v) { _mm512_storeu_ps(p, v); }
CLLM_INLINE Vector spread(float x) { return _mm512_set1_ps(x); }
CLLM_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
CLLM_INLINE Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
CLLM_INLINE Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
CLLM_INLINE Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
CLLM_INLINE Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
CLLM_INLINE Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
CLLM_INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
CLLM_INLINE Vector round(Vector a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
// a * 2^b for whole b.
CLLM_INLINE Vector scale_by_power(Vector a, Vector b) { return _mm512_scalef_ps(a, b); }
// Returns a where x < y, else b.
CLLM_INLINE Vector select_less(Vector x, Vector y, Vector a, Vector b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
CLLM_INLINE Vector load_f16(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
CLLM_INLINE Vector load_bf16(const void *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
CLLM_INLINE Vector load_i8(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
CLLM_INLINE Vector spread_f16(const void *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
CLLM_INLINE float largest(Vector v) { return _mm512_reduce_max_ps(v); }
CLLM_INLINE __m256 fold(Vector v) {
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

typedef __m256 Vector;
constexpr int WIDTH = 8;
constexpr int REGISTERS = 16;

CLLM_INLINE Vector load(const float *p) { return _mm256_loadu_ps(p); }
CLLM_INLINE void store(float *p, Vector v) { _mm256_storeu_ps(p, v); }
CLLM_INLINE Vector spread(float x) { return _mm256_set1_ps(x); }
CLLM_INLINE Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
CLLM_INLINE Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
CLLM_INLINE Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
CLLM_INLINE Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
CLLM_INLINE Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
CLLM_INLINE Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
CLLM_INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
CLLM_INLINE Vector round(Vector a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
CLLM_INLINE Vector scale_by_power(Vector a, Vector b) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(b), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
CLLM_INLINE Vector select_less(Vector x, Vector y, Vector a, Vector b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
CLLM_INLINE Vector load_f16(const void *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
CLLM_INLINE Vector load_bf16(const void *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
CLLM_INLINE Vector load_i8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
CLLM_INLINE Vector spread_f16(const void *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
CLLM_INLINE float largest(Vector v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
CLLM_INLINE __m256 fold(Vector v) { return v; }

#else

typedef float32x4_t Vector;
constexpr int WIDTH = 4;
constexpr int REGISTERS = 32;

CLLM_INLINE Vector load(const float *p) { return vld1q_f32(p); }
CLLM_INLINE void store(float *p, Vector v) { vst1q_f32(p, v); }
CLLM_INLINE Vector spread(float x) { return vdupq_n_f32(x); }
CLLM_INLINE Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
CLLM_INLINE Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
CLLM_INLINE Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
CLLM_INLINE Vector divide(Vector a, Vector b) { return vdivq_f32(a, b); }
CLLM_INLINE Vector max(Vector a, Vector b) { return vmaxq_f32(a, b); }
CLLM_INLINE Vector min(Vector a, Vector b) { return vminq_f32(a, b); }
CLLM_INLINE Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
CLLM_INLINE Vector round(Vector a) { return vrndnq_f32(a); }
CLLM_INLINE Vector scale_by_power(Vector a, Vector b) {
    const int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(b), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), exponent));
}
CLLM_INLINE Vector select_less(Vector x, Vector y, Vector a, Vector b) {
    return vbslq_f32(vcltq_f32(x, y), a, b);
}
CLLM_INLINE Vector load_f16(const void *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}
CLLM_INLINE Vector load_bf16(const void *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16));
}
CLLM_INLINE Vector load_i8(const void *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    const int8x8_t eight = vreinterpret_s8_s32(vdup_n_s32(bytes));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(eight))));
}
CLLM_INLINE Vector spread_f16(const void *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return vdupq_lane_f32(vget_low_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)))), 0);
}
CLLM_INLINE float largest(Vector v) { return vmaxvq_f32(v); }

#endif

CLLM_INLINE Vector zero() { return spread(0.0f); }

// All sums across a vector are added in the same order, which sum_lanes repeats: neighbours first,
// then the sums of neighbours; with 16 values, each to the one 8 places further before that.
constexpr int lane_at(int n) { return WIDTH == 16 ? n / 2 + n % 2 * 8 : n; }

// Stores the sums of four vectors: rows of the same query are adjacent, or two by two.
#if defined(__x86_64__) || defined(_M_X64) || defined(__i386__)
CLLM_INLINE __m128 four_sums(Vector a, Vector b, Vector c, Vector d) {
    const __m256 ab = _mm256_hadd_ps(fold(a), fold(b)), cd = _mm256_hadd_ps(fold(c), fold(d));
    const __m256 all = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
CLLM_INLINE float sum(Vector v) { return _mm_cvtss_f32(four_sums(v, v, v, v)); }
CLLM_INLINE void store_sums(float *p, Vector a, Vector b, Vector c, Vector d) {
    _mm_storeu_ps(p, four_sums(a, b, c, d));
}
CLLM_INLINE void store_sums(float *p, float *q, Vector a, Vector b, Vector c, Vector d) {
    const __m128 sums = four_sums(a, b, c, d);
    _mm_storel_pi((__m64 *)p, sums);
    _mm_storeh_pi((__m64 *)q, sums);
}
CLLM_INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
#else
CLLM_INLINE Vector four_sums(Vector a, Vector b, Vector c, Vector d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}
CLLM_INLINE float sum(Vector v) { return vgetq_lane_f32(four_sums(v, v, v, v), 0); }
CLLM_INLINE void store_sums(float *p, Vector a, Vector b, Vector c, Vector d) {
    store(p, four_sums(a, b, c, d));
}
CLLM_INLINE void store_sums(float *p, float *q, Vector a, Vector b, Vector c, Vector d) {
    const Vector sums = four_sums(a, b, c, d);
    vst1_f32(p, vget_low_f32(sums));
    vst1_f32(q, vget_high_f32(sums));
}
CLLM_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
#endif

// Adds COUNT vectors, ``stride`` apart, in the order in which a sum across a vector adds its values:
// the n-th is for the value lane_at(n).
template <int COUNT>
CLLM_INLINE Vector sum_lanes(const Vector *lanes, int stride) {
    if constexpr (COUNT == 1) return *lanes;
    else return add(sum_lanes<COUNT / 2>(lanes, stride),
                    sum_lanes<COUNT / 2>(lanes + COUNT / 2 * stride, stride));
}

// e^x with a relative error of about 1e-7; 0 below -87; not a number if x is not.
CLLM_INLINE Vector exp(Vector x) {
    // The second operand is the result if one is not a number (x86).
    const Vector limited = min(spread(88.0f), max(spread(-87.0f), x));
    const Vector power = round(mul(limited, spread(1.44269504f)));
    // The logarithm of 2 in two parts, so that the rest is exact.
    Vector r = fma(power, spread(-0.693145752f), limited);
    r = fma(power, spread(-1.42860677e-6f), r);
    // A polynomial fitted to (e^r - 1 - r) / r^2.
    Vector p = fma(r, spread(1.393368836e-03f), spread(8.363205468e-03f));
    p = fma(r, p, spread(4.166646457e-02f));
    p = fma(r, p, spread(1.666657682e-01f));
    p = fma(r, p, spread(5.000000014e-01f));
    const Vector result = add(fma(mul(r, r), p, r), spread(1.0f));
    return select_less(x, spread(-87.0f), zero(), scale_by_power(result, power));
}

CLLM_INLINE float exp(float x) {
    float values[WIDTH];
    store(values, exp(spread(x)));
    return values[0];
}

CLLM_INLINE Vector tanh(Vector x) {
    // Near 0 a polynomial fitted to (tanh(x) - x) / x^3, elsewhere 1 - 2 / (e^2|x| + 1).
    const Vector size = max(x, sub(zero(), x)), square = mul(x, x);
    Vector p = fma(square, spread(-6.001800605e-03f), spread(2.093142412e-02f));
    p = fma(square, p, spread(-5.383701649e-02f));
    p = fma(square, p, spread(1.333267900e-01f));
    p = fma(square, p, spread(-3.333332807e-01f));
    const Vector near = fma(mul(square, x), p, x);
    const Vector power = exp(min(add(size, size), spread(40.0f)));
    const Vector far = sub(spread(1.0f), divide(spread(2.0f), add(power, spread(1.0f))));
    const Vector signed_far = select_less(x, zero(), sub(zero(), far), far);
    return select_less(size, spread(0.625f), near, signed_far);
}

// The types of keys and values. A run is what is loaded at once: RUN vectors from the i-th value on.
struct Float32 {
    static constexpr int RUN = 1;
    static constexpr size_t bytes(int size) { return 4 * size; }
    CLLM_INLINE void run(const char *row, int i, Vector *out) { out[0] = load((const float *)row + i); }
};
struct Float16 {
    static constexpr int RUN = 1;
    static constexpr size_t bytes(int size) { return 2 * size; }
    CLLM_INLINE void run(const char *row, int i, Vector *out) { out[0] = load_f16(row + 2 * i); }
};
struct BFloat16 {
    static constexpr int RUN = 1;
    static constexpr size_t bytes(int size) { return 2 * size; }
    CLLM_INLINE void run(const char *row, int i, Vector *out) { out[0] = load_bf16(row + 2 * i); }
};
// Blocks of 32 values of 8 bits, each with a scale of 16 bits before them. A run is half a block.
struct Quantized8 {
    static constexpr int RUN = 16 / WIDTH;
    static constexpr size_t bytes(int size) { return (size_t)size / 32 * 34; }
    CLLM_INLINE void run(const char *row, int i, Vector *out) {
        const char *block = row + i / 32 * 34;
        const Vector scale = spread_f16(block);
        for (int j = 0; j < RUN; j++) out[j] = mul(load_i8(block + 2 + i % 32 + j * WIDTH), scale);
    }
};

}  // namespace
}  // namespace cllm

#endif
