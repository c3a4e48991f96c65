/* Experts of few rows: routing, activation, products with weights in fp4. */

#include "numbers.h"

int swiglu(i64 rows, i64 inner, float limit, void *gate_up, int bf16) {
    float *row = malloc(2 * inner * sizeof(float));
    if (!row) return 1;
    for (i64 t = 0; t < rows; t++) {
        void *own = (void *)at(gate_up, t * 2 * inner, bf16);
        load(row, own, 2 * inner, bf16);
        for (i64 f = 0; f < inner; f++) row[f] = gated(row[f], row[inner + f], limit);
        store(own, row, inner, bf16);
    }
    free(row);
    return 0;
}

/* With `table` the experts are those of the row's token, else those with the largest score + bias. */
int route(i64 rows, i64 experts, i64 selected, i64 width, const float *gate, const float *bias,
          const i64 *table, const i64 *tokens, const void *x, i64 x_stride, int bf16,
          int normalise, float scale, i64 *ids, float *weights) {
    float *row = malloc((width + 2 * experts) * sizeof(float));
    if (!row) return 1;
    float *score = row + width, *rank = score + experts;
    for (i64 t = 0; t < rows; t++) {
        i64 *own = ids + t * selected;
        float *share = weights + t * selected, total = 0;
        load(row, at(x, t * x_stride, bf16), width, bf16);
        for (i64 e = 0; e < experts; e++) {
            float logit = dot(row, gate + e * width, width);
            score[e] = sqrtf(logit > 20 ? logit : log1pf(expf(logit)));
            if (bias) {
                rank[e] = score[e] + bias[e];
                if (isnan(rank[e])) rank[e] = INFINITY;
            }
        }
        for (i64 k = 0; k < selected; k++) {
            i64 best = -1;
            if (table) {
                best = table[tokens[t] * selected + k];
            } else {
                for (i64 e = 0; e < experts; e++) {
                    int taken = 0;
                    for (i64 j = 0; j < k; j++) taken |= own[j] == e;
                    if (!taken && (best < 0 || rank[e] > rank[best])) best = e;
                }
            }
            own[k] = best;
            total += share[k] = score[best];
        }
        for (i64 k = 0; k < selected; k++)
            share[k] *= normalise ? scale / (total + 1e-20f) : scale;
    }
    free(row);
    return 0;
}

/* e2m1 codes of one expert, number n in the low and number count / 2 + n in the high nibble. */
static void unpack_e2m1(float *restrict out, const uint8_t *restrict packed,
                        const uint8_t *restrict scale, i64 count, i64 group) {
    for (int high = 0; high < 2; high++) {
        float *restrict half = out + high * (count / 2);
        for (i64 n = 0; n < count / 2; n++) {
            uint32_t code = packed[n] >> (4 * high) & 15;
            uint32_t magnitude = code & 7;
            uint32_t bits = magnitude < 2 ? bits_of(0.5f * (int32_t)magnitude)
                                          : (magnitude << 22) + (126u << 23);
            half[n] = float_of(bits | (code & 8) << 28);
        }
    }
    for (i64 g = 0; g < count / group; g++) {
        float by = scale[g] ? float_of((uint32_t)scale[g] << 23) : 0x1p-127f;
        for (i64 n = 0; n < group; n++) out[g * group + n] *= by;
    }
}

/* Numbers of `rows` experts or parts of them, [rows, count], for products that others compute. */
int unpack_fp4(i64 rows, i64 count, i64 group, const uint8_t *packed, const uint8_t *scale,
               float *out) {
    for (i64 row = 0; row < rows; row++)
        unpack_e2m1(out + row * count, packed + row * (count / 2), scale + row * (count / group),
                    count, group);
    return 0;
}

/* Each chosen expert, or part of one, is unpacked once, for all rows that chose it. */
int experts_fp4(i64 rows, i64 experts, i64 parts, i64 selected, i64 width, i64 inner, i64 group,
                float limit, const uint8_t *packed, const uint8_t *scale, const void *x, int bf16,
                const i64 *ids, const float *weights, float *y) {
    i64 count = 3 * inner * width;
    float *numbers = malloc((count + rows * width + inner) * sizeof(float));
    if (!numbers) return 1;
    float *in = numbers + count, *hidden = in + rows * width;
    const float *up = numbers + inner * width, *down = up + inner * width;
    load(in, x, rows * width, bf16);
    memset(y, 0, rows * width * sizeof(float));
    for (i64 place = 0; place < experts * parts; place++) {
        int unpacked = 0;
        for (i64 pick = 0; pick < rows * selected; pick++) {
            if (ids[pick] != place / parts) continue;
            if (!unpacked) {
                const uint8_t *own = scale + place * (count / group);
                unpack_e2m1(numbers, packed + place * (count / 2), own, count, group);
                unpacked = 1;
            }
            const float *row = in + pick / selected * width;
            float *out = y + pick / selected * width;
            for (i64 f = 0; f < inner; f++)
                hidden[f] = gated(dot(numbers + f * width, row, width),
                                  dot(up + f * width, row, width), limit) * weights[pick];
            for (i64 d = 0; d < width; d++) out[d] += dot(down + d * inner, hidden, inner);
        }
    }
    free(numbers);
    return 0;
}
