/* Hyper-connections of few rows. */

#include "numbers.h"

static void sinkhorn(float *comb, i64 n, i64 iterations, float eps) {
    for (i64 half = 0; half < 2 * iterations - 1; half++) {
        i64 along = half % 2 ? n : 1, across = half % 2 ? 1 : n; /* even: sums of columns */
        for (i64 line = 0; line < n; line++) {
            float sum = eps;
            for (i64 k = 0; k < n; k++) sum += comb[line * along + k * across];
            for (i64 k = 0; k < n; k++) comb[line * along + k * across] /= sum;
        }
    }
}

/* The streams of each row, added up; and with `post` also how the output is mixed back. `fn` is
   [streams * width, mixes], its scales multiplied in. */
int hc_mix(i64 rows, i64 streams, i64 width, i64 mixes, i64 iterations, float eps, float norm_eps,
           const float *fn, const float *base, const void *x, int x_bf16, void *u, int u_bf16,
           float *post, float *comb) {
    enum { PARTS = 8 }; /* partial sums, so that rounding does not grow with the width */
    i64 elements = streams * width;
    float *row = malloc((elements + width + PARTS * mixes) * sizeof(float));
    if (!row) return 1;
    float *sum = row + elements, *part = sum + width;
    for (i64 t = 0; t < rows; t++) {
        load(row, at(x, t * elements, x_bf16), elements, x_bf16);
        float by = inverse_rms(row, elements, norm_eps);
        memset(part, 0, PARTS * mixes * sizeof(float));
        for (i64 k = 0; k < elements; k++)
            add_scaled(part + k % PARTS * mixes, fn + k * mixes, row[k], mixes);
        for (i64 m = 0; m < mixes; m++) {
            for (i64 p = 1; p < PARTS; p++) part[m] += part[p * mixes + m];
            part[m] = part[m] * by + base[m];
        }
        memset(sum, 0, width * sizeof(float));
        for (i64 i = 0; i < streams; i++)
            add_scaled(sum, row + i * width, sigmoid(part[i]) + eps, width);
        store((void *)at(u, t * width, u_bf16), sum, width, u_bf16);
        if (!post) continue;
        for (i64 i = 0; i < streams; i++) post[t * streams + i] = 2 * sigmoid(part[streams + i]);
        for (i64 i = 0; i < streams; i++) {
            const float *logits = part + (2 + i) * streams;
            float *out = comb + (t * streams + i) * streams, most = logits[0], total = 0;
            for (i64 j = 1; j < streams; j++) most = logits[j] > most ? logits[j] : most;
            for (i64 j = 0; j < streams; j++) total += out[j] = expf(logits[j] - most);
            for (i64 j = 0; j < streams; j++) out[j] = out[j] / total + eps;
        }
        sinkhorn(comb + t * streams * streams, streams, iterations, eps);
    }
    free(row);
    return 0;
}

int hc_expand(i64 rows, i64 streams, i64 width, void *x, int x_bf16, const void *y, int y_bf16,
              const float *post, const float *comb) {
    float *row = malloc((streams + 2) * width * sizeof(float));
    if (!row) return 1;
    float *added = row + streams * width, *out = added + width;
    for (i64 t = 0; t < rows; t++) {
        void *own = (void *)at(x, t * streams * width, x_bf16);
        load(row, own, streams * width, x_bf16);
        load(added, at(y, t * width, y_bf16), width, y_bf16);
        for (i64 j = 0; j < streams; j++) {
            for (i64 d = 0; d < width; d++) out[d] = post[t * streams + j] * added[d];
            for (i64 i = 0; i < streams; i++)
                add_scaled(out, row + i * width, comb[(t * streams + i) * streams + j], width);
            store((void *)at(own, j * width, x_bf16), out, width, x_bf16);
        }
    }
    free(row);
    return 0;
}
