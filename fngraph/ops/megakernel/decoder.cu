// All layers of a decoder and its head in one launch, at one token of one request. See __init__.py.
//
// A program a multiprocessor, which stays for the whole step. Its warps share the columns of each
// product; its rows it takes in groups of 8, which are the n of mma.m16n8k16. Weights are asked for
// RING loads of 16 bytes a lane ahead, across products, so that memory is busy while a product waits
// for its input. There is no barrier between programs: each result is a word, two numbers and the
// number of the step, and who needs it looks until that is there.
//
// Macros that a shape is compiled by: PROGRAMS, WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS, WORDS,
// BLOCK, NORMED (of q and k).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS 8
#define THREADS (WARPS * 32)
#define RING 32                    // loads of weights ahead, of a lane
#define SHARE (HEADS / KV_HEADS)   // query heads of a kv head
#define KEYS 16                    // of a warp at a time
#define MOST_SPLITS 16             // programs that share a kv head's keys
#define PATIENCE (1u << 26)        // looks at a word, some ten seconds, until the launch fails

struct Layer {
  const u16 *norm, *qkv, *q_norm, *k_norm, *out, *mlp_norm, *gate_up, *down;
  u16 *k_cache, *v_cache;
};

struct Step {
  const Layer* layers;
  const u16 *x, *cos, *sin, *norm, *head;
  u16* logits;
  const long long* slot;  // of the new key; -1: none
  const int *seq_len, *start, *table;
  u64* words;
  u32* number;  // of the step, from 1
  int blocks;   // of the table
  float eps, head_eps, scale;  // scale times log2(e)
};

// numbers

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
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
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
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
__device__ __forceinline__ bool is_of(u64 v, u32 step) { return (u32)(v >> 32) == step; }

// N pairs of words of a lane, `stride` apart: all are asked for at once, then those that were early.
template <int N>
__device__ __forceinline__ void gather(const u64* p, int stride, int have, u64 (&a)[N], u64 (&b)[N], u32 step) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    a[i] = b[i] = (u64)step << 32;
    if (i < have) look(p + i * stride, a[i], b[i]);
  }
  u32 looks = 0;
  for (bool more = true; more;) {
    more = false;
    if (++looks > PATIENCE) __trap();
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!is_of(a[i], step) || !is_of(b[i], step)) {
        look(p + i * stride, a[i], b[i]);
        more = true;
      }
  }
}

// products

