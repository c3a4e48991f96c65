// moe.experts_fp8_rows on sm_90 with fp4 weights: one of its two products, weights times rows.
//
// A tile of up to BM slots (choices of an expert, their rows anywhere) meets 128 rows of weights at
// a time, two warpgroups with 64 of them each. A third warpgroup fetches: codes of the slots' rows
// by cp.async, weights by one bulk copy a step. Weights are the product's first operand, from
// registers: two words of packed numbers become e4m3 codes in a few instructions (experts_fp4.py has
// the order of the bits). Sums of 128 products are scaled and added up in fp32.
//
// The two warpgroups multiply in turns, so that one scales and adds while the other multiplies. With
// few slots a tile, where reading weights is what counts, two blocks share a multiprocessor instead.
//
// Constants: GATED (1: gate and up, whose rows take turns by 8, then the activation; 0: down,
// weighted), COLUMNS of the weights, WIDTH of the result, BM, PER (slots that share an input row),
// STAGES. The activation becomes codes where tiles are high, so that an item has a whole group of
// them; all else is bf16.
#include "wgmma_e4m3.cuh"

#define CONSUMERS 256
#define PRODUCERS 128
#define STEP 128  // columns of one step: bytes of a row, one group of scales
#define STEPS (COLUMNS / STEP)
#define FEW (BM <= 32)
#define CODED (GATED && !FEW)
#define PARTS (CODED ? 2 : 1)          // times 128 rows of weights of an item
#define RESULT (GATED && FEW ? 64 : 128)  // columns of an item
#define BLOCKS (WIDTH / RESULT)
#define WEIGHT_BYTES 8704              // of 128 rows in one step: 2 x (4096 of numbers, 256 of shifts)
#define STAGE_BYTES (BM * STEP + 9216) // rows of codes, then weights, whole kilobytes
#define OUT_STRIDE 264                 // bytes of a row of results, 8 beyond 128 bf16: other banks
#define PLACE_OUT (STAGES * STAGE_BYTES)
#define PLACE_SCALES (PLACE_OUT + BM * OUT_STRIDE)
#define PLACE_SLOTS (PLACE_SCALES + 4 * STEPS * BM)
#define PLACE_BARRIERS (PLACE_SLOTS + 8 * BM)

struct Arguments {
  const uint8* codes;    // [rows, code_stride]
  const uint8* scales;   // e8m0 [rows, STEPS]
  const uint8* weights;  // [E, PARTS * BLOCKS, STEPS, WEIGHT_BYTES]
  const float* factors;  // [E, PARTS * BLOCKS, 128]
  const int* slots;      // [tiles, BM], -1 behind the last; null: tile n holds slot n
  const int* experts;    // [tiles], -1: nothing; int64 where there are no slots
  const float* shares;   // by slot, of down
  uint8* out;            // codes [slots, WIDTH], or bf16
  uint8* out_scales;     // e8m0 [slots, BLOCKS]
  int64 tiles, code_stride, expert_count;
  float limit;
};

struct Shared {
  uint32 base;
  uint8* memory;
  __device__ __forceinline__ uint32 stage(int i) const { return base + i * STAGE_BYTES; }
  __device__ __forceinline__ uint32 full(int i) const { return base + PLACE_BARRIERS + 16 * i; }
  __device__ __forceinline__ uint32 empty(int i) const { return full(i) + 8; }
  __device__ __forceinline__ float* scales() const { return (float*)(memory + PLACE_SCALES); }
  __device__ __forceinline__ int* slots() const { return (int*)(memory + PLACE_SLOTS); }
  __device__ __forceinline__ float* shares() const { return (float*)(slots() + BM); }
};

// Where a ring of stages stands.
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Item {
  int64 tile;
  int block, expert, count;
};

__device__ __forceinline__ int slot_of(const Arguments& a, int64 tile, int n) {
  return a.slots ? a.slots[tile * BM + n] : (n ? -1 : (int)tile);
}

// False where the tile holds nothing. Called by whole warps.
__device__ __forceinline__ bool item_of(const Arguments& a, int64 work, int lane, Item& item) {
  item.tile = work % a.tiles;
  item.block = (int)(work / a.tiles);
  const int64 expert = a.slots ? a.experts[item.tile] : ((const int64*)a.experts)[item.tile];
  if (expert < 0 || expert >= a.expert_count) return false;
  item.expert = (int)expert;
  item.count = 0;
#pragma unroll
  for (int n = 0; n < BM; n += 32) {
    const bool is_slot = n + lane < BM && slot_of(a, item.tile, n + lane) >= 0;
    item.count += __popc(__ballot_sync(~0u, is_slot));
  }
  return item.count > 0;
}

