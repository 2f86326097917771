/* Which rows are alike. */
#include "shared.h"
#include <string.h>

#define MAX_TRIED 32 /* other rows that a row is compared with */

/* A product carries upwards alone: its upper bits are brought down again. */
INLINE uint64_t mixed(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
    return sum ^ sum >> 32;
}

/* The bytes of a row as one number, by four sums that do not wait for each other. */
INLINE uint64_t digest(const uint8_t *row, int64_t width) {
    uint64_t sums[4] = {1, 2, 3, 4}, words[4];
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        memcpy(words, row + i, 32);
        for (int j = 0; j < 4; j++) sums[j] = mixed(sums[j], words[j]);
    }
    for (; i < width; i++) sums[0] = mixed(sums[0], row[i]);
    return mixed(mixed(mixed(sums[0], sums[1]), sums[2]), sums[3]);
}

/* Of rows [n, width]: the number of different ones in found[0], where each of those is first met in `first`, and in
 * like[i] which of them row i equals. -1 instead of a number if there are more than `most`, or so many in one place of
 * `table` (slots of them, a power of two, more than `most`, all -1) that looking on is not worth it. */
void distinct_rows(const uint8_t *rows, int64_t n, int64_t width, int64_t most, int64_t *table, int64_t slots,
                   int64_t *first, int64_t *like, int64_t *found) {
    int64_t count = 0;
    *found = -1;
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *row = rows + i * width;
        uint64_t place = digest(row, width);
        for (int tried = 0;; tried++, place++) {
            int64_t *other = table + (place & (slots - 1));
            if (*other < 0) {
                if (count == most) return;
                first[count] = i;
                *other = count++;
            }
            if (!memcmp(rows + first[*other] * width, row, width)) {
                like[i] = *other;
                break;
            }
            if (tried == MAX_TRIED) return;
        }
    }
    *found = count;
}
