// Attention for llama.cpp's CPU library, in place of ggml_compute_forward_flash_attn_ext. README.md
// explains the method. What this file does not know is passed on to ggml.

#include <algorithm>
#include <cmath>

#include "ggml-cpu-impl.h"
#include "switch.h"
#include "tiles.h"

// ggml's own function, whose name is changed where ops.cpp is compiled (llama.cmake).
extern "C" void ggml_original_flash_attn_ext(const ggml_compute_params *params, ggml_tensor *dst);
CLLM_API void ggml_compute_forward_flash_attn_ext(const ggml_compute_params *params,
                                                  ggml_tensor *dst);

std::atomic<bool> cllm::enabled{true};

// Turns cLLM's kernels on or off for all models of the process. Call it while nothing is computed.
CLLM_API void cllm_kernels_enable(int on) { cllm::enabled = on != 0; }

// Returns the instructions that the kernels use, such as "AVX2"; null if ggml computes everything.
CLLM_API const char *cllm_kernels() {
#ifdef CLLM_VECTORS
    return cllm::enabled ? CLLM_VECTORS : nullptr;
#else
    return nullptr;
#endif
}

#ifdef CLLM_VECTORS

namespace cllm {
namespace {

constexpr int FEW_ROWS = 4;     // up to here, the functions for few rows are faster
static_assert(FEW_ROWS <= MAX_GROUP);
constexpr int BLOCK_ROWS = 64;  // rows of a block; ggml's work memory is made for as many
constexpr int STREAM_GROUP = 8; // streams that take turns at each tile, because they may share memory
constexpr int SHARES = 4;       // parts of the work for each thread, if there is so much
constexpr int SEGMENT = 4;      // tiles of a segment

typedef void (*ScoreFew)(const float *const *, const char *, size_t, int, int, ptrdiff_t, float *);
typedef void (*AddFew)(const float *, const char *, size_t, int, int, ptrdiff_t, const float *,
                       float *);

struct Few {
    ScoreFew score[MAX_GROUP];
    AddFew add[MAX_GROUP];
};

template <class Type>
constexpr Few few = {
    {score_few<Type, 1>, score_few<Type, 2>, score_few<Type, 3>, score_few<Type, 4>},
    {add_few<Type, 1>, add_few<Type, 2>, add_few<Type, 3>, add_few<Type, 4>},
};

// One operation: shapes, strides and constants of its tensors.
struct Attention {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    ggml_tensor *dst;
    int key_size, value_size;  // of a head
    int heads, kv_heads, group;  // group: query heads for each KV head
    int tokens, streams, rows;   // rows: of a stream and KV head, token by token
    int positions, tiles, segments;
    float scale, cap, bias;

    explicit Attention(ggml_tensor *op)
        : q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), sinks(op->src[4]), dst(op) {
        key_size = (int)k->ne[0], value_size = (int)v->ne[0];
        heads = (int)q->ne[2], kv_heads = (int)k->ne[2], group = heads / kv_heads;
        tokens = (int)q->ne[1], streams = (int)q->ne[3], rows = tokens * group;
        positions = (int)k->ne[1], tiles = (positions + TILE - 1) / TILE;
        segments = (tiles + SEGMENT - 1) / SEGMENT;
        memcpy(&scale, (const float *)op->op_params, sizeof scale);
        memcpy(&bias, (const float *)op->op_params + 1, sizeof bias);
        memcpy(&cap, (const float *)op->op_params + 2, sizeof cap);
        if (cap != 0.0f) scale /= cap;
    }

