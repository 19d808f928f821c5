// What runs on an SM of Hopper while wgmma multiplies? Cycles of a step by warp groups, instructions and who does what.
//
//     nvcc -O3 -gencode arch=compute_90a,code=sm_90a -o overlap kernels/bench/wgmma_overlap.cu && ./overlap
//
// A step of a warp group multiplies 64 x 64 weights from registers by 64 tokens (four m64n64k16, 128 cycles of the tensor
// cores) and decodes as many, which the trellis GEMM does at once (`trellis/gemm_sm90.py`). `decode` is the mix of the code
// `mul1`: per two weights two SHF, IMAD and IDP (dp4a), one PRMT, one HFMA2; the others are 128 of one instruction, in
// sixteen chains that do not depend on each other. Who does what:
//
//     multiply, compute     only one of the two
//     both                  every warp group both, as the kernel: the registers of the next step while wgmma runs
//     apart                 half of the warp groups two multiplications, half two computations
//
// What would hide is max(multiply, compute), what does not overlap at all their sum. The clock is that of the last warp group
// to end; of `apart` also that of those that multiply.

#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

enum Who { MULTIPLY, COMPUTE, BOTH, APART };
enum What { DECODE, SHF, PRMT, IDP, IMAD, LOP3, HFMA2 };
constexpr int STEPS = 2000, SMS = 132, SMEM = 65536;

#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

__device__ __forceinline__ void wgmma(float *d, const uint32_t *a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%34,%35},%36,1,1,1,0;"
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// 16 registers of the next step, from w; instruction after instruction over all of them.
template <What WHAT> __device__ __forceinline__ void compute(uint32_t w, uint32_t one, uint32_t *a) {
  if constexpr (WHAT == DECODE) {
#pragma unroll
    for (int i = 0; i < 16; i++)
      asm volatile("{.reg .b32 s, t;\n shf.r.wrap.b32 s, %1, %2, 3;\n shf.r.wrap.b32 t, %2, %1, 5;\n"
                   " mul.lo.u32 s, s, 0x83DCD12D;\n mul.lo.u32 t, t, 0x83DCD12D;\n dp4a.u32.u32 s, s, 0x01010101, %3;\n"
                   " dp4a.u32.u32 t, t, 0x01010101, %3;\n prmt.b32 s, s, t, 0x5410;\n fma.rn.f16x2 %0, s, %3, %3;\n}"
                   : "=r"(a[i]) : "r"(w), "r"(w + i), "r"(one));
  } else {
#pragma unroll
    for (int repeat = 0; repeat < 8; repeat++)
#pragma unroll
      for (int i = 0; i < 16; i++) {
        if constexpr (WHAT == SHF) asm volatile("shf.r.wrap.b32 %0, %0, %1, 3;" : "+r"(a[i]) : "r"(w));
        if constexpr (WHAT == PRMT) asm volatile("prmt.b32 %0, %0, %1, 0x5410;" : "+r"(a[i]) : "r"(w));
        if constexpr (WHAT == IDP) asm volatile("dp4a.u32.u32 %0, %0, 0x01010101, %1;" : "+r"(a[i]) : "r"(w));
        if constexpr (WHAT == IMAD) asm volatile("mad.lo.u32 %0, %0, %1, %1;" : "+r"(a[i]) : "r"(w));
        if constexpr (WHAT == LOP3) asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(a[i]) : "r"(w), "r"(one));
        if constexpr (WHAT == HFMA2) asm volatile("fma.rn.f16x2 %0, %0, %1, %1;" : "+r"(a[i]) : "r"(w));
      }
  }
}

template <Who WHO, What WHAT> __global__ void __launch_bounds__(512) kernel(uint32_t *out, uint32_t one, long long *cycles) {
  extern __shared__ __align__(1024) uint8_t smem[];
  for (int i = threadIdx.x; i < SMEM / 4; i += blockDim.x) ((uint32_t *)smem)[i] = 0;
  asm volatile("fence.proxy.async;" ::: "memory");
  const uint64_t at = (uint32_t)__cvta_generic_to_shared(smem) & 0x3FFFF;
  const uint64_t b = at >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;  // 128-byte swizzle
  const int group = threadIdx.x / 128;
  const bool multiplies = WHO != COMPUTE && (WHO != APART || group % 2 == 0);
  const bool computes = WHO != MULTIPLY && (WHO != APART || group % 2 == 1);
  float d[32] = {};
  uint32_t a[2][16], w = one * threadIdx.x;
  for (int i = 0; i < 16; i++) a[0][i] = w + i, a[1][i] = w - i;
  __syncthreads();
  const long long begin = clock64();
  for (int step = 0; step < (WHO == APART ? 2 : 1) * STEPS; step += 2)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (multiplies) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma(d, a[half] + 4 * k, b + 2 * k);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
      }
      if (computes) compute<WHAT>(w += step, one, a[half ^ 1]);
    }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  const long long took = clock64() - begin;
  if (threadIdx.x % 128 == 0 && blockIdx.x == 0) cycles[group] = took;
  float sum = 0;
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) sum += d[i];
  for (int i = 0; i < 16; i++) bits ^= a[0][i] ^ a[1][i];
  if (sum == 1.25f || bits == 12345) out[threadIdx.x] = bits;  // never, but the compiler does not know
}

template <Who WHO, What WHAT> void run(int groups) {
  static uint32_t *out = nullptr;
  long long *cycles, most = 0;
  if (!out) cudaMalloc(&out, 4096);
  cudaMallocHost(&cycles, 4 * sizeof(long long));
  auto own = kernel<WHO, WHAT>;
  cudaFuncSetAttribute(own, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
  for (int i = 0; i < 2; i++) own<<<SMS, 128 * groups, SMEM>>>(out, 7, cycles), cudaDeviceSynchronize();
  for (int i = 0; i < groups; i++) most = cycles[i] > most ? cycles[i] : most;
  printf("%8.0f", (double)most / STEPS);
  if (WHO == APART) printf("  (those that multiply %.0f)", (double)cycles[0] / STEPS);
  if (cudaError_t error = cudaGetLastError()) printf(" %s", cudaGetErrorString(error));
  cudaFreeHost(cycles);
}

template <What WHAT> void row(const char *name, int groups) {
  printf("%d warp groups, %-7s", groups, name);
  run<MULTIPLY, WHAT>(groups), run<COMPUTE, WHAT>(groups), run<BOTH, WHAT>(groups);
  if (groups > 1) run<APART, WHAT>(groups);
  printf("\n");
}

int main() {
  printf("%22s multiply compute    both   apart\n", "");
  for (int groups : {1, 2, 4}) row<DECODE>("decode", groups);
  row<SHF>("SHF", 4), row<PRMT>("PRMT", 4), row<IDP>("IDP", 4);
  row<IMAD>("IMAD", 4), row<LOP3>("LOP3", 4), row<HFMA2>("HFMA2", 4);
}
