/* Attention of few decode rows. */

#include "numbers.h"

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