__device__ __forceinline__ void bulk_copy(uint32 to, const void* from, int bytes, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void produce(const Arguments& a, const Shared& s, int thread) {
  const int row0 = thread >> 3, piece = thread & 7;
  Ring ring;
  ring.parity = 1;
  Item item;
  for (int64 work = blockIdx.x; work < a.tiles * BLOCKS; work += gridDim.x) {
    if (!item_of(a, work, thread & 31, item)) continue;
    const uint8* from[BM / 16];
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
      const int n = row0 + 16 * i;
      const int64 row = n < item.count ? slot_of(a, item.tile, n) / PER : 0;
      from[i] = a.codes + row * a.code_stride + 16 * piece;
    }
    for (int part = 0; part < PARTS; ++part) {
      const int64 rows = (int64)item.expert * (PARTS * BLOCKS) + PARTS * item.block + part;
      const uint8* weights = a.weights + rows * STEPS * WEIGHT_BYTES;
      for (int step = 0; step < STEPS; ++step) {
        const uint32 stage = s.stage(ring.stage), full = s.full(ring.stage);
        mbarrier_wait(s.empty(ring.stage), ring.parity);
        if (thread == 0) {
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                       "r"(WEIGHT_BYTES)
                       : "memory");
          bulk_copy(stage + BM * STEP, weights + (int64)step * WEIGHT_BYTES, WEIGHT_BYTES, full);
        }
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) {
          const int n = row0 + 16 * i;
          if (n < item.count)
            copy_async(stage + n * STEP + ((piece ^ (n & 7)) << 4), from[i] + step * STEP, true);
        }
        mbarrier_arrive_after_copies(full);
        ring.next();
      }
    }
  }
}

__device__ __forceinline__ uint32 load_word(uint32 at) {
  uint32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}

__device__ __forceinline__ uint4 load_words(uint32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at));
  return x;
}

// Eight numbers of one row of weights as e4m3 codes, 2^(6 - shift) times as large.
__device__ __forceinline__ void unpack(uint32 word, uint32 shift, uint32& first, uint32& second) {
  const uint32 low = 0x6C686000u - shift * 0x08080800u;
  const uint32 high = 0x7C787470u - shift * 0x08080808u;
  first = __byte_perm(low, high, word & 0x7777u) | (word & 0x80808080u);
  second = __byte_perm(low, high, (word >> 16) & 0x7777u) | ((word << 4) & 0x80808080u);
}

// The 64 rows of a warpgroup in one step, as the instruction takes them: 4 x 4 registers.
__device__ __forceinline__ void load_weights(uint32 (&a)[16], uint32 tile, int thread) {
  const uint4 first = load_words(tile + 16 * thread);
  const uint4 second = load_words(tile + 2048 + 16 * thread);
  const int row = 16 * (thread >> 5) + ((thread & 31) >> 2);
  const uint32 shifts = load_word(tile + 4096 + 4 * row);
  const uint32 shifts8 = load_word(tile + 4096 + 4 * (row + 8));
  unpack(first.x, shifts & 255, a[0], a[2]);
  unpack(first.y, shifts8 & 255, a[1], a[3]);
  unpack(first.z, shifts >> 8 & 255, a[4], a[6]);
  unpack(first.w, shifts8 >> 8 & 255, a[5], a[7]);
  unpack(second.x, shifts >> 16 & 255, a[8], a[10]);
  unpack(second.y, shifts8 >> 16 & 255, a[9], a[11]);
  unpack(second.z, shifts >> 24, a[12], a[14]);
  unpack(second.w, shifts8 >> 24, a[13], a[15]);
}

