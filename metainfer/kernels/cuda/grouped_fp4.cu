// moe.experts_fp8_rows on sm_90 with fp4 weights: one of its two products, weights times rows.
//
// A tile of up to BM slots (choices of an expert, their rows anywhere) meets 128 rows of weights at
// a time. Two warpgroups multiply, 64 rows of weights each, the product's first operand, unpacked
// from shared memory into registers (grouped_fp4.py has the order of the bits). A warp fetches: the
// rows of a tile lie ready as "records", so that a step is three bulk copies. Three warps store
// what the warpgroups left in shared memory while these go on with the next item. Where tiles are
// low (FEW), reading weights is what counts: two blocks share a multiprocessor, rows come by
// cp.async from where they are, and the activation becomes codes in a kernel of its own.
//
// A step of 128 columns with 128 rows of weights and N slots, in cycles of a multiprocessor:
//   matrix units    2 x 4 products m64 nN k32 of N / 2 each: 4 N
//   shared memory   128 bytes a cycle: 2 x 4 x N / 4 for the products' second operand, N + 68
//                   + N / 32 to fill the stage, 70 to load weights, 8 warps x N / 16 loads of
//                   16 bytes a thread for scales, 2 to 4 cycles each: 4 N + 138 to 5 N + 138
//   instructions    of one of the two warps of a scheduler: unpacking 8 words x 7 and 2 tables x 3
//                   = 62, 3 loads, scaling and adding N / 2 and N / 16 loads, 45 beside them; of
//                   both (as compiled: 370 at N = 128, 296 at 64): 220 + 9 N / 8
//   logic, shifts   of which a scheduler begins one in two cycles: 2 x 2 x (8 x 6 + 3) = 204
//   level 2 cache   8704 + 132 N bytes: 50 a cycle at N = 128, 67 at 64
// With a table for each word unpacking takes 110 instructions, nearly all of them for the unit of
// logic: 440 cycles at any N. So columns are in an order in which the 32 codes of a row that one
// thread unpacks have one scale. Registers at N = 128: 64 sums, 64 totals, 2 x 16 weights, of 224.
//
// Constants: GATED (1: gate and up, whose rows take turns by 8, then the activation; 0: down,
// weighted), COLUMNS of the weights, WIDTH of the result, BM, PER (slots that share an input row),
// STAGES.
#include "grouped_fp4.cuh"

// Whole tiles: one warp, of which one thread copies. Tells the consumers what the item is.
__device__ __forceinline__ void produce(const Arguments& a, const Shared& s, int thread) {
  Ring ring;
  ring.parity = 1;
  Items items = {blockIdx.x};
  Item item;
  while (items.next(a, thread & 31, item)) {
    const int rows = (item.count + 15) & ~15;
    const uint8* record = a.codes + (int64)item.tile * STEPS * RECORD;
    const int64 piece = (int64)item.expert * (PARTS * BLOCKS) + PARTS * item.block;
    const uint8* weights = a.weights + piece * STEPS * WEIGHT_BYTES;
    for (int i = 0; i < PARTS * STEPS; ++i) {
      const uint32 stage = s.stage(ring.stage), full = s.full(ring.stage);
      const uint8* from = record + (i % STEPS) * RECORD;
      mbarrier_wait(s.empty(ring.stage), ring.parity);
      if (thread == 0) {
        *s.item(ring.stage) = make_int4(item.tile, item.block, item.expert, item.count);
        mbarrier_expect(full, WEIGHT_BYTES + rows * (STEP + 4));
        bulk_copy(stage + PLACE_WEIGHTS, weights + (int64)i * WEIGHT_BYTES, WEIGHT_BYTES, full);
        bulk_copy(stage, from, rows * STEP, full);
        bulk_copy(stage + BM * STEP, from + BM * STEP, rows * 4, full);
      }
      ring.next();
    }
  }
  mbarrier_wait(s.empty(ring.stage), ring.parity);
  if (thread == 0) {
    *s.item(ring.stage) = make_int4(0, 0, 0, 0);
    mbarrier_arrive(s.full(ring.stage));
  }
}

