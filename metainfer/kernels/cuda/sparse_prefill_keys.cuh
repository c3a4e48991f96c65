// Keys of attention.sparse_prefill (sparse_prefill.cu has the constants): which rows of the caches a
// query row sees, and their way into shared memory, decoded where they are bytes.
#pragma once
#include "hopper.cuh"

#define VALUE 512
#define KEY (VALUE + ROPE_EXTRA)
#define TILE 64
#define CHUNK_BYTES 8192  // 64 rows of 64 channels
#define TILE_BYTES (TILE * KEY * 2)
#define PLACE_TILES (64 * VALUE * 2)
#define PLACE_WEIGHTS (PLACE_TILES + 2 * TILE_BYTES)
#define PLACE_NUMBERS (PLACE_WEIGHTS + 2 * CHUNK_BYTES)
#define NUMBERS 384  // masks, maxima and sums, 2 x 64 fp32 each
#define CONSUMERS 256
#define PRODUCERS 128
#define INFINITY __int_as_float(0x7f800000)

enum Format { BF16 = 0, FP32 = 1, V4_FP8 = 2, V41_FP4 = 3, MLA_FP8 = 4 };

struct Shared {
  uint32 base, barriers;
  float *mask, *maxima, *sums;
  __device__ __forceinline__ uint32 full(int buffer) const { return barriers + 8 * buffer; }
  __device__ __forceinline__ uint32 empty(int buffer) const { return barriers + 16 + 8 * buffer; }
};

struct Arguments {
  const uint8 *q, *latents, *entries;
  const int64 *positions, *latent_rows, *entry_rows, *sequences, *selected;
  const float* sinks;
  uint8* out;
  float* lse;
  int64 rows, head_blocks, table_width, listed;
  float scale;  // of the scores, times log2(e)
  int64 ratio;
};

// One query row: where it is, and how many slots of keys it has: its window, then entries. Slots
// without a key are masked.
struct Row {
  int64 t, position, latent, table;
  int seen, slots;
};

__device__ __forceinline__ Row row_of(const Arguments& a, int64 t) {
  Row r;
  r.t = t;
  r.position = a.positions[t];
  r.latent = WINDOW ? a.latent_rows[t] : 0;
  r.table = a.sequences ? a.sequences[t] * a.table_width : 0;
  int64 seen = a.ratio ? (r.position + 1) / a.ratio : 0;
  seen = seen < a.table_width ? seen : a.table_width;
  r.seen = (int)seen;
  r.slots = WINDOW + (SELECTS ? (a.ratio ? (int)a.listed : 0) : r.seen);
  return r;
}

__device__ __forceinline__ int tile_pairs(const Row& r) {
  return (r.slots + 2 * TILE - 1) / (2 * TILE);
}

// From slot to cache row in two steps, each a load that the fetching of other tiles hides: the
// number of the entry (-1: none), then its row. In the window the number is that of the slot.
__device__ __forceinline__ int entry_in(const Arguments& a, const Row& r, int slot) {
  if (slot >= r.slots) return -1;
  if (slot < WINDOW) return slot;
  return SELECTS ? (int)a.selected[r.t * a.listed + slot - WINDOW] : slot - WINDOW;
}

__device__ __forceinline__ int64 row_in(const Arguments& a, const Row& r, bool of_window,
                                        int entry) {
  if (of_window) {
    const int64 back = WINDOW - 1 - entry;
    return back <= r.position ? r.latent - back : -1;
  }
  if (entry < 0 || entry >= r.seen) return -1;
  return a.entry_rows ? a.entry_rows[r.table + entry] : r.table + entry;
}

__device__ __forceinline__ void store_channels(uint32 to, const float (&v)[8]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pack_bf16(v[0], v[1])),
               "r"(pack_bf16(v[2], v[3])), "r"(pack_bf16(v[4], v[5])), "r"(pack_bf16(v[6], v[7])));
}

__device__ __forceinline__ void decode_e4m3(uint32 codes, float scale, float* v) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)(codes >> 16 * i)));
    float low, high;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    v[2 * i] = low * scale;
    v[2 * i + 1] = high * scale;
  }
}

__device__ __forceinline__ float decode_e2m1(uint32 code, float scale) {
  const float magnitude = __uint_as_float((code & 7) << 22) * __uint_as_float(253u << 23);
  return __uint_as_float(__float_as_uint(magnitude) | (code & 8) << 28) * scale;
}

// What one thread reads of a row of bytes: eight channels of each chunk of 64, `lane8` of eight
// threads a row. Loads come first, so that those of the next row run under the decoding of this.
template <int F>
struct Coded {
  static constexpr int CHUNKS = KEY / 64 - (F == V4_FP8 || F == MLA_FP8);
  uint64 codes[CHUNKS];
  uint4 scales;

