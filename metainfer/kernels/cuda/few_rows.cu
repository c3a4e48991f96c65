// Products of few rows with weights, bound by reading the weight: linear.fp8_rows,
// linear.grouped_fp8_rows and linear.dense from sm_80 on.
//
// A unit is 16 rows of a weight by 128 bytes of each. A warp reads a unit from memory straight into
// the registers in which matrix units take it, 16 bytes at a time, DEPTH units ahead. The order of
// columns within 64 bytes is that in which threads happen to hold them; rows of x are read in the
// same order, so sums are the same. Warps of a block share tiles of 16 rows: `slices` of them take
// units of one tile in turn, and their sums are added in their order through shared memory. Nothing
// depends on who was first, and no block waits for another. To begin before the kernel ahead has ended
// (programmatic dependent launch) gained nothing in graphs on an H200, and is not done.
//
// Constants: FORM (in what is multiplied: 0 e4m3 codes, 1 codes converted to fp16, 2 codes turned
// into fp16 by integer operations, 2^-8 of what they stand for, 3 bf16), NT (times 8 rows of x),
// WARPS of a block, DEPTH, PARTS (weights that are added up), WEIGHT_SCALE and ROW_SCALE (0 none,
// 1 e8m0, 2 fp32), BLOCK_O and BLOCK_I (rows and columns of a weight that share a scale), GROUP
// (columns of a row that do: 128, or 32 as of the weight, both e8m0), WIDE (1: the result is fp32,
// else bf16).

#include "few_rows.cuh"

#define UNIT 128         // bytes of a row in a unit
#define TILE 16          // rows of a tile
#define PADDED 20        // numbers of a column of a tile in shared memory: other banks
#define COLUMNS (8 * NT)  // rows of x
#define AHEAD (NT == 1)  // whether rows of x are read ahead as the weight is

struct Arguments {
  const uint8* x;         // [T, x_stride]
  const uint8* x_scales;  // [T, x_scale_stride]
  const uint8* weight;    // [PARTS, groups * outputs, units, 128]
  const uint8* scales;    // [blocks of rows, scale_stride]
  uint8* y;               // [T, groups * outputs]
  int rows;               // T
  int outputs, units;     // rows of a group's weight, and units of a row
  int slices_log2;
  int64 x_stride, x_scale_stride, scale_stride;  // bytes, numbers, numbers
};

struct Unit {
  uint4 low[2], high[2];  // 16 bytes of rows r and r + 8, and those 64 further
#if AHEAD
  uint4 x[2];
#endif
#if WEIGHT_SCALE
  uint32 scale, row_scale[NT][2];  // as memory holds them, so that nothing waits for them
#endif
};

// What a warp reads.
struct Reader {
  const uint8* weight;  // of this thread's row and columns
  const uint8* x[NT];
  const uint8* scales;
  const uint8* row_scales[NT][2];
  int64 part_bytes, eight_rows;
  int units;
  uint64 policy;
};

__device__ __forceinline__ uint4 load(const uint8* from) { return *(const uint4*)from; }

__device__ __forceinline__ float e8m0_number(uint32 byte) {
  if (byte == 255) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(byte ? byte << 23 : 1u << 22);  // 2^-127 is not a normal number
}

// The scale, or four of them, of a unit or a block.
template <int FORMAT>
__device__ __forceinline__ uint32 scale_at(const uint8* scales, int place) {
  return FORMAT == 1 && GROUP != 32 ? scales[place] : ((const uint32*)scales)[place];
}

template <int FORMAT>
__device__ __forceinline__ float scale_of(uint32 kept, int group) {
  if (FORMAT != 1) return __uint_as_float(kept);
  return e8m0_number(GROUP == 32 ? kept >> 8 * group & 255 : kept);
}

// What no kernel writes.
__device__ __forceinline__ void fetch_weight(Unit& u, const Reader& r, int unit) {
  const bool second = PARTS > 1 && unit >= r.units;
  const int column = second ? unit - r.units : unit;
  const uint8* from = r.weight + (second ? r.part_bytes : 0) + (int64)column * UNIT;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u.low[i] = load_once(from + 64 * i, r.policy);
    u.high[i] = load_once(from + r.eight_rows + 64 * i, r.policy);
  }
#if WEIGHT_SCALE
  u.scale = scale_at<WEIGHT_SCALE>(r.scales, GROUP == 32 ? column : column * UNIT / BLOCK_I);
#endif
}

