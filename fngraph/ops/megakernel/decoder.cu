// All layers of a decoder and its head in one launch, at a token of each of a few requests. See
// __init__.py.
//
// A program a multiprocessor, which stays for the whole step. Its warps share the columns of each
// product; its rows it takes in groups of 8, which are the n of mma.m16n8k16, whose m are tokens,
// two rows each. Weights are asked for RING loads of 16 bytes a lane ahead, across products, so
// that memory is busy while a product waits for its input. There is no barrier between programs:
// each result is a word, two numbers and the number of the step, and who needs it looks until that
// is there.
//
// A program is a thread block, its own memory is shared memory. Macros that it is compiled by:
// PROGRAMS, WARPS, RING (loads of weights ahead, of a lane), TOKENS (4 at most), WIDTH, HEADS,
// KV_HEADS, HEAD, MLP, LAYERS, VOCAB, BLOCK, NORMED (of q and k).

#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    megakernel(const __grid_constant__ Step a) {
  Shared& m = own<Shared>();
  const int program = blockIdx.x, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const u32 step = look(a.number);
  for (int i = thread; i < LAYERS * (int)(sizeof(Layer) / 8); i += THREADS)
    ((u64*)m.layers)[i] = ((const u64*)a.layers)[i];
  if (thread < TOKENS) m.slots[thread] = a.slot[thread];
  __syncthreads();
  if (thread == 0) {  // it knows the number of the step
    __threadfence();
    atomicAdd(a.number + 1, 1);
  }

  // norms are small, and would be asked for too late: they wait in the second-level cache
  constexpr int LINES = WIDTH / 64;
  for (int i = program * THREADS + thread; i < LAYERS * 2 * LINES; i += PROGRAMS * THREADS) {
    const Layer& y = m.layers[i / (2 * LINES)];
    prefetch((i % (2 * LINES) < LINES ? y.norm : y.mlp_norm) + i % LINES * 64);
  }

  uint4 ring[RING];
  const u16* from = Qkv::begin(m.layers[0].qkv);
  Each<0, Qkv::AHEAD>::go([&]<int V>() { Qkv::load<V>(ring[V], from, Qkv::room()); });
  for (int i = thread; i < TOKENS * Out::ROWS; i += THREADS) {
    const int t = i / Out::ROWS, own = i % Out::ROWS;
    const int row = (program + (own >> 3) * PROGRAMS) * 8 + (own & 7);
    m.residual[t][own] = row < WIDTH ? __uint_as_float((u32)a.x[t * WIDTH + row] << 16) : 0.f;
  }

  Attention attention(a, m, step);
  const u64* before = nullptr;  // the sum that the layer begins with
  int side = 0;                 // of m.parts

  // x times its norm's weight, and the sum of its squares; the norm's scale is for the sums behind
  auto take_normed = [&](const u64* words, const u16* norm, auto source) {
    constexpr int CHUNKS = WIDTH / WARPS / 4, N = (CHUNKS + 31) / 32;
    const int at = warp * (WIDTH / WARPS) + lane * 4, have = (CHUNKS - lane + 31) / 32;
    uint2 gain[N];
    u64 x[TOKENS * N], y[TOKENS * N];
#pragma unroll
    for (int i = 0; i < N; i++)
      gain[i] = i < have ? *(const uint2*)(norm + at + i * 128) : make_uint2(0, 0);
    if (words)
      gather<TOKENS * N>([&](int i) { return i % N < have; },
                         [&](int i) { return words + source(i / N) * SUM + at / 2 + i % N * 64; },
                         x, y, step);
    else
#pragma unroll
      for (int i = 0; i < TOKENS * N; i++) {
        const u16* row = a.x + i / N * WIDTH + at;
        const uint2 v = i % N < have ? *(const uint2*)(row + i % N * 128) : make_uint2(0, 0);
        x[i] = v.x, y[i] = v.y;
      }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const u32 v = (u32)x[t * N + i], w = (u32)y[t * N + i];
        const float x0 = low(v), x1 = high(v), x2 = low(w), x3 = high(w);
        if (i < have) {
          squares += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3;
          *(uint2*)&m.input[warp][t][lane * 4 + i * 128] =
              make_uint2(pack(x0 * low(gain[i].x), x1 * high(gain[i].x)),
                         pack(x2 * low(gain[i].y), x3 * high(gain[i].y)));
        }
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
      if (lane == 0) m.squares[side][t][warp] = squares;
    }
    __syncwarp();
  };
  auto same = [](int t) { return t; };
  auto norm_scale = [&](int t) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += m.squares[side][t][w];
    return rsqrtf(sum / WIDTH + a.eps);
  };
  // each row's number by `f(token, row of this program)`, two to a word
  auto publish = [&](u64* words, int rows, int groups, auto f) {
    for (int i = thread; i - lane < TOKENS * rows; i += THREADS) {
      const int t = TOKENS > 1 ? i / rows : 0, row = i - t * rows;
      const float v = i < TOKENS * rows ? f(t, row) : 0.f, w = __shfl_down_sync(~0u, v, 1);
      const int group = program + (row >> 3) * PROGRAMS;
      if (i < TOKENS * rows && !(i & 1) && group < groups)
        put(words + (t * groups + group) * 4 + ((row & 7) >> 1), pack(v, w), step);
    }
    side ^= 1;
  };
  auto add = [&](u64* words, int rows) {  // to the residual
    publish(words, rows, WIDTH / 8, [&](int t, int i) {
      return m.residual[t][i] =
                 rounded(m.residual[t][i] + rounded(total(m.parts[t][side], rows, i)));
    });
  };

