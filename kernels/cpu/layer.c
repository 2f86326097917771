/* Norms and rotation; all tensors are contiguous. */
#include "shared.h"

/* hidden [N, width] += delta, if given; normed = RMS norm of the result, times weight [width]. */
void add_rms_norm(float *hidden, const float *delta, const float *weight, float eps, int64_t rows, int64_t width,
                  int64_t threads, float *normed) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        float *row = hidden + n * width;
        if (delta) {
            const float *added = delta + n * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) row[i] += added[i];
        }
        norm_row(row, weight, eps, width, normed + n * width);
    }
}

INLINE void rotate(float *head, const float *weight, float eps, const float *cosine, const float *sine, int64_t d,
                   float *out) {
    if (weight) norm_row(head, weight, eps, d, head);
    turn(head, cosine, sine, d, out);
}

/* heads [N, H + 2 K, D]: queries and keys are normalised, if norms [H + K, D] are given, and rotated by cosine and sine
 * [N, D]. Queries stay in place; keys and values go to the cache at entry[n] + head * C, unless entry[n] is negative.
 * */
void rotate_and_store(float *heads, int64_t rows, int64_t num_heads, int64_t num_kv, int64_t d, const float *norms,
                      float eps, const float *cosine, const float *sine, const int64_t *entry, int64_t context,
                      int64_t threads, float *keys, float *values) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        float *token = heads + n * (num_heads + 2 * num_kv) * d, *own = token + num_heads * d;
        const float *c = cosine + n * d, *s = sine + n * d;
        for (int64_t h = 0; h < num_heads; h++)
            rotate(token + h * d, norms ? norms + h * d : 0, eps, c, s, d, token + h * d);
        for (int64_t h = 0; h < num_kv && entry[n] >= 0; h++) {
            int64_t at = (entry[n] + h * context) * d;
            rotate(own + h * d, norms ? norms + (num_heads + h) * d : 0, eps, c, s, d, keys + at);
            for (int64_t i = 0; i < d; i++) values[at + i] = own[(num_kv + h) * d + i];
        }
    }
}

/* Rotates the first `num_turned` of the `num_heads` heads of each token of heads [N, num_heads, D] in place. Token n
 * has position n % period in cosine and sine [period, D]. */
void rotate_heads(float *heads, int64_t rows, int64_t num_heads, int64_t num_turned, int64_t d, const float *cosine,
                  const float *sine, int64_t period, int64_t threads) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        float *token = heads + n * num_heads * d;
        int64_t at = n % period * d;
        for (int64_t h = 0; h < num_turned; h++) rotate(token + h * d, 0, 0, cosine + at, sine + at, d, token + h * d);
    }
}
