// What the threads of grouped_fp4.cu share: where things lie, what there is to do, how numbers are
// unpacked. The constants are the source's.
#pragma once
#include "wgmma_e4m3.cuh"

#define CONSUMERS 256
#define STEP 128  // columns of one step: bytes of a row, one group of its scales
#define STEPS (COLUMNS / STEP)
#define FEW (BM <= 32)
#define TURNS (BM == 128)
#define PRODUCERS (FEW ? 64 : 32)
#define STORERS (128 - PRODUCERS)
#define CODED (GATED && !FEW)
#define PARTS (CODED ? 2 : 1)             // times 128 rows of weights of an item
#define RESULT (GATED && FEW ? 64 : 128)  // columns of an item
#define BLOCKS (WIDTH / RESULT)
#define WEIGHT_BYTES 8704  // of 128 rows in one step: 2 x (4096 of numbers, 256 of shifts)
#define RECORD (BM * 132)  // bytes of a tile's rows in one step: codes, then scales
#define PLACE_WEIGHTS RECORD
#define STAGE_BYTES ((RECORD + WEIGHT_BYTES + 1023) / 1024 * 1024)
#define OUT_STRIDE 272  // bytes of a row of results, 16 beyond 128 bf16: other banks
#define PLACE_OUT (STAGES * STAGE_BYTES)
#define PLACE_SHARES (PLACE_OUT + BM * OUT_STRIDE)
#define PLACE_SCALES (PLACE_SHARES + 4 * BM)
#define PLACE_ITEMS (PLACE_SCALES + (FEW ? 4 * STEPS * BM : 0))
#define PLACE_BARRIERS (PLACE_ITEMS + 16 * STAGES)

struct Arguments {
  const uint8* codes;    // FEW: [rows, code_stride]; else records [tiles, STEPS, RECORD]
  const uint8* scales;   // FEW: e8m0 [rows, STEPS]
  const uint8* weights;  // [E, PARTS * BLOCKS, STEPS, WEIGHT_BYTES]
  const float* factors;  // [E, PARTS * BLOCKS, 128]
  const int* slots;      // [tiles, BM], -1 behind the last; null: tile n holds slot n
  const int* experts;    // [tiles], -1 behind the last; int64 where there are no slots
  const float* shares;   // by slot, of down
  uint8* out;            // CODED: records [tiles, BLOCKS, RECORD]; else bf16 [slots, WIDTH]
  int64 tiles, code_stride, expert_count;
  float limit;
};

struct Shared {
  uint32 base;
  uint8* memory;
  __device__ __forceinline__ uint32 stage(int i) const { return base + i * STAGE_BYTES; }
  __device__ __forceinline__ uint32 full(int i) const { return base + PLACE_BARRIERS + 16 * i; }
  __device__ __forceinline__ uint32 empty(int i) const { return full(i) + 8; }
  __device__ __forceinline__ uint32 out_full() const { return full(STAGES); }
  __device__ __forceinline__ uint32 out_empty() const { return full(STAGES) + 8; }
  __device__ __forceinline__ float* shares() const { return (float*)(memory + PLACE_SHARES); }
  __device__ __forceinline__ int4* item(int i) const { return (int4*)(memory + PLACE_ITEMS) + i; }
  __device__ __forceinline__ float* scales(int stage, int step) const {
    if (FEW) return (float*)(memory + PLACE_SCALES) + step * BM;
    return (float*)(memory + stage * STAGE_BYTES + BM * STEP);
  }
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
  int tile, block, expert, count;
};

__device__ __forceinline__ int slot_of(const Arguments& a, int64 tile, int n) {
  return a.slots ? a.slots[tile * BM + n] : (n ? -1 : (int)tile);
}

