// The arithmetic of one tile: up to 64 positions of one KV head, for some rows of queries.
//
// A row is one query head of one token. There are two sets of functions:
// - few rows: keys and values are converted in registers where they are. Scores lie as [row][TILE].
// - many rows: keys and values of the tile are converted once into float32. Scores lie as
//   [position][rows], so that a vector holds several rows and no sums across a vector are needed.
#pragma once

#include <cmath>

#include "vectors.h"

#ifdef CLLM_VECTORS

namespace cllm {
namespace {

constexpr int TILE = 64;    // positions
constexpr int PANEL = 16;   // values of a head that lie together in a converted tile
constexpr int MAX_GROUP = 4;  // rows that the functions for few rows take at once
constexpr int PANEL_VECTORS = PANEL / WIDTH;

// ---------------------------------------------------------------------------------- few rows

template <class Type, int ROWS, int POSITIONS>
CLLM_INLINE void score_some(const float *const *q, const char *k, size_t stride, int size,
                            float *scores) {
    Vector sums[ROWS][POSITIONS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < POSITIONS; p++) sums[r][p] = zero();
    for (int i = 0; i < size; i += Type::RUN * WIDTH)
        for (int p = 0; p < POSITIONS; p++) {
            Vector keys[Type::RUN];
            Type::run(k + p * stride, i, keys);
            for (int j = 0; j < Type::RUN; j++)
                for (int r = 0; r < ROWS; r++)
                    sums[r][p] = fma(load(q[r] + i + j * WIDTH), keys[j], sums[r][p]);
        }
    if constexpr (POSITIONS % 4 == 0) {
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < POSITIONS; p += 4)
                store_sums(scores + r * TILE + p, sums[r][p], sums[r][p + 1], sums[r][p + 2],
                           sums[r][p + 3]);
    } else if constexpr (POSITIONS == 2 && ROWS % 2 == 0) {
        for (int r = 0; r < ROWS; r += 2)
            store_sums(scores + r * TILE, scores + (r + 1) * TILE, sums[r][0], sums[r][1],
                       sums[r + 1][0], sums[r + 1][1]);
    } else {
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < POSITIONS; p++) scores[r * TILE + p] = sum(sums[r][p]);
    }
}

CLLM_INLINE void prefetch_row(const char *row, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) prefetch(row + i);
}

// scores[row][position] = q . k for ``count`` positions. ``ahead`` is the distance in bytes to the
// tile that is computed next, which is fetched meanwhile; 0 fetches nothing.
template <class Type, int ROWS>
static void score_few(const float *const *q, const char *k, size_t stride, int count, int size,
                      ptrdiff_t ahead, float *scores) {
    constexpr int POSITIONS = ROWS == 1 ? 8 : REGISTERS == 32 || ROWS < 4 ? 4 : 2;
    int t = 0;
    for (; t + POSITIONS <= count; t += POSITIONS) {
        if (ahead)
            for (int p = 0; p < POSITIONS; p++)
                prefetch_row(k + (t + p) * stride + ahead, Type::bytes(size));
        score_some<Type, ROWS, POSITIONS>(q, k + t * stride, stride, size, scores + t);
    }
    for (; t < count; t++) score_some<Type, ROWS, 1>(q, k + t * stride, stride, size, scores + t);
}