    const float *query(int stream, int head, int token) const {
        return (const float *)((const char *)q->data + token * q->nb[1] + head * q->nb[2] +
                               stream * q->nb[3]);
    }
    // Row 0 of a tensor of keys or values.
    const char *cells(const ggml_tensor *kv, int stream, int kv_head, int position) const {
        return (const char *)kv->data + position * kv->nb[1] + kv_head * kv->nb[2] +
               stream / (streams / kv->ne[3]) * kv->nb[3];
    }
    const ggml_fp16_t *mask_row(int stream, int token) const {
        return (const ggml_fp16_t *)((const char *)mask->data + token * mask->nb[1] +
                                     stream % mask->ne[3] * mask->nb[3]);
    }
    float *output(int stream, int head, int token) const {
        const int64_t row = ((int64_t)stream * tokens + token) * heads + head;
        return (float *)((char *)dst->data + row * dst->nb[1]);
    }
    float slope(int head) const {  // ALiBi
        if (bias <= 0.0f) return 1.0f;
        const int powers = 1 << (int)floor(log2(heads));
        return head < powers ? powf(powf(2.0f, -bias / powers), head + 1)
                             : powf(powf(2.0f, -bias / 2 / powers), 2 * (head - powers) + 1);
    }
};

static bool readable(const ggml_tensor *kv) {
    if (kv->ne[0] % PANEL || kv->nb[0] != ggml_type_size(kv->type)) return false;
    switch (kv->type) {
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_F32: return true;
        case GGML_TYPE_Q8_0: return kv->ne[0] % 32 == 0;
        default: return false;
    }
}

static bool known(const ggml_compute_params *params, const ggml_tensor *dst) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *mask = dst->src[3];
    return enabled && !params->use_ref && q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) &&
           readable(k) && readable(v) && k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 &&
           q->ne[3] % k->ne[3] == 0 && q->ne[3] % v->ne[3] == 0 && k->ne[1] > 0 &&
           (!mask || mask->ne[2] == 1) && ggml_nrows(dst) < INT32_MAX / 2;
}

// ------------------------------------------------------------------------------- conversion

template <class Type>
static void convert_rows(const char *cells, size_t cell_stride, int count, int size, float *out,
                         size_t stride, size_t panel) {
    for (int t = 0; t < count; t++) {
        const char *row = cells + t * cell_stride;
        prefetch_row(row + TILE * cell_stride, Type::bytes(size));
        for (int i = 0; i < size; i += Type::RUN * WIDTH) {
            Vector values[Type::RUN];
            Type::run(row, i, values);
            float *place = out + t * stride + i / PANEL * panel + i % PANEL;
            for (int j = 0; j < Type::RUN; j++) store(place + j * WIDTH, values[j]);
        }
    }
}

// Converts ``count`` positions into float32, and makes the rest of the tile 0. A row's panels lie
// ``panel`` values apart, rows ``stride``.
static void convert_tile(const ggml_tensor *kv, const char *cells, int count, float *out,
                         size_t stride, size_t panel) {
    const auto convert = kv->type == GGML_TYPE_F16    ? convert_rows<Float16>
                         : kv->type == GGML_TYPE_BF16 ? convert_rows<BFloat16>
                         : kv->type == GGML_TYPE_F32  ? convert_rows<Float32>
                                                      : convert_rows<Quantized8>;
    convert(cells, kv->nb[1], count, (int)kv->ne[0], out, stride, panel);
    for (int t = count; t < TILE; t++)
        for (int i = 0; i < (int)kv->ne[0]; i += PANEL)
            memset(out + t * stride + i / PANEL * panel, 0, PANEL * sizeof(float));
}

// ------------------------------------------------------------------------------- masks

enum class Mask { NONE, SOME, ALL };  // which positions of a tile a token may not see

// Looks at a token's mask of a tile; writes it as float32 if it is neither 0 nor all -inf. Raises
// ``end`` to the end of what the token sees: to read a cell that was never written would take memory.
static Mask read_mask(const Attention &a, int stream, int token, int tile, float *out, int &end) {
    const int first = tile * TILE, count = std::min(TILE, a.positions - first);
    if (!a.mask) {
        end = count;
        if (count == TILE) return Mask::NONE;
        for (int t = 0; t < TILE; t++) out[t] = t < count ? 0.0f : -INFINITY;
        return Mask::SOME;
    }
    const ggml_fp16_t *row = a.mask_row(stream, token) + first;
    uint16_t any = 0, all = 0;  // bits that differ from 0, and from -inf
    for (int t = 0; t < count; t++) {
        any |= row[t];
        all |= row[t] ^ 0xfc00;
    }
    if (all == 0) return Mask::ALL;
    int last = count;
    while (row[last - 1] == 0xfc00) last--;
    end = std::max(end, last);
    if (any == 0 && count == TILE) return Mask::NONE;
    int t = 0;
    for (; t + WIDTH <= count; t += WIDTH) store(out + t, load_f16(row + t));
    for (; t < count; t++) out[t] = ggml_fp16_to_fp32(row[t]);
    for (; t < TILE; t++) out[t] = -INFINITY;
    return Mask::SOME;
}