template <int FROM, int TO>
struct Each {  // f<FROM>() ... f<TO - 1>()
  template <class F>
  static __device__ __forceinline__ void go(F&& f) {
    if constexpr (TO - FROM == 1) f.template operator()<FROM>();
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
    return w + (size_t)(blockIdx.x * 8 + (lane >> 3)) * COLUMNS + warp * (COLUMNS / WARPS) + (lane & 7) * 8;
  }
  // groups or pairs that this program really has
  static __device__ __forceinline__ int room() {
    if constexpr (GROUPS % PROGRAMS == 0) return MINE;
    else return (GROUPS - (int)blockIdx.x + PROGRAMS - 1) / PROGRAMS;
  }
  static __host__ __device__ constexpr int place(int group) { return PAIRED ? group / 2 : group; }
  static __host__ __device__ constexpr size_t offset(int group, int load) {
    return (size_t)place(group) * PROGRAMS * 8 * COLUMNS + (PAIRED && (group & 1) ? (size_t)GROUPS * 8 * COLUMNS : 0) +
           load % 2 * 4 * COLUMNS + load / 2 * 64;
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
typedef Product<WIDTH, WORDS / 8, false> Head;

constexpr int PART_ROWS = larger(larger(larger(Qkv::ROWS, Out::ROWS), larger(GateUp::ROWS, Down::ROWS)), 128);
constexpr int INPUT = larger(larger(WIDTH, MLP), HEADS * HEAD) / WARPS;  // columns of a warp
constexpr int PADDED = HEAD + 8;                                         // against bank conflicts

struct Shared {
  float parts[2][WARPS * PART_ROWS];  // of sums, a warp's each
  float squares[2][WARPS];
  u16 input[WARPS][INPUT];
  u16 k[2][WARPS][KEYS][PADDED], v[2][WARPS][KEYS][PADDED];
  u16 q[SHARE][PADDED], new_k[HEAD], new_v[HEAD];
  float highest[WARPS][8], sums[WARPS][8];
  Layer layers[LAYERS];
  float residual[larger(Out::ROWS, Down::ROWS)];  // of this program's rows
};
extern "C" __device__ int shared_bytes = sizeof(Shared);

// Rows of x: row 0 of the tile holds the first 32 of 64 columns, row 1 the others; so of c[row][n]
// those count whose n is of the same half.
__device__ __forceinline__ void add_up(float (&acc)[2][2][4], float* to) {
  const int lane = threadIdx.x & 31;
  float a = acc[0][0][1] + acc[0][1][1], b = acc[1][0][1] + acc[1][1][1];
  a = __shfl_down_sync(~0u, a, 4);
  b = __shfl_down_sync(~0u, b, 4);
  if (lane < 4) {
    to[lane] = a + acc[0][0][0] + acc[0][1][0];
    to[4 + lane] = b + acc[1][0][0] + acc[1][1][0];
  }
#pragma unroll
  for (int i = 0; i < 16; i++) (&acc[0][0][0])[i] = 0.f;
}

template <int STEPS>
struct Input {  // of a warp, in registers where they are few
  static constexpr bool HELD = STEPS <= 4;
  uint4 held[HELD ? STEPS : 1];
  const u16* at;
  __device__ __forceinline__ Input(const u16* from) : at(from + (threadIdx.x & 7) * 8) {
    if constexpr (HELD) {
#pragma unroll
      for (int s = 0; s < STEPS; s++) held[s] = shared(at + s * 64);
    }
  }
  template <int S>
  __device__ __forceinline__ uint4 get() const {
    if constexpr (HELD) return held[S];
    else return shared(at + S * 64);
  }
};

__device__ __forceinline__ void multiply(const uint4& w, const uint4& x, float (&acc)[2][4]) {
  mma(acc[0], x.x, 0, x.y, 0, w.x, w.y);
  mma(acc[1], x.z, 0, x.w, 0, w.z, w.w);
}

// All of product P, whose first loads are in the ring, and the first of N, which comes behind it.
template <class P, class N>
__device__ __forceinline__ void run(uint4 (&ring)[RING], const u16* from, const u16* next, int next_room,
                                    const u16* input, float* to) {
  constexpr int G = P::OF_GROUP;
  Input<P::STEPS> x(input);
  float acc[2][2][4] = {};
  const int room = P::room();
  if constexpr (!P::LOOPED) {
    Each<0, P::LOADS>::go([&]<int V>() {
      constexpr int slot = V % RING;
      multiply(ring[slot], x.template get<V % G / 2>(), acc[V % 2]);
      if constexpr (V % G == G - 1) add_up(acc, to + V / G * 8);
      if constexpr (V + RING < P::LOADS) P::template load<V + RING>(ring[slot], from, room);
      else if constexpr (slot < N::AHEAD) N::template load<slot>(ring[slot], next, next_room);
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
        multiply(ring[V], shared(x.at + (r % PARTS * (P::SLOTS / 2) + V / 2) * 64), acc[V % 2]);
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) megakernel(const __grid_constant__ Step a) {
  extern __shared__ __align__(16) char memory[];
  Shared& m = *(Shared*)memory;
  const int program = blockIdx.x, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const u32 step = *(volatile u32*)a.number;
  for (int i = thread; i < LAYERS * (int)(sizeof(Layer) / 8); i += THREADS) ((u64*)m.layers)[i] = ((const u64*)a.layers)[i];
  __syncthreads();

  // norms are small, and would be asked for too late: they wait in the second-level cache
  constexpr int LINES = WIDTH / 64;
  for (int i = program * THREADS + thread; i < LAYERS * 2 * LINES; i += PROGRAMS * THREADS) {
    const Layer& y = m.layers[i / (2 * LINES)];
    const u16* p = (i % (2 * LINES) < LINES ? y.norm : y.mlp_norm) + i % LINES * 64;
    asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(p));
  }

  uint4 ring[RING];
  const u16* from = Qkv::begin(m.layers[0].qkv);
  Each<0, Qkv::AHEAD>::go([&]<int V>() { Qkv::load<V>(ring[V], from, Qkv::room()); });
  for (int i = thread; i < Out::ROWS; i += THREADS) {
    const int row = (program + (i >> 3) * PROGRAMS) * 8 + (i & 7);
    m.residual[i] = row < WIDTH ? __uint_as_float((u32)a.x[row] << 16) : 0.f;
  }

  // keys: a split's warps take KEYS of them in turn
  const long long slot = *a.slot;
  int len = a.start[1] > a.start[0] ? *a.seq_len : 0;
  len = min(len, a.blocks * BLOCK);
  int splits = (len + WARPS * KEYS - 1) / (WARPS * KEYS);
  splits = max(1, min(min(splits, MOST_SPLITS), PROGRAMS / KV_HEADS));
  const int kv_head = program % KV_HEADS, split = program / KV_HEADS, turn = splits * WARPS;
  const bool attends = split < splits;
  const int first = split * WARPS + warp;

  // words of a layer: q, k and v; each split's outputs and their weights; sums and the gate
  constexpr size_t QKV = Qkv::GROUPS * 4, SPLIT = HEADS * HEAD / 2, SUM = WIDTH / 2, GATE = MLP / 2;
  constexpr size_t OF_LAYER = QKV + MOST_SPLITS * (SPLIT + HEADS) + 2 * SUM + GATE;
  const u64* before = nullptr;  // the sum that the layer begins with
  int side = 0;                 // of m.parts

  // x times its norm's weight, and the sum of its squares; the norm's scale is for the sums behind
  auto take_normed = [&](const u64* words, const u16* norm) {
    constexpr int CHUNKS = WIDTH / WARPS / 4, N = (CHUNKS + 31) / 32;
    const int at = warp * (WIDTH / WARPS) + lane * 4, have = (CHUNKS - lane + 31) / 32;
    uint2 gain[N];
    u64 x[N], y[N];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) gain[i] = i < have ? *(const uint2*)(norm + at + i * 128) : make_uint2(0, 0);
    if (words) gather<N>(words + at / 2, 64, have, x, y, step);
    else
#pragma unroll
      for (int i = 0; i < N; i++) {
        const uint2 v = i < have ? *(const uint2*)(a.x + at + i * 128) : make_uint2(0, 0);
        x[i] = v.x, y[i] = v.y;
      }
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float x0 = low((u32)x[i]), x1 = high((u32)x[i]), x2 = low((u32)y[i]), x3 = high((u32)y[i]);
      if (i < have) {
        squares += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3;
        *(uint2*)&m.input[warp][lane * 4 + i * 128] =
            make_uint2(pack(x0 * low(gain[i].x), x1 * high(gain[i].x)), pack(x2 * low(gain[i].y), x3 * high(gain[i].y)));
      }
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
    if (lane == 0) m.squares[side][warp] = squares;
    __syncwarp();
  };
  auto norm_scale = [&](float eps) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += m.squares[side][w];
    return rsqrtf(sum / WIDTH + eps);
  };
  // each row's number by `f(row of this program)`, two to a word
  auto publish = [&](u64* words, int rows, int groups, auto f) {
    for (int i = warp * 32 + lane; i - lane < rows; i += THREADS) {
      const float v = i < rows ? f(i) : 0.f, w = __shfl_down_sync(~0u, v, 1);
      const int group = program + (i >> 3) * PROGRAMS;
      if (i < rows && !(i & 1) && group < groups) put(words + group * 4 + ((i & 7) >> 1), pack(v, w), step);
    }
    side ^= 1;
  };
  auto add = [&](u64* words, int rows) {  // to the residual
    publish(words, rows, WIDTH / 8, [&](int i) {
      return m.residual[i] = rounded(m.residual[i] + rounded(total(m.parts[side], rows, i)));
    });
  };

#pragma unroll 1
  for (int l = 0; l < LAYERS; l++) {
    const Layer& y = m.layers[l];
    u64 *qkv = a.words + l * OF_LAYER, *outs = qkv + QKV, *logs = outs + MOST_SPLITS * SPLIT;
    u64 *mid = logs + MOST_SPLITS * HEADS, *gate = mid + SUM, *end = gate + GATE;

    // A turn's cached keys and values into shared memory, zeros in the place of the new ones.
    auto fetch = [&](int chunk, int half) {
      constexpr int PIECES = HEAD / 8;
#pragma unroll 2
      for (int i = 0; i < KEYS * PIECES / 32 && chunk * KEYS < len; i++) {
        const int e = i * 32 + lane, row = e / PIECES, d = e % PIECES * 8, key = chunk * KEYS + row;
        size_t at = 0;
        bool cached = key < len;
        if (cached) {
          at = (size_t)a.table[key / BLOCK] * BLOCK + key % BLOCK;
          cached = (long long)at != slot;
        }
        at = cached ? (at * KV_HEADS + kv_head) * HEAD + d : 0;
        const u32 bytes = cached ? 16 : 0;  // else zeros
        const u32 k = __cvta_generic_to_shared(&m.k[half][warp][row][d]), v = __cvta_generic_to_shared(&m.v[half][warp][row][d]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(k), "l"(y.k_cache + at), "r"(bytes));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(v), "l"(y.v_cache + at), "r"(bytes));
      }
      asm volatile("cp.async.commit_group;");
    };
    if (attends) {
      fetch(first, 0);
      fetch(first + turn, 1);
    }

    // q, k, v
    const u16* out_from = Out::begin(y.out);
    fill<Qkv, Out>(ring, out_from, Out::room());
    take_normed(before, y.norm);
    run<Qkv, Out>(ring, from, out_from, Out::room(), m.input[warp], m.parts[side] + warp * Qkv::ROWS);
    __syncthreads();
    publish(qkv, Qkv::ROWS, Qkv::GROUPS, [&](int i) { return total(m.parts[side], Qkv::ROWS, i) * norm_scale(a.eps); });

    // attention
    if (attends) {
      constexpr int OF_HEAD = HEAD / 4, HALF = HEAD / 2;  // threads: two pairs each
      for (int i = warp * 32 + lane; i - lane < (SHARE + 1) * OF_HEAD; i += THREADS) {
        const bool in = i < (SHARE + 1) * OF_HEAD;
        const int h = in ? i / OF_HEAD : 0, d = i % OF_HEAD * 2;
        const bool is_k = h == SHARE;
        const u64* p = qkv + ((is_k ? (HEADS + kv_head) : (kv_head * SHARE + h)) * HEAD + d) / 2;
        const u32 c = *(const u32*)(a.cos + d), s = *(const u32*)(a.sin + d);
        u32 g = 0, f = 0;
        if constexpr (NORMED) {
          const u16* norm = is_k ? y.k_norm : y.q_norm;
          g = *(const u32*)(norm + d), f = *(const u32*)(norm + d + HALF);
        }
        u64 x = look(p), z = look(p + HALF / 2);
        for (u32 looks = 0; !is_of(x, step) || !is_of(z, step);) {
          if (++looks > PATIENCE) __trap();
          x = look(p), z = look(p + HALF / 2);
        }
        float x0 = low((u32)x), x1 = high((u32)x), z0 = low((u32)z), z1 = high((u32)z);
        if constexpr (NORMED) {
          float squares = x0 * x0 + x1 * x1 + z0 * z0 + z1 * z1;
#pragma unroll
          for (int o = OF_HEAD / 2; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o, OF_HEAD);
          const float by = rsqrtf(squares / HEAD + a.head_eps);
          x0 = rounded(rounded(x0 * by) * low(g)), x1 = rounded(rounded(x1 * by) * high(g));
          z0 = rounded(rounded(z0 * by) * low(f)), z1 = rounded(rounded(z1 * by) * high(f));
        }
        u16* to = is_k ? m.new_k : m.q[h];
        if (in) {
          *(u32*)(to + d) = pack(rounded(x0 * low(c)) - rounded(z0 * low(s)), rounded(x1 * high(c)) - rounded(z1 * high(s)));
          *(u32*)(to + d + HALF) = pack(rounded(z0 * low(c)) + rounded(x0 * low(s)), rounded(z1 * high(c)) + rounded(x1 * high(s)));
        }
      }
      if (thread >= THREADS - HALF) {
        const int i = thread - (THREADS - HALF);
        const u64* p = qkv + (HEADS + KV_HEADS + kv_head) * HALF + i;
        u64 x = look(p);
        for (u32 looks = 0; !is_of(x, step); x = look(p))
          if (++looks > PATIENCE) __trap();
        *(u32*)(m.new_v + 2 * i) = (u32)x;
      }
      __syncthreads();
      if (split == 0 && slot >= 0 && thread < HALF) {
        const size_t at = ((size_t)slot * KV_HEADS + kv_head) * HEAD + 2 * thread;
        *(u32*)(y.k_cache + at) = *(u32*)(m.new_k + 2 * thread);
        *(u32*)(y.v_cache + at) = *(u32*)(m.new_v + 2 * thread);
      }

      float highest = -1e30f, sum = 0.f, acc[HEAD / 16][4] = {};
      const int n = lane >> 2, pair = (lane & 3) * 2, head = n < SHARE ? n : 0;
      int half = 0;
      for (int chunk = first; chunk * KEYS < len; chunk += turn, half ^= 1) {
        asm volatile("cp.async.wait_group 1;");
        __syncwarp();
        const int key = chunk * KEYS + lane;
        const bool is_new = lane < KEYS && key < len && (long long)a.table[key / BLOCK] * BLOCK + key % BLOCK == slot;
        for (u32 left = __ballot_sync(~0u, is_new); left; left &= left - 1) {
          const int row = __ffs(left) - 1;
          for (int d = lane * 2; d < HEAD; d += 64) {
            *(u32*)&m.k[half][warp][row][d] = *(u32*)(m.new_k + d);
            *(u32*)&m.v[half][warp][row][d] = *(u32*)(m.new_v + d);
          }
        }
        __syncwarp();
        float score[2][4] = {};  // of heads by keys
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
          for (int s = 0; s < HEAD / 32; s++) {
            const uint4 k = shared(&m.k[half][warp][t * 8 + n][s * 32 + pair * 4]), q = shared(&m.q[head][s * 32 + pair * 4]);
            mma(score[t], q.x, 0, q.y, 0, k.x, k.y);
            mma(score[t], q.z, 0, q.w, 0, k.z, k.w);
          }
        float p[4], top = highest;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          p[e] = chunk * KEYS + (e >> 1) * 8 + pair + (e & 1) < len ? score[e >> 1][e & 1] * a.scale : -1e30f;
          top = fmaxf(top, p[e]);
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shrink = exp2f(highest - top);
        highest = top, sum *= shrink;
#pragma unroll
        for (int e = 0; e < 4; e++) sum += p[e] = exp2f(p[e] - top);
        const u32 p0 = pack(p[0], p[1]), p1 = pack(p[2], p[3]);  // keys by heads: as they lie
        const float shrink0 = __shfl_sync(~0u, shrink, pair * 4), shrink1 = __shfl_sync(~0u, shrink, pair * 4 + 4);
#pragma unroll
        for (int i = 0; i < HEAD / 16; i++) acc[i][0] *= shrink0, acc[i][1] *= shrink1, acc[i][2] *= shrink0, acc[i][3] *= shrink1;
#pragma unroll
        for (int b = 0; b < HEAD / 64; b++) {  // columns by keys, two of a lane's 8 columns at a time
          uint4 v[4];
#pragma unroll
          for (int j = 0; j < 4; j++) v[j] = shared(&m.v[half][warp][pair + (j & 1) + (j >> 1) * 8][b * 64 + n * 8]);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const u32 v0 = (&v[0].x)[j], v1 = (&v[1].x)[j], v2 = (&v[2].x)[j], v3 = (&v[3].x)[j];
            mma(acc[b * 4 + j], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                __byte_perm(v2, v3, 0x7632), p0, p1);
          }
        }
        __syncwarp();
        fetch(chunk + 2 * turn, half);
      }
      asm volatile("cp.async.wait_all;");
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (pair == 0) m.highest[warp][n] = highest, m.sums[warp][n] = sum;
      float* mine = (float*)m.k[0][warp];  // heads by columns, where its keys lay
      __syncwarp();
#pragma unroll
      for (int i = 0; i < HEAD / 16; i++) {
        const int d = i / 4 * 64 + n * 8 + i % 4 * 2;
        if (pair < SHARE) *(float2*)&mine[pair * HEAD + d] = make_float2(acc[i][0], acc[i][2]);
        if (pair + 1 < SHARE) *(float2*)&mine[(pair + 1) * HEAD + d] = make_float2(acc[i][1], acc[i][3]);
      }
      __syncthreads();
      for (int i = thread; i < SHARE * HALF; i += THREADS) {
        const int h = i / HALF, d = i % HALF * 2;
        float top = -1e30f, all = 0.f, o0 = 0.f, o1 = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, m.highest[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const float by = exp2f(m.highest[w][h] - top);
          const float2 o = *(const float2*)((const float*)m.k[0][w] + h * HEAD + d);
          all += m.sums[w][h] * by, o0 += o.x * by, o1 += o.y * by;
        }
        const float by = len ? 1.f / all : 0.f;
        const int of = kv_head * SHARE + h;
        put(outs + split * SPLIT + (of * HEAD + d) / 2, pack(o0 * by, o1 * by), step);
        if (d == 0) put(logs + split * HEADS + of, __float_as_uint(top + log2f(all)), step);
      }
    }

    // its product: splits are merged by who reads them
    const u16* gate_from = GateUp::begin(y.gate_up);
    fill<Out, GateUp>(ring, gate_from, GateUp::room());
    {
      constexpr int CHUNKS = HEADS * HEAD / WARPS / 4, N = (CHUNKS + 31) / 32, M = N < 2 ? N : 2, E = N == 1 ? 4 : 2;
      for (int n = 0; n < N; n += M) {
        float top[M], all[M] = {}, o[M][4] = {};
#pragma unroll
        for (int i = 0; i < M; i++) top[i] = -1e30f;
        for (int s = 0; s < splits; s += E) {
          u64 log[M][E], x[M][E], z[M][E];
          u32 looks = 0;
          bool again = false;
          do {
            bool more = false;
#pragma unroll
            for (int i = 0; i < M; i++) {
              const int chunk = (n + i) * 32 + lane, column = warp * (HEADS * HEAD / WARPS) + chunk * 4;
#pragma unroll
              for (int e = 0; e < E; e++) {
                if (!again) log[i][e] = x[i][e] = z[i][e] = chunk < CHUNKS && s + e < splits ? 0 : (u64)step << 32;
                if (!is_of(log[i][e], step) || !is_of(x[i][e], step) || !is_of(z[i][e], step)) {
                  log[i][e] = look(logs + (s + e) * HEADS + column / HEAD);
                  look(outs + (s + e) * SPLIT + column / 2, x[i][e], z[i][e]);
                  more = true;
                }
              }
            }
            again = more;
            if (++looks > PATIENCE) __trap();
          } while (again);
#pragma unroll
          for (int i = 0; i < M; i++)
#pragma unroll
            for (int e = 0; e < E; e++)
              if (s + e < splits) {
                const float l = __uint_as_float((u32)log[i][e]), high_ = fmaxf(top[i], l);
                const float shrink = exp2f(top[i] - high_), by = exp2f(l - high_);
                top[i] = high_, all[i] = all[i] * shrink + by;
                o[i][0] = o[i][0] * shrink + by * low((u32)x[i][e]), o[i][1] = o[i][1] * shrink + by * high((u32)x[i][e]);
                o[i][2] = o[i][2] * shrink + by * low((u32)z[i][e]), o[i][3] = o[i][3] * shrink + by * high((u32)z[i][e]);
              }
        }
#pragma unroll
        for (int i = 0; i < M; i++) {
          const int chunk = (n + i) * 32 + lane;
          const float by = len ? 1.f / all[i] : 0.f;
          if (chunk < CHUNKS)
            *(uint2*)&m.input[warp][chunk * 4] = make_uint2(pack(o[i][0] * by, o[i][1] * by), pack(o[i][2] * by, o[i][3] * by));
        }
      }
      __syncwarp();
    }
    run<Out, GateUp>(ring, out_from, gate_from, GateUp::room(), m.input[warp], m.parts[side] + warp * Out::ROWS);
    __syncthreads();
    add(mid, Out::ROWS);

    // gate and up
    const u16* down_from = Down::begin(y.down);
    fill<GateUp, Down>(ring, down_from, Down::room());
    take_normed(mid, y.mlp_norm);
    run<GateUp, Down>(ring, gate_from, down_from, Down::room(), m.input[warp], m.parts[side] + warp * GateUp::ROWS);
    __syncthreads();
    publish(gate, GateUp::MINE * 8, GateUp::GROUPS, [&](int i) {
      const float by = norm_scale(a.eps);
      const float* row = m.parts[side] + (i >> 3) * 16 + (i & 7);
      const float g = rounded(total(row, GateUp::ROWS, 0) * by), u = rounded(total(row, GateUp::ROWS, 8) * by);
      return rounded(g / (1.f + __expf(-g))) * u;
    });

    // down
    const bool is_last = l + 1 == LAYERS;
    from = Qkv::begin(is_last ? a.head : m.layers[l + 1].qkv);  // whose first loads are alike
    const int first_room = is_last ? Head::room() : Qkv::room();
    fill<Down, Qkv>(ring, from, first_room);
    {
      constexpr int CHUNKS = MLP / WARPS / 4, N = (CHUNKS + 31) / 32, M = N < 8 ? N : 8;
#pragma unroll
      for (int n = 0; n < N; n += M) {
        u64 x[M], z[M];
        const int have = (CHUNKS - n * 32 - lane + 31) / 32;
        gather<M>(gate + warp * (MLP / WARPS / 2) + (n * 32 + lane) * 2, 64, have, x, z, step);
#pragma unroll
        for (int i = 0; i < M; i++)
          if (i < have) *(uint2*)&m.input[warp][((n + i) * 32 + lane) * 4] = make_uint2((u32)x[i], (u32)z[i]);
      }
      __syncwarp();
    }
    run<Down, Qkv>(ring, down_from, from, first_room, m.input[warp], m.parts[side] + warp * Down::ROWS);
    __syncthreads();
    add(end, Down::ROWS);
    before = end;
  }

