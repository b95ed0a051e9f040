// Attention over a paged cache, a query row a request: a split's warps take chunks of KEYS of its
// keys in turn.

#pragma once
#include "products.cuh"

#define SHARE (HEADS / KV_HEADS)  // query heads of a kv head
#define KEYS 16                   // of a warp at a time
#define MOST_SPLITS 16            // programs that share a kv head's keys
static_assert(SHARE <= 8 && MOST_SPLITS <= 32, "heads are rows of a tile, splits lanes of a warp");

struct Layer {
  const u16 *norm, *qkv, *q_norm, *k_norm, *out, *mlp_norm, *gate_up, *down;
  u16 *k_cache, *v_cache;
};

struct Step {
  const Layer* layers;
  const u16 *x, *cos, *sin, *norm, *head;
  u16* logits;
  const long long *slot, *chosen;  // of a new key, -1: none; tokens of logits, null: each
  const int *seq_len, *start, *table;
  u64* words;
  u32* number;                 // of the step, from 1; and how many programs have read it
  int blocks;                  // of the table
  float eps, head_eps, scale;  // scale times log2(e)
};

constexpr int HALF = HEAD / 2;    // of a head: as many angles, and words
constexpr int PADDED = HEAD + 8;  // against bank conflicts

struct Shared {
  float parts[TOKENS][2][SIDE];  // of sums, a warp's each
  float squares[2][TOKENS][WARPS];
  u16 input[WARPS][TOKENS][INPUT];
  u16 k[2][WARPS][KEYS][PADDED], v[2][WARPS][KEYS][PADDED];
  u16 q[SHARE][PADDED], new_k[HEAD], new_v[HEAD];
  float highest[WARPS][8], sums[WARPS][8];
  Layer layers[LAYERS];
  long long slots[TOKENS];
  float residual[TOKENS][larger(Out::ROWS, Down::ROWS)];  // of this program's rows
};
extern "C" __device__ long long shared_bytes = sizeof(Shared);

// words of a token in a layer: q, k and v; all splits' outputs merged; a sum; the gate; of several,
// its key and value for requests that read what it writes. And of a layer: each split's outputs and
// the logs of their weights, a request's behind those of the one before
constexpr size_t QKV = Qkv::GROUPS * 4, SPLIT = HEADS * HEAD / 2, SUM = WIDTH / 2, GATE = MLP / 2;
constexpr size_t NEWS = TOKENS > 1 ? KV_HEADS * HEAD : 0;
constexpr int SHARERS = PROGRAMS / KV_HEADS;  // programs of a kv head, for all requests' splits
constexpr size_t SPLITS = SHARERS < TOKENS * MOST_SPLITS ? SHARERS : TOKENS * MOST_SPLITS;
constexpr size_t OUTS = SPLITS * SPLIT, LOGS = SPLITS * HEADS;
static_assert(OUTS % 2 == 0 && LOGS % 2 == 0, "words behind them are read two at a time");
constexpr size_t OF_LAYER = OUTS + LOGS + TOKENS * (QKV + SPLIT + 2 * SUM + GATE + NEWS);
extern "C" __device__ long long words_of_step = LAYERS * OF_LAYER;

// What a program has of a step's attention. Of the programs of a kv head each request has one or
// more: as many as it has splits, or if these are too many, as many as its share of them.
struct Attention {
  static_assert(SHARERS >= TOKENS, "each request has a program of each kv head");
  const Step& a;
  Shared& m;
  const u32 step;
  int request_ = -1, split_, splits, len;
  int whose[2];  // of both chunks in memory: the request whose new key a lane's is; -1: none's