// ------------------------------------------------------------------------------- plan

// The state of rows in a segment: maximum and sum of the weights, and the values added so far.
struct State {
    float *maxima, *totals, *out;

    State(float *memory, size_t rows) : maxima(memory), totals(memory + rows) {
        out = memory + 2 * rows;
    }
    void clear(size_t first, size_t count, int size) const {
        std::fill_n(maxima + first, count, -INFINITY);
        std::fill_n(totals + first, count, 0.0f);
        std::fill_n(out + first * size, count * size, 0.0f);
    }
};

// Maximum and sum of a row's weights in all segments joined so far. The values lie in the output.
struct Joined {
    float maximum = -INFINITY, total = 0.0f;
};

static size_t padded(size_t n) { return (n + 15) / 16 * 16; }

// How an operation is divided into pieces: by streams, KV heads, blocks of rows, and by segments if
// that would be too few. Then there is memory for the states of ``slots`` segments, which are
// computed in one wave, and joined before the next. A piece has ``run`` of them.
struct Plan {
    bool many;
    int stream_group, head_group, block_rows;  // of one piece
    int stream_groups, head_groups, blocks;
    int slots, run;  // 0 where a piece has all segments
    size_t scratch, state_rows, state;  // floats: of a thread, and of each slot

    int groups() const { return stream_groups * head_groups * blocks; }
    size_t shared() const { return slots ? slots * state + 2 * state_rows : 0; }

