/* Matrix products of attention between queries, one in each lane of some registers, and rows of keys or values. Each
 * element of a row is loaded once for all registers that are side by side, so that loads do not limit the products. */
#include "shared.h"

#define SIDE 2 /* largest number of registers side by side */
/* Number of rows or columns that are summed at once; SIDE times as many registers hold the sums. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define AT_ONCE 8
#else
#define AT_ONCE 4
#endif
#define UNROLL_ROWS _Pragma("GCC unroll 8")
#define UNROLL_SIDE _Pragma("GCC unroll 2")

/* Keeps a value in a register: otherwise compilers load it again for each product. */
INLINE lanes in_register(lanes value) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(value));
#elif defined(__AVX__)
    __asm__("" : "+x"(value));
#elif defined(__aarch64__)
    __asm__("" : "+w"(value));
#endif
    return value;
}

/* The queries of a tile. Register v has valid[v] of them in its first lanes: consecutive rows from row[v] on, of head
 * head[v], both counted from the tile's start. The tile's query row r attends to the first seen[r] keys; `length` is
 * the largest of these numbers. */
typedef struct {
    int64_t registers, valid[SIDE], row[SIDE], head[SIDE], length;
    const int64_t *seen;
} Tile;

/* Offset of register v's first query in an array with these distances between rows and heads. */
#define BEGIN(v, rows_apart, heads_apart) (tile->row[v] * (rows_apart) + tile->head[v] * (heads_apart))

/* Transposes LANES rows of LANES floats in place. */
INLINE void transpose(lanes *rows) {
    lanes read[LANES];
#pragma GCC unroll 2
    for (lanes *some = rows; some < rows + LANES; some += TOGETHER)
#pragma GCC unroll 4
        for (int left = TOGETHER; left > 1; left /= 2) {
#pragma GCC unroll 16
            for (int j = 0; j < TOGETHER; j++) read[j] = some[j];
#pragma GCC unroll 8
            for (int j = 0; j < TOGETHER / 2; j++) {
                some[j] = EVEN(read[2 * j], read[2 * j + 1]);
                some[j + TOGETHER / 2] = ODD(read[2 * j], read[2 * j + 1]);
            }
        }
#if LANES == 8
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        lanes low = LOW(rows[j], rows[j + 4]), high = HIGH(rows[j], rows[j + 4]);
        rows[j] = low;
        rows[j + 4] = high;
    }
#endif
}

/* turned[i * w], lane l = rows[l][i] * by; 0 in the lanes from `valid` on. */
INLINE void turn_in(const float *rows, int64_t stride, int64_t valid, int64_t w, int64_t d, float by, lanes *turned) {
    int64_t whole = d - d % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes block[LANES] = {{0}};
        for (int l = 0; l < valid; l++) block[l] = *(const lanes *)(rows + l * stride + i) * by;
        transpose(block);
        for (int u = 0; u < LANES; u++) turned[(i + u) * w] = block[u];
    }
    for (int64_t i = whole; i < d; i++)
        for (int l = 0; l < LANES; l++) ((float *)(turned + i * w))[l] = l < valid ? rows[l * stride + i] * by : 0;
}

/* rows[l][i] = lane l of turned[i * w], times lane l of `by`, for `valid` rows. */
INLINE void turn_out(const lanes *turned, int64_t w, int64_t d, lanes by, int64_t valid, float *rows, int64_t stride) {
    int64_t whole = d - d % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes block[LANES];
        for (int u = 0; u < LANES; u++) block[u] = turned[(i + u) * w] * by;
        transpose(block);
        for (int l = 0; l < valid; l++) *(lanes *)(rows + l * stride + i) = block[l];
    }
    for (int64_t i = whole; i < d; i++) {
        lanes last = turned[i * w] * by;
        for (int l = 0; l < valid; l++) rows[l * stride + i] = last[l];
    }
}

/* scores[j] = sum over i of turned[i] * rows[j][i], for `count` rows; turned [d, w], scores [count, w]. */
INLINE void dots_of_rows(const lanes *turned, int64_t w, int64_t d, const float *rows, int64_t stride, int64_t count,
                         lanes *scores) {
    int64_t j = 0;
    for (; j + AT_ONCE <= count; j += AT_ONCE) {
        const float *row = rows + j * stride;
        lanes dot[AT_ONCE][SIDE] = {{{0}}}, own[SIDE];
        for (int64_t i = 0; i < d; i++) {
            UNROLL_SIDE for (int v = 0; v < w; v++) own[v] = in_register(turned[i * w + v]);
            UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++)
                UNROLL_SIDE for (int v = 0; v < w; v++) dot[u][v] += own[v] * row[u * stride + i];
        }
        UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++)
            UNROLL_SIDE for (int v = 0; v < w; v++) scores[(j + u) * w + v] = dot[u][v];
    }
    for (; j < count; j++) {
        lanes dot[SIDE] = {{0}};
        for (int64_t i = 0; i < d; i++)
            UNROLL_SIDE for (int v = 0; v < w; v++) dot[v] += turned[i * w + v] * rows[j * stride + i];
        UNROLL_SIDE for (int v = 0; v < w; v++) scores[j * w + v] = dot[v];
    }
}

