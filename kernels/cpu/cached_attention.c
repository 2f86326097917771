/* Attention of single tokens to the cache. */
#include "shared.h"

#define MAX_GROUP 32  /* largest H / K */
#define BLOCK 128     /* keys whose scores are held at once */
#define FEW 16        /* rows of values that are added at once */
#define PAIR 2        /* queries that share one read of the values */
#define WIDE 4        /* registers for a query's sums at once */
#define LINE 16       /* floats in a cache line; values are prefetched while scores are computed */

/* score[j] = scale * query . key[j] for LANES keys of d floats, a multiple of LANES. The lanes of all keys' sums are
 * added up together; doing it for each key alone would cost more than the products. */
INLINE void dots(const float *query, const float *key, int64_t d, float scale, float *score) {
    lanes sum[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
        const float *own = key + j * d;
        sum[j] = *(const lanes *)query * *(const lanes *)own;
#pragma GCC unroll 16
        for (int64_t i = LANES; i < d; i += LANES) sum[j] += *(const lanes *)(query + i) * *(const lanes *)(own + i);
    }
#pragma GCC unroll 4
    for (int left = TOGETHER, width = LANES / 2; left > 1; left /= 2, width /= 2)
#pragma GCC unroll 8
        for (int j = 0; j < width; j++) sum[j] = EVEN(sum[2 * j], sum[2 * j + 1]) + ODD(sum[2 * j], sum[2 * j + 1]);
#if LANES == 8
    sum[0] = LOW(sum[0], sum[1]) + HIGH(sum[0], sum[1]);
#endif
    *(lanes *)score = sum[0] * scale;
}

/* out[g * d + i] = out[g * d + i] * kept[g] + sum over j of scores[g * BLOCK + j] * values[j * d + i], for `many`
 * queries, `count` values and the columns of `wide` registers. */
INLINE void add_columns(const float *scores, const float *kept, int many, int64_t count, const float *values, int64_t d,
                        int wide, float *out) {
    lanes sum[PAIR][WIDE] = {{{0}}};
    for (int64_t j = 0; j < count; j++, values += d)
        for (int g = 0; g < many; g++)
            for (int v = 0; v < wide; v++)
                sum[g][v] += *(const lanes *)(values + v * LANES) * scores[g * BLOCK + j];
    for (int g = 0; g < many; g++)
        for (int v = 0; v < wide; v++) {
            lanes *all = (lanes *)(out + g * d + v * LANES);
            *all = *all * kept[g] + sum[g][v];
        }
}

/* `add_columns` for all d columns; `count` is so small that the values stay in the first-level cache meanwhile. */
INLINE void add_values(const float *scores, const float *kept, int many, int64_t count, const float *values, int64_t d,
                       float *out) {
    int64_t i = 0;
#define ADD(wide)                                    \
    for (; i + wide * LANES <= d; i += wide * LANES) \
        add_columns(scores, kept, many, count, values + i, d, wide, out + i);
    ADD(WIDE)
    ADD(WIDE / 2)
    ADD(1)
    for (int g = 0; i < d && g < many; g++)
        for (int64_t k = i; k < d; k++) {
            float sum = 0;
            for (int64_t j = 0; j < count; j++) sum += scores[g * BLOCK + j] * values[j * d + k];
            out[g * d + k] = out[g * d + k] * kept[g] + sum;
        }
}

/* Softmax attention of `group` queries that share keys and values [length, D], block by block (Milakov and Gimelshein,
 * 2018), with running values of the largest score, the sum of the exponentials and the weighted sum of values. */
INLINE void attend_group(const float *query, int64_t group, int64_t d, const float *keys, const float *values,
                         int64_t length, float scale, float *out) {
    float scores[MAX_GROUP][BLOCK], most[MAX_GROUP], sum[MAX_GROUP], kept[MAX_GROUP];
    for (int64_t g = 0; g < group; g++) {
        most[g] = -INFINITY;
        sum[g] = 0;
        for (int64_t i = 0; i < d; i++) out[g * d + i] = 0;
    }
    for (int64_t start = 0; start < length; start += BLOCK) {
        int64_t count = length - start < BLOCK ? length - start : BLOCK;
        int64_t folded = d % LANES ? 0 : count - count % LANES;
        const float *key = keys + start * d, *value = values + start * d;
        for (int64_t j = 0; j < folded; j += LANES) {
            for (int64_t i = j * d; i < (j + LANES) * d; i += LINE) __builtin_prefetch(value + i);
            for (int64_t g = 0; g < group; g++) dots(query + g * d, key + j * d, d, scale, scores[g] + j);
        }
        for (int64_t j = folded; j < count; j++)
            for (int64_t g = 0; g < group; g++) {
                float dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t i = 0; i < d; i++) dot += query[g * d + i] * key[j * d + i];
                scores[g][j] = dot * scale;
            }
        for (int64_t g = 0; g < group; g++) {
            float *score = scores[g], top = most[g], added = 0;
#pragma omp simd reduction(max : top)
            for (int64_t j = 0; j < count; j++) top = score[j] > top ? score[j] : top;
#pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < count; j++) {
                score[j] = exp_negative(score[j] - top);
                added += score[j];
            }
            kept[g] = start ? exp_negative(most[g] - top) : 0;
            sum[g] = sum[g] * kept[g] + added;
            most[g] = top;
        }
        for (int64_t from = 0; from < count; from += FEW) {
            int64_t g = 0, few = count - from < FEW ? count - from : FEW;
            for (; g + PAIR <= group; g += PAIR)
                add_values(scores[g] + from, kept + g, PAIR, few, value + from * d, d, out + g * d);
            for (; g < group; g++) add_values(scores[g] + from, kept + g, 1, few, value + from * d, d, out + g * d);
            for (g = 0; g < group; g++) kept[g] = 1;
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < d; i++) out[g * d + i] /= sum[g];
}

/* out [N, H * D]: token n, whose queries begin at query + n * stride, attends to the length[n] entries of its
 * slot that begin at index first[n]; `keys` and `values` are [slots, K, C, D]. */
void attend(const float *query, int64_t stride, int64_t rows, int64_t num_heads, int64_t num_kv, int64_t d,
            const int64_t *first, const int64_t *length, int64_t context, const float *keys, const float *values,
            float scale, int64_t threads, float *out) {
    int64_t group = num_heads / num_kv;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t n = 0; n < rows; n++) {
        for (int64_t h = 0; h < num_kv; h++) {
            int64_t at = (first[n] + h * context) * d;
            const float *q = query + n * stride + h * group * d;
            float *o = out + (n * num_heads + h * group) * d;
#define GROUP(size) attend_group(q, group, size, keys + at, values + at, length[n], scale, o)
            BY_SIZE(GROUP)
        }
    }
}
