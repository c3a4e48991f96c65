/* Products of few rows with weights in fp8. */

#include "numbers.h"

/* y[t, o] = sum over i of x[t, g, i] * codes[o, i] * factor[block of o, i]; every
   `blocks_per_group` blocks of rows read the next group g of x. */
int fp8_rows(i64 rows, i64 blocks, i64 block_rows, i64 columns, i64 out_rows, i64 blocks_per_group,
             const int8_t *codes, const float *factor, const void *x, i64 x_stride,
             i64 group_stride, void *y, int bf16) {
    float *scaled = malloc((rows + 1) * columns * sizeof(float));
    if (!scaled) return 1;
    float *weight = scaled + rows * columns;
    for (i64 block = 0; block < blocks; block++) {
        const float *own = factor + block * columns;
        i64 group = block / blocks_per_group * group_stride;
        for (i64 t = 0; t < rows; t++) {
            float *row = scaled + t * columns;
            load(row, at(x, t * x_stride + group, bf16), columns, bf16);
            for (i64 i = 0; i < columns; i++) row[i] *= own[i];
        }
        i64 first = block * block_rows;
        i64 end = first + block_rows < out_rows ? first + block_rows : out_rows;
        for (i64 o = first; o < end; o++) {
            unpack_e4m3(weight, codes + o * columns, columns);
            for (i64 t = 0; t < rows; t++) {
                float sum = dot(weight, scaled + t * columns, columns);
                store((void *)at(y, t * out_rows + o, bf16), &sum, 1, bf16);
            }
        }
    }
    free(scaled);
    return 0;
}
