// few_rows.cu on a CPU: block after block, a thread each of its threads.
#include "few_rows_cpu.cuh"

#include "few_rows.cu"

extern "C" void start(int blocks, int groups, const uint8* x, const uint8* x_scales,
                      const uint8* weight, const uint8* scales, uint8* y, const int64* n) {
  gridDim = {blocks, groups, 1};
  for (int block = 0; block < blocks * groups; ++block) {
    block_meets = std::make_unique<std::barrier<>>(32 * WARPS);
    for (auto& meets : warp_meets) meets = std::make_unique<std::barrier<>>(32);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 32 * WARPS; ++thread) {
      threads.emplace_back([=] {
        threadIdx = {thread, 0, 0};
        blockIdx = {block % blocks, block / blocks, 0};
        few_rows(x, x_scales, weight, scales, y, n[0], n[1], n[2], n[3], n[4], n[5], n[6]);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}
