/* SwiGLU's product (Shazeer, 2020) and its gradients. */
#include "shared.h"

/* out [N, width] = silu(gate) * up; `stride` is the distance between rows in both gate and up. */
void silu_mul(const float *gate, const float *up, int64_t stride, int64_t rows, int64_t width, int64_t threads,
              float *out) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        const float *gates = gate + n * stride, *ups = up + n * stride;
        float *row = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) row[i] = gates[i] * sigmoid(gates[i]) * ups[i];
    }
}

/* The gradients of gate and up [N, width]; `out`, if given, gets the result of silu_mul. All arrays are contiguous. */
void silu_mul_backward(const float *gate, const float *up, const float *grad, int64_t rows, int64_t width,
                       int64_t threads, float *for_gate, float *for_up, float *out) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        const float *gates = gate + n * width, *ups = up + n * width, *given = grad + n * width;
        float *own_gate = for_gate + n * width, *own_up = for_up + n * width, *row = out ? out + n * width : own_gate;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float share = sigmoid(gates[i]), silu = gates[i] * share;
            row[i] = silu * ups[i];
            own_up[i] = given[i] * silu;
            own_gate[i] = given[i] * ups[i] * share * (1.0f + gates[i] * (1.0f - share));
        }
    }
}
