// attention.sparse_prefill on sm_90: one query row with 64 of its heads at a time.
//
// Three warpgroups. One fetches tiles of 64 keys into shared memory, two buffers in turn. The other
// two take a pair of tiles together: each scores one tile (S = Q K^T), both agree on the maxima,
// each leaves its weights P in shared memory, and then each adds P V of both tiles for one half of
// the value's channels. Keys are values, so one tile in shared memory is an operand of both products:
// once with the channels as K, once with its rows as K.
//
// Constants: ROPE_EXTRA (channels of a key that are no part of the value, 0 or 64), FORMAT (how
// entries are kept), WINDOW (slots of the window, a multiple of 64, or 0), SELECTS (0: a row attends
// to all entries that it sees).
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
#define LOG2E 1.4426950408889634f
#define INFINITY __int_as_float(0x7f800000)
#define LOWEST -3e38f  // finite: a row that sees nothing has weights of 0, not NaN

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

// Rows (heads) and pairs of columns that a thread holds of a product of 64 rows.
struct Place {
  int group, row0, row1, column;
};

__device__ __forceinline__ void load_queries(const Shared& s, const uint8* q, int thread) {
#pragma unroll 8
  for (int i = thread; i < 64 * 64; i += CONSUMERS) {
    const int row = i >> 6, piece = i & 63;
    const uint32 to = s.base + (piece >> 3) * CHUNK_BYTES + row * 128 +
                      (((piece & 7) ^ (row & 7)) << 4);
    const uint4 v = *(const uint4*)(q + row * (KEY * 2) + 16 * piece);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w));
  }
}

#if ROPE_EXTRA
// The channels behind the value stay in registers: shared memory has no room for them.
__device__ __forceinline__ void load_extra(uint32 (&extra)[4][4], const uint8* q, const Place& p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint8* at = q + 2 * (VALUE + 16 * i + p.column);
    extra[i][0] = *(const uint32*)(at + p.row0 * (KEY * 2));
    extra[i][1] = *(const uint32*)(at + p.row1 * (KEY * 2));
    extra[i][2] = *(const uint32*)(at + p.row0 * (KEY * 2) + 16);
    extra[i][3] = *(const uint32*)(at + p.row1 * (KEY * 2) + 16);
  }
}
#endif

__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores of one tile into weights in shared memory; accumulators and sums move to the new maxima.
__device__ __forceinline__ void weigh(const Shared& s, const Place& p, float scale,
                                      float (&scores)[32], float (&out)[128], float (&maxima)[2],
                                      float (&sums)[2]) {
  const float2* mask = (const float2*)(s.mask + p.group * 64 + p.column);
  float top0 = -INFINITY, top1 = -INFINITY;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 hidden = mask[4 * j];
    float* c = scores + 4 * j;
    c[0] = c[0] * scale + hidden.x;
    c[1] = c[1] * scale + hidden.y;
    c[2] = c[2] * scale + hidden.x;
    c[3] = c[3] * scale + hidden.y;
    top0 = fmaxf(top0, fmaxf(c[0], c[1]));
    top1 = fmaxf(top1, fmaxf(c[2], c[3]));
  }
  top0 = row_max(top0);
  top1 = row_max(top1);
  if (p.column == 0) {
    s.maxima[p.group * 64 + p.row0] = top0;
    s.maxima[p.group * 64 + p.row1] = top1;
  }
  named_barrier<CONSUMERS>(2);
  const float* other = s.maxima + (p.group ^ 1) * 64;
  const float max0 = fmaxf(maxima[0], fmaxf(top0, other[p.row0]));
  const float max1 = fmaxf(maxima[1], fmaxf(top1, other[p.row1]));
  const float shrink0 = exp2_fast(maxima[0] - max0), shrink1 = exp2_fast(maxima[1] - max1);
  sums[0] *= shrink0;
  sums[1] *= shrink1;
  const uint32 weights = s.base + PLACE_WEIGHTS + p.group * CHUNK_BYTES + 2 * p.column;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float* c = scores + 4 * j;
    const float w0 = exp2_fast(c[0] - max0), w1 = exp2_fast(c[1] - max0);
    const float w2 = exp2_fast(c[2] - max1), w3 = exp2_fast(c[3] - max1);
    sums[0] += w0 + w1;
    sums[1] += w2 + w3;
    const uint32 to0 = weights + p.row0 * 128 + ((j ^ (p.row0 & 7)) << 4);
    const uint32 to1 = weights + p.row1 * 128 + ((j ^ (p.row1 & 7)) << 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to0), "r"(pack_bf16(w0, w1)));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to1), "r"(pack_bf16(w2, w3)));
  }
  fence_async();
  if (__any_sync(~0u, max0 != maxima[0] || max1 != maxima[1])) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      out[4 * j] *= shrink0;
      out[4 * j + 1] *= shrink0;
      out[4 * j + 2] *= shrink1;
      out[4 * j + 3] *= shrink1;
    }
  }
  maxima[0] = max0;
  maxima[1] = max1;
}