/* sums[i] = sums[i] * kept + sum over j of weights[j] * rows[j][i], for `count` rows; sums [d, w], weights [count, w],
 * kept [w]. */
INLINE void add_rows(const lanes *weights, int64_t w, int64_t count, const float *rows, int64_t stride, int64_t d,
                     const lanes *kept, lanes *sums) {
    for (int64_t i = 0; i < d; i += AT_ONCE) {
        lanes part[AT_ONCE][SIDE], own[SIDE];
        UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++)
            UNROLL_SIDE for (int v = 0; v < w; v++) part[u][v] = sums[(i + u) * w + v] * kept[v];
        for (int64_t j = 0; j < count; j++) {
            UNROLL_SIDE for (int v = 0; v < w; v++) own[v] = in_register(weights[j * w + v]);
            UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++)
                UNROLL_SIDE for (int v = 0; v < w; v++) part[u][v] += own[v] * rows[j * stride + i + u];
        }
        UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++)
            UNROLL_SIDE for (int v = 0; v < w; v++) sums[(i + u) * w + v] = part[u][v];
    }
}

/* The sum of a[i] * b[i], in whole registers: inside the gradient functions compilers would add the products one by
 * one. */
INLINE float dot_of(const float *a, const float *b, int64_t d) {
    lanes sums = {0};
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) sums += *(const lanes *)(a + i) * *(const lanes *)(b + i);
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += sums[l];
    for (; i < d; i++) sum += a[i] * b[i];
    return sum;
}

/* own[v * LANES + l] = the row of register v's query l; 0 in the rows from valid[v] on. */
INLINE void gather(const Tile *tile, int64_t w, const float *rows, int64_t rows_apart, int64_t heads_apart, int64_t d,
                   float *own) {
    for (int v = 0; v < w; v++, own += LANES * d) {
        int64_t valid = tile->valid[v];
        const float *first = rows + BEGIN(v, rows_apart, heads_apart);
        for (int64_t l = 0; l < valid; l++)
#pragma omp simd
            for (int64_t i = 0; i < d; i++) own[l * d + i] = first[l * rows_apart + i];
        for (int64_t i = valid * d; i < LANES * d; i++) own[i] = 0;
    }
}

/* sums[u][v] += sum over l of weights[u * across + l] * rows[l * d], for AT_ONCE sums of `registers` each. */
INLINE void add_outer_tile(const float *weights, int64_t across, const float *rows, int64_t d, int registers,
                           float *sums, int64_t sum_stride) {
    lanes part[AT_ONCE][SIDE], own[SIDE];
    UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++)
        UNROLL_SIDE for (int v = 0; v < registers; v++) part[u][v] = *(lanes *)(sums + u * sum_stride + v * LANES);
    for (int64_t l = 0; l < across; l++) {
        UNROLL_SIDE for (int v = 0; v < registers; v++)
            own[v] = in_register(*(const lanes *)(rows + l * d + v * LANES));
        UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++) {
            lanes factor = in_register((lanes){0} + weights[u * across + l]);
            UNROLL_SIDE for (int v = 0; v < registers; v++) part[u][v] += own[v] * factor;
        }
    }
    UNROLL_ROWS for (int u = 0; u < AT_ONCE; u++)
        UNROLL_SIDE for (int v = 0; v < registers; v++) *(lanes *)(sums + u * sum_stride + v * LANES) = part[u][v];
}

/* sums[j][i] += sum over l of weights[j][l] * rows[l][i], for `count` sums and the gathered rows of w registers. Not
 * inlined: inside another function compilers keep addresses on the stack and read them again for every few sums. */
static NOT_INLINE void add_outer(const lanes *weights, int64_t w, int64_t count, const float *rows, int64_t d,
                                 float *sums, int64_t sum_stride) {
    const float *weight = (const float *)weights;
    int64_t across = w * LANES, whole = d - d % LANES, j = 0;
    for (; j + AT_ONCE <= count; j += AT_ONCE) {
        float *sum = sums + j * sum_stride;
        int64_t i = 0;
        for (; i + SIDE * LANES <= whole; i += SIDE * LANES)
            add_outer_tile(weight + j * across, across, rows + i, d, SIDE, sum + i, sum_stride);
        for (; i < whole; i += LANES)
            add_outer_tile(weight + j * across, across, rows + i, d, 1, sum + i, sum_stride);
    }
    for (int64_t left = j, from = whole < d ? 0 : left; from < count; from++)
        for (int64_t l = 0; l < across; l++)
#pragma omp simd
            for (int64_t i = from < left ? whole : 0; i < d; i++)
                sums[from * sum_stride + i] += rows[l * d + i] * weight[from * across + l];
}

/* scores[j] = `fill` in the lanes whose queries do not attend to key start + j; scores [count, w]. */
INLINE void hide(float fill, const Tile *tile, int64_t w, int64_t start, int64_t count, lanes *scores) {
    int64_t first = tile->seen[0];
    for (int64_t j = first > start ? first - start : 0; j < count; j++)
        for (int v = 0; v < w; v++)
            for (int l = 0; l < tile->valid[v]; l++)
                if (start + j >= tile->seen[tile->row[v] + l]) ((float *)(scores + j * w + v))[l] = fill;
}
