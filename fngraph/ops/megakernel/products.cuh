// Products of a weight's rows and a row of input a token: who has which rows, what is asked for
// ahead.

#pragma once
#include "words.cuh"

#define THREADS (WARPS * 32)
static_assert(TOKENS <= 4, "a token has two of the first 8 rows of a tile");

template <int FROM, int TO>
struct Each {  // f<FROM>() ... f<TO - 1>()
  template <class F>
  static __device__ __forceinline__ void go(F&& f) {
    if constexpr (TO - FROM == 1)
      f.template operator()<FROM>();
    else if constexpr (FROM < TO) {
      Each<FROM, (FROM + TO) / 2>::go(f);
      Each<(FROM + TO) / 2, TO>::go(f);
    }
  }
};

__host__ __device__ constexpr int slots_of(int of_group, int most) {  // for a part of a group
  int slots = most / 2 * 2;
  while (of_group % slots) slots -= 2;
  return slots;
}

// A product by GROUPS groups of 8 rows of COLUMNS numbers; a program's are PROGRAMS apart. Of two
// matrices that lie one behind the other, a group of the first goes before that of the second. Load
// V of a warp is 4 rows of 64 columns, 128 bytes side by side for 8 lanes. Long products go round
// SLOTS of the ring: whole groups, or an even part of one.
template <int COLUMNS_, int GROUPS_, bool PAIRED_>
struct Product {
  static constexpr int COLUMNS = COLUMNS_, GROUPS = GROUPS_;
  static constexpr bool PAIRED = PAIRED_;
  static constexpr int STEPS = COLUMNS / (64 * WARPS), OF_GROUP = 2 * STEPS;  // loads
  static constexpr int MINE = (GROUPS + PROGRAMS - 1) / PROGRAMS;  // groups, or pairs, of a program
  static constexpr int COUNT = PAIRED ? 2 * MINE : MINE;
  static constexpr int ROWS = COUNT * 8, LOADS = COUNT * OF_GROUP;
  static constexpr bool LOOPED = LOADS > 2 * RING;
  static constexpr int WHOLE = RING / OF_GROUP;  // groups of a round; 0: a round is a part of one
  static constexpr int SLOTS = !LOOPED ? RING : WHOLE ? WHOLE * OF_GROUP : slots_of(OF_GROUP, RING);
  static constexpr int AHEAD = LOADS < SLOTS ? LOADS : SLOTS;  // loads before it begins

  static __device__ __forceinline__ const u16* begin(const u16* w) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return w + (size_t)(blockIdx.x * 8 + (lane >> 3)) * COLUMNS + warp * (COLUMNS / WARPS) +
           (lane & 7) * 8;
  }
  // groups or pairs that this program really has
  static __device__ __forceinline__ int room() {
    if constexpr (GROUPS % PROGRAMS == 0)
      return MINE;
    else
      return (GROUPS - (int)blockIdx.x + PROGRAMS - 1) / PROGRAMS;
  }
  static __host__ __device__ constexpr int place(int group) { return PAIRED ? group / 2 : group; }
  static __host__ __device__ constexpr size_t offset(int group, int load) {
    return (size_t)place(group) * PROGRAMS * 8 * COLUMNS +
           (PAIRED && (group & 1) ? (size_t)GROUPS * 8 * COLUMNS : 0) + load % 2 * 4 * COLUMNS +
           load / 2 * 64;
  }
  template <int V>
  static __device__ __forceinline__ void load(uint4& slot, const u16* from, int room) {
    constexpr int group = V / OF_GROUP;
    constexpr size_t at = offset(group, V % OF_GROUP);
    if (place(group) < room) slot = weights(from + at);
  }
};

typedef Product<WIDTH, (HEADS + 2 * KV_HEADS) * HEAD / 8, false> Qkv;
typedef Product<HEADS * HEAD, WIDTH / 8, false> Out;
typedef Product<WIDTH, MLP / 8, true> GateUp;
typedef Product<MLP, WIDTH / 8, false> Down;
typedef Product<WIDTH, VOCAB / 8, false> Head;

constexpr int PART_ROWS =  // of the head's rounds too, of which one of 512 columns has 128
    larger(larger(larger(Qkv::ROWS, Out::ROWS), larger(GateUp::ROWS, Down::ROWS)), 128);
constexpr int SIDE = WARPS * PART_ROWS;                                 // sums of a token
constexpr int INPUT = larger(larger(WIDTH, MLP), HEADS* HEAD) / WARPS;  // a token's of a warp

// Rows of x: of a token's two, the first holds the first 32 of 64 columns, the second the others;
// so of c[row][n] those count whose n is of the same half.
__device__ __forceinline__ void add_up(float (&acc)[2][2][4], float* to) {
  const int lane = threadIdx.x & 31, token = lane >> 3;
  float a = acc[0][0][1] + acc[0][1][1], b = acc[1][0][1] + acc[1][1][1];
  a = __shfl_down_sync(~0u, a, 4);
  b = __shfl_down_sync(~0u, b, 4);
  if (!(lane & 4) && token < TOKENS) {
    to[token * 2 * SIDE + (lane & 3)] = a + acc[0][0][0] + acc[0][1][0];
    to[token * 2 * SIDE + (lane & 3) + 4] = b + acc[1][0][0] + acc[1][1][0];
  }
#pragma unroll
  for (int i = 0; i < 16; i++) (&acc[0][0][0])[i] = 0.f;
}