__device__ __forceinline__ void finish(const Arguments& a, const Shared& s, const Place& p,
                                       int64 t, int head0, float (&out)[128], float (&maxima)[2],
                                       float (&sums)[2]) {
  sums[0] = row_sum(sums[0]);
  sums[1] = row_sum(sums[1]);
  if (p.column == 0) {
    s.sums[p.group * 64 + p.row0] = sums[0];
    s.sums[p.group * 64 + p.row1] = sums[1];
  }
  named_barrier<CONSUMERS>(2);
  const int64 heads = 64 * a.head_blocks;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half ? p.row1 : p.row0;
    const float sum = sums[half] + s.sums[(p.group ^ 1) * 64 + row];
    const float inverse = sum > 0.f ? 1.f / sum : (sum == 0.f ? 0.f : sum);
    const int64 at = t * heads + head0 + row;
    uint8* to = a.out + 2 * (at * VALUE + 256 * p.group + p.column);
#pragma unroll
    for (int j = 0; j < 32; ++j)
      *(uint32*)(to + 16 * j) =
          pack_bf16(out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse);
    if (a.lse && p.group == 0 && p.column == 0)
      a.lse[at] = sum > 0.f ? (maxima[half] + __log2f(sum)) / LOG2E
                            : (sum == 0.f ? -INFINITY : sum);
  }
  named_barrier<CONSUMERS>(3);
}

__device__ __forceinline__ void consume(const Arguments& a, const Shared& s, int thread) {
  const int warp = (thread & 127) >> 5, lane = thread & 31;
  Place p;
  p.group = thread >> 7;
  p.row0 = 16 * warp + (lane >> 2);
  p.row1 = p.row0 + 8;
  p.column = 2 * (lane & 3);
  int parity = 0;
  for (int64 work = blockIdx.x; work < a.rows * a.head_blocks; work += gridDim.x) {
    const int64 t = work / a.head_blocks;
    const int head0 = 64 * (int)(work % a.head_blocks);
    const uint8* q = a.q + (t * a.head_blocks * 64 + head0) * (KEY * 2);
    load_queries(s, q, thread);
#if ROPE_EXTRA
    uint32 extra[4][4];
    load_extra(extra, q, p);
#endif
    fence_async();
    named_barrier<CONSUMERS>(1);
    float out[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0.f;
    float maxima[2] = {LOWEST, LOWEST}, sums[2] = {0.f, 0.f};
    if (a.sinks) {
      maxima[0] = fmaxf(a.sinks[head0 + p.row0] * LOG2E, LOWEST);
      maxima[1] = fmaxf(a.sinks[head0 + p.row1] * LOG2E, LOWEST);
      if (p.group == 0 && p.column == 0) sums[0] = sums[1] = 1.f;
    }
    const int pairs = tile_pairs(row_of(a, t));
    for (int pair = 0; pair < pairs; ++pair) {
      float scores[32];
      mbarrier_wait(s.full(p.group), parity);
      fence_async();
      wgmma_fence();
      const uint32 keys = s.base + PLACE_TILES + p.group * TILE_BYTES;
#pragma unroll
      for (int k = 0; k < VALUE / 16; ++k) {
        const uint32 at = (k >> 2) * CHUNK_BYTES + (k & 3) * 32;
        wgmma_64x64(scores, tile_descriptor(s.base + at, 16, 1024),
                    tile_descriptor(keys + at, 16, 1024), k != 0);
      }
#if ROPE_EXTRA
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_64x64(scores, extra[k], tile_descriptor(keys + 8 * CHUNK_BYTES + k * 32, 16, 1024));
#endif
      wgmma_commit();
      wgmma_wait<0>();
      weigh(s, p, a.scale, scores, out, maxima, sums);
      named_barrier<CONSUMERS>(3);
      mbarrier_wait(s.full(p.group ^ 1), parity);
      fence_async();
      wgmma_fence();
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint32 values = s.base + PLACE_TILES + tile * TILE_BYTES + p.group * 4 * CHUNK_BYTES;
        const uint32 weights = s.base + PLACE_WEIGHTS + tile * CHUNK_BYTES;
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma_64x256_rows(out, tile_descriptor(weights + k * 32, 16, 1024),
                            tile_descriptor(values + k * 2048, CHUNK_BYTES, 1024));
        wgmma_commit();
      }
      wgmma_wait<1>();
      mbarrier_arrive(s.empty(0));
      wgmma_wait<0>();
      mbarrier_arrive(s.empty(1));
      parity ^= 1;
    }
    finish(a, s, p, t, head0, out, maxima, sums);
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    sparse_prefill(const uint8* q, const int64* positions, const uint8* latents,
                   const int64* latent_rows, const float* sinks, const uint8* entries,
                   const int64* entry_rows, const int64* sequences, const int64* selected,
                   uint8* out, float* lse, int64 rows, int64 head_blocks, int64 table_width,
                   int64 listed, int64 ratio, float scale) {
  extern __shared__ __align__(1024) uint8 memory[];
  Shared s;
  s.base = shared_address(memory);
  s.mask = (float*)(memory + PLACE_NUMBERS);
  s.maxima = s.mask + 128;
  s.sums = s.maxima + 128;
  s.barriers = s.base + PLACE_NUMBERS + 4 * NUMBERS;
  const Arguments a = {q,        latents,  entries, positions, latent_rows, entry_rows,
                       sequences, selected, sinks,   out,       lse,         rows,
                       head_blocks, table_width, listed, scale, ratio};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(s.full(i), 2 * PRODUCERS);
      mbarrier_init(s.empty(i), CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // Registers of the block: 256 x 216 + 128 x 72 = 384 x 168, what it starts with.
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    produce(a, s, threadIdx.x - CONSUMERS);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    consume(a, s, threadIdx.x);
  }
}