    Plan(const Attention &a, int threads, size_t memory) : slots(0) {
        many = a.rows > FEW_ROWS;
        stream_group = head_group = 1;
        blocks = (a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        block_rows = (a.rows + blocks - 1) / blocks;
        if (many) {
            block_rows = (block_rows + WIDTH - 1) / WIDTH * WIDTH;
            blocks = (a.rows + block_rows - 1) / block_rows;
        } else {
            stream_group = std::min(STREAM_GROUP, a.streams);
            head_group = a.kv_heads;
        }
        count_groups(a);
        divide_positions(a, threads, memory);
        // Smaller pieces if there are too few of them, or no room for their states.
        while ((groups() * std::max(slots, 1) < 2 * threads || threads * scratch > memory) &&
               (stream_group > 1 || head_group > 1)) {
            int &larger = stream_group > 1 ? stream_group : head_group;
            larger = (larger + 1) / 2;
            count_groups(a);
        }
        run = slots ? std::max(1, groups() * slots / (SHARES * threads)) : 0;
    }

private:
    void count_groups(const Attention &a) {
        stream_groups = (a.streams + stream_group - 1) / stream_group;
        head_groups = (a.kv_heads + head_group - 1) / head_group;
        scratch = padded(scratch_size(a));
    }

    void divide_positions(const Attention &a, int threads, size_t memory) {
        state_rows = padded((size_t)a.streams * a.kv_heads * a.rows);
        state = padded(state_rows * (a.value_size + 2));
        if (groups() >= (SHARES - 1) * threads) return;
        const size_t used = (many ? threads * scratch : 0) + 2 * state_rows;
        const int room = memory > used ? (int)std::min<size_t>((memory - used) / state, a.segments) : 0;
        if (room < 2) return;
        const int waves = (a.segments + room - 1) / room;
        slots = (a.segments + waves - 1) / waves;
        count_groups(a);
    }

    size_t scratch_size(const Attention &a) const {
        if (many)
            return (size_t)(block_rows + TILE) * (a.key_size + a.value_size) +
                   (size_t)block_rows * 2 * TILE;
        const size_t rows = (size_t)stream_group * head_group * a.rows;
        return slots ? 0 : rows * (a.value_size + 4);
    }
};

// ------------------------------------------------------------------------------- results

static float value_at(const ggml_tensor *kv, const char *row, int i) {
    ggml_fp16_t half;
    switch (kv->type) {
        case GGML_TYPE_F32: return ((const float *)row)[i];
        case GGML_TYPE_F16: return ggml_fp16_to_fp32(((const ggml_fp16_t *)row)[i]);
        case GGML_TYPE_BF16: return ggml_bf16_to_fp32(((const ggml_bf16_t *)row)[i]);
        default:
            memcpy(&half, row + i / 32 * 34, sizeof half);
            return ggml_fp16_to_fp32(half) * ((const int8_t *)row + i / 32 * 34 + 2)[i % 32];
    }
}

// Computes a row position by position without looking at those that are masked. A tile multiplies
// their values by 0, which would not help if one were infinite: a broken sequence would break those
// that share its tiles. What sees a broken position is broken itself, and gets no more work.
static void compute_alone(const Attention &a, int stream, int head, int token) {
    float *out = a.output(stream, head, token);
    const float *query = a.query(stream, head, token), slope = a.slope(head);
    const int kv_head = head / a.group;
    double maximum = a.sinks ? ((const float *)a.sinks->data)[head] : -INFINITY;
    double total = a.sinks ? 1.0 : 0.0;
    std::fill_n(out, a.value_size, 0.0f);
    for (int t = 0; t < a.positions; t++) {
        const float mask = a.mask ? ggml_fp16_to_fp32(a.mask_row(stream, token)[t]) : 0.0f;
        if (mask == -INFINITY) continue;
        const char *key = a.cells(a.k, stream, kv_head, t), *value = a.cells(a.v, stream, kv_head, t);
        double score = 0.0;
        for (int i = 0; i < a.key_size; i++) score += query[i] * value_at(a.k, key, i);
        score *= a.scale;
        if (a.cap != 0.0f) score = a.cap * std::tanh(score);
        score += slope * mask;
        if (score == -INFINITY) continue;
        bool broken = !std::isfinite(score);
        const double now = std::max(maximum, score), decay = std::exp(maximum - now);
        const double weight = std::exp(score - now);
        for (int i = 0; i < a.value_size; i++) {
            out[i] = (float)(out[i] * decay + weight * value_at(a.v, value, i));
            broken |= !std::isfinite(out[i]);
        }
        if (broken) {
            std::fill_n(out, a.value_size, NAN);
            return;
        }
        total = total * decay + weight;
        maximum = now;
    }
    for (int i = 0; i < a.value_size; i++) out[i] = (float)(out[i] / total);
}

// Joins a row's state of the next segment with those before it. Segments are always the same, and
// joined in the same order, so that the result does not depend on how the work is divided.
static void join_segment(const Attention &a, int stream, int head, int token, const State &segment,
                         size_t at, Joined &joined) {
    const float *values = segment.out + at * a.value_size;
    const float top = segment.maxima[at], total = segment.totals[at];
    float *out = a.output(stream, head, token);
    if (joined.total == 0.0f) {
        std::copy_n(values, a.value_size, out);
        joined.maximum = top, joined.total = total;
        return;
    }
    const float now = std::max(joined.maximum, top);
    const float kept = exp(joined.maximum - now), added = exp(top - now);
    for (int i = 0; i < a.value_size; i += WIDTH)
        store(out + i, fma(load(values + i), spread(added), mul(load(out + i), spread(kept))));
    joined.maximum = now;
    joined.total = joined.total * kept + total * added;
}

// Writes a row's result, with its sink.
static void finish_row(const Attention &a, int stream, int head, int token, const Joined &joined) {
    float *out = a.output(stream, head, token), total = joined.total, factor = 1.0f;
    if (total == 0.0f) {
        std::fill_n(out, a.value_size, 0.0f);
        return;
    }
    if (a.sinks) {
        const float sink = ((const float *)a.sinks->data)[head];
        const float now = std::max(sink, joined.maximum);
        factor = exp(joined.maximum - now);
        total = total * factor + exp(sink - now);
    }
    factor /= total;
    Vector check = spread(factor * 0.0f);
    for (int i = 0; i < a.value_size; i += WIDTH) {
        const Vector v = fma(load(out + i), spread(factor), zero());  // never -0
        check = fma(v, zero(), check);  // 0, or not a number if v is not finite
        store(out + i, v);
    }
    if (a.mask && !(sum(check) == 0.0f)) compute_alone(a, stream, head, token);
}

// Calls function(stream, head, token, number) for rows of a KV head, numbered from ``at`` on.
template <class Function>
static void for_rows(const Attention &a, int stream, int kv_head, int first, int count, size_t at,
                     const Function &function) {
    for (int r = first; r < first + count; r++, at++)
        function(stream, kv_head * a.group + r % a.group, r / a.group, at);
}

// ------------------------------------------------------------------------------- few rows

// A tile of one stream with the masks of its tokens.
struct Turn {
    int tile, stream, end;  // end: of the positions that some token sees
    const float *masks[FEW_ROWS];
    float buffer[FEW_ROWS * TILE];
};

// Finds the next tile that some token sees, from tile and stream on. Returns false at the end.
static bool next_turn(const Attention &a, int end_tile, int first_stream, int end_stream,
                      Turn &turn) {
    for (; turn.tile < end_tile; turn.tile++, turn.stream = first_stream)
        for (; turn.stream < end_stream; turn.stream++) {
            turn.end = 0;
            for (int i = 0; i < a.tokens; i++) {
                float *buffer = turn.buffer + i * TILE;
                const Mask mask = read_mask(a, turn.stream, i, turn.tile, buffer, turn.end);
                if (mask == Mask::ALL) std::fill_n(buffer, TILE, -INFINITY);
                turn.masks[i] = mask == Mask::NONE ? nullptr : buffer;
            }
            if (turn.end > 0) return true;
        }
    return false;
}

struct FewRows {
    const Attention &a;
    const Plan &plan;
    Joined *joined;  // followed by the state
    const Few *keys, *values;

