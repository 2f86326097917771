/* Attention of sequences' tokens, each to its own sequence, and the gradients. */
#include "tiles.h"

#define TILE_KEYS 64  /* keys whose scores, for a tile's queries, are held at once */

INLINE float larger(float a, float b) { return a > b ? a : b; }

/* top[l] = the maximum of top[l] and lane l of `count` scores. Four scores are combined first, since each update of top
 * waits for the one before. */
INLINE void raise(const float *score, int64_t across, int64_t count, float *top) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4, score += 4 * across)
#pragma omp simd
        for (int64_t l = 0; l < across; l++) {
            float low = larger(score[l], score[across + l]);
            float high = larger(score[2 * across + l], score[3 * across + l]);
            top[l] = larger(larger(low, high), top[l]);
        }
    for (; j < count; j++, score += across)
#pragma omp simd
        for (int64_t l = 0; l < across; l++) top[l] = larger(score[l], top[l]);
}

/* Softmax attention of a tile's queries, one block of keys after the other (Milakov and Gimelshein, 2018). No sums
 * across lanes are needed: each lane has the scores of its own query, in base 2. `log_sum`, if given, gets the base-2
 * logarithm of the sum of the exponentials. The distance between heads is query_head for queries, d for out and 1 for
 * log_sum. */
INLINE void attend_tile(const Tile *tile, int64_t w, int64_t d, const float *query, int64_t query_row,
                        int64_t query_head, const float *keys, int64_t key_row, const float *values, int64_t value_row,
                        float scale, float *out, int64_t out_row, float *log_sum, int64_t log_row) {
    lanes turned[MAX_HEAD * SIDE], weighted[MAX_HEAD * SIDE], scores[TILE_KEYS * SIDE];
    lanes tops[SIDE], sums[SIDE] = {{0}}, kept[SIDE];
    float *score = (float *)scores, most[SIDE * LANES], *top = (float *)tops, *sum = (float *)sums;
    int64_t across = w * LANES;
    UNROLL_SIDE for (int v = 0; v < w; v++)
        turn_in(query + BEGIN(v, query_row, query_head), query_row, tile->valid[v], w, d, scale * LOG2_E, turned + v);
    for (int64_t i = 0; i < d * w; i++) weighted[i] = (lanes){0};
    for (int64_t l = 0; l < across; l++) most[l] = top[l] = -INFINITY;
    for (int64_t start = 0; start < tile->length; start += TILE_KEYS) {
        int64_t count = tile->length - start < TILE_KEYS ? tile->length - start : TILE_KEYS;
        dots_of_rows(turned, w, d, keys + start * key_row, key_row, count, scores);
        hide(-INFINITY, tile, w, start, count, scores);
        raise(score, across, count, top);
#pragma omp simd
        for (int64_t l = 0; l < across; l++) {
            ((float *)kept)[l] = exp2_negative(most[l] - top[l]);
            sum[l] *= ((float *)kept)[l];
            most[l] = top[l];
        }
        for (int64_t j = 0; j < count; j++)
#pragma omp simd
            for (int64_t l = 0; l < across; l++) {
                score[j * across + l] = exp2_negative(score[j * across + l] - top[l]);
                sum[l] += score[j * across + l];
            }
        add_rows(scores, w, count, values + start * value_row, value_row, d, kept, weighted);
    }
    UNROLL_SIDE for (int v = 0; v < w; v++) {
        turn_out(weighted + v, w, d, 1 / sums[v], tile->valid[v], out + BEGIN(v, out_row, d), out_row);
        for (int l = 0; log_sum && l < tile->valid[v]; l++)
            log_sum[BEGIN(v, log_row, 1) + l * log_row] = most[v * LANES + l] + log2f(sums[v][l]);
    }
}

/* The gradients of `attend_tile`: those of the queries are written, those of keys and values are added to the arrays.
 * The weights are computed again from the scores and `log_sum`; `out` is the forward's result (Dao et al., 2022,
 * algorithm 4). */
