// Numbers, tensor cores, and words by which programs tell one another results.

#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define PATIENCE (1u << 26)  // looks at a word, less than a minute, until the launch fails

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  return v;
}
__device__ __forceinline__ float rounded(float a) { return low(pack(a, 0.f)); }
__device__ __forceinline__ uint4 shared(const u16* p) { return *(const uint4*)p; }
__device__ __forceinline__ uint4 weights(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// words

__device__ __forceinline__ void put(u64* p, u32 v, u32 step) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"((u64)v | ((u64)step << 32))
               : "memory");
}
__device__ __forceinline__ u64 look(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void look(const u64* p, u64& a, u64& b) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(a), "=l"(b)
               : "l"(p)
               : "memory");
}
__device__ __forceinline__ bool is_of(u64 v, u32 step) { return (u32)(v >> 32) == step; }

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
