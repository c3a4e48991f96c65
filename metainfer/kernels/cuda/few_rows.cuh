// What few_rows.cu needs and CUDA C++ has no words for, by FORM of what is multiplied.
// (PTX ISA: "mma", "cvt", "Cache eviction priority hints".)
#ifndef FEW_ROWS_CUH
#define FEW_ROWS_CUH

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

// Of memory that is read once: others' stays in the cache.
__device__ __forceinline__ uint64 soon_dropped() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes that nobody reads again.
__device__ __forceinline__ uint4 load_once(const uint8* from, uint64 policy) {
  uint4 v;
  asm volatile(
      "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from), "l"(policy));
  return v;
}

// d += a b: 16 rows of the weight (two registers of rows r, two of r + 8, in turn) by 8 of x.
__device__ __forceinline__ void mma(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3,
                                    uint32 b0, uint32 b1) {
#if FORM == 0
  asm(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
#elif FORM == 3
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
#else
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#if FORM == 1
// Two codes -> two numbers in fp16.
__device__ __forceinline__ uint32 halves_of(unsigned short codes) {
  uint32 both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(codes));
  return both;
}
#endif

__device__ __forceinline__ unsigned short bf16_of(float number) {
  unsigned short near;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(near) : "f"(number));
  return near;
}

#endif
