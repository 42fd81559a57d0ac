// The arithmetic of one tile: up to 64 positions of one KV head, for some rows of queries.
//
// A row is one query head of one token. There are two sets of functions:
// - few rows: keys and values are converted in registers where they are. Scores lie as [row][TILE].
// - many rows: keys and values of the tile are converted once into float32. Scores lie as
//   [position][rows], so that a vector holds several rows and no sums across a vector are needed.
//
// Both do the same operations in the same order for each row, so that its bits do not depend on which
// is used: sums have WIDTH parts, which are added as the values of a vector are (sum_lanes).
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

// Adds a mask to scores. What is masked stays so even if the score is not a number.
CLLM_INLINE Vector add_mask(Vector scores, Vector mask) {
    return select_less(mask, spread(-3e38f), mask, add(scores, mask));
}

// Makes weights of a row's scores, whose number is a multiple of WIDTH, and updates the row's
// maximum and sum. Returns the factor for what was added before.
static float weigh_few(float *scores, int count, float scale, float cap, const float *mask,
                       float slope, float *maximum, float *total) {
    Vector top = spread(-INFINITY);
    for (int t = 0; t < count; t += WIDTH) {
        Vector s = mul(load(scores + t), spread(scale));
        if (cap != 0.0f) s = mul(tanh(s), spread(cap));
        if (mask) s = add_mask(s, mul(load(mask + t), spread(slope)));
        store(scores + t, s);
        top = max(top, s);
    }
    const float old = *maximum, highest = largest(top), now = highest > old ? highest : old;
    const float base = now < -3e38f ? 0.0f : now;
    Vector added = zero();
    for (int t = 0; t < count; t += WIDTH) {
        const Vector weight = exp(sub(load(scores + t), spread(base)));
        store(scores + t, weight);
        added = add(added, weight);
    }
    const float decay = exp(old - base);
    *maximum = now;
    *total = *total * decay + sum(added);
    return decay;
}

// ---------------------------------------------------------------------------------- many rows

// How queries lie for score_many: rows in groups of QUERY_ROWS (fewer in the last), and in a group
// as [lane][size / WIDTH][rows].
constexpr int QUERY_ROWS = 2 * WIDTH;

// Adds the products of one value of each query and key to the sums, or begins them.
template <int VECTORS, int POSITIONS, bool FIRST>
CLLM_INLINE void add_products(const float *queries, const float *keys, size_t stride, Vector *sums) {
    Vector q[VECTORS];
    for (int j = 0; j < VECTORS; j++) q[j] = load(queries + j * WIDTH);
    for (int p = 0; p < POSITIONS; p++) {
        const Vector key = spread(keys[p * stride]);
        for (int j = 0; j < VECTORS; j++) {
            Vector &sum = sums[p * VECTORS + j];
            sum = FIRST ? mul(key, q[j]) : fma(key, q[j], sum);
        }
    }
}

template <int VECTORS, int POSITIONS>
CLLM_INLINE void score_block(const float *queries, const float *keys, int size, float scale,
                             float *scores, int rows) {
    constexpr int COUNT = POSITIONS * VECTORS;
    Vector lanes[WIDTH][COUNT];
    for (int n = 0; n < WIDTH; n++) {
        Vector sums[COUNT];
        const float *key = keys + lane_at(n), *end = key + size;
        add_products<VECTORS, POSITIONS, true>(queries, key, size, sums);
        queries += VECTORS * WIDTH;
        for (key += WIDTH; key != end; key += WIDTH, queries += VECTORS * WIDTH)
            add_products<VECTORS, POSITIONS, false>(queries, key, size, sums);
        for (int i = 0; i < COUNT; i++) lanes[n][i] = sums[i];
    }
    for (int p = 0; p < POSITIONS; p++)
        for (int j = 0; j < VECTORS; j++) {
            const Vector sum = sum_lanes<WIDTH>(&lanes[0][p * VECTORS + j], COUNT);
            store(scores + p * rows + j * WIDTH, mul(sum, spread(scale)));
        }
}

template <int VECTORS, int POSITIONS>
static void score_rows(const float *queries, const float *keys, int size, float scale, float *scores,
                       int rows) {
    int t = 0;
    for (; t + POSITIONS <= TILE; t += POSITIONS)
        score_block<VECTORS, POSITIONS>(queries, keys + t * size, size, scale, scores + t * rows, rows);
    constexpr int REST = TILE % POSITIONS;
    if constexpr (REST > 0)
        score_block<VECTORS, REST>(queries, keys + t * size, size, scale, scores + t * rows, rows);
}

// scores[position][rows] = scale * queries . keys, which lie as [TILE][size].
static void score_many(const float *queries, int rows, const float *keys, int size, float scale,
                       float *scores) {
    constexpr int POSITIONS = REGISTERS == 32 ? 8 : 6;
    int r = 0;
    for (; r + QUERY_ROWS <= rows; r += QUERY_ROWS)
        score_rows<2, POSITIONS>(queries + r * size, keys, size, scale, scores + r, rows);
    if (r < rows) score_rows<1, 8>(queries + r * size, keys, size, scale, scores + r, rows);
}

// As weigh_few, for all rows. mask lies as the scores do and has the slopes in it, or is null.
static void weigh_many(float *scores, int rows, float cap, const float *mask, float *maxima,
                       float *totals, float *decays) {
    for (int r = 0; r < rows; r += WIDTH) {
        Vector top = spread(-INFINITY);
        for (int t = 0; t < TILE; t++) {
            Vector s = load(scores + t * rows + r);
            if (cap != 0.0f) s = mul(tanh(s), spread(cap));
            if (mask) s = add_mask(s, load(mask + t * rows + r));
            if (cap != 0.0f || mask) store(scores + t * rows + r, s);
            top = max(top, s);
        }
        const Vector old = load(maxima + r), now = max(top, old);
        // 0 where nothing has been seen: e^-inf is 0 and not e^(-inf + inf).
        const Vector base = select_less(now, spread(-3e38f), zero(), now);
        Vector lanes[WIDTH];
        for (int n = 0; n < WIDTH; n++) {
            lanes[n] = zero();
            for (int t = lane_at(n); t < TILE; t += WIDTH) {
                const Vector weight = exp(sub(load(scores + t * rows + r), base));
                store(scores + t * rows + r, weight);
                lanes[n] = add(lanes[n], weight);
            }
        }
        const Vector added = sum_lanes<WIDTH>(lanes, 1);
        const Vector decay = exp(sub(old, base));
        store(maxima + r, now);
        store(totals + r, add(mul(load(totals + r), decay), added));
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