template <int COUNT>
__device__ __forceinline__ void hold(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__device__ __forceinline__ void hold(uint32 (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Rows came by cp.async, whose writes wgmma sees once the barrier that counts them was passed.
// One step: the product of this stage runs while the next stage's weights are unpacked.
template <int N>
__device__ __forceinline__ void step_product(const Shared& s, Ring& ring, int group, int thread,
                                             int step, bool more, uint32 (&now)[16],
                                             uint32 (&next)[16], float (&total)[N / 2]) {
  float sum[N / 2];
  const int stage = ring.stage;
  const uint32 rows = s.stage(stage);
  hold(now);
  if (!FEW) named_barrier<CONSUMERS>(4 + group);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Wgmma<N>::run(sum, now + 4 * i, tile_descriptor(rows + 32 * i, 16, 1024), i != 0);
    if (i == 2) wgmma_commit();
  }
  wgmma_commit();
  ring.next();
  if (more) {
    mbarrier_wait(s.full(ring.stage), ring.parity);
    load_weights(next, s.stage(ring.stage) + BM * STEP + group * (WEIGHT_BYTES / 2), thread);
  }
  if (!FEW) {
    wgmma_wait<1>();
    named_barrier_arrive<CONSUMERS>(4 + (group ^ 1));  // the last product is short
  }
  wgmma_wait<0>();
  hold(sum);
  hold(now);
  __syncwarp();
  if ((thread & 31) == 0) mbarrier_arrive(s.empty(stage));
  const float2* scales = (const float2*)(s.scales() + step * BM + 2 * (thread & 3));
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 scale = scales[4 * j];
    total[4 * j] += sum[4 * j] * scale.x;
    total[4 * j + 1] += sum[4 * j + 1] * scale.y;
    total[4 * j + 2] += sum[4 * j + 2] * scale.x;
    total[4 * j + 3] += sum[4 * j + 3] * scale.y;
  }
}

__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

__device__ __forceinline__ float gated(float gate, float up, float limit) {
  gate = at_most(gate, limit);
  up = at_most(up, limit);
  up = up < -limit ? -limit : up;
  return gate / (1.f + __expf(-gate)) * up;
}

__device__ __forceinline__ void leave(const Shared& s, int n, int column, float x) {
  const uint32 at = s.base + PLACE_OUT + n * OUT_STRIDE + 2 * column;
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"((unsigned short)pack_bf16(x, 0.f)));
}

// 128 columns of the result for up to N slots, as bf16 in shared memory.
template <int N>
__device__ __forceinline__ void multiply(const Arguments& a, const Shared& s, Ring& ring,
                                         const Item& item, int group, int thread) {
  const int warp = thread >> 5, lane = thread & 31, row = 16 * warp + (lane >> 2);
#pragma unroll 1
  for (int part = 0; part < PARTS; ++part) {
    float total[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[i] = 0.f;
    uint32 even[16], odd[16];
    mbarrier_wait(s.full(ring.stage), ring.parity);
    load_weights(even, s.stage(ring.stage) + BM * STEP + group * (WEIGHT_BYTES / 2), thread);
#pragma unroll 1
    for (int step = 0; step < STEPS; step += 2) {
      step_product<N>(s, ring, group, thread, step, step + 1 < STEPS, even, odd, total);
      if (step + 1 < STEPS)
        step_product<N>(s, ring, group, thread, step + 1, step + 2 < STEPS, odd, even, total);
    }
    const int64 rows = (int64)item.expert * (PARTS * BLOCKS) + PARTS * item.block + part;
    const float* factors = a.factors + rows * 128 + 64 * group + row;
    const float factor = factors[0], factor8 = factors[8];
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int n = 8 * j + 2 * (lane & 3) + q;
        const float x = total[4 * j + q] * factor, x8 = total[4 * j + 2 + q] * factor8;
        if (GATED) {
          leave(s, n, 64 * part + 32 * group + 8 * warp + (lane >> 2), gated(x, x8, a.limit));
        } else {
          const float share = s.shares()[n];
          leave(s, n, 64 * group + row, x * share);
          leave(s, n, 64 * group + row + 8, x8 * share);
        }
      }
    }
  }
}

__device__ __forceinline__ float e8m0_number(uint32 byte) {
  if (byte == 255) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(byte ? byte << 23 : 1u << 22);  // 2^-127 is not a normal number
}

// Slots, their shares, and the scales of their rows, where all consumers find them.
__device__ __forceinline__ void load_numbers(const Arguments& a, const Shared& s, const Item& item,
                                             int thread) {
  for (int n = thread; n < item.count; n += CONSUMERS) {
    const int slot = slot_of(a, item.tile, n);
    s.slots()[n] = slot;
    if (!GATED) s.shares()[n] = a.shares[slot];
  }
  for (int i = thread; i < item.count * STEPS; i += CONSUMERS) {
    const int n = i / STEPS, step = i % STEPS;
    const int64 row = slot_of(a, item.tile, n) / PER;
    s.scales()[step * BM + n] = e8m0_number(a.scales[row * STEPS + step]);
  }
}

__device__ __forceinline__ uint32 codes_of(float x0, float x1, float x2, float x3) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
  return low | (uint32)high << 16;
}

