/* Attention of single tokens to what is in the cache. */
#include "shared.h"

#define MAX_GROUP 32  /* H / K at most */
#define BLOCK 128     /* keys whose scores are held at once */

/* score[j] = scale * query . key[j] for LANES keys of d floats, a multiple of LANES: all their sums are folded
 * together, since to fold each by itself would cost more than the products. */
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
    for (int width = LANES / 2; width; width /= 2)
#pragma GCC unroll 8
        for (int j = 0; j < width; j++) sum[j] = EVEN(sum[2 * j], sum[2 * j + 1]) + ODD(sum[2 * j], sum[2 * j + 1]);
    *(lanes *)score = sum[0] * scale;
}

/* Softmax attention of `group` queries, which share keys and values [length, D], block by block (Milakov and
 * Gimelshein, 2018): the largest score so far, the sum of the exponentials and the weighted values are kept. */
INLINE void attend_group(const float *query, int64_t group, int64_t d, const float *keys, const float *values,
                         int64_t length, float scale, float *out) {
    float scores[MAX_GROUP][BLOCK], most[MAX_GROUP], sum[MAX_GROUP];
    for (int64_t g = 0; g < group; g++) {
        most[g] = -INFINITY;
        sum[g] = 0;
        for (int64_t i = 0; i < d; i++) out[g * d + i] = 0;
    }
    for (int64_t start = 0; start < length; start += BLOCK) {
        int64_t count = length - start < BLOCK ? length - start : BLOCK;
        int64_t folded = d % LANES ? 0 : count - count % LANES;
        for (int64_t j = 0; j < folded; j += LANES)
            for (int64_t g = 0; g < group; g++) dots(query + g * d, keys + (start + j) * d, d, scale, scores[g] + j);
        for (int64_t j = folded; j < count; j++) {
            const float *key = keys + (start + j) * d;
            for (int64_t g = 0; g < group; g++) {
                float dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t i = 0; i < d; i++) dot += query[g * d + i] * key[i];
                scores[g][j] = dot * scale;
            }
        }
        for (int64_t g = 0; g < group; g++) {
            float *score = scores[g], top = most[g], added = 0, weighted[MAX_HEAD];
#pragma omp simd reduction(max : top)
            for (int64_t j = 0; j < count; j++) top = score[j] > top ? score[j] : top;
#pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < count; j++) {
                score[j] = exp_negative(score[j] - top);
                added += score[j];
            }
            float kept = start ? exp_negative(most[g] - top) : 0;
            for (int64_t i = 0; i < d; i++) weighted[i] = out[g * d + i] * kept;
            int64_t j = 0;
            for (; j + 4 <= count; j += 4) {
                const float *v = values + (start + j) * d;
                float a = score[j], b = score[j + 1], c = score[j + 2], e = score[j + 3];
#pragma omp simd
                for (int64_t i = 0; i < d; i++)
                    weighted[i] += (a * v[i] + b * v[d + i]) + (c * v[2 * d + i] + e * v[3 * d + i]);
            }
            for (; j < count; j++) {
                const float *v = values + (start + j) * d;
#pragma omp simd
                for (int64_t i = 0; i < d; i++) weighted[i] += score[j] * v[i];
            }
            for (int64_t i = 0; i < d; i++) out[g * d + i] = weighted[i];
            sum[g] = sum[g] * kept + added;
            most[g] = top;
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < d; i++) out[g * d + i] /= sum[g];
}

/* out [N, H * D]: token n, whose queries begin at query + n * stride, attends to the first length[n] entries of the
 * slot that begins at first[n]; `keys` and `values` are [slots, K, C, D]. */
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
