/* Kernels for steps of few rows, where each call into torch costs more than its arithmetic.

   Compiled on demand by library.py. Every function works in fp32 on one thread, with its numbers
   in and out in fp32 or, where the flag beside the pointer is 1, in bf16. Strides are in elements.
   Each returns 0, or 1 where memory ran out. NaN and infinities keep their meaning: see the flags.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

static inline float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

static inline uint16_t to_bf16(float number) { /* to the nearest, ties to even */
    uint32_t bits = bits_of(number);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)(rounded >> 16);
}

static inline const void *at(const void *numbers, i64 place, int bf16) {
    return (const char *)numbers + place * (bf16 ? 2 : 4);
}

static void load(float *restrict out, const void *in, i64 count, int bf16) {
    if (bf16) {
        const uint16_t *restrict halves = in;
        for (i64 i = 0; i < count; i++) out[i] = float_of((uint32_t)halves[i] << 16);
    } else {
        memcpy(out, in, count * sizeof(float));
    }
}

static void store(void *out, const float *restrict in, i64 count, int bf16) {
    if (bf16) {
        uint16_t *restrict halves = out;
        for (i64 i = 0; i < count; i++) halves[i] = to_bf16(in[i]);
    } else {
        memcpy(out, in, count * sizeof(float));
    }
}

static inline float dot(const float *restrict a, const float *restrict b, i64 count) {
    float sum = 0;
    for (i64 i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static inline void add_scaled(float *restrict out, const float *restrict in, float by, i64 count) {
    for (i64 i = 0; i < count; i++) out[i] += by * in[i];
}

static inline float inverse_rms(const float *x, i64 count, float eps) {
    return 1.0f / sqrtf(dot(x, x, count) / count + eps);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static inline float gated(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate * sigmoid(gate) * up;
}

/* ---- products ---- */

/* e4m3 codes as numbers times 2^-8, which the factor that goes with them undoes. */
static void unpack_e4m3(float *restrict out, const int8_t *restrict codes, i64 count) {
    for (i64 i = 0; i < count; i++) {
        int32_t code = codes[i]; /* its sign is the sign bit now */
        uint32_t magnitude = code & 0x7f;
        uint32_t normal = (magnitude << 20) + (112u << 23);
        uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of(113u << 23));
        uint32_t bits = magnitude < 8 ? subnormal : normal;
        out[i] = float_of(bits | ((uint32_t)code & 0x80000000u));
    }
}

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

/* ---- norms and rotations ---- */

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

/* ---- hyper-connections ---- */

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

/* ---- experts ---- */

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

/* ---- attention of decode rows ---- */

enum { V4_FP8 = 2, V4_ROW = 592, V4_CODED = 448, V4_BLOCK = 64, V4_SCALES_AT = 576 };

/* A row in the format v4_fp8 of ops/formats.py: codes, 64 channels in bf16, a power of two for each
   block of codes. */
static void load_v4_fp8(float *restrict out, const uint8_t *row) {
    for (i64 first = 0; first < V4_CODED; first += V4_BLOCK) {
        float *restrict block = out + first;
        uint32_t exponent = row[V4_SCALES_AT + first / V4_BLOCK];
        unpack_e4m3(block, (const int8_t *)row + first, V4_BLOCK);
        if (exponent - 1u < 246u) { /* 256 times the scale is a number too */
            float factor = float_of((exponent + 8) << 23);
            for (i64 i = 0; i < V4_BLOCK; i++) block[i] *= factor;
        } else {
            double factor = exponent == 255 ? NAN : ldexp(1.0, (int)exponent - 127 + 8);
            for (i64 i = 0; i < V4_BLOCK; i++) block[i] = (float)(block[i] * factor);
        }
    }
    load(out + V4_CODED, row + V4_CODED, V4_BLOCK, 1);
}

static i64 gather(float *keys, const void *cache, int form, i64 width, const i64 *listed, i64 count) {
    i64 found = 0;
    for (i64 k = 0; k < count; k++) {
        if (listed[k] < 0) continue;
        float *key = keys + found++ * width;
        if (form == V4_FP8)
            load_v4_fp8(key, (const uint8_t *)cache + listed[k] * V4_ROW);
        else
            load(key, at(cache, listed[k] * width, form), width, form);
    }
    return found;
}

/* The forms of caches are 0 for fp32, 1 for bf16, V4_FP8. */

int sparse_decode(i64 rows, i64 heads, i64 width, const void *q, int bf16, const void *ring,
                  int ring_form, const i64 *ring_rows, i64 num_ring, const void *entries,
                  int entries_form, const i64 *entry_rows, i64 num_entries, const float *sink,
                  void *out) {
    i64 most_keys = num_ring + num_entries;
    float *keys = malloc(((most_keys + 2) * width + most_keys) * sizeof(float));
    if (!keys) return 1;
    float *query = keys + most_keys * width, *sum = query + width, *weight = sum + width;
    float by = 1.0f / sqrtf(width);
    for (i64 t = 0; t < rows; t++) {
        i64 n = gather(keys, ring, ring_form, width, ring_rows + t * num_ring, num_ring);
        n += gather(keys + n * width, entries, entries_form, width, entry_rows + t * num_entries,
                    num_entries);
        for (i64 h = 0; h < heads; h++) {
            i64 place = (t * heads + h) * width;
            load(query, at(q, place, bf16), width, bf16);
            float most = sink[h];
            for (i64 k = 0; k < n; k++) {
                weight[k] = by * dot(query, keys + k * width, width);
                most = weight[k] > most ? weight[k] : most;
            }
            float total = expf(sink[h] - most);
            for (i64 k = 0; k < n; k++) total += weight[k] = expf(weight[k] - most);
            memset(sum, 0, width * sizeof(float));
            for (i64 k = 0; k < n; k++) add_scaled(sum, keys + k * width, weight[k] / total, width);
            store((void *)at(out, place, bf16), sum, width, bf16);
        }
    }
    free(keys);
    return 0;
}
