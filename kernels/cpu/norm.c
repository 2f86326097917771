/* RMS norms of rows, followed by a rotary embedding if angles are given; rotary embeddings alone; and the gradients. */
#include "shared.h"

#define BLOCK_ROWS 64 /* tokens over which one part of the weight's gradient is summed */

/* `beside`, if given, is added to the gradient. */
INLINE void norm_row_backward(const float *row, const float *weight, float by, const float *given, int64_t width,
                              const float *beside, float *out, float *sums) {
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < width; i++) dot += given[i] * weight[i] * row[i];
    float along = dot * by * by / width;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        out[i] = (given[i] * weight[i] - row[i] * along) * by + (beside ? beside[i] : 0);
        sums[i] += given[i] * row[i] * by;
    }
}

/* A token's heads, normalised and then rotated. */
INLINE void turned_heads(const float *x, const float *weight, float eps, const float *cosine, const float *sine,
                         int64_t heads, int64_t d, float *out, float *scale) {
    for (int64_t h = 0; h < heads; h++) {
        float normed[MAX_HEAD];
        scale[h] = norm_row(x + h * d, weight, eps, d, normed);
        turn(normed, cosine, sine, d, out + h * d);
    }
}

INLINE void turned_heads_backward(const float *x, const float *weight, const float *scale, const float *cosine,
                                  const float *sine, const float *grad, int64_t heads, int64_t d, float *for_x,
                                  float *sums) {
    for (int64_t h = 0; h < heads; h++) {
        float back[MAX_HEAD];
        turn_back(grad + h * d, cosine, sine, d, back);
        norm_row_backward(x + h * d, weight, scale[h], back, d, 0, for_x + h * d, sums);
    }
}

/* All arrays are contiguous. out [N, H, D] = x * scale * weight [D], where scale [N, H] = 1 / sqrt(a head's mean square
 * + eps); then rotated by the token's cosine and sine [N, D], if given. If `delta` is given, x + delta is written to
 * `total` and takes the place of x. */
void rms_norm(const float *x, const float *delta, const float *weight, float eps, const float *cosine,
              const float *sine, int64_t rows, int64_t heads, int64_t d, int64_t threads, float *total, float *out,
              float *scale) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        int64_t at = n * heads * d;
        if (delta) {
#pragma omp simd
            for (int64_t i = at; i < at + heads * d; i++) total[i] = x[i] + delta[i];
        }
#define TURNED(size) \
    turned_heads(x + at, weight, eps, cosine + n * d, sine + n * d, heads, size, out + at, scale + n * heads)
        if (cosine)
            BY_SIZE(TURNED)
        else
            for (int64_t h = 0; h < heads; h++)
                scale[n * heads + h] = norm_row((delta ? total : x) + at + h * d, weight, eps, d, out + at + h * d);
    }
}

/* for_x [N, H, D], plus `beside` if that is given and there is no rotation; for_weight [blocks of BLOCK_ROWS tokens,
 * D], which the caller sums over the blocks. */
void rms_norm_backward(const float *x, const float *weight, const float *scale, const float *cosine, const float *sine,
                       const float *grad, const float *beside, int64_t rows, int64_t heads, int64_t d, int64_t threads,
                       float *for_x, float *for_weight) {
    int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    SHARED
    for (int64_t block = 0; block < blocks; block++) {
        int64_t end = (block + 1) * BLOCK_ROWS < rows ? (block + 1) * BLOCK_ROWS : rows;
        float *sums = for_weight + block * d;
        for (int64_t i = 0; i < d; i++) sums[i] = 0;
        for (int64_t n = block * BLOCK_ROWS; n < end; n++) {
            int64_t at = n * heads * d;
            const float *by = scale + n * heads;
#define TURNED_BACK(size)                                                                                          \
    turned_heads_backward(x + at, weight, by, cosine + n * d, sine + n * d, grad + at, heads, size, for_x + at, sums)
            if (cosine)
                BY_SIZE(TURNED_BACK)
            else
                for (int64_t h = 0; h < heads; h++, at += d)
                    norm_row_backward(x + at, weight, by[h], grad + at, d, beside ? beside + at : 0, for_x + at, sums);
        }
    }
}

/* out [N, H, D], contiguous = the heads of x, where tokens have distance `stride`, rotated by their token's cosine and
 * sine [N, D]; with `back` the gradient of x from that of the result. */
void turn_tokens(const float *x, int64_t stride, const float *cosine, const float *sine, int64_t rows, int64_t heads,
                 int64_t d, int64_t threads, int64_t back, float *out) {
    SHARED
    for (int64_t n = 0; n < rows; n++)
        for (int64_t h = 0; h < heads; h++) {
            const float *head = x + n * stride + h * d;
            float *place = out + (n * heads + h) * d;
#define TURN(size) turn(head, cosine + n * d, sine + n * d, size, place)
#define TURN_BACK(size) turn_back(head, cosine + n * d, sine + n * d, size, place)
            if (back)
                BY_SIZE(TURN_BACK)
            else
                BY_SIZE(TURN)
        }
}
