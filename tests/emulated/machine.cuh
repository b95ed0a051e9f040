// The machine of `fngraph/ops/megakernel/machine.cuh`, on a CPU: each thread of each program is a
// context of its own, which goes on until it waits for others of its warp or program, or looks at a
// word. Copies are made as late as they may be, and nothing is in a program's memory beforehand.
//
// Programs take turns, warps in an order that a seed draws anew each time; so what is found is
// what follows from any order, not from that of a GPU. What a GPU does out of order within a thread
// is not.

#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int min(u32 a, int b) { return min((int)a, b); }
inline int max(int a, int b) { return a > b ? a : b; }

// threads

struct Index {
  u32 x;
};
struct Program;
struct Warp;
struct Copy {
  u16* to;
  const u16* from;
  u32 bytes;
};
struct Thread {
  ucontext_t begin;
  jmp_buf rest;  // _setjmp leaves signals alone, where swapcontext makes two system calls
  bool has_begun = false, is_done = false;
  Index thread, block;
  Program* program;
  Warp* warp;
  std::vector<std::vector<Copy>> copies;  // by group; the last one is open
};
struct Meeting {
  u32 arrived = 0;
  u64 round = 0;
};
struct Warp {
  Meeting meeting;
  u64 given[32][10], taken[32][4];  // of each lane
  Thread* threads[32];
};
struct Program {
  Meeting meeting;
  char* memory;
};

static Thread* now;
static jmp_buf scheduler;
static bool has_moved;  // whether anything has happened that others may wait for
static bool has_failed;
#define threadIdx (now->thread)
#define blockIdx (now->block)

inline void others() {
  if (!_setjmp(now->rest)) _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void go_on(Thread* t) {
  now = t;
  if (_setjmp(scheduler)) return;
  if (t->has_begun) _longjmp(t->rest, 1);
  t->has_begun = true;
  setcontext(&t->begin);
}
inline void __trap() {
  has_failed = true;
  for (;;) others();
}
template <class F>
inline void meet(Meeting& of, u32 all, F last) {
  const u64 round = of.round;
  if (++of.arrived == all) {
    last();
    of.arrived = 0, of.round++;
    has_moved = true;
  }
  while (of.round == round) others();
}
inline u32 lane() { return now->thread.x & 31; }
inline void __syncthreads();
inline void __syncwarp() { meet(now->warp->meeting, 32, [] {}); }

template <class T>
inline T shuffled(T v, int width, int (*source)(int lane, int by, int width), int by) {
  Warp& w = *now->warp;
  memcpy(&w.given[lane()][0], &v, sizeof v);
  meet(w.meeting, 32, [&] {
    for (int i = 0; i < 32; i++) w.taken[i][0] = w.given[source(i, by, width)][0];
  });
  memcpy(&v, &w.taken[lane()][0], sizeof v);
  return v;
}
template <class T>
inline T __shfl_xor_sync(u32, T v, int by, int width = 32) {
  return shuffled(v, width, [](int i, int by, int w) { return (i ^ by) / w == i / w ? i ^ by : i; }, by);
}
template <class T>
inline T __shfl_down_sync(u32, T v, int by, int width = 32) {
  return shuffled(v, width, [](int i, int by, int w) { return (i + by) / w == i / w ? i + by : i; }, by);
}
template <class T>
inline T __shfl_sync(u32, T v, int from) {  // each lane names its own
  Warp& w = *now->warp;
  memcpy(&w.given[lane()][0], &v, sizeof v);
  w.given[lane()][1] = from & 31;
  meet(w.meeting, 32, [&] {
    for (int i = 0; i < 32; i++) w.taken[i][0] = w.given[w.given[i][1]][0];
  });
  memcpy(&v, &w.taken[lane()][0], sizeof v);
  return v;
}
inline u32 __ballot_sync(u32, bool v) {
  Warp& w = *now->warp;
  w.given[lane()][0] = v;
  meet(w.meeting, 32, [&] {
    u32 all = 0;
    for (int i = 0; i < 32; i++) all |= (u32)w.given[i][0] << i;
    for (int i = 0; i < 32; i++) w.taken[i][0] = all;
  });
  return (u32)w.taken[lane()][0];
}

// numbers

inline float __uint_as_float(u32 v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline u32 __float_as_uint(float f) {
  u32 v;
  memcpy(&v, &f, 4);
  return v;
}
inline u32 bfloat16(float f) {
  const u32 v = __float_as_uint(f);
  return f != f ? 0x7fff : (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
inline u32 pack(float a, float b) { return bfloat16(a) | bfloat16(b) << 16; }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float __expf(float v) { return expf(v); }
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
inline int __clz(int v) { return v ? __builtin_clz((u32)v) : 32; }
inline u32 __byte_perm(u32 a, u32 b, u32 by) {
  const u64 both = a | (u64)b << 32;
  u32 v = 0;
  for (int i = 0; i < 4; i++) v |= (u32)(both >> 8 * (by >> 4 * i & 7) & 0xff) << 8 * i;
  return v;
}

inline float half_of(u32 v, int i) { return __uint_as_float(i ? v & 0xffff0000u : v << 16); }

// c += a b, of a lane's parts of rows by 16 and 16 by columns, as PTX has them for m16n8k16
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& w = *now->warp;
  const u32 given[10] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; i++) w.given[lane()][i] = given[i];
  for (int i = 0; i < 4; i++) w.given[lane()][6 + i] = __float_as_uint(c[i]);
  meet(w.meeting, 32, [&] {
    float a[16][16], b[16][8];
    for (int i = 0; i < 32; i++)
      for (int e = 0; e < 2; e++) {
        const int row = i >> 2, k = (i & 3) * 2 + e;
        for (int part = 0; part < 4; part++)
          a[row + (part & 1) * 8][k + (part >> 1) * 8] = half_of((u32)w.given[i][part], e);
        for (int part = 0; part < 2; part++)
          b[k + part * 8][row] = half_of((u32)w.given[i][4 + part], e);
      }
    for (int i = 0; i < 32; i++)
      for (int e = 0; e < 4; e++) {
        const int row = (i >> 2) + (e >> 1) * 8, column = (i & 3) * 2 + (e & 1);
        float sum = __uint_as_float((u32)w.given[i][6 + e]);
        for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
        w.taken[i][e] = __float_as_uint(sum);
      }
  });
  for (int i = 0; i < 4; i++) c[i] = __uint_as_float((u32)w.taken[lane()][i]);
}

// memory

inline uint4 weights(const u16* p) {
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline void prefetch(const u16*) {}
inline void put(u64* p, u64 v) { *p = v, has_moved = true; }
inline u64 look(const u64* p) {
  others();
  return *p;
}
inline void look(const u64* p, u64& a, u64& b) {
  if ((u64)p % 16) __trap();
  others();
  a = p[0], b = p[1];
}
inline u32 look(const u32* p) {
  others();
  return *p;
}
inline void atomicAdd(u32* p, int v) { *p += v, has_moved = true; }
inline void __threadfence() {}

template <class T>
inline T& own() {
  return *(T*)now->program->memory;
}
inline void copy_later(u16* to, const u16* from, u32 bytes) {
  if ((u64)to % 16 || (u64)from % 16) __trap();
  now->copies.back().push_back({to, from, bytes});
}
inline void end_group() { now->copies.emplace_back(); }
template <int N>
inline void wait_but() {
  auto& groups = now->copies;
  while ((int)groups.size() > N + 1) {
    for (const Copy& c : groups.front()) {
      memset(c.to, 0, 16);
      memcpy(c.to, c.from, c.bytes);
    }
    groups.erase(groups.begin());
  }
}