// Rows of results from shared memory to where they are kept; a warp has one at a time.
__device__ __forceinline__ void store_rows(const Arguments& a, const Shared& s, const Item& item,
                                           int thread) {
  const int lane = thread & 31;
  for (int n = thread >> 5; n < item.count; n += CONSUMERS / 32) {
    const int64 slot = s.slots()[n];
    if (RESULT == 64) {
      const uint32 both = *(const uint32*)(s.memory + PLACE_OUT + n * OUT_STRIDE + 4 * lane);
      *(uint32*)(a.out + 2 * (slot * WIDTH + 64 * item.block) + 4 * lane) = both;
      continue;
    }
    const uint2 pair = *(const uint2*)(s.memory + PLACE_OUT + n * OUT_STRIDE + 8 * lane);
    if (!CODED) {
      *(uint2*)(a.out + 2 * (slot * WIDTH + 128 * item.block) + 8 * lane) = pair;
      continue;
    }
    const float x0 = __uint_as_float(pair.x << 16), x1 = __uint_as_float(pair.x & 0xFFFF0000u);
    const float x2 = __uint_as_float(pair.y << 16), x3 = __uint_as_float(pair.y & 0xFFFF0000u);
    const uint32 magnitude = 0x7FFFFFFFu;
    uint32 most = max(max(__float_as_uint(x0) & magnitude, __float_as_uint(x1) & magnitude),
                      max(__float_as_uint(x2) & magnitude, __float_as_uint(x3) & magnitude));
    most = __reduce_max_sync(~0u, most);
    // 2^ceil(log2(max(most, 1e-4) / 448)) by the bits: one more where the mantissa passes 1.75.
    const uint32 kept = min(max(most, __float_as_uint(1e-4f)), 0x7F800000u);
    const uint32 scale = most > 0x7F800000u ? 255u : ((kept + 0x1FFFFFu) >> 23) - 8u;
    const float inverse = __uint_as_float((254u - scale) << 23);
    uint32 codes = 0;
    if (scale != 255u)
      codes = codes_of(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse);
    *(uint32*)(a.out + slot * WIDTH + 128 * item.block + 4 * lane) = codes;
    if (lane == 0) a.out_scales[slot * BLOCKS + item.block] = (uint8)scale;
  }
}

__device__ __forceinline__ void consume(const Arguments& a, const Shared& s, int thread) {
  const int group = thread >> 7, own = thread & 127;
  if (!FEW && group == 1) named_barrier_arrive<CONSUMERS>(4);  // the first turn is the other's
  Ring ring;
  Item item;
  for (int64 work = blockIdx.x; work < a.tiles * BLOCKS; work += gridDim.x) {
    if (!item_of(a, work, thread & 31, item)) continue;
    load_numbers(a, s, item, thread);
    named_barrier<CONSUMERS>(1);
    if (item.count <= 16)
      multiply<16>(a, s, ring, item, group, own);
#if BM >= 32
    else if (item.count <= 32)
      multiply<32>(a, s, ring, item, group, own);
#endif
#if BM >= 64
    else if (item.count <= 64)
      multiply<64>(a, s, ring, item, group, own);
#endif
#if BM >= 128
    else if (item.count <= 96)
      multiply<96>(a, s, ring, item, group, own);
    else
      multiply<128>(a, s, ring, item, group, own);
#endif
    named_barrier<CONSUMERS>(2);
    store_rows(a, s, item, thread);
    named_barrier<CONSUMERS>(3);
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, FEW ? 2 : 1)
    experts_fp4(const uint8* codes, const uint8* scales, const uint8* weights,
                const float* factors, const int* slots, const int* experts, const float* shares,
                uint8* out, uint8* out_scales, int64 tiles, int64 code_stride,
                int64 expert_count, float limit) {
  extern __shared__ __align__(1024) uint8 memory[];
  const Shared s = {shared_address(memory), memory};
  const Arguments a = {codes, scales,     weights, factors,     slots,        experts, shares,
                       out,   out_scales, tiles,   code_stride, expert_count, limit};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(s.full(i), PRODUCERS + 1);
      mbarrier_init(s.empty(i), CONSUMERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
#if FEW
  // Registers of two blocks: 2 x (256 x 96 + 128 x 40); they start with 80 a thread.
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    produce(a, s, threadIdx.x - CONSUMERS);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
    consume(a, s, threadIdx.x);
  }
#else
  // Registers of the block: 256 x 216 + 128 x 72 = 384 x 168, what it starts with.
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    produce(a, s, threadIdx.x - CONSUMERS);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    consume(a, s, threadIdx.x);
  }
#endif
}
