/* The parts of a decoder layer that torch computes slowly on a CPU, in float32: kernels/cpu_layer.py compiles and calls
 * them, and actor/engine/layers.py has the same in torch. All tensors are contiguous. N = tokens, H = query heads,
 * K = key heads, D = head size, C = entries of a slot. `threads` share the tokens. Nothing here allocates or fails; a
 * NaN that comes in goes out. */
#include <math.h>
#include <stdint.h>

#define MAX_HEAD 256  /* D at most */
#define MAX_GROUP 32  /* H / K at most */
#define BLOCK 128     /* keys whose scores are held at once */
#define TILE_KEYS 64  /* likewise, of the queries of a tile */

#define SHARED _Pragma("omp parallel for num_threads(threads) if (threads > 1 && rows > 16)")

/* `call` with the head size, which the compiler knows where it is a usual one. */
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

#define INLINE static inline __attribute__((always_inline))

/* As many floats as a register has, and the even and the odd ones of two registers laid end to end. */
#if defined(__AVX512F__)
#define LANES 16
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#elif defined(__AVX__)
#define LANES 8
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#else
#define LANES 4
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7)
#endif
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* e^x of x <= 0 by Cody and Waite's reduction and a polynomial of degree 6: relative error below 3e-7. */
INLINE float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return p * power.value;
}

/* hidden [N, width] += delta (where there is one); normed = RMS norm of it, times weight [width]. */
void add_rms_norm(float *hidden, const float *delta, const float *weight, float eps, int64_t rows, int64_t width,
                  int64_t threads, float *normed) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        float *row = hidden + n * width, *out = normed + n * width, squares = 0;
        if (delta) {
            const float *added = delta + n * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) row[i] += added[i];
        }
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += row[i] * row[i];
        float scale = 1.0f / sqrtf(squares / width + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = row[i] * scale * weight[i];
    }
}

/* out [N, width] = silu(gate) * up, of gate_up [N, 2 * width]. */
void silu_mul(const float *gate_up, int64_t rows, int64_t width, int64_t threads, float *out) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        const float *gates = gate_up + 2 * n * width, *ups = gates + width;
        float *row = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float gate = gates[i];
            float e = exp_negative(-fabsf(gate));
            row[i] = gate * (gate < 0 ? e : 1.0f) / (1.0f + e) * ups[i];
        }
    }
}

INLINE void rotate(float *head, const float *weight, float eps, const float *cosine, const float *sine, int64_t d,
                   float *out) {
    float scale = 1;
    if (weight) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < d; i++) squares += head[i] * head[i];
        scale = 1.0f / sqrtf(squares / d + eps);
#pragma omp simd
        for (int64_t i = 0; i < d; i++) head[i] *= scale * weight[i];
    }
    int64_t half = d / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[half + i];
        out[i] = low * cosine[i] - high * sine[i];
        out[half + i] = high * cosine[half + i] + low * sine[half + i];
    }
}

/* heads [N, H + 2 K, D]: queries and keys are normed (where norms [H + K, D] are given) and turned by cosine and sine
 * [N, D]; queries in place, keys and values into the cache at entry[n] + head * C, nowhere where entry is negative. */
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

/* The first `num_turned` of the `num_heads` of each token of heads [N, num_heads, D] turned in place; token n stands at
 * place n % period of cosine and sine [period, D]. */
void rotate_heads(float *heads, int64_t rows, int64_t num_heads, int64_t num_turned, int64_t d, const float *cosine,
                  const float *sine, int64_t period, int64_t threads) {
    SHARED
    for (int64_t n = 0; n < rows; n++) {
        float *token = heads + n * num_heads * d;
        int64_t at = n % period * d;
        for (int64_t h = 0; h < num_turned; h++) rotate(token + h * d, 0, 0, cosine + at, sine + at, d, token + h * d);
    }
}

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

/* Softmax attention of LANES neighbouring queries, or of `valid` of them, one in each lane: the first sees `first`
 * keys, each next `more` more. A key's score is LANES products at once, and nothing is folded. */
INLINE void attend_tile(const float *query, int64_t query_stride, int64_t valid, int64_t first, int64_t more, int64_t d,
                        const float *keys, const float *values, int64_t stride, float scale, float *out,
                        int64_t out_stride) {
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
    int64_t length = first + more * (valid - 1);
    for (int64_t start = 0; start < length; start += TILE_KEYS) {
        int64_t count = length - start < TILE_KEYS ? length - start : TILE_KEYS, j = 0;
        for (; j + 8 <= count; j += 8) {
            const float *key = keys + (start + j) * stride;
            lanes dot[8] = {{0}};
            for (int64_t i = 0; i < d; i++)
#pragma GCC unroll 8
                for (int u = 0; u < 8; u++) dot[u] += turned[i] * key[u * stride + i];
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) scores[j + u] = dot[u];
        }
        for (; j < count; j++) {
            lanes dot = {0};
            for (int64_t i = 0; i < d; i++) dot += turned[i] * keys[(start + j) * stride + i];
            scores[j] = dot;
        }
        float *score = (float *)scores, top[LANES];
        for (j = first > start ? first - start : 0; j < count; j++)
            for (int l = 0; l < LANES; l++)
                if (start + j >= first + l * more) score[j * LANES + l] = -INFINITY;
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
                const float *value = values + (start + j) * stride + i;
#pragma GCC unroll 8
                for (int u = 0; u < 8; u++) part[u] += scores[j] * value[u];
            }
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) weighted[i + u] = part[u];
        }
    }
    for (int l = 0; l < valid; l++)
        for (int64_t i = 0; i < d; i++) out[l * out_stride + i] = weighted[i][l] / sum[l];
}

/* out [N, H * D]: attention of the N tokens of one sequence. Token n sees `first` + n * `more` keys; its queries begin
 * at query + n * query_stride; key j of head h is at keys + j * stride + h * head_stride, as its value is; D is a
 * multiple of 8. */
void attend_together(const float *query, int64_t query_stride, int64_t rows, int64_t num_heads, int64_t num_kv,
                     int64_t d, int64_t first, int64_t more, const float *keys, const float *values, int64_t stride,
                     int64_t head_stride, float scale, int64_t threads, float *out) {
    int64_t group = num_heads / num_kv, width = num_heads * d, tiles = (rows + LANES - 1) / LANES;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < num_heads; h++) {
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t at = tile * LANES, valid = rows - at < LANES ? rows - at : LANES, seen = first + at * more;
            const float *q = query + at * query_stride + h * d;
            const float *k = keys + h / group * head_stride, *v = values + h / group * head_stride;
            float *o = out + at * width + h * d;
#define TILE(size) attend_tile(q, query_stride, valid, seen, more, size, k, v, stride, scale, o, width)
            BY_SIZE(TILE)
        }
    }
}
