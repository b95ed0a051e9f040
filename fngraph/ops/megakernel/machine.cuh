// What the kernel asks of the machine beyond C++: numbers, memory, tensor cores. Nothing else here
// has a line of assembly.

#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// numbers

__device__ __forceinline__ u32 pack(float a, float b) {  // two bfloat16
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  return v;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// memory that is read once

__device__ __forceinline__ uint4 weights(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ void prefetch(const u16* p) {  // into the second-level cache
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(p));
}

// words that other programs write

__device__ __forceinline__ void put(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
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
__device__ __forceinline__ u32 look(const u32* p) { return *(volatile const u32*)p; }

// memory of a program

template <class T>
__device__ __forceinline__ T& own() {
  extern __shared__ __align__(16) char memory[];
  return *(T*)memory;
}
// Copies 16 bytes, or writes 16 zeros if `bytes` is 0, by the time that its group is waited for
__device__ __forceinline__ void copy_later(u16* to, const u16* from, u32 bytes) {
  const u32 at = __cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait_but() {  // for all groups but the last N
  asm volatile("cp.async.wait_group %0;" ::"n"(N));
}