#pragma unroll 1
  for (int l = 0; l < LAYERS; l++) {
    const Layer& y = m.layers[l];
    u64 *qkv = a.words + l * OF_LAYER, *outs = qkv + TOKENS * QKV, *logs = outs + OUTS,
        *merged = logs + LOGS, *mid = merged + TOKENS * SPLIT, *gate = mid + TOKENS * SUM,
        *end = gate + TOKENS * GATE, *news = end + TOKENS * SUM;

    // q, k, v
    const u16* out_from = Out::begin(y.out);
    fill<Qkv, Out>(ring, out_from, Out::room());
    if (attention.attends()) {
      attention.fetch(y, attention.begin(), 0);
      attention.fetch(y, attention.begin() + attention.stride(), 1);
    }
    take_normed(before, y.norm, same);
    run<Qkv, Out>(ring, from, out_from, Out::room(), m.input[warp],
                  m.parts[0][side] + warp * Qkv::ROWS);
    __syncthreads();
    publish(qkv, Qkv::ROWS, Qkv::GROUPS,
            [&](int t, int i) { return total(m.parts[t][side], Qkv::ROWS, i) * norm_scale(t); });

    // attention
    if (attention.attends()) attention.attend(y, qkv, outs, logs, merged, news);

    // its product
    const u16* gate_from = GateUp::begin(y.gate_up);
    fill<Out, GateUp>(ring, gate_from, GateUp::room());
    take<HEADS * HEAD>(merged, m.input[warp], step);
    run<Out, GateUp>(ring, out_from, gate_from, GateUp::room(), m.input[warp],
                     m.parts[0][side] + warp * Out::ROWS);
    __syncthreads();
    add(mid, Out::ROWS);

    // gate and up
    const u16* down_from = Down::begin(y.down);
    fill<GateUp, Down>(ring, down_from, Down::room());
    take_normed(mid, y.mlp_norm, same);
    run<GateUp, Down>(ring, gate_from, down_from, Down::room(), m.input[warp],
                      m.parts[0][side] + warp * GateUp::ROWS);
    __syncthreads();
    publish(gate, GateUp::MINE * 8, GateUp::GROUPS, [&](int t, int i) {
      const float by = norm_scale(t);
      const float* row = m.parts[t][side] + (i >> 3) * 16 + (i & 7);
      const float g = rounded(total(row, GateUp::ROWS, 0) * by),
                  u = rounded(total(row, GateUp::ROWS, 8) * by);
      return rounded(g / (1.f + __expf(-g))) * u;
    });

    // down
    const bool is_last = l + 1 == LAYERS;
    from = Qkv::begin(is_last ? a.head : m.layers[l + 1].qkv);  // whose first loads are alike
    const int first_room = is_last ? Head::room() : Qkv::room();
    fill<Down, Qkv>(ring, from, first_room);
    take<MLP>(gate, m.input[warp], step);
    run<Down, Qkv>(ring, down_from, from, first_room, m.input[warp],
                   m.parts[0][side] + warp * Down::ROWS);
    __syncthreads();
    add(end, Down::ROWS);
    before = end;
  }

  // the head, in rounds of the ring; sums of several at a time
  {
    constexpr int STEPS = Head::STEPS, G = Head::OF_GROUP, GROUPS = Head::WHOLE, LOADS = GROUPS * G;
    constexpr int ROUNDS = (Head::MINE + GROUPS - 1) / GROUPS,
                  AT_ONCE = larger(1, PART_ROWS * 2 / (GROUPS * 8)), ROWS = AT_ONCE * GROUPS * 8;
    static_assert(GROUPS >= 1 && ROWS <= 2 * PART_ROWS,
                  "a round of the head fits into the ring and the parts");
    const int room = Head::room();
    Each<Qkv::AHEAD, LOADS>::go([&]<int V>() { Head::load<V>(ring[V], from, room); });
    take_normed(before, a.norm, [&](int t) {
      if (TOKENS == 1 || !a.chosen) return t;
      const int row = (int)a.chosen[t];
      return min(max(row < 0 ? row + TOKENS : row, 0), TOKENS - 1);
    });
    Input<STEPS> x(m.input[warp]);
    __syncthreads();
    const float scale = norm_scale(0);  // of the first token
    float acc[2][2][4] = {};
#pragma unroll 1
    for (int r = 0; r < ROUNDS; r++) {
      float* to = m.parts[0][0] + warp * ROWS + r % AT_ONCE * GROUPS * 8;
      Each<0, LOADS>::go([&]<int V>() {
        multiply(ring[V], x.template get<V % G / 2>(), acc[V % 2]);
        if constexpr (V % G == G - 1) add_up(acc, to + V / G * 8);
        const int group = (r + 1) * GROUPS + V / G;
        if (group < room) ring[V] = weights(from + Head::offset(group, V % G));
      });
      if (r % AT_ONCE == AT_ONCE - 1 || r == ROUNDS - 1) {
        __syncthreads();
        const int rows = (r % AT_ONCE + 1) * GROUPS * 8;
        for (int i = thread; i < TOKENS * rows; i += THREADS) {
          const int t = TOKENS > 1 ? i / rows : 0, row = i - t * rows;
          const int group = program + (r / AT_ONCE * AT_ONCE * GROUPS + (row >> 3)) * PROGRAMS;
          if (group < Head::GROUPS)
            a.logits[(size_t)t * VOCAB + group * 8 + (row & 7)] =
                (u16)pack(total(m.parts[t][0], ROWS, row) * (t ? norm_scale(t) : scale), 0.f);
        }
        __syncthreads();
      }
    }
  }
  if (program == 0 && thread == 0) {  // a program that has no rows may not have begun yet
    for (u32 looks = 0; look(a.number + 1) != PROGRAMS;)
      if (++looks > PATIENCE) __trap();
    __threadfence();
    a.number[1] = 0;
    a.number[0] = step + 1 ? step + 1 : 1;  // 0 is what words begin with
  }
}