template <int STEPS>
struct Input {  // of a warp, in registers where they are few
  static constexpr bool HELD = STEPS <= 4;
  uint4 held[HELD ? STEPS : 1];
  const u16* at;
  __device__ __forceinline__ Input(const u16 (*from)[INPUT])
      : at(from[min((threadIdx.x & 31) >> 3, TOKENS - 1)] + (threadIdx.x & 7) * 8) {
    if constexpr (HELD) {
#pragma unroll
      for (int s = 0; s < STEPS; s++) held[s] = load16(at + s * 64);
    }
  }
  template <int S>
  __device__ __forceinline__ uint4 get() const {
    if constexpr (HELD)
      return held[S];
    else
      return load16(at + S * 64);
  }
};

#define MOST_PAIRS 16  // of words that a lane asks for at once, beside the ring

// This warp's columns of each token's row of COLUMNS words' numbers, into its input.
template <int COLUMNS>
__device__ __forceinline__ void take(const u64* words, u16 (*input)[INPUT], u32 step) {
  constexpr int MINE = COLUMNS / WARPS, CHUNKS = MINE / 4, N = (CHUNKS + 31) / 32, ALL = N * TOKENS,
                ROUNDS = (ALL + MOST_PAIRS - 1) / MOST_PAIRS, M = (ALL + ROUNDS - 1) / ROUNDS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  words += warp * (MINE / 2) + lane * 2;
#pragma unroll
  for (int n = 0; n < ALL; n += M) {
    u64 a[M], b[M];
    auto has = [&](int i) { return n + i < ALL && (n + i) % N * 32 + lane < CHUNKS; };
    auto at = [&](int i) { return words + (n + i) / N * (COLUMNS / 2) + (n + i) % N * 64; };
    gather<M>(has, at, a, b, step);
#pragma unroll
    for (int i = 0; i < M; i++)
      if (has(i))
        *(uint2*)&input[(n + i) / N][((n + i) % N * 32 + lane) * 4] =
            make_uint2((u32)a[i], (u32)b[i]);
  }
  __syncwarp();
}

__device__ __forceinline__ void multiply(const uint4& w, const uint4& x, float (&acc)[2][4]) {
  mma(acc[0], x.x, 0, x.y, 0, w.x, w.y);
  mma(acc[1], x.z, 0, x.w, 0, w.z, w.w);
}

// All of product P, whose first loads are in the ring, and the first of N, which comes behind it.
template <class P, class N>
__device__ __forceinline__ void run(uint4 (&ring)[RING], const u16* from, const u16* next,
                                    int next_room, const u16 (*input)[INPUT], float* to) {
  constexpr int G = P::OF_GROUP;
  Input<P::STEPS> x(input);
  float acc[2][2][4] = {};
  const int room = P::room();
  if constexpr (!P::LOOPED) {
    Each<0, P::LOADS>::go([&]<int V>() {
      constexpr int slot = V % RING;
      multiply(ring[slot], x.template get<V % G / 2>(), acc[V % 2]);
      if constexpr (V % G == G - 1) add_up(acc, to + V / G * 8);
      if constexpr (V + RING < P::LOADS)
        P::template load<V + RING>(ring[slot], from, room);
      else if constexpr (slot < N::AHEAD)
        N::template load<slot>(ring[slot], next, next_room);
    });
  } else if constexpr (P::WHOLE > 0) {
    constexpr int ROUNDS = (P::COUNT + P::WHOLE - 1) / P::WHOLE;
    auto round = [&](int first, auto refill) {
      Each<0, P::SLOTS>::go([&]<int V>() {
        const int group = first + V / G;
        if (P::COUNT % P::WHOLE == 0 || group < P::COUNT) {
          multiply(ring[V], x.template get<V % G / 2>(), acc[V % 2]);
          if constexpr (V % G == G - 1) add_up(acc, to + group * 8);
        }
        refill.template operator()<V>(group + P::WHOLE);
      });
    };
#pragma unroll 1
    for (int r = 0; r < ROUNDS - 1; r++)
      round(r * P::WHOLE, [&]<int V>(int group) {
        if (P::place(group) < room) ring[V] = weights(from + P::offset(group, V % G));
      });
    round((ROUNDS - 1) * P::WHOLE, [&]<int V>(int) {
      if constexpr (V < N::AHEAD) N::template load<V>(ring[V], next, next_room);
    });
  } else {
    constexpr int PARTS = G / P::SLOTS, ROUNDS = P::COUNT * PARTS;
    auto round = [&](int r, auto refill) {
      Each<0, P::SLOTS>::go([&]<int V>() {
        multiply(ring[V], load16(x.at + (r % PARTS * (P::SLOTS / 2) + V / 2) * 64), acc[V % 2]);
        refill.template operator()<V>((r + 1) / PARTS, (r + 1) % PARTS * P::SLOTS + V);
      });
      if (r % PARTS == PARTS - 1) add_up(acc, to + r / PARTS * 8);
    };
#pragma unroll 1
    for (int r = 0; r < ROUNDS - 1; r++)
      round(r, [&]<int V>(int group, int load) {
        if (P::place(group) < room) ring[V] = weights(from + P::offset(group, load));
      });
    round(ROUNDS - 1, [&]<int V>(int, int) {
      if constexpr (V < N::AHEAD) N::template load<V>(ring[V], next, next_room);
    });
  }
}

// What P leaves free of the ring goes to N at once.
template <class P, class N>
__device__ __forceinline__ void fill(uint4 (&ring)[RING], const u16* next, int next_room) {
  Each<P::AHEAD, N::AHEAD>::go([&]<int V>() { N::template load<V>(ring[V], next, next_room); });
}

__device__ __forceinline__ float total(const float* parts, int rows, int row) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += parts[w * rows + row];
  return sum;
}