template <class Type, int ROWS, int VECTORS>
CLLM_INLINE void add_some(const float *weights, const char *v, size_t stride, int count, int first,
                          const float *decay, float *out, int size) {
    Vector sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < VECTORS; j++)
            sums[r][j] = mul(load(out + r * size + first + j * WIDTH), spread(decay[r]));
    for (int t = 0; t < count; t++) {
        Vector factors[ROWS];
        for (int r = 0; r < ROWS; r++) factors[r] = spread(weights[r * TILE + t]);
        for (int j = 0; j < VECTORS; j += Type::RUN) {
            Vector values[Type::RUN];
            Type::run(v + t * stride, first + j * WIDTH, values);
            for (int i = 0; i < Type::RUN; i++)
                for (int r = 0; r < ROWS; r++)
                    sums[r][j + i] = fma(factors[r], values[i], sums[r][j + i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < VECTORS; j++) store(out + r * size + first + j * WIDTH, sums[r][j]);
}

// out[row][size] = out * decay[row] + the sum of weights[row][position] * v.
template <class Type, int ROWS>
static void add_few(const float *weights, const char *v, size_t stride, int count, int size,
                    ptrdiff_t ahead, const float *decay, float *out) {
    constexpr int VECTORS = REGISTERS == 32 ? (ROWS == 1 ? 8 : 4) : ROWS == 1 ? 8 : ROWS < 4 ? 4 : 2;
    if (ahead)
        for (int t = 0; t < count; t++) prefetch_row(v + t * stride + ahead, Type::bytes(size));
    int i = 0;
    for (; i + VECTORS * WIDTH <= size; i += VECTORS * WIDTH)
        add_some<Type, ROWS, VECTORS>(weights, v, stride, count, i, decay, out, size);
    // The size is a multiple of PANEL.
    for (; i < size; i += PANEL)
        add_some<Type, ROWS, PANEL_VECTORS>(weights, v, stride, count, i, decay, out, size);
}

// Makes weights of a row's scores, whose number is a multiple of WIDTH, and updates the row's
// maximum and sum. Returns the factor for what was added before.
static float weigh_few(float *scores, int count, float scale, float cap, const float *mask,
                       float slope, float *maximum, float *total) {
    Vector top = spread(-INFINITY);
    for (int t = 0; t < count; t += WIDTH) {
        Vector s = mul(load(scores + t), spread(scale));
        if (cap != 0.0f) s = mul(tanh(s), spread(cap));
        if (mask) s = fma(load(mask + t), spread(slope), s);
        store(scores + t, s);
        top = max(top, s);
    }
    const float old = *maximum, highest = largest(top), now = highest > old ? highest : old;
    const float base = now == -INFINITY ? 0.0f : now;
    Vector added = zero();
    for (int t = 0; t < count; t += WIDTH) {
        const Vector weight = exp(sub(load(scores + t), spread(base)));
        store(scores + t, weight);
        added = add(added, weight);
    }
    const float decay = now == old ? 1.0f : expf(old - base);
    *maximum = now;
    *total = *total * decay + sum(added);
    return decay;
}

// ---------------------------------------------------------------------------------- many rows

// scores[position][rows] = queries . keys. Queries lie as [size][rows], keys as [TILE][size].
template <int VECTORS, int POSITIONS>
CLLM_INLINE void score_block(const float *queries, int rows, const float *keys, int size,
                             float *scores) {
    Vector sums[POSITIONS][VECTORS];
    for (int p = 0; p < POSITIONS; p++)
        for (int j = 0; j < VECTORS; j++) sums[p][j] = zero();
    for (int i = 0; i < size; i++) {
        Vector q[VECTORS];
        for (int j = 0; j < VECTORS; j++) q[j] = load(queries + (size_t)i * rows + j * WIDTH);
        for (int p = 0; p < POSITIONS; p++) {
            const Vector key = spread(keys[p * size + i]);
            for (int j = 0; j < VECTORS; j++) sums[p][j] = fma(key, q[j], sums[p][j]);
        }
    }
    for (int p = 0; p < POSITIONS; p++)
        for (int j = 0; j < VECTORS; j++) store(scores + p * rows + j * WIDTH, sums[p][j]);
}

template <int VECTORS, int POSITIONS>
static void score_rows(const float *queries, int rows, const float *keys, int size, float *scores) {
    int t = 0;
    for (; t + POSITIONS <= TILE; t += POSITIONS)
        score_block<VECTORS, POSITIONS>(queries, rows, keys + t * size, size, scores + t * rows);
    constexpr int REST = TILE % POSITIONS;
    if constexpr (REST > 0)
        score_block<VECTORS, REST>(queries, rows, keys + t * size, size, scores + t * rows);
}

static void score_many(const float *queries, int rows, const float *keys, int size, float *scores) {
    constexpr int POSITIONS = REGISTERS == 32 ? 8 : 6;
    int r = 0;
    for (; r + 2 * WIDTH <= rows; r += 2 * WIDTH)
        score_rows<2, POSITIONS>(queries + r, rows, keys, size, scores + r);
    if (r < rows) score_rows<1, 8>(queries + r, rows, keys, size, scores + r);
}

// As weigh_few, for all rows. mask lies as the scores do and has the slopes in it, or is null.
static void weigh_many(float *scores, int rows, float cap, const float *mask, float *maxima,
                       float *totals, float *decays) {
    for (int r = 0; r < rows; r += WIDTH) {
        Vector top = spread(-INFINITY);
        for (int t = 0; t < TILE; t++) {
            Vector s = load(scores + t * rows + r);
            if (cap != 0.0f) s = mul(tanh(s), spread(cap));
            if (mask) s = add(s, load(mask + t * rows + r));
            if (cap != 0.0f || mask) store(scores + t * rows + r, s);
            top = max(top, s);
        }
        const Vector old = load(maxima + r), now = max(top, old);
        // 0 where nothing has been seen: e^-inf is 0 and not e^(-inf + inf).
        const Vector base = select_less(now, spread(-3e38f), zero(), now);
        Vector added = zero();
        for (int t = 0; t < TILE; t++) {
            const Vector weight = exp(sub(load(scores + t * rows + r), base));
            store(scores + t * rows + r, weight);
            added = add(added, weight);
        }
        const Vector decay = exp(sub(old, base));
        store(maxima + r, now);
        store(totals + r, fma(load(totals + r), decay, added));
        store(decays + r, decay);
    }
}

// The part of add_many for ROWS rows and PANELS panels of values.
template <int ROWS, int PANELS>
CLLM_INLINE void add_block(const float *weights, int rows, const float *values, const float *decays,
                           float *out, int size) {
    constexpr int VECTORS = PANELS * PANEL_VECTORS;
    Vector sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < VECTORS; j++)
            sums[r][j] = mul(load(out + r * size + j * WIDTH), spread(decays[r]));
    for (int t = 0; t < TILE; t++) {
        Vector v[VECTORS];
        for (int j = 0; j < VECTORS; j++)
            v[j] = load(values + (j / PANEL_VECTORS * TILE + t) * PANEL + j % PANEL_VECTORS * WIDTH);
        for (int r = 0; r < ROWS; r++) {
            const Vector weight = spread(weights[t * rows + r]);
            for (int j = 0; j < VECTORS; j++) sums[r][j] = fma(weight, v[j], sums[r][j]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < VECTORS; j++) store(out + r * size + j * WIDTH, sums[r][j]);
}

template <int PANELS>
static void add_panels(const float *weights, int rows, const float *values, const float *decays,
                       float *out, int size) {
    constexpr int GROUP = REGISTERS == 32 ? 8 : 6;  // rows is a multiple of 8
    for (int r = 0; r < rows;) {
        const int left = rows - r;
        if (left >= GROUP && (left != 8 || GROUP == 8)) {
            add_block<GROUP, PANELS>(weights + r, rows, values, decays + r, out + r * size, size);
            r += GROUP;
        } else if (left >= 4) {
            add_block<4, PANELS>(weights + r, rows, values, decays + r, out + r * size, size);
            r += 4;
        } else {
            add_block<2, PANELS>(weights + r, rows, values, decays + r, out + r * size, size);
            r += 2;
        }
    }
}

// out[rows][size] = out * decays[row] + the sum of weights[position][row] * values, which lie as
// [size / PANEL][TILE][PANEL].
static void add_many(const float *weights, int rows, const float *values, const float *decays,
                     int size, float *out) {
    constexpr int PANELS = REGISTERS == 32 && WIDTH == 16 ? 2 : 1;
    int i = 0;
    for (; i + PANELS * PANEL <= size; i += PANELS * PANEL)
        add_panels<PANELS>(weights, rows, values + i * TILE, decays, out + i, size);
    if (i < size) add_panels<1>(weights, rows, values + i * TILE, decays, out + i, size);
}

}  // namespace
}  // namespace cllm

#endif