INLINE void attend_tile_backward(const Tile *tile, int64_t w, int64_t d, const float *query, int64_t query_row,
                                 int64_t query_head, const float *keys, int64_t key_row, const float *values,
                                 int64_t value_row, float scale, const float *out, const float *grad_out,
                                 int64_t out_row, const float *log_sum, int64_t log_row, float *grad_query,
                                 float *grad_keys, float *grad_values, int64_t grad_row) {
    lanes turned[MAX_HEAD * SIDE], pulled[MAX_HEAD * SIDE], moved[MAX_HEAD * SIDE], all[SIDE];
    lanes weights[TILE_KEYS * SIDE], slopes[TILE_KEYS * SIDE], queries[MAX_HEAD * SIDE], grads[MAX_HEAD * SIDE];
    float *weight = (float *)weights, *slope = (float *)slopes, logs[SIDE * LANES] = {0}, inner[SIDE * LANES] = {0};
    int64_t across = w * LANES;
    gather(tile, w, query, query_row, query_head, d, (float *)queries);
    gather(tile, w, grad_out, out_row, d, d, (float *)grads);
    UNROLL_SIDE for (int v = 0; v < w; v++) {
        int64_t valid = tile->valid[v], at = BEGIN(v, out_row, d);
        turn_in(query + BEGIN(v, query_row, query_head), query_row, valid, w, d, scale * LOG2_E, turned + v);
        turn_in(grad_out + at, out_row, valid, w, d, 1, pulled + v);
        for (int l = 0; l < valid; l++) {
            inner[v * LANES + l] = dot_of(grad_out + at + l * out_row, out + at + l * out_row, d);
            logs[v * LANES + l] = log_sum[BEGIN(v, log_row, 1) + l * log_row];
        }
        all[v] = (lanes){0} + 1;
    }
    for (int64_t i = 0; i < d * w; i++) moved[i] = (lanes){0};
    for (int64_t start = 0; start < tile->length; start += TILE_KEYS) {
        int64_t count = tile->length - start < TILE_KEYS ? tile->length - start : TILE_KEYS;
        const float *key = keys + start * key_row, *value = values + start * value_row;
        float *for_keys = grad_keys + start * grad_row, *for_values = grad_values + start * grad_row;
        dots_of_rows(turned, w, d, key, key_row, count, weights);
        dots_of_rows(pulled, w, d, value, value_row, count, slopes);
        for (int64_t j = 0; j < count; j++)
#pragma omp simd
            for (int64_t l = 0; l < across; l++) {
                float share = exp2_negative(weight[j * across + l] - logs[l]);
                weight[j * across + l] = share;
                slope[j * across + l] = share * (slope[j * across + l] - inner[l]) * scale;
            }
        hide(0, tile, w, start, count, weights);
        hide(0, tile, w, start, count, slopes);
        add_rows(slopes, w, count, key, key_row, d, all, moved);
        add_outer(slopes, w, count, (float *)queries, d, for_keys, grad_row);
        add_outer(weights, w, count, (float *)grads, d, for_values, grad_row);
    }
    UNROLL_SIDE for (int v = 0; v < w; v++)
        turn_out(moved + v, w, d, all[v], tile->valid[v], grad_query + BEGIN(v, out_row, d), out_row);
}

/* Calls attend_tile with the number of registers as a compile-time constant and, for SIDE registers, the usual head
 * sizes too. */
static void tile_of_size(const Tile *tile, int64_t d, const float *query, int64_t query_row, int64_t query_head,
                         const float *keys, int64_t key_row, const float *values, int64_t value_row, float scale,
                         float *out, int64_t out_row, float *log_sum, int64_t log_row) {
#define FORWARD(w, size)                                                                                            \
    attend_tile(tile, w, size, query, query_row, query_head, keys, key_row, values, value_row, scale, out, out_row, \
                log_sum, log_row)
#define FORWARD_OF_SIDE(size) FORWARD(SIDE, size)
    if (tile->registers == SIDE)
        BY_SIZE(FORWARD_OF_SIDE)
    else
        FORWARD(1, d);
}

/* The next tile of `left` queries of the first of `heads` heads, which share keys; its queries attend to seen[0],
 * seen[1], ... keys. It holds two heads side by side, or two runs of queries, or one run. */
INLINE Tile tile_at(int64_t left, int64_t heads, const int64_t *seen) {
    int64_t first = left < LANES ? left : LANES, next = left - first < LANES ? left - first : LANES;
    Tile tile = {.registers = 1, .valid = {first}, .seen = seen};
    if (heads > 1) {
        tile.registers = SIDE;
        tile.valid[1] = first;
        tile.head[1] = 1;
    } else if (next) {
        tile.registers = SIDE;
        tile.valid[1] = next;
        tile.row[1] = LANES;
    }
    tile.length = seen[tile.row[1] + tile.valid[tile.registers - 1] - 1];
    return tile;
}

#define ROWS_OF(tile) ((tile).row[1] + LANES) /* number of rows from a tile to the next one */

/* out [N, H * D]: attention of the N tokens of one sequence. Token n attends to `first` + n * `more` keys. Its queries
 * begin at query + n * query_row; key j of head h is at keys + j * key_row + h * key_head, values likewise; D is a
 * multiple of 8. */