// Items of this block in their order: all of a tile follow each other, so that what runs at one
// time reads few experts. Called by whole warps. False when there are no more.
struct Items {
  int64 work;
  __device__ __forceinline__ bool next(const Arguments& a, int lane, Item& item) {
    for (; work < a.tiles * BLOCKS; work += gridDim.x) {
      const int64 tile = work / BLOCKS;
      const int64 expert = a.slots ? a.experts[tile] : ((const int64*)a.experts)[tile];
      if (expert < 0 || expert >= a.expert_count) {
        if (a.slots) return false;
        continue;
      }
      item.tile = (int)tile;
      item.block = (int)(work - tile * BLOCKS);
      item.expert = (int)expert;
      item.count = 0;
#pragma unroll
      for (int n = 0; n < BM; n += 32) {
        const bool is_slot = n + lane < BM && slot_of(a, tile, n + lane) >= 0;
        item.count += __popc(__ballot_sync(~0u, is_slot));
      }
      work += gridDim.x;
      return true;
    }
    return false;
  }
};

// Where the scale of the n-th row is: four that one thread wants lie together.
__device__ __forceinline__ int scale_place(int n) {
  return (n & ~15) + 4 * (n >> 1 & 3) + 2 * (n >> 3 & 1) + (n & 1);
}

// Where a word of four codes of the n-th row is, in bytes: word 8 c + p of a group is the c-th of
// piece p, so that a thread c of a product's quads meets the 32 columns of one scale of weights.
__device__ __forceinline__ int word_place(int n, int word) {
  return n * STEP + ((word & 7) ^ (n & 7)) * 16 + 4 * (word >> 3);
}

__device__ __forceinline__ float e8m0_number(uint32 byte) {
  if (byte == 255) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(byte ? byte << 23 : 1u << 22);  // 2^-127 is not a normal number
}

__device__ __forceinline__ uint32 codes_of(float x0, float x1, float x2, float x3) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
  return low | (uint32)high << 16;
}

__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

__device__ __forceinline__ float gated(float gate, float up, float limit) {
  gate = at_most(gate, limit);
  up = at_most(up, limit);
  up = up < -limit ? -limit : up;
  return __fdividef(gate, 1.f + exp2_fast(gate * -1.44269504f)) * up;
}

__device__ __forceinline__ uint4 load_words(uint32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at));
  return x;
}

// Bytes of eight by the lower four nibbles of `selectors`, whose highest bits are not set:
// __byte_perm would clear these bits anew.
__device__ __forceinline__ uint32 selected(uint32 low, uint32 high, uint32 selectors) {
  uint32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
  return bytes;
}

// Magnitudes as e4m3 codes, 2^(6 - shift) times as large: what PRMT looks up.
struct Table {
  uint32 low, high;
  __device__ __forceinline__ explicit Table(uint32 shift)
      : low(0x6C686000u - shift * 0x08080800u), high(0x7C787470u - shift * 0x08080808u) {}
  // Eight numbers of one row in seven instructions.
  __device__ __forceinline__ void unpack(uint32 word, uint32& first, uint32& second) const {
    const uint32 magnitudes = word & 0x77777777u;
    first = selected(low, high, magnitudes) | (word & 0x80808080u);
    second = selected(low, high, magnitudes >> 16) | ((word << 4) & 0x80808080u);
  }
};

// The 64 rows of a warpgroup in one step, as the instruction takes them: 4 x 4 registers.
__device__ __forceinline__ void load_weights(uint32 (&a)[16], uint32 half, int thread) {
  unsigned short shifts;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(shifts) : "r"(half + 4096 + 2 * thread));
  const uint4 first = load_words(half + 16 * thread);
  const uint4 second = load_words(half + 2048 + 16 * thread);
  const Table row(shifts & 255), row8(shifts >> 8);
  row.unpack(first.x, a[0], a[2]);
  row8.unpack(first.y, a[1], a[3]);
  row.unpack(first.z, a[4], a[6]);
  row8.unpack(first.w, a[5], a[7]);
  row.unpack(second.x, a[8], a[10]);
  row8.unpack(second.y, a[9], a[11]);
  row.unpack(second.z, a[12], a[14]);
  row8.unpack(second.w, a[13], a[15]);
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

// 8 x 8 results of 16 bits, two and four times: rows of memory are the products' columns.
__device__ __forceinline__ void store_turned(uint32 at, uint32 a, uint32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a),
               "r"(b)
               : "memory");
}

__device__ __forceinline__ void store_turned(uint32 at, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void bulk_copy(uint32 to, const void* from, int bytes, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_word_async(uint32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}
