/* Detection of equal rows. */
#include "shared.h"
#include <string.h>

#define MAX_TRIED 32 /* largest number of other rows with which a row is compared */

/* Mixes `word` into `sum`. In a product, bits influence only higher bits, so the upper half is folded into the lower.
 * */
INLINE uint64_t mixed(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
    return sum ^ sum >> 32;
}

/* A hash of a row's bytes, by four independent sums. */
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

/* Finds the distinct rows of rows [n, width]. found[0]: their number; first[k]: index of the first occurrence of the
 * k-th; like[i]: the number k of row i. found[0] is -1 if there are more than `most`, or too many collisions in the
 * hash table `table` for the search to be worth it. The table's size `slots` is a power of two above `most`; it starts
 * with -1 in all slots. */
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