  __device__ __forceinline__ void load(const uint8* row, int lane8, bool real) {
    scales = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) codes[chunk] = 0;
    if (!real) return;
    if (F == MLA_FP8) scales = *(const uint4*)(row + 512);
    if (F == V4_FP8) scales = *(const uint4*)(row + 576);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (F == V41_FP4)
        codes[chunk] = *(const uint32*)(row + 32 * chunk + 4 * lane8) |
                       (uint64)row[256 + 4 * chunk + lane8 / 2] << 32;
      else
        codes[chunk] = *(const uint64*)(row + 64 * chunk + 8 * lane8);
    }
  }

  __device__ __forceinline__ void store(uint32 to) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      float v[8];
      if (F == V41_FP4) {
        float scale[4];
        decode_e4m3((uint32)(codes[chunk] >> 32), 1.f, scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = decode_e2m1((uint32)codes[chunk] >> 4 * i, scale[0]);
      } else {
        const float scale = F == MLA_FP8 ? __uint_as_float(word(chunk / 2)) : power(chunk);
        decode_e4m3((uint32)codes[chunk], scale, v);
        decode_e4m3((uint32)(codes[chunk] >> 32), scale, v + 4);
      }
      store_channels(to + chunk * CHUNK_BYTES, v);
    }
  }

  __device__ __forceinline__ uint32 word(int i) const {
    return i == 0 ? scales.x : i == 1 ? scales.y : i == 2 ? scales.z : scales.w;
  }

  __device__ __forceinline__ float power(int chunk) const {
    const uint32 exponent = word(chunk / 4) >> 8 * (chunk % 4) & 255;
    // 2^-127 is not a normal number: its bits are those of half the least normal one.
    return __uint_as_float(exponent ? exponent << 23 : 1u << 22);
  }
};

__device__ __forceinline__ void store_floats(uint32 to, const uint8* row, int lane8, bool real) {
#pragma unroll
  for (int chunk = 0; chunk < KEY / 64; ++chunk) {
    float v[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (real) {
      *(float4*)v = *(const float4*)(row + 4 * (64 * chunk + 8 * lane8));
      *(float4*)(v + 4) = *(const float4*)(row + 4 * (64 * chunk + 8 * lane8) + 16);
    }
    store_channels(to + chunk * CHUNK_BYTES, v);
  }
}

__device__ __forceinline__ void fetch_plain(uint32 to, const uint8* row, int lane8, bool real) {
#pragma unroll
  for (int chunk = 0; chunk < KEY / 64; ++chunk)
    copy_async(to + chunk * CHUNK_BYTES, row + chunk * 128 + 16 * lane8, real);
}

#define ROW_BYTES \
  (FORMAT == BF16      ? KEY * 2 \
   : FORMAT == FP32    ? KEY * 4 \
   : FORMAT == V4_FP8  ? 592 \
   : FORMAT == V41_FP4 ? 288 \
                       : 656)

__device__ __forceinline__ void fetch_tile(const Arguments& a, const Shared& s, int buffer,
                                           bool of_window, const int64 (&rows)[4], int row0,
                                           int lane8) {
  uint32 to[4];
  const uint8* from[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int place = row0 + 16 * i;
    const int64 row = rows[i] >= 0 ? rows[i] : 0;
    to[i] = s.base + PLACE_TILES + buffer * TILE_BYTES + place * 128 +
            ((lane8 ^ (place & 7)) << 4);
    from[i] = of_window ? a.latents + row * (KEY * 2) : a.entries + row * ROW_BYTES;
    if (lane8 == 0) s.mask[buffer * 64 + place] = rows[i] >= 0 ? 0.f : -INFINITY;
  }
  if (of_window || FORMAT == BF16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fetch_plain(to[i], from[i], lane8, rows[i] >= 0);
  } else if (FORMAT == FP32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_floats(to[i], from[i], lane8, rows[i] >= 0);
    fence_async();
  } else {
    Coded<FORMAT> coded[2];
    coded[0].load(from[0], lane8, rows[0] >= 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < 3) coded[(i + 1) & 1].load(from[i + 1], lane8, rows[i + 1] >= 0);
      coded[i & 1].store(to[i]);
      const uint32 last = to[i] + (KEY / 64 - 1) * CHUNK_BYTES;
      if (FORMAT == V4_FP8) copy_async(last, from[i] + 448 + 16 * lane8, rows[i] >= 0);
      if (FORMAT == MLA_FP8) copy_async(last, from[i] + 528 + 16 * lane8, rows[i] >= 0);
    }
    fence_async();
  }
}

__device__ __forceinline__ void produce(const Arguments& a, const Shared& s, int thread) {
  const int row0 = thread >> 3, lane8 = thread & 7;
  int parity = 1;
  for (int64 work = blockIdx.x; work < a.rows * a.head_blocks; work += gridDim.x) {
    const Row r = row_of(a, work / a.head_blocks);
    const int tiles = 2 * tile_pairs(r);
    int entries[4];  // two tiles ahead
    int64 next[4];   // one tile ahead
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      next[i] = row_in(a, r, WINDOW > 0, entry_in(a, r, row0 + 16 * i));
      entries[i] = entry_in(a, r, TILE + row0 + 16 * i);
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int buffer = tile & 1;
      int64 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[i] = next[i];
        next[i] = row_in(a, r, (tile + 1) * TILE < WINDOW, entries[i]);
        entries[i] = entry_in(a, r, (tile + 2) * TILE + row0 + 16 * i);
      }
      mbarrier_wait(s.empty(buffer), parity);
      fetch_tile(a, s, buffer, tile * TILE < WINDOW, rows, row0, lane8);
      mbarrier_arrive_after_copies(s.full(buffer));
      mbarrier_arrive(s.full(buffer));
      if (buffer) parity ^= 1;
    }
  }
}