  __device__ __forceinline__ Attention(const Step& a, Shared& m, u32 step)
      : a(a), m(m), step(step) {
    int lens[TOKENS], wanted[TOKENS], all = 0, before = 0;
#pragma unroll
    for (int r = 0; r < TOKENS; r++) {
      lens[r] = a.start[r + 1] > a.start[r] ? min(a.seq_len[r], a.blocks * BLOCK) : 0;
      wanted[r] = larger(1, (lens[r] + WARPS * KEYS - 1) / (WARPS * KEYS));
      all += wanted[r];
    }
#pragma unroll
    for (int r = 0; r < TOKENS; r++) {
      int have = wanted[r];
      if (all > SHARERS) have = (int)((long long)have * (SHARERS - TOKENS) / all) + 1;
      have = min(have, MOST_SPLITS);
      const int own = (int)blockIdx.x / KV_HEADS - before;
      if (r == 0 || (own >= 0 && own < have)) {
        request_ = own < have ? r : -1;
        split_ = own, splits = have, len = lens[r];
      }
      before += have;
    }
  }
  static __device__ __forceinline__ int kv_head() { return blockIdx.x % KV_HEADS; }
  __device__ __forceinline__ int request() const { return TOKENS > 1 ? request_ : 0; }
  __device__ __forceinline__ int split() const {
    return TOKENS > 1 ? split_ : (int)blockIdx.x / KV_HEADS;
  }
  __device__ __forceinline__ bool attends() const {
    return TOKENS > 1 ? request_ >= 0 : split() < splits;
  }
  __device__ __forceinline__ const int* table() const { return a.table + request() * a.blocks; }
  __device__ __forceinline__ long long slot() const { return m.slots[request()]; }
  __device__ __forceinline__ int begin() const { return split() * WARPS + (threadIdx.x >> 5); }
  __device__ __forceinline__ int stride() const { return splits * WARPS; }

  // The request whose new key belongs there; -1: none's.
  __device__ __forceinline__ int writer(int at) const {
    int found = -1;
#pragma unroll
    for (int r = 0; r < TOKENS; r++)
      if (m.slots[r] == at) found = r;
    return found;
  }

