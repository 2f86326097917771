/* Attention of the tokens of sequences, each to its own sequence, and its gradients. */
#include "shared.h"

#define TILE_KEYS 64  /* keys whose scores are held at once, of the queries of a tile */

/* Softmax attention of LANES queries, or of `valid` of them, one in each lane; query l sees the first seen[l] keys,
 * which only grow. A key's score is LANES products at once, and nothing is folded. `log_sum`, where there is one, gets
 * the logarithm of the sum of the exponentials. */
INLINE void attend_tile(const float *query, int64_t query_stride, int64_t valid, const int64_t *seen, int64_t d,
                        const float *keys, int64_t key_stride, const float *values, int64_t value_stride, float scale,
                        float *out, int64_t out_stride, float *log_sum, int64_t log_stride) {
    lanes turned[MAX_HEAD], weighted[MAX_HEAD], scores[TILE_KEYS];
    float most[LANES], sum[LANES], kept[LANES];
    for (int64_t i = 0; i < d; i++) {
        for (int l = 0; l < LANES; l++) turned[i][l] = l < valid ? query[l * query_stride + i] * scale : 0;
        weighted[i] = (lanes){0};
    }
    for (int l = 0; l < LANES; l++) {
        most[l] = -INFINITY;
        sum[l] = 0;
    }
    int64_t first = seen[0], length = seen[valid - 1];
    for (int64_t start = 0; start < length; start += TILE_KEYS) {
        int64_t count = length - start < TILE_KEYS ? length - start : TILE_KEYS, j = 0;
        for (; j + 8 <= count; j += 8) {
            const float *key = keys + (start + j) * key_stride;
            lanes dot[8] = {{0}};
            for (int64_t i = 0; i < d; i++)
#pragma GCC unroll 8
                for (int u = 0; u < 8; u++) dot[u] += turned[i] * key[u * key_stride + i];
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) scores[j + u] = dot[u];
        }
        for (; j < count; j++) {
            lanes dot = {0};
            for (int64_t i = 0; i < d; i++) dot += turned[i] * keys[(start + j) * key_stride + i];
            scores[j] = dot;
        }
        float *score = (float *)scores, top[LANES];
        for (j = first > start ? first - start : 0; j < count; j++)
            for (int l = 0; l < valid; l++)
                if (start + j >= seen[l]) score[j * LANES + l] = -INFINITY;
        for (int l = 0; l < LANES; l++) top[l] = most[l];
        for (j = 0; j < count; j++)
#pragma omp simd
            for (int l = 0; l < LANES; l++) top[l] = score[j * LANES + l] > top[l] ? score[j * LANES + l] : top[l];
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            kept[l] = exp_negative(most[l] - top[l]);
            sum[l] *= kept[l];
            most[l] = top[l];
        }
        for (j = 0; j < count; j++)
#pragma omp simd
            for (int l = 0; l < LANES; l++) {
                score[j * LANES + l] = exp_negative(score[j * LANES + l] - top[l]);
                sum[l] += score[j * LANES + l];
            }
        for (int64_t i = 0; i < d; i += 8) {
            lanes part[8];
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) part[u] = weighted[i + u] * *(lanes *)kept;
            for (j = 0; j < count; j++) {
                const float *value = values + (start + j) * value_stride + i;
#pragma GCC unroll 8
                for (int u = 0; u < 8; u++) part[u] += scores[j] * value[u];
            }
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) weighted[i + u] = part[u];
        }
    }
    for (int l = 0; l < valid; l++)
        for (int64_t i = 0; i < d; i++) out[l * out_stride + i] = weighted[i][l] / sum[l];
    for (int l = 0; log_sum && l < valid; l++) log_sum[l * log_stride] = most[l] + logf(sum[l]);
}

static void tile_of_size(int64_t d, const float *query, int64_t query_stride, int64_t valid, const int64_t *seen,
                         const float *keys, int64_t key_stride, const float *values, int64_t value_stride, float scale,
                         float *out, int64_t out_stride, float *log_sum, int64_t log_stride) {
#define TILE(size)                                                                                               \
    attend_tile(query, query_stride, valid, seen, size, keys, key_stride, values, value_stride, scale, out,      \
                out_stride, log_sum, log_stride)
    BY_SIZE(TILE)
}