    FewRows(const Attention &a, const Plan &plan, float *scratch)
        : a(a), plan(plan), joined((Joined *)scratch), keys(functions(a.k)), values(functions(a.v)) {}

    static const Few *functions(const ggml_tensor *kv) {
        return kv->type == GGML_TYPE_F16    ? &few<Float16>
               : kv->type == GGML_TYPE_BF16 ? &few<BFloat16>
               : kv->type == GGML_TYPE_F32  ? &few<Float32>
                                            : &few<Quantized8>;
    }

    void compute_tile(const Turn &turn, const Turn *next, int kv_head, const State &state, size_t at) {
        const int first = turn.tile * TILE, count = turn.end;
        const int even = (count + WIDTH - 1) / WIDTH * WIDTH;
        const char *k = a.cells(a.k, turn.stream, kv_head, first);
        const char *v = a.cells(a.v, turn.stream, kv_head, first);
        ptrdiff_t k_ahead = 0, v_ahead = 0;
        if (next && (next->tile + 1) * TILE <= a.positions) {
            k_ahead = a.cells(a.k, next->stream, kv_head, next->tile * TILE) - k;
            v_ahead = a.cells(a.v, next->stream, kv_head, next->tile * TILE) - v;
        }
        const float *queries[FEW_ROWS];
        float scores[FEW_ROWS * TILE], decays[FEW_ROWS];
        for (int r = 0; r < a.rows; r++)
            queries[r] = a.query(turn.stream, kv_head * a.group + r % a.group, r / a.group);
        keys->score[a.rows - 1](queries, k, a.k->nb[1], count, a.key_size, k_ahead, scores);
        for (int r = 0; r < a.rows; r++) {
            std::fill(scores + r * TILE + count, scores + r * TILE + even, 0.0f);
            decays[r] = weigh_few(scores + r * TILE, even, a.scale, a.cap, turn.masks[r / a.group],
                                  a.slope(kv_head * a.group + r % a.group), state.maxima + at + r,
                                  state.totals + at + r);
        }
        values->add[a.rows - 1](scores, v, a.v->nb[1], count, a.value_size, v_ahead, decays,
                                state.out + at * a.value_size);
    }