  // the head, in rounds of the ring; sums of several at a time
  {
    constexpr int STEPS = Head::STEPS, G = Head::OF_GROUP, GROUPS = Head::WHOLE, LOADS = GROUPS * G;
    constexpr int ROUNDS = (Head::MINE + GROUPS - 1) / GROUPS, AT_ONCE = larger(1, PART_ROWS * 2 / (GROUPS * 8)), ROWS = AT_ONCE * GROUPS * 8;
    static_assert(GROUPS >= 1 && ROWS <= 2 * PART_ROWS, "a round of the head fits into the ring and the parts");
    const int room = Head::room();
    Each<Qkv::AHEAD, LOADS>::go([&]<int V>() { Head::load<V>(ring[V], from, room); });
    take_normed(before, a.norm);
    Input<STEPS> x(m.input[warp]);
    __syncthreads();
    const float by = norm_scale(a.eps);
    float acc[2][2][4] = {}, *parts = m.parts[0];
#pragma unroll 1
    for (int r = 0; r < ROUNDS; r++) {
      float* to = parts + warp * ROWS + r % AT_ONCE * GROUPS * 8;
      Each<0, LOADS>::go([&]<int V>() {
        multiply(ring[V], x.template get<V % G / 2>(), acc[V % 2]);
        if constexpr (V % G == G - 1) add_up(acc, to + V / G * 8);
        const int group = (r + 1) * GROUPS + V / G;
        if (group < room) ring[V] = weights(from + Head::offset(group, V % G));
      });
      if (r % AT_ONCE == AT_ONCE - 1 || r == ROUNDS - 1) {
        __syncthreads();
        for (int i = thread; i < (r % AT_ONCE + 1) * GROUPS * 8; i += THREADS) {
          const int group = program + (r / AT_ONCE * AT_ONCE * GROUPS + (i >> 3)) * PROGRAMS;
          if (group < Head::GROUPS) a.logits[(size_t)group * 8 + (i & 7)] = (u16)pack(total(parts, ROWS, i) * by, 0.f);
        }
        __syncthreads();
      }
    }
  }
  if (program == 0 && thread == 0) *(volatile u32*)a.number = step + 1;
}
