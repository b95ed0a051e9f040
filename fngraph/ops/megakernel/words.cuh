// Numbers, and words by which programs tell one another results.

#pragma once
#include "machine.cuh"

#define PATIENCE (1u << 26)  // looks at a word, less than a minute, until the launch fails

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float rounded(float a) { return low(pack(a, 0.f)); }
__device__ __forceinline__ uint4 load16(const u16* p) { return *(const uint4*)p; }

// A word is a number, or two, and the number of the step: data and flag in one store, NCCL's LL.
__device__ __forceinline__ void put(u64* p, u32 v, u32 step) { put(p, (u64)v | ((u64)step << 32)); }
__device__ __forceinline__ bool is_of(u64 v, u32 step) { return (u32)(v >> 32) == step; }

// Two words, as soon as both are there.
__device__ __forceinline__ void find(const u64* p, const u64* q, u64& a, u64& b, u32 step) {
  u32 looks = 0;
  do {
    if (++looks > PATIENCE) __trap();
    a = look(p), b = look(q);
  } while (!is_of(a, step) || !is_of(b, step));
}

// N pairs of words of a lane, at `at(i)` where `has(i)`: all are asked for at once, then those that
// were early.
template <int N, class Has, class At>
__device__ __forceinline__ void gather(Has has, At at, u64 (&a)[N], u64 (&b)[N], u32 step) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    a[i] = b[i] = (u64)step << 32;
    if (has(i)) look(at(i), a[i], b[i]);
  }
  u32 looks = 0;
  for (bool more = true; more;) {
    more = false;
    if (++looks > PATIENCE) __trap();
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!is_of(a[i], step) || !is_of(b[i], step)) {
        look(at(i), a[i], b[i]);
        more = true;
      }
  }
}