    // Computes segments of a group of rows. ``shared`` is the state of the first one, if they have one
    // each that is joined later; null if they are all.
    void compute_piece(int group, int first, int end, float *shared) {
        const int streams = group % plan.stream_groups * plan.stream_group;
        const int heads = group / plan.stream_groups * plan.head_group;
        const int end_stream = std::min(streams + plan.stream_group, a.streams);
        const int end_head = std::min(heads + plan.head_group, a.kv_heads);
        const size_t rows = (size_t)(end_stream - streams) * (end_head - heads) * a.rows;
        const State own((float *)(joined + rows), rows);
        const auto state_of = [&](int segment) {
            return shared ? State(shared + (segment - first) * plan.state, plan.state_rows) : own;
        };
        const auto place = [&](int stream, int head) {
            return shared ? ((size_t)stream * a.kv_heads + head) * a.rows
                          : ((size_t)(stream - streams) * (end_head - heads) + head - heads) * a.rows;
        };
        const auto clear = [&](const State &state) {
            for (int s = streams; s < end_stream; s++)
                state.clear(place(s, heads), (size_t)(end_head - heads) * a.rows, a.value_size);
        };
        const auto for_all = [&](const auto &function) {
            for (int s = streams; s < end_stream; s++)
                for (int h = heads; h < end_head; h++)
                    for_rows(a, s, h, 0, a.rows, place(s, h), function);
        };
        for (int s = first; s < (shared ? end : first + 1); s++) clear(state_of(s));
        if (!shared) std::fill_n(joined, rows, Joined());

        const int end_tile = std::min(end * SEGMENT, a.tiles);
        Turn turns[2];
        Turn *turn = turns, *next = turns + 1;
        turn->tile = first * SEGMENT, turn->stream = streams;
        bool more = next_turn(a, end_tile, streams, end_stream, *turn);
        while (more) {
            next->tile = turn->tile, next->stream = turn->stream + 1;
            more = next_turn(a, end_tile, streams, end_stream, *next);
            const State state = state_of(turn->tile / SEGMENT);
            for (int h = heads; h < end_head; h++)
                compute_tile(*turn, more ? next : nullptr, h, state, place(turn->stream, h));
            if (!shared && (!more || next->tile / SEGMENT > turn->tile / SEGMENT)) {
                for_all([&](int stream, int head, int token, size_t at) {
                    join_segment(a, stream, head, token, state, at, joined[at]);
                });
                if (more) clear(state);
            }
            std::swap(turn, next);
        }
        if (!shared)
            for_all([&](int stream, int head, int token, size_t at) {
                finish_row(a, stream, head, token, joined[at]);
            });
    }
};

// ------------------------------------------------------------------------------- many rows

struct ManyRows {
    const Attention &a;
    const Plan &plan;
    float *queries, *keys, *values, *out, *scores, *masks;

    ManyRows(const Attention &a, const Plan &plan, float *scratch) : a(a), plan(plan) {
        queries = scratch;
        keys = queries + (size_t)plan.block_rows * a.key_size;
        values = keys + (size_t)TILE * a.key_size;
        out = values + (size_t)TILE * a.value_size;
        scores = out + (size_t)plan.block_rows * a.value_size;
        masks = scores + (size_t)plan.block_rows * TILE;
    }

    void pack_queries(int stream, int kv_head, int first, int count, int padded_rows) {
        for (int r = 0; r < padded_rows; r++) {
            const int row = first + r, start = r / QUERY_ROWS * QUERY_ROWS;
            const int width = std::min(QUERY_ROWS, padded_rows - start);
            const float *query = r < count ? a.query(stream, kv_head * a.group + row % a.group,
                                                     row / a.group) : nullptr;
            float *place = queries + (size_t)start * a.key_size + r - start;
            for (int n = 0; n < WIDTH; n++)
                for (int i = lane_at(n); i < a.key_size; i += WIDTH, place += width)
                    *place = query ? query[i] : 0.0f;
        }
    }

