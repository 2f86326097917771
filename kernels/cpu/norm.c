/* RMS norm of rows, and its gradients; all tensors are contiguous. */
#include "shared.h"

#define BLOCK_ROWS 64 /* whose part of the weight's gradient is summed together */

/* normed [N, width] = x * scale * weight, where scale [N] is one over the root of the row's mean square and eps. */
void rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, int64_t threads,
              float *normed, float *scale) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        const float *row = x + n * width;
        float *out = normed + n * width, squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += row[i] * row[i];
        float by = scale[n] = 1.0f / sqrtf(squares / width + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = row[i] * by * weight[i];
    }
}

/* for_x [N, width]; for_weight [blocks of BLOCK_ROWS rows, width], to be summed over the blocks. */
void rms_norm_backward(const float *x, const float *weight, const float *scale, const float *grad, int64_t rows,
                       int64_t width, int64_t threads, float *for_x, float *for_weight) {
    int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    SHARED
    for (int64_t block = 0; block < blocks; block++) {
        int64_t end = (block + 1) * BLOCK_ROWS < rows ? (block + 1) * BLOCK_ROWS : rows;
        float *sums = for_weight + block * width;
        for (int64_t i = 0; i < width; i++) sums[i] = 0;
        for (int64_t n = block * BLOCK_ROWS; n < end; n++) {
            const float *row = x + n * width, *given = grad + n * width;
            float *out = for_x + n * width, dot = 0, by = scale[n];
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < width; i++) dot += given[i] * weight[i] * row[i];
            float along = dot * by * by / width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                out[i] = (given[i] * weight[i] - row[i] * along) * by;
                sums[i] += given[i] * row[i] * by;
            }
        }
    }
}