// Low tiles: two warps gather rows word by word.
__device__ __forceinline__ void produce_few(const Arguments& a, const Shared& s, int thread) {
  const int lane = thread & 31;
  Ring ring;
  ring.parity = 1;
  Items items = {blockIdx.x};
  Item item;
  while (items.next(a, lane, item)) {
    const int own_row = lane < item.count ? slot_of(a, item.tile, lane) / PER : 0;
    const int64 piece = (int64)item.expert * BLOCKS + item.block;
    const uint8* weights = a.weights + piece * STEPS * WEIGHT_BYTES;
    for (int step = 0; step < STEPS; ++step) {
      const uint32 stage = s.stage(ring.stage), full = s.full(ring.stage);
      mbarrier_wait(s.empty(ring.stage), ring.parity);
      if (thread == 0) {
        mbarrier_expect(full, WEIGHT_BYTES);
        bulk_copy(stage + PLACE_WEIGHTS, weights + (int64)step * WEIGHT_BYTES, WEIGHT_BYTES, full);
      }
#pragma unroll (FEW ? 2 : 4)
      for (int n = thread >> 5; n < item.count; n += PRODUCERS / 32) {
        const int64 row = __shfl_sync(~0u, own_row, n);
        copy_word_async(stage + word_place(n, lane),
                        a.codes + row * a.code_stride + step * STEP + 4 * lane);
      }
      mbarrier_arrive_after_copies(full);
      ring.next();
    }
  }
}

// Scales of a low tile's rows, where all consumers find them.
__device__ __forceinline__ void load_scales(const Arguments& a, const Shared& s, const Item& item,
                                            int thread) {
  for (int i = thread; i < item.count * STEPS; i += CONSUMERS) {
    const int n = i / STEPS, step = i % STEPS;
    const int64 row = slot_of(a, item.tile, n) / PER;
    s.scales(0, step)[scale_place(n)] = e8m0_number(a.scales[row * STEPS + step]);
  }
}

// Rows came through the asynchronous proxy, or by cp.async, whose writes wgmma sees once the
// barrier that counts them was passed. One step: the product of this stage runs while the next
// stage's weights are unpacked: where `more` is not known to the compiler, they are so before the
// product is waited for. Whole tiles: the warpgroups multiply in turns, which gained 3 % at 8,192
// rows and cost 13 % at 1,024.
template <int N>
__device__ __forceinline__ void step_product(const Shared& s, Ring& ring, int group, int thread,
                                             int step, bool more, uint32 (&now)[16],
                                             uint32 (&next)[16], float (&total)[N / 2]) {
  float sum[N / 2];
  const int stage = ring.stage;
  const uint64 rows = tile_descriptor(s.stage(stage), 16, 1024);
  hold(now);
  if (TURNS) named_barrier<CONSUMERS>(4 + group);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Wgmma<N>::run(sum, now + 4 * i, rows + 2 * i, i != 0);  // 32 bytes further
    if (i == 2) wgmma_commit();
  }
  wgmma_commit();
  ring.next();
  if (more) {
    mbarrier_wait(s.full(ring.stage), ring.parity);
    load_weights(next, s.stage(ring.stage) + PLACE_WEIGHTS + group * (WEIGHT_BYTES / 2), thread);
  }
  if (TURNS) {
    wgmma_wait<1>();
    named_barrier_arrive<CONSUMERS>(4 + (group ^ 1));  // the last product is short
  }
  wgmma_wait<0>();
  hold(sum);
  hold(now);
  const float4* scales = (const float4*)s.scales(stage, step) + (thread & 3);
#pragma unroll
  for (int j = 0; j < N / 16; ++j) {
    const float4 scale = scales[4 * j];
    total[8 * j] += sum[8 * j] * scale.x;
    total[8 * j + 1] += sum[8 * j + 1] * scale.y;
    total[8 * j + 2] += sum[8 * j + 2] * scale.x;
    total[8 * j + 3] += sum[8 * j + 3] * scale.y;
    total[8 * j + 4] += sum[8 * j + 4] * scale.z;
    total[8 * j + 5] += sum[8 * j + 5] * scale.w;
    total[8 * j + 6] += sum[8 * j + 6] * scale.z;
    total[8 * j + 7] += sum[8 * j + 7] * scale.w;
  }
  __syncwarp();
  if ((thread & 31) == 0) mbarrier_arrive(s.empty(stage));
}

