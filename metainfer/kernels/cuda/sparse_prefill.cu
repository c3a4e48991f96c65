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
#include "sparse_prefill_keys.cuh"

#define LOG2E 1.4426950408889634f
#define LOWEST -3e38f  // finite: a row that sees nothing has weights of 0, not NaN

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