__device__ __forceinline__ void fetch_rows(Unit& u, const Reader& r, int unit) {
  const int column = PARTS > 1 && unit >= r.units ? unit - r.units : unit;
#if AHEAD
  u.x[0] = load(r.x[0] + column * UNIT);
  u.x[1] = load(r.x[0] + column * UNIT + 64);
#endif
#if WEIGHT_SCALE
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    u.row_scale[n][0] = scale_at<ROW_SCALE>(r.row_scales[n][0], column);
    u.row_scale[n][1] = scale_at<ROW_SCALE>(r.row_scales[n][1], column);
  }
#endif
}

struct Halves {
  uint32 first, second;
};

// Four codes -> fp16, in any order that is the same for weights and rows of x.
__device__ __forceinline__ Halves halves(uint32 codes) {
  Halves h;
#if FORM == 1
  h.first = halves_of(codes & 0xFFFF);
  h.second = halves_of(codes >> 16);
#else
  // Exponent and mantissa lie one bit lower in fp16.
  h.first = (codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u);
  h.second = (codes & 0x80008000u) | (codes >> 1 & 0x3F803F80u);
#endif
  return h;
}

// Two words each of rows r and r + 8 with two of each row of x.
__device__ __forceinline__ void multiply_words(float (&d)[NT][4], uint32 low0, uint32 low1,
                                               uint32 high0, uint32 high1,
                                               const uint32 (&x0)[NT], const uint32 (&x1)[NT]) {
#if FORM == 0 || FORM == 3
#pragma unroll
  for (int n = 0; n < NT; ++n) mma(d[n], low0, high0, low1, high1, x0[n], x1[n]);
#else
  const Halves l0 = halves(low0), l1 = halves(low1), h0 = halves(high0), h1 = halves(high1);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const Halves b0 = halves(x0[n]), b1 = halves(x1[n]);
    mma(d[n], l0.first, h0.first, l0.second, h0.second, b0.first, b0.second);
    mma(d[n], l1.first, h1.first, l1.second, h1.second, b1.first, b1.second);
  }
#endif
}

// Run i of rows of x, 64 bytes of each; words of other groups than `half` become 0 where a group is
// half a run (two of the four threads that share a row).
__device__ __forceinline__ void load_run(uint32 (&x)[4][NT], const Unit& u, const Reader& r,
                                         int column, int i, int half) {
  const uint32 kept = GROUP == 32 && (threadIdx.x >> 1 & 1) != half ? 0 : ~0u;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#if AHEAD
    const uint4 v = u.x[i];
#else
    const uint4 v = load(r.x[n] + column * UNIT + 64 * i);
#endif
    x[0][n] = v.x & kept, x[1][n] = v.y & kept, x[2][n] = v.z & kept, x[3][n] = v.w & kept;
  }
}

__device__ __forceinline__ void multiply(float (&d)[NT][4], const Unit& u, const Reader& r,
                                         int column, int i, int half) {
  uint32 x[4][NT];
  load_run(x, u, r, column, i, half);
  multiply_words(d, u.low[i].x, u.low[i].y, u.high[i].x, u.high[i].y, x[0], x[1]);
  multiply_words(d, u.low[i].z, u.low[i].w, u.high[i].z, u.high[i].w, x[2], x[3]);
}

// total += part times the scales of group `n` of the unit.
__device__ __forceinline__ void add_scaled(float (&total)[NT][4], const float (&part)[NT][4],
                                           const Unit& u, int group) {
#if WEIGHT_SCALE
  const float scale =
      scale_of<WEIGHT_SCALE>(u.scale, group) * (FORM == 2 ? 65536.0f : 1.0f);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const float even = scale * scale_of<ROW_SCALE>(u.row_scale[n][0], group);
    const float odd = scale * scale_of<ROW_SCALE>(u.row_scale[n][1], group);
    total[n][0] = fmaf(part[n][0], even, total[n][0]);
    total[n][1] = fmaf(part[n][1], odd, total[n][1]);
    total[n][2] = fmaf(part[n][2], even, total[n][2]);
    total[n][3] = fmaf(part[n][3], odd, total[n][3]);
  }
#endif
}

__device__ __forceinline__ void clear(float (&d)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; ++n) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
}

// total += the products of a unit.
__device__ __forceinline__ void add(float (&total)[NT][4], const Unit& u, const Reader& r,
                                    int unit) {
  const int column = PARTS > 1 && unit >= r.units ? unit - r.units : unit;
#if !WEIGHT_SCALE
  multiply(total, u, r, column, 0, 0);
  multiply(total, u, r, column, 1, 0);
#elif GROUP == 32
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    float part[NT][4];
    clear(part);
    multiply(part, u, r, column, group >> 1, group & 1);
    add_scaled(total, part, u, group);
  }
