/* Functions that all C files of this folder share. library.py compiles them. Where they are not available, torch
 * computes the same: actor/engine/layers.py, learner/model/attention.py, learner/model/forwards.py. All is float32. N =
 * tokens, H = query heads, K = key heads, D = head size, C = entries of a slot. `threads` share the tokens. Nothing
 * here allocates or fails; a NaN in the input gives a NaN in the output. */
#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define NOT_INLINE __attribute__((noinline))
#define SHARED _Pragma("omp parallel for num_threads(threads) if (threads > 1 && rows > 16)")

/* 2^(n + r), for an integer n, |r| <= 1/2 and n + r <= 0: a polynomial of degree 5 that is 1 at 0, with the least
 * relative error, below 4e-7 including rounding. */
INLINE float power_of_two(float n, float r) {
    union { float value; uint32_t bits; } power = {1.3264727e-3f};
    power.value = power.value * r + 9.671513e-3f;
    power.value = power.value * r + 5.5507336e-2f;
    power.value = power.value * r + 2.4022242e-1f;
    power.value = power.value * r + 6.93147e-1f;
    power.value = power.value * r + 1.0f;
    power.bits += (uint32_t)(int32_t)n << 23;
    return power.value;
}

/* 2^x for x <= 0; the result is at least 2^-125. */
INLINE float exp2_negative(float x) {
    x = x < -125.0f ? -125.0f : x;
    float n = rintf(x);
    return power_of_two(n, x - n);
}

#define LOG2_E 1.44269504f

/* `sum`, computed before it is added to anything, although -fassociative-math allows other orders. */
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
#define FIRST(sum) __builtin_assoc_barrier(sum)
#else
#define FIRST(sum) (sum)
#endif

/* e^x for x <= 0, by Cody and Waite's reduction; the result is at least e^-86. */
INLINE float exp_negative(float x) {
    x = x < -86.0f ? -86.0f : x;
    float n = rintf(x * LOG2_E);
    float r = FIRST(x - n * 0.693359375f) + n * 2.12194440e-4f;
    return power_of_two(n, r * LOG2_E);
}

INLINE float sigmoid(float x) {
    float e = exp_negative(-fabsf(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

#define MAX_HEAD 256  /* largest D */

/* `call` with the head size, as a compile-time constant for the usual sizes. */
#define BY_SIZE(call)       \
    switch (d) {            \
        case 16:            \
            call(16);       \
            break;          \
        case 32:            \
            call(32);       \
            break;          \
        case 64:            \
            call(64);       \
            break;          \
        case 128:           \
            call(128);      \
            break;          \
        default:            \
            call(d);        \
    }

/* LANES: number of floats in a vector register. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* The elements with even, or odd, index of two registers laid end to end. With registers of 256 bits, each half of 128
 * bits by itself: shuffles across halves take three instructions with AVX2. */
#if LANES == 16
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#elif LANES == 8
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15)
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7)
#endif
#define TOGETHER (LANES == 8 ? 4 : LANES) /* number of lanes within which EVEN and ODD move elements */

/* out = row / sqrt(its mean square + eps) * weight; `out` may be `row`. Returns the row's factor. */
INLINE float norm_row(const float *row, const float *weight, float eps, int64_t width, float *out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += row[i] * row[i];
    float by = 1.0f / sqrtf(squares / width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = row[i] * by * weight[i];
    return by;
}

/* out = a head of d floats rotated by the rotary embedding (Su et al., 2021, equation 34, with pairs formed from the
 * two halves); `out` may be `head`. */
INLINE void turn(const float *head, const float *cosine, const float *sine, int64_t d, float *out) {
    int64_t half = d / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[half + i];
        out[i] = low * cosine[i] - high * sine[i];
        out[half + i] = high * cosine[half + i] + low * sine[half + i];
    }
}

/* The gradient of `turn`. */
INLINE void turn_back(const float *grad, const float *cosine, const float *sine, int64_t d, float *out) {
    int64_t half = d / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = grad[i], high = grad[half + i];
        out[i] = low * cosine[i] + high * sine[half + i];
        out[half + i] = high * cosine[half + i] - low * sine[i];
    }
}
