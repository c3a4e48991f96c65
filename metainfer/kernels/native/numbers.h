/* What the kernels of this package share: numbers in fp32 and bf16, and sums over rows.

   Kernels are for steps of few rows, where each call into torch costs more than its arithmetic;
   library.py compiles them on demand. Every function works in fp32 on one thread, with its numbers
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

static inline void load(float *restrict out, const void *in, i64 count, int bf16) {
    if (bf16) {
        const uint16_t *restrict halves = in;
        for (i64 i = 0; i < count; i++) out[i] = float_of((uint32_t)halves[i] << 16);
    } else {
        memcpy(out, in, count * sizeof(float));
    }
}

static inline void store(void *out, const float *restrict in, i64 count, int bf16) {
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

/* e4m3 codes as numbers times 2^-8, which the factor that goes with them undoes. */
static inline void unpack_e4m3(float *restrict out, const int8_t *restrict codes, i64 count) {
    for (i64 i = 0; i < count; i++) {
        int32_t code = codes[i]; /* its sign is the sign bit now */
        uint32_t magnitude = code & 0x7f;
        uint32_t normal = (magnitude << 20) + (112u << 23);
        uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of(113u << 23));
        uint32_t bits = magnitude < 8 ? subnormal : normal;
        out[i] = float_of(bits | ((uint32_t)code & 0x80000000u));
    }
}
