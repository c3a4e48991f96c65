// What few_rows.cu needs of a GPU, for one thread of a CPU each of its threads: matrix instructions
// as the PTX ISA describes them, where threads of a warp meet.
#define FEW_ROWS_CUH

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __syncthreads() block_meets->arrive_and_wait()

using std::min;
typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

struct uint4 {
  uint32 x, y, z, w;
};
struct Place {
  int x, y, z;
};
thread_local Place threadIdx, blockIdx;
static Place gridDim;
float shared[WARPS * 8 * NT * 20];  // what the kernel declares as memory of its block
static std::unique_ptr<std::barrier<>> block_meets, warp_meets[WARPS];

static float __uint_as_float(uint32 bits) {
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
static uint32 __float_as_uint(float number) {
  uint32 bits;
  std::memcpy(&bits, &number, 4);
  return bits;
}
static int __clz(int x) { return __builtin_clz(x); }

// A number of `mantissa` bits behind the point and an exponent of `exponent` bits.
static float number_of(uint32 bits, int exponent, int mantissa) {
  const int e = bits >> mantissa & ((1 << exponent) - 1), bias = (1 << (exponent - 1)) - 1;
  const int m = bits & ((1 << mantissa) - 1);
  const int whole = e ? m + (1 << mantissa) : m;
  const float size = std::ldexp((float)whole, std::max(e, 1) - bias - mantissa);
  return bits >> (exponent + mantissa) & 1 ? -size : size;
}

static uint64 soon_dropped() { return 0; }
static uint4 load_once(const uint8* from, uint64) { return *(const uint4*)from; }

// Subnormal numbers of e4m3 are normal ones in fp16.
static uint32 half_of(uint32 code) {
  const uint32 sign = (code & 0x80) << 8;
  if (!(code & 0x7F)) return sign;
  int e = code >> 3 & 15, m = code & 7;
  if (!e) {
    for (e = 1; !(m & 8); --e) m *= 2;
    m &= 7;
  }
  return sign | (uint32)(e + 8) << 10 | (uint32)m << 7;
}
static uint32 halves_of(unsigned short codes) {
  return half_of(codes & 255) | half_of(codes >> 8) << 16;
}

static unsigned short bf16_of(float number) {
  const uint32 bits = __float_as_uint(number);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

struct Operands {
  uint32 a[4], b[2];
};
static Operands given[WARPS][32];

// Entry k of a row that four threads hold, `each` entries a register.
static float entry(const uint32* registers, int apart, int k, int each) {
  const int bits = 32 / each, place = k % each;
  const uint32 value = registers[apart * (k / (4 * each))] >> (bits * place);
  if (FORM == 0) return number_of(value & 255, 4, 3);
  if (FORM == 3) return __uint_as_float(value << 16);
  return number_of(value & 0xFFFF, 5, 10);
}

static void mma(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = FORM == 0 ? 4 : 2;
  given[warp][lane] = {{a0, a1, a2, a3}, {b0, b1}};
  warp_meets[warp]->arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 8 * each; ++k) {
      const int holder = k % (4 * each) / each;
      const Operands &rows = given[warp][row % 8 * 4 + holder],
                     &columns = given[warp][column * 4 + holder];
      sum += (double)entry(rows.a + row / 8, 2, k, each) * entry(columns.b, 1, k, each);
    }
    d[i] = (float)sum;
  }
  warp_meets[warp]->arrive_and_wait();
}