void attend_together(const float *query, int64_t query_row, int64_t rows, int64_t num_heads, int64_t num_kv, int64_t d,
                     int64_t first, int64_t more, const float *keys, int64_t key_row, int64_t key_head,
                     const float *values, int64_t value_row, int64_t value_head, float scale, int64_t threads,
                     float *out) {
    int64_t group = num_heads / num_kv, width = num_heads * d, side = group > 1 ? SIDE : 1;
    int64_t step = group > 1 ? LANES : SIDE * LANES, tiles = (rows + step - 1) / step;
    int64_t parts = (group + side - 1) / side;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < num_kv * parts; part++) {
        for (int64_t t = 0; t < tiles; t++) {
            int64_t kv = part / parts, beside = part % parts * side, h = kv * group + beside, n = t * step;
            int64_t left = rows - n < step ? rows - n : step, seen[SIDE * LANES];
            for (int64_t l = 0; l < left; l++) seen[l] = first + (n + l) * more;
            Tile tile = tile_at(left, group - beside, seen);
            tile_of_size(&tile, d, query + n * query_row + h * d, query_row, d, keys + kv * key_head, key_row,
                         values + kv * value_head, value_row, scale, out + n * width + h * d, width, 0, 0);
        }
    }
}

/* Attention of packed documents. `pieces` [P, 3]: each document's first query, number of queries and first key. Query n
 * attends to the first seen[n] keys of its document, never fewer than the document's previous query. A head's queries
 * begin at query + h * query_head with distance query_row; keys and values likewise. out [N, H, D], log_sum [N, H],
 * which only the gradients need. */
void attend_pieces(const float *query, int64_t query_row, int64_t query_head, int64_t num_heads, int64_t num_kv,
                   int64_t d, const int64_t *pieces, int64_t num_pieces, const int64_t *seen, const float *keys,
                   int64_t key_row, int64_t key_head, const float *values, int64_t value_row, int64_t value_head,
                   float scale, int64_t threads, float *out, float *log_sum) {
    int64_t group = num_heads / num_kv, width = num_heads * d;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < num_pieces; p++) {
        for (int64_t kv = 0; kv < num_kv; kv++) {
            int64_t row = pieces[3 * p], end = row + pieces[3 * p + 1], key = pieces[3 * p + 2];
            const float *k = keys + key * key_row + kv * key_head, *v = values + key * value_row + kv * value_head;
            for (int64_t beside = 0; beside < group; beside += SIDE)
                for (int64_t n = row, h = kv * group + beside; n < end;) {
                    Tile tile = tile_at(end - n, group - beside, seen + n);
                    tile_of_size(&tile, d, query + n * query_row + h * query_head, query_row, query_head, k, key_row, v,
                                 value_row, scale, out + n * width + h * d, width, log_sum + n * num_heads + h,
                                 num_heads);
                    n += ROWS_OF(tile);
                }
        }
    }
}

/* The gradients of `attend_pieces`: grad_query [N, H, D] is written, grad_keys and grad_values [T, K, D] are added to.
 * A document's keys are processed by one thread only, so that sums do not depend on the number of threads. */
void attend_pieces_backward(const float *query, int64_t query_row, int64_t query_head, int64_t num_heads,
                            int64_t num_kv, int64_t d, const int64_t *pieces, int64_t num_pieces, const int64_t *seen,
                            const float *keys, int64_t key_row, int64_t key_head, const float *values,
                            int64_t value_row, int64_t value_head, float scale, int64_t threads, const float *out,
                            const float *log_sum, const float *grad_out, float *grad_query, float *grad_keys,
                            float *grad_values) {
    int64_t group = num_heads / num_kv, width = num_heads * d, kv_width = num_kv * d;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < num_pieces; p++) {
        for (int64_t kv = 0; kv < num_kv; kv++) {
            int64_t row = pieces[3 * p], end = row + pieces[3 * p + 1], key = pieces[3 * p + 2];
            const float *k = keys + key * key_row + kv * key_head, *v = values + key * value_row + kv * value_head;
            float *gk = grad_keys + key * kv_width + kv * d, *gv = grad_values + key * kv_width + kv * d;
            for (int64_t beside = 0; beside < group; beside += SIDE)
                for (int64_t n = row, h = kv * group + beside; n < end;) {
                    Tile of_these = tile_at(end - n, group - beside, seen + n), *tile = &of_these;
                    int64_t at = n * width + h * d;
                    const float *q = query + n * query_row + h * query_head, *log = log_sum + n * num_heads + h;
#define BACKWARD(w, size)                                                                                              \
    attend_tile_backward(tile, w, size, q, query_row, query_head, k, key_row, v, value_row, scale, out + at,           \
                         grad_out + at, width, log, num_heads, grad_query + at, gk, gv, kv_width)
#define BACKWARD_OF_SIDE(size) BACKWARD(SIDE, size)
                    if (tile->registers == SIDE)
                        BY_SIZE(BACKWARD_OF_SIDE)
                    else
                        BACKWARD(1, d);
                    n += ROWS_OF(*tile);
                }
        }
    }
}