    // Writes the masks of a tile as [position][rows], unless all are 0 or all are -inf.
    Mask read_masks(int stream, int kv_head, int first, int count, int padded_rows, int tile,
                    int &seen) {
        float buffer[TILE];
        bool all = true, none = true;
        const int first_token = first / a.group, end_token = (first + count - 1) / a.group + 1;
        for (int i = first_token; i < end_token; i++) {
            const Mask kind = read_mask(a, stream, i, tile, buffer, seen);
            all &= kind == Mask::ALL;
            none &= kind == Mask::NONE;
            if (!a.mask) break;  // all tokens are alike
        }
        if (all || none) return all ? Mask::ALL : Mask::NONE;
        for (int i = first_token; i < end_token; i++) {
            const Mask kind = read_mask(a, stream, i, tile, buffer, seen);
            if (kind != Mask::SOME) std::fill_n(buffer, TILE, kind == Mask::ALL ? -INFINITY : 0.0f);
            const int begin = std::max(i * a.group, first), end = std::min((i + 1) * a.group, first + count);
            for (int row = begin; row < end; row++) {
                const float slope = a.slope(kv_head * a.group + row % a.group);
                for (int t = 0; t < TILE; t++)
                    masks[t * padded_rows + row - first] = slope * buffer[t];
            }
        }
        for (int r = count; r < padded_rows; r++)
            for (int t = 0; t < TILE; t++) masks[t * padded_rows + r] = 0.0f;
        return Mask::SOME;
    }

    // As FewRows::compute_piece, for a block of rows.
    void compute_piece(int group, int first_segment, int end_segment, float *shared) {
        const int block = group % plan.blocks;
        const int kv_head = group / plan.blocks % a.kv_heads, stream = group / plan.blocks / a.kv_heads;
        const int first = block * plan.block_rows;
        const int count = std::min(plan.block_rows, a.rows - first);
        const int rows = (count + WIDTH - 1) / WIDTH * WIDTH;
        float maxima[BLOCK_ROWS], totals[BLOCK_ROWS];
        Joined joined[BLOCK_ROWS];
        State state(nullptr, 0);
        state.maxima = maxima, state.totals = totals, state.out = out;
        pack_queries(stream, kv_head, first, count, rows);
        const size_t place = ((size_t)stream * a.kv_heads + kv_head) * a.rows + first;
        for (int s = first_segment; shared && s < end_segment; s++, shared += plan.state) {
            const State slot(shared, plan.state_rows);
            state.clear(0, rows, a.value_size);
            compute_segment(s, stream, kv_head, first, count, rows, state);
            std::copy_n(maxima, count, slot.maxima + place);
            std::copy_n(totals, count, slot.totals + place);
            std::copy_n(out, (size_t)count * a.value_size, slot.out + place * a.value_size);
        }
        if (plan.slots) return;
        bool clear = false;
        for (int s = 0; s < a.segments; s++) {
            if (!clear) state.clear(0, rows, a.value_size);
            clear = !compute_segment(s, stream, kv_head, first, count, rows, state);
            if (clear) continue;
            for_rows(a, stream, kv_head, first, count, 0, [&](int, int head, int token, size_t at) {
                join_segment(a, stream, head, token, state, at, joined[at]);
            });
        }
        for_rows(a, stream, kv_head, first, count, 0, [&](int, int head, int token, size_t at) {
            finish_row(a, stream, head, token, joined[at]);
        });
    }