  // A chunk's cached keys and values into shared memory; zeros in the place of the step's new ones,
  // and behind the last.
  __device__ __forceinline__ void fetch(const Layer& y, int chunk, int stage) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    constexpr int PIECES = HEAD / 8;
    if (chunk * KEYS < len) {
      const int key = chunk * KEYS + lane % KEYS;
      const int slot = key < len ? table()[key / BLOCK] * BLOCK + key % BLOCK : -1;
      const int of = key < len ? writer(slot) : -1, cached = of < 0 ? slot : -1;
      (stage ? whose[1] : whose[0]) = of;
#pragma unroll 2
      for (int i = 0; i < KEYS * PIECES / 32; i++) {
        const int e = i * 32 + lane, row = e / PIECES, d = e % PIECES * 8;
        const int from = __shfl_sync(~0u, cached, row);
        const size_t at = ((size_t)max(from, 0) * KV_HEADS + kv_head()) * HEAD + d;
        const u32 bytes = from < 0 ? 0 : 16;  // 0: zeros
        copy_later(&m.k[stage][warp][row][d], y.k_cache + at, bytes);
        copy_later(&m.v[stage][warp][row][d], y.v_cache + at, bytes);
      }
    }
    end_group();
  }

  // Its split's outputs and their weights, of the words of q, k and v; the new key into the cache,
  // and to those that read it in this step.
  __device__ __forceinline__ void attend(const Layer& y, const u64* qkv, u64* outs, u64* logs,
                                         u64* merged, u64* news) {
    const int first = (int)blockIdx.x / KV_HEADS - split();  // of its request's splits
    qkv += request() * QKV, outs += first * SPLIT, logs += first * HEADS;
    merged += request() * SPLIT;
    const bool alone = splits == 1;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    constexpr int OF_HEAD = HEAD / 4;  // threads: two pairs each
    for (int i = thread; i - lane < (SHARE + 1) * OF_HEAD; i += THREADS) {
      const bool in = i < (SHARE + 1) * OF_HEAD;
      const int h = in ? i / OF_HEAD : 0, d = i % OF_HEAD * 2;
      const bool is_k = h == SHARE;
      const u64* p = qkv + ((is_k ? (HEADS + kv_head()) : (kv_head() * SHARE + h)) * HEAD + d) / 2;
      const u32 c = *(const u32*)(a.cos + request() * HALF + d),
                s = *(const u32*)(a.sin + request() * HALF + d);
      u32 g = 0, f = 0;
      if constexpr (NORMED) {
        const u16* norm = is_k ? y.k_norm : y.q_norm;
        g = *(const u32*)(norm + d), f = *(const u32*)(norm + d + HALF);
      }
      u64 x, z;
      find(p, p + HALF / 2, x, z, step);
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
        *(u32*)(to + d) = pack(rounded(x0 * low(c)) - rounded(z0 * low(s)),
                               rounded(x1 * high(c)) - rounded(z1 * high(s)));
        *(u32*)(to + d + HALF) = pack(rounded(z0 * low(c)) + rounded(x0 * low(s)),
                                      rounded(z1 * high(c)) + rounded(x1 * high(s)));
      }
    }
    if (const int i = (thread - (THREADS - OF_HEAD)) * 2; i >= 0) {
      const u64* p = qkv + (HEADS + KV_HEADS + kv_head()) * HALF + i;
      u64 x, z;
      find(p, p + 1, x, z, step);
      *(uint2*)(m.new_v + 2 * i) = make_uint2((u32)x, (u32)z);
    }
    __syncthreads();
    if (split() == 0 && slot() >= 0 && thread < HALF) {
      const size_t at = ((size_t)slot() * KV_HEADS + kv_head()) * HEAD + 2 * thread;
      const u32 k = *(const u32*)(m.new_k + 2 * thread), v = *(const u32*)(m.new_v + 2 * thread);
      *(u32*)(y.k_cache + at) = k;
      *(u32*)(y.v_cache + at) = v;
      if (TOKENS > 1) {
        u64* to = news + (request() * KV_HEADS + kv_head()) * HEAD + thread;
        put(to, k, step), put(to + HALF, v, step);
      }
    }

    float highest = -1e30f, sum = 0.f, acc[HEAD / 16][4] = {};
    const int n = lane >> 2, pair = (lane & 3) * 2, head = n < SHARE ? n : 0;
    int stage = 0;
    for (int chunk = begin(); chunk * KEYS < len; chunk += stride(), stage ^= 1) {
      wait_but<1>();
      __syncwarp();
      const int mine = stage ? whose[1] : whose[0];  // of the second half as of the first
      for (u32 left = __ballot_sync(~0u, mine >= 0) % (1 << KEYS); left; left &= left - 1) {
        const int row = __ffs(left) - 1, of = TOKENS > 1 ? __shfl_sync(~0u, mine, row) : 0;
        for (int d = lane * 2; d < HEAD; d += 64) {
          u32 k = *(const u32*)(m.new_k + d), v = *(const u32*)(m.new_v + d);
          if (of != request()) {
            const u64* p = news + (of * KV_HEADS + kv_head()) * HEAD + d / 2;
            u64 x, z;
            find(p, p + HALF, x, z, step);
            k = (u32)x, v = (u32)z;
          }
          *(u32*)&m.k[stage][warp][row][d] = k;
          *(u32*)&m.v[stage][warp][row][d] = v;
        }
      }
      __syncwarp();
      float score[2][4] = {};  // of heads by keys
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int s = 0; s < HEAD / 32; s++) {
          const uint4 k = load16(&m.k[stage][warp][t * 8 + n][s * 32 + pair * 4]),
                      q = load16(&m.q[head][s * 32 + pair * 4]);
          mma(score[t], q.x, 0, q.y, 0, k.x, k.y);
          mma(score[t], q.z, 0, q.w, 0, k.z, k.w);
        }
      float p[4], top = highest;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        p[e] = chunk * KEYS + (e >> 1) * 8 + pair + (e & 1) < len ? score[e >> 1][e & 1] * a.scale
                                                                  : -1e30f;
        top = fmaxf(top, p[e]);
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float shrink = exp2f(highest - top);
      highest = top, sum *= shrink;