/* out [N, H * D]: attention of the N tokens of one sequence. Token n sees `first` + n * `more` keys; its queries begin
 * at query + n * query_stride; key j of head h is at keys + j * key_stride + h * key_head, values likewise; D is a
 * multiple of 8. */
void attend_together(const float *query, int64_t query_stride, int64_t rows, int64_t num_heads, int64_t num_kv,
                     int64_t d, int64_t first, int64_t more, const float *keys, int64_t key_stride, int64_t key_head,
                     const float *values, int64_t value_stride, int64_t value_head, float scale, int64_t threads,
                     float *out) {
    int64_t group = num_heads / num_kv, width = num_heads * d, tiles = (rows + LANES - 1) / LANES;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < num_heads; h++) {
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t at = tile * LANES, valid = rows - at < LANES ? rows - at : LANES, seen[LANES];
            for (int l = 0; l < LANES; l++) seen[l] = first + (at + l) * more;
            const float *k = keys + h / group * key_head, *v = values + h / group * value_head;
            tile_of_size(d, query + at * query_stride + h * d, query_stride, valid, seen, k, key_stride, v,
                         value_stride, scale, out + at * width + h * d, width, 0, 0);
        }
    }
}

/* sums[j] += weight[j][l] * row[l], summed over `valid` rows of d floats; weight [count, LANES]. */
INLINE void add_outer(const float *weight, int64_t count, const float *row, int64_t row_stride, int64_t valid, int64_t d,
                      float *sums, int64_t sum_stride) {
    int64_t whole = d - d % LANES, j = 0;
    for (; j + 8 <= count; j += 8)
        for (int64_t i = 0; i < whole; i += LANES) {
            lanes sum[8];
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) sum[u] = *(lanes *)(sums + (j + u) * sum_stride + i);
            for (int l = 0; l < valid; l++) {
                lanes part = *(const lanes *)(row + l * row_stride + i);
#pragma GCC unroll 8
                for (int u = 0; u < 8; u++) sum[u] += part * weight[(j + u) * LANES + l];
            }
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) *(lanes *)(sums + (j + u) * sum_stride + i) = sum[u];
        }
    for (int64_t left = j, from = 0; from < count; from++)
        for (int l = 0; l < valid; l++)
#pragma omp simd
            for (int64_t i = from < left ? whole : 0; i < d; i++)
                sums[from * sum_stride + i] += row[l * row_stride + i] * weight[from * LANES + l];
}

/* The gradients of `attend_tile`: that of the queries is written, those of keys and values are added to. The weights
 * are computed again from the scores and `log_sum`; `out` is what the forward gave (Dao et al., 2022, algorithm 4). */
