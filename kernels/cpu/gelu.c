/* GELU by the hyperbolic tangent (Hendrycks and Gimpel, 2016): x (1 + tanh(a)) / 2 is x sigmoid(2 a). */
#include "shared.h"

#define TWICE 1.5957691216f /* 2 sqrt(2 / pi) */
#define CUBIC 0.044715f

#define FAR 20.0f /* for larger |x| the GELU is 0 or x, with a slope of 0 or 1 */

/* sigmoid(2 a) for x; `near` gets x, limited to [-FAR, FAR]. */
INLINE float share_of(float x, float *near) {
    *near = x < -FAR ? -FAR : x > FAR ? FAR : x;
    float share = sigmoid(TWICE * *near * (1.0f + CUBIC * *near * *near));
    return x < -FAR ? 0 : share;
}

/* out [rows, width] */
void gelu(const float *x, int64_t rows, int64_t width, int64_t threads, float *out) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        const float *values = x + n * width;
        float *row = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float near;
            row[i] = values[i] * share_of(values[i], &near);
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
            float near, share = share_of(values[i], &near);
            float slope = TWICE * (1.0f + 3.0f * CUBIC * near * near);
            row[i] = given[i] * share * (1.0f + near * (1.0f - share) * slope);
        }
    }
}