    // Returns false if no row sees anything of the segment.
    bool compute_segment(int segment, int stream, int kv_head, int first, int count, int rows,
                         const State &state) {
        bool any = false;
        float decays[BLOCK_ROWS];
        const int end_tile = std::min((segment + 1) * SEGMENT, a.tiles);
        for (int tile = segment * SEGMENT; tile < end_tile; tile++) {
            const int position = tile * TILE;
            int number = 0;
            const Mask mask = read_masks(stream, kv_head, first, count, rows, tile, number);
            if (mask == Mask::ALL) continue;
            any = true;
            convert_tile(a.k, a.cells(a.k, stream, kv_head, position), number, keys, a.key_size, PANEL);
            score_many(queries, rows, keys, a.key_size, a.scale, scores);
            weigh_many(scores, rows, a.cap, mask == Mask::SOME ? masks : nullptr, state.maxima,
                       state.totals, decays);
            convert_tile(a.v, a.cells(a.v, stream, kv_head, position), number, values, PANEL, TILE * PANEL);
            add_many(scores, rows, values, decays, a.value_size, state.out);
        }
        return any;
    }
};

// ------------------------------------------------------------------------------- operation

// Joins the segments from ``first`` to ``end`` of a row, and finishes it after the last.
static void join_row(const Attention &a, const Plan &plan, float *memory, Joined *joined, int first,
                     int end, size_t row) {
    const int in_head = (int)(row % a.rows), kv_head = (int)(row / a.rows % a.kv_heads);
    const int stream = (int)(row / a.rows / a.kv_heads);
    const int head = kv_head * a.group + in_head % a.group, token = in_head / a.group;
    if (first == 0) joined[row] = Joined();
    for (int s = first; s < end; s++)
        join_segment(a, stream, head, token, State(memory + (s - first) * plan.state, plan.state_rows),
                     row, joined[row]);
    if (end == a.segments) finish_row(a, stream, head, token, joined[row]);
}

// Calls function(piece) for all pieces, each in one of the threads.
template <class Function>
static void share_pieces(const ggml_compute_params *params, int pieces, const Function &function) {
    const int threads = params->nth;
    const bool shares = pieces > threads && threads > 1;
    if (shares) {
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, threads);
        ggml_barrier(params->threadpool);
    }
    for (int piece = params->ith; piece < pieces;) {
        function(piece);
        piece = shares ? ggml_threadpool_chunk_add(params->threadpool, 1) : piece + threads;
    }
}

template <class Rows>
static void compute_pieces(const Attention &a, const Plan &plan, const ggml_compute_params *params,
                           float *memory) {
    Rows rows(a, plan, memory + params->ith * plan.scratch);
    const int groups = plan.groups();
    if (!plan.slots) {
        share_pieces(params, groups,
                     [&](int group) { rows.compute_piece(group, 0, a.segments, nullptr); });
        return;
    }
    float *states = memory + params->nth * plan.scratch;
    Joined *joined = (Joined *)(states + plan.slots * plan.state);
    const size_t count = (size_t)a.streams * a.kv_heads * a.rows;
    for (int first = 0; first < a.segments; first += plan.slots) {
        const int end = std::min(first + plan.slots, a.segments);
        if (first > 0) ggml_barrier(params->threadpool);
        const int runs = (end - first + plan.run - 1) / plan.run;
        share_pieces(params, groups * runs, [&](int piece) {
            const int begin = piece / groups * plan.run;
            rows.compute_piece(piece % groups, first + begin, std::min(first + begin + plan.run, end),
                               states + begin * plan.state);
        });
        ggml_barrier(params->threadpool);
        for (size_t row = params->ith; row < count; row += params->nth)
            join_row(a, plan, states, joined, first, end, row);
    }
}

// Returns false if the work memory is too small.
static bool compute(const ggml_compute_params *params, ggml_tensor *dst) {
    const Attention a(dst);
    if (a.tokens == 0 || a.streams == 0) return true;
    const uintptr_t start = (uintptr_t)params->wdata, aligned = (start + 63) / 64 * 64;
    const size_t bytes = params->wsize > aligned - start ? params->wsize - (aligned - start) : 0;
    const Plan plan(a, params->nth, bytes / sizeof(float));
    if (params->nth * plan.scratch + plan.shared() > bytes / sizeof(float)) return false;
    if (plan.many)
        compute_pieces<ManyRows>(a, plan, params, (float *)aligned);
    else
        compute_pieces<FewRows>(a, plan, params, (float *)aligned);
    return true;
}

}  // namespace
}  // namespace cllm

#endif

void ggml_compute_forward_flash_attn_ext(const ggml_compute_params *params, ggml_tensor *dst) {
#ifdef CLLM_VECTORS
    if (cllm::known(params, dst) && cllm::compute(params, dst)) return;
#endif
    ggml_original_flash_attn_ext(params, dst);
}