// Totals of gate (four rows of each eight) and up as activations, in shared memory.
template <int N>
__device__ __forceinline__ void leave_gated(const Shared& s, const float (&total)[N / 2],
                                            float factor, float factor8, float limit, int column,
                                            int lane) {
  const uint32 to = s.base + PLACE_OUT + (lane & 15) * OUT_STRIDE + 2 * column;
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    uint32 both[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* x = total + 4 * (j + i);
      both[i] = pack_bf16(gated(x[0] * factor, x[2] * factor8, limit),
                          gated(x[1] * factor, x[3] * factor8, limit));
    }
    store_turned(to + 8 * j * OUT_STRIDE, both[0], both[1]);
  }
}

template <int N>
__device__ __forceinline__ void leave_down(const Shared& s, const float (&total)[N / 2],
                                           float factor, float factor8, int column, int lane) {
  const uint32 to = s.base + PLACE_OUT + (8 * (lane >> 4) + (lane & 7)) * OUT_STRIDE +
                    2 * (column + 8 * (lane >> 3 & 1));
  const float2* shares = (const float2*)s.shares() + (lane & 3);
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    uint32 both[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* x = total + 4 * (j + i);
      const float2 share = shares[4 * (j + i)];
      both[2 * i] = pack_bf16(x[0] * factor * share.x, x[1] * factor * share.y);
      both[2 * i + 1] = pack_bf16(x[2] * factor8 * share.x, x[3] * factor8 * share.y);
    }
    store_turned(to + 8 * j * OUT_STRIDE, both[0], both[1], both[2], both[3]);
  }
}