#else
  float part[NT][4];
  clear(part);
  multiply(part, u, r, column, 0, 0);
  multiply(part, u, r, column, 1, 0);
  add_scaled(total, part, u, 0);
#endif
}

// `row` of the weight is the first of a tile of the group `blockIdx.y`.
__device__ __forceinline__ Reader reader_of(const Arguments& a, int64 row, int lane) {
  const int own = lane >> 2, piece = 16 * (lane & 3), group = blockIdx.y;
  const int64 row_bytes = (int64)a.units * UNIT;
  Reader r;
  r.units = a.units;
  r.eight_rows = 8 * row_bytes;
  r.part_bytes = (int64)gridDim.y * a.outputs * row_bytes;
  r.weight = a.weight + (row + own) * row_bytes + piece;
#pragma unroll
  for (int n = 0; n < NT; ++n)  // rows of x that are not there are the last one again
    r.x[n] = a.x + min(8 * n + own, a.rows - 1) * a.x_stride + group * row_bytes + piece;
#if WEIGHT_SCALE
  r.scales = a.scales + row / BLOCK_O * a.scale_stride * (WEIGHT_SCALE == 1 ? 1 : 4);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int other = min(8 * n + 2 * (lane & 3) + q, a.rows - 1);
      const int64 place = other * a.x_scale_stride + group * a.units * (GROUP == 32 ? 4 : 1);
      r.row_scales[n][q] = a.x_scales + place * (ROW_SCALE == 1 ? 1 : 4);
    }
  }
#endif
  r.policy = soon_dropped();
  return r;
}

// Sums of the units of a tile that one slice has.
__device__ __forceinline__ void sums(float (&total)[NT][4], const Reader& r, int slice,
                                     int slices) {
  const int units = PARTS * r.units;
  Unit ahead[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
    if (slice + d * slices < units) fetch_weight(ahead[d], r, slice + d * slices);
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
    if (slice + d * slices < units) fetch_rows(ahead[d], r, slice + d * slices);
  for (int first = slice; first < units; first += DEPTH * slices) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int unit = first + d * slices, next = unit + DEPTH * slices;
      if (unit < units) add(total, ahead[d], r, unit);
      if (next < units) {
        fetch_weight(ahead[d], r, next);
        fetch_rows(ahead[d], r, next);
      }
    }
  }
}

__device__ __forceinline__ void store(uint8* y, int64 place, float value) {
#if WIDE
  ((float*)y)[place] = value;
#else
  ((unsigned short*)y)[place] = bf16_of(value);
#endif
}

// Block (WARPS / slices tiles, group).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    few_rows(const uint8* x, const uint8* x_scales, const uint8* weight, const uint8* scales,
             uint8* y, int64 rows, int64 outputs, int64 units, int64 slices_log2, int64 x_stride,
             int64 x_scale_stride, int64 scale_stride) {
  extern __shared__ float shared[];  // [WARPS, COLUMNS, PADDED]
  const Arguments a = {x,
                       x_scales,
                       weight,
                       scales,
                       y,
                       (int)rows,
                       (int)outputs,
                       (int)units,
                       (int)slices_log2,
                       x_stride,
                       x_scale_stride,
                       scale_stride};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, log2 = a.slices_log2;
  const int slices = 1 << log2, height = WARPS * TILE >> log2;
  const int first = blockIdx.x * height, row = first + (warp >> log2) * TILE;
  const int64 before = (int64)blockIdx.y * a.outputs;  // rows of the groups before
  float total[NT][4];
  clear(total);
  if (row < a.outputs)
    sums(total, reader_of(a, before + row, lane), warp & (slices - 1), slices);

  float* own = shared + warp * COLUMNS * PADDED;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float* at = own + (8 * n + 2 * (lane & 3)) * PADDED + (lane >> 2);
    at[0] = total[n][0], at[PADDED] = total[n][1];
    at[8] = total[n][2], at[PADDED + 8] = total[n][3];
  }
  __syncthreads();
  // Heights are powers of two times 16, as WARPS is.
  const int height_log2 = 31 - __clz(height);
  for (int i = threadIdx.x; i < a.rows << height_log2; i += 32 * WARPS) {
    const int t = i >> height_log2, n = i & (height - 1);
    if (first + n >= a.outputs) continue;
    const float* part = shared + ((n / TILE << log2) * COLUMNS + t) * PADDED + n % TILE;
    float sum = part[0];
    for (int s = 1; s < slices; ++s) sum += part[s * COLUMNS * PADDED];
    store(a.y, t * (int64)gridDim.y * a.outputs + before + first + n, sum);
  }
}
