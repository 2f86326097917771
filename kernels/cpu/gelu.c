/* GELU by the hyperbolic tangent (Hendrycks and Gimpel, 2016): x (1 + tanh(a)) / 2 is x sigmoid(2 a). */
#include "shared.h"

#define TWICE 1.5957691216f /* 2 sqrt(2 / pi) */
#define CUBIC 0.044715f

/* out [rows, width] */
void gelu(const float *x, int64_t rows, int64_t width, int64_t threads, float *out) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        const float *values = x + n * width;
        float *row = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float square = values[i] * values[i];
            row[i] = values[i] * sigmoid(TWICE * values[i] * (1.0f + CUBIC * square));
        }
    }
}

/* The gradient of x. */
void gelu_backward(const float *x, const float *grad, int64_t rows, int64_t width, int64_t threads, float *out) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        const float *values = x + n * width, *given = grad + n * width;
        float *row = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float square = values[i] * values[i];
            float share = sigmoid(TWICE * values[i] * (1.0f + CUBIC * square));
            float slope = TWICE * (1.0f + 3.0f * CUBIC * square);
            row[i] = given[i] * share * (1.0f + values[i] * (1.0f - share) * slope);
        }
    }
}