// An item's columns of the result for up to N slots, as bf16 in shared memory.
template <int N>
__device__ __forceinline__ void multiply(const Arguments& a, const Shared& s, Ring& ring,
                                         const Item& item, int group, int thread, int out_parity) {
  const int warp = thread >> 5, lane = thread & 31;
#pragma unroll 1
  for (int part = 0; part < PARTS; ++part) {
    float total[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[i] = 0.f;
    uint32 even[16], odd[16];
    mbarrier_wait(s.full(ring.stage), ring.parity);
    load_weights(even, s.stage(ring.stage) + PLACE_WEIGHTS + group * (WEIGHT_BYTES / 2), thread);
    int steps = STEPS;
    asm volatile("" : "+r"(steps));  // a branch that nothing is moved across, see step_product
#pragma unroll 1
    for (int step = 0; step < STEPS; step += 2) {
      step_product<N>(s, ring, group, thread, step, step + 1 < steps, even, odd, total);
      if (step + 1 < STEPS)
        step_product<N>(s, ring, group, thread, step + 1, step + 2 < steps, odd, even, total);
    }
    const int64 rows = (int64)item.expert * (PARTS * BLOCKS) + PARTS * item.block + part;
    const float* factors = a.factors + rows * 128 + 64 * group + 16 * warp + (lane >> 2);
    const float factor = factors[0], factor8 = factors[8];
    if (part == 0) mbarrier_wait(s.out_empty(), out_parity);
    if (GATED)
      leave_gated<N>(s, total, factor, factor8, a.limit, 64 * part + 32 * group + 8 * warp, lane);
    else
      leave_down<N>(s, total, factor, factor8, 64 * group + 16 * warp, lane);
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(s.out_full());
}

// With the fewest columns that hold the slots.
template <int N>
__device__ __forceinline__ void multiply_up_to(const Arguments& a, const Shared& s, Ring& ring,
                                               const Item& item, int group, int own, int parity) {
  if constexpr (N > 16) {
    if (item.count <= N - 16) {
      multiply_up_to<N - 16>(a, s, ring, item, group, own, parity);
      return;
    }
  }
  multiply<N>(a, s, ring, item, group, own, parity);
}

__device__ __forceinline__ void consume(const Arguments& a, const Shared& s, int thread) {
  const int group = thread >> 7, own = thread & 127;
  if (TURNS && group == 1) named_barrier_arrive<CONSUMERS>(4);  // the first turn is the other's
  Ring ring;
  Items items = {blockIdx.x};
  Item item;
  for (int parity = 0;; parity ^= 1) {
    if (FEW) {
      if (!items.next(a, thread & 31, item)) break;
      named_barrier<CONSUMERS>(1);  // the scales before were read
      load_scales(a, s, item, thread);
      named_barrier<CONSUMERS>(2);
    } else {
      mbarrier_wait(s.full(ring.stage), ring.parity);
      const int4 told = *s.item(ring.stage);
      item = {told.x, told.y, told.z, told.w};
      if (item.count == 0) break;
    }
    multiply_up_to<BM>(a, s, ring, item, group, own, parity);
  }
}

// 128 activations of the n-th slot as codes and their scale, in the record of the next product.
__device__ __forceinline__ void store_codes(const Arguments& a, const Item& item, int n, int lane,
                                            uint2 pair) {
  const float x0 = __uint_as_float(pair.x << 16), x1 = __uint_as_float(pair.x & 0xFFFF0000u);
  const float x2 = __uint_as_float(pair.y << 16), x3 = __uint_as_float(pair.y & 0xFFFF0000u);
  const uint32 magnitude = 0x7FFFFFFFu;
  uint32 most = max(max(__float_as_uint(x0) & magnitude, __float_as_uint(x1) & magnitude),
                    max(__float_as_uint(x2) & magnitude, __float_as_uint(x3) & magnitude));
  asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(most));
  const uint32 kept = min(max(most, __float_as_uint(1e-4f)), 0x7F800000u);
  const uint32 scale = most > 0x7F800000u ? 255u : ((kept + 0x1FFFFFu) >> 23) - 8u;
  const float inverse = __uint_as_float((254u - scale) << 23);
  uint32 codes = 0;
  if (scale != 255u) codes = codes_of(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse);
  uint8* record = a.out + ((int64)item.tile * BLOCKS + item.block) * RECORD;
  *(uint32*)(record + word_place(n, lane)) = codes;
  if (lane == 0) *(float*)(record + BM * STEP + 4 * scale_place(n)) = e8m0_number(scale);
}

// What consumers left goes to where it is kept; a warp has a row at a time. The shares of the slots
// of an item are there before its results.
__device__ __forceinline__ void store(const Arguments& a, const Shared& s, int thread) {
  const int lane = thread & 31;
  Items items = {blockIdx.x};
  Item item;
  for (int parity = 0; items.next(a, lane, item); parity ^= 1) {
    if (!GATED)
#pragma unroll 1
      for (int n = thread; n < item.count; n += STORERS)
        s.shares()[n] = a.shares[slot_of(a, item.tile, n)];
    mbarrier_arrive(s.out_empty());
    mbarrier_wait(s.out_full(), parity);
#pragma unroll (FEW ? 2 : 4)
    for (int n = thread >> 5; n < item.count; n += STORERS / 32) {
      const uint8* row = s.memory + PLACE_OUT + n * OUT_STRIDE;
      if (CODED) {
        store_codes(a, item, n, lane, *(const uint2*)(row + 8 * lane));
        continue;
      }
      const int64 slot = slot_of(a, item.tile, n);
      uint8* to = a.out + 2 * (slot * WIDTH + RESULT * item.block);
      if (RESULT == 64)
        *(uint32*)(to + 4 * lane) = *(const uint32*)(row + 4 * lane);
      else
        *(uint2*)(to + 8 * lane) = *(const uint2*)(row + 8 * lane);
    }
  }
}

__device__ __forceinline__ void fetch_or_store(const Arguments& a, const Shared& s, int thread) {
  if (thread >= PRODUCERS)
    store(a, s, thread - PRODUCERS);
  else if (FEW)
    produce_few(a, s, thread);
  else
    produce(a, s, thread);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, FEW ? 2 : 1)
    grouped_fp4(const uint8* codes, const uint8* scales, const uint8* weights,
                const float* factors, const int* slots, const int* experts, const float* shares,
                uint8* out, int64 tiles, int64 code_stride, int64 expert_count, float limit) {
  extern __shared__ __align__(1024) uint8 memory[];
  const Shared s = {shared_address(memory), memory};
  const Arguments a = {codes, scales, weights, factors,     slots,        experts, shares,
                       out,   tiles,  code_stride, expert_count, limit};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(s.full(i), FEW ? PRODUCERS + 1 : 1);
      mbarrier_init(s.empty(i), CONSUMERS / 32);
    }
    mbarrier_init(s.out_full(), CONSUMERS / 32);
    mbarrier_init(s.out_empty(), STORERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
#if FEW
  // Registers of two blocks: 2 x (256 x 96 + 128 x 40); they start with 80 a thread.
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    fetch_or_store(a, s, threadIdx.x - CONSUMERS);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
    consume(a, s, threadIdx.x);
  }
#else
  // Registers of the block: 256 x 224 + 128 x 56 = 384 x 168, what it starts with.
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    fetch_or_store(a, s, threadIdx.x - CONSUMERS);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    consume(a, s, threadIdx.x);
  }
#endif
}
