/* Norms and rotations of few rows. */

#include "numbers.h"

int rms_norm(i64 rows, i64 width, float eps, const void *x, i64 x_stride, int x_bf16,
             const float *weight, void *y, int y_bf16) {
    float *row = malloc(width * sizeof(float));
    if (!row) return 1;
    for (i64 t = 0; t < rows; t++) {
        load(row, at(x, t * x_stride, x_bf16), width, x_bf16);
        float by = inverse_rms(row, width, eps);
        for (i64 i = 0; i < width; i++) row[i] *= by * weight[i];
        store((void *)at(y, t * width, y_bf16), row, width, y_bf16);
    }
    free(row);
    return 0;
}

static void turn(float *pairs, const float *rotation, i64 count, float direction) {
    for (i64 i = 0; i < count; i++) {
        float re = pairs[2 * i], im = pairs[2 * i + 1];
        float c = rotation[2 * i], s = direction * rotation[2 * i + 1];
        pairs[2 * i] = re * c - im * s;
        pairs[2 * i + 1] = re * s + im * c;
    }
}

int rotate(i64 rows, i64 heads, i64 width, i64 turned, void *x, i64 x_stride, int bf16,
           const float *rotation, float direction) {
    float *row = malloc(turned * sizeof(float));
    if (!row) return 1;
    for (i64 t = 0; t < rows; t++) {
        for (i64 h = 0; h < heads; h++) {
            void *own = (void *)at(x, t * x_stride + (h + 1) * width - turned, bf16);
            load(row, own, turned, bf16);
            turn(row, rotation + t * turned, turned / 2, direction);
            store(own, row, turned, bf16);
        }
    }
    free(row);
    return 0;
}

int norm_rotate(i64 rows, i64 heads, i64 width, i64 turned, float eps, void *x, i64 x_stride,
                int bf16, const float *weight, const float *rotation) {
    float *row = malloc(width * sizeof(float));
    if (!row) return 1;
    for (i64 t = 0; t < rows; t++) {
        for (i64 h = 0; h < heads; h++) {
            void *own = (void *)at(x, t * x_stride + h * width, bf16);
            load(row, own, width, bf16);
            float by = inverse_rms(row, width, eps);
            for (i64 i = 0; i < width; i++) row[i] *= weight ? by * weight[i] : by;
            turn(row + width - turned, rotation + t * turned, turned / 2, 1.0f);
            store(own, row, width, bf16);
        }
    }
    free(row);
    return 0;
}