#pragma unroll
      for (int e = 0; e < 4; e++) sum += p[e] = exp2f(p[e] - top);
      const u32 p0 = pack(p[0], p[1]), p1 = pack(p[2], p[3]);  // keys by heads: as they lie
      const float shrink0 = __shfl_sync(~0u, shrink, pair * 4),
                  shrink1 = __shfl_sync(~0u, shrink, pair * 4 + 4);
#pragma unroll
      for (int i = 0; i < HEAD / 16; i++)
        acc[i][0] *= shrink0, acc[i][1] *= shrink1, acc[i][2] *= shrink0, acc[i][3] *= shrink1;
#pragma unroll
      for (int b = 0; b < HEAD / 64; b++) {  // columns by keys, two of a lane's 8 columns at a time
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
          v[j] = load16(&m.v[stage][warp][pair + (j & 1) + (j >> 1) * 8][b * 64 + n * 8]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 v0 = (&v[0].x)[j], v1 = (&v[1].x)[j], v2 = (&v[2].x)[j], v3 = (&v[3].x)[j];
          mma(acc[b * 4 + j], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632),
              __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632), p0, p1);
        }
      }
      __syncwarp();
      fetch(y, chunk + 2 * stride(), stage);
    }
    wait_but<0>();
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (pair == 0) m.highest[warp][n] = highest, m.sums[warp][n] = sum;
    float* mine = (float*)m.k[0][warp];  // heads by columns, where its keys lay
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
      const int d = i / 4 * 64 + n * 8 + i % 4 * 2;
      if (pair < SHARE) *(float2*)&mine[pair * HEAD + d] = make_float2(acc[i][0], acc[i][2]);
      if (pair + 1 < SHARE)
        *(float2*)&mine[(pair + 1) * HEAD + d] = make_float2(acc[i][1], acc[i][3]);
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
      const int of = kv_head() * SHARE + h;
      put((alone ? merged : outs + split() * SPLIT) + (of * HEAD + d) / 2, pack(o0 * by, o1 * by),
          step);
      if (!alone && d == 0)
        put(logs + split() * HEADS + of, __float_as_uint(top + log2f(all)), step);
    }
    if (!alone) merge(outs, logs, merged);
  }

  // This split's share of its kv head's outputs, of all splits: a lane reads a word of one of them,
  // and as few lanes as there are splits (or a power of two) a word of all, so that most shares are
  // read at once.
  __device__ __forceinline__ void merge(const u64* outs, const u64* logs, u64* merged) {
    constexpr int ALL = SHARE * HALF;
    const int bits = 32 - __clz(splits - 1);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, s = lane & ((1 << bits) - 1),
              at_once = 32 >> bits;
    const int each = (ALL + splits - 1) / splits, end = min((split() + 1) * each, ALL);
    for (int at = split() * each + warp * at_once; at < end; at += WARPS * at_once) {
      const int word = at + (lane >> bits), of = kv_head() * SHARE + word / HALF,
                of_split = kv_head() * ALL + word;
      const bool in = word < end && s < splits;
      u64 x = 0, log = 0;
      if (in) find(outs + s * SPLIT + of_split, logs + s * HEADS + of, x, log, step);
      const float l = in ? __uint_as_float((u32)log) : -1e30f;
      float top = l;
      for (int o = 1 << bits >> 1; o; o >>= 1)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      const float by = in ? exp2f(l - top) : 0.f;
      float all = by, o0 = by * low((u32)x), o1 = by * high((u32)x);
      for (int o = 1 << bits >> 1; o; o >>= 1) {
        all += __shfl_xor_sync(~0u, all, o);
        o0 += __shfl_xor_sync(~0u, o0, o), o1 += __shfl_xor_sync(~0u, o1, o);
      }
      if (in && s == 0) put(merged + of_split, pack(o0 / all, o1 / all), step);
    }
  }
};