INLINE void attend_tile_backward(const float *query, int64_t query_stride, int64_t valid, const int64_t *seen,
                                 int64_t d, const float *keys, int64_t key_stride, const float *values,
                                 int64_t value_stride, float scale, const float *out, const float *grad_out,
                                 int64_t out_stride, const float *log_sum, int64_t log_stride, float *grad_query,
                                 float *grad_keys, float *grad_values, int64_t grad_stride) {
    lanes turned[MAX_HEAD], pulled[MAX_HEAD], moved[MAX_HEAD], weights[TILE_KEYS], slopes[TILE_KEYS];
    float *weight = (float *)weights, *slope = (float *)slopes, logs[LANES], inner[LANES] = {0};
    for (int64_t i = 0; i < d; i++) {
        for (int l = 0; l < LANES; l++) {
            turned[i][l] = l < valid ? query[l * query_stride + i] * scale : 0;
            pulled[i][l] = l < valid ? grad_out[l * out_stride + i] : 0;
            inner[l] += l < valid ? pulled[i][l] * out[l * out_stride + i] : 0;
        }
        moved[i] = (lanes){0};
    }
    for (int l = 0; l < LANES; l++) logs[l] = l < valid ? log_sum[l * log_stride] : 0;
    int64_t first = seen[0], length = seen[valid - 1];
    for (int64_t start = 0; start < length; start += TILE_KEYS) {
        int64_t count = length - start < TILE_KEYS ? length - start : TILE_KEYS, j = 0;
        const float *key = keys + start * key_stride, *value = values + start * value_stride;
        for (; j + 8 <= count; j += 8) {
            lanes dot[8] = {{0}}, pull[8] = {{0}};
            for (int64_t i = 0; i < d; i++)
#pragma GCC unroll 8
                for (int u = 0; u < 8; u++) {
                    dot[u] += turned[i] * key[(j + u) * key_stride + i];
                    pull[u] += pulled[i] * value[(j + u) * value_stride + i];
                }
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) {
                weights[j + u] = dot[u];
                slopes[j + u] = pull[u];
            }
        }
        for (; j < count; j++) {
            weights[j] = slopes[j] = (lanes){0};
            for (int64_t i = 0; i < d; i++) {
                weights[j] += turned[i] * key[j * key_stride + i];
                slopes[j] += pulled[i] * value[j * value_stride + i];
            }
        }
        for (j = 0; j < count; j++)
#pragma omp simd
            for (int l = 0; l < LANES; l++) weight[j * LANES + l] = exp_negative(weight[j * LANES + l] - logs[l]);
        for (j = first > start ? first - start : 0; j < count; j++)
            for (int l = 0; l < valid; l++)
                if (start + j >= seen[l]) weight[j * LANES + l] = 0;
        for (j = 0; j < count; j++)
#pragma omp simd
            for (int l = 0; l < LANES; l++)
                slope[j * LANES + l] = weight[j * LANES + l] * (slope[j * LANES + l] - inner[l]) * scale;
        for (int64_t i = 0; i < d; i += 8) {
            lanes part[8];
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) part[u] = moved[i + u];
            for (j = 0; j < count; j++)
#pragma GCC unroll 8
                for (int u = 0; u < 8; u++) part[u] += slopes[j] * key[j * key_stride + i + u];
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) moved[i + u] = part[u];
        }
        float *for_keys = grad_keys + start * grad_stride, *for_values = grad_values + start * grad_stride;
        add_outer(slope, count, query, query_stride, valid, d, for_keys, grad_stride);
        add_outer(weight, count, grad_out, out_stride, valid, d, for_values, grad_stride);
    }
    for (int l = 0; l < valid; l++)
        for (int64_t i = 0; i < d; i++) grad_query[l * out_stride + i] = moved[i][l];
}

/* Attention of packed documents. `pieces` [P, 3] has each document's first query, the number of its queries and its
 * first key; query n sees seen[n] of its document's keys, no fewer than the one before. A head's queries begin at
 * query + h * query_head and are query_row apart; keys and values likewise. out [N, H, D], log_sum [N, H]. */
void attend_pieces(const float *query, int64_t query_row, int64_t query_head, int64_t num_heads, int64_t num_kv,
                   int64_t d, const int64_t *pieces, int64_t num_pieces, const int64_t *seen, const float *keys,
                   int64_t key_row, int64_t key_head, const float *values, int64_t value_row, int64_t value_head,
                   float scale, int64_t threads, float *out, float *log_sum) {
    int64_t group = num_heads / num_kv, width = num_heads * d;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < num_pieces; p++) {
        for (int64_t h = 0; h < num_heads; h++) {
            int64_t row = pieces[3 * p], end = row + pieces[3 * p + 1], key = pieces[3 * p + 2];
            const float *k = keys + key * key_row + h / group * key_head;
            const float *v = values + key * value_row + h / group * value_head;
            for (int64_t n = row; n < end; n += LANES) {
                int64_t valid = end - n < LANES ? end - n : LANES;
                tile_of_size(d, query + n * query_row + h * query_head, query_row, valid, seen + n, k, key_row, v,
                             value_row, scale, out + n * width + h * d, width, log_sum + n * num_heads + h, num_heads);
            }
        }
    }
}

/* The gradients of `attend_pieces`: grad_query [N, H, D] is written, grad_keys and grad_values [T, K, D] are added to.
 * Each document's keys are one thread's alone, so that sums do not depend on the number of threads. */
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
            for (int64_t h = kv * group; h < (kv + 1) * group; h++)
                for (int64_t n = row; n < end; n += LANES) {
                    int64_t valid = end - n < LANES ? end - n : LANES, at = n * width + h * d;
                    const float *q = query + n * query_row + h * query_head, *log = log_sum + n * num_heads + h;
#define BACKWARD(size)                                                                                     \
    attend_tile_backward(q, query_row, valid, seen + n, size, k, key_row, v, value_row, scale, out + at,         \
                         grad_out + at, width, log, num_heads, grad_query + at, gk, gv, kv_width)
                    BY_SIZE(BACKWARD)
                }
        }
    }
}
