// A launch of the kernel on a CPU, for ctypes.

#include "decoder.cu"

inline void __syncthreads() { meet(now->program->meeting, THREADS, [] {}); }

static const Step* given;
static void enter() {
  megakernel(*given);
  now->is_done = true, has_moved = true;
  for (;;) others();
}

// 0; 1: it has failed; 2: all threads wait for what never comes.
extern "C" int launch(const Step* step, u32 seed) {
  constexpr size_t STACK = 1 << 16;
  constexpr int ALL = PROGRAMS * THREADS;
  std::vector<Program> programs(PROGRAMS);
  std::vector<Warp> warps(ALL / 32);
  std::vector<Thread> threads(ALL);
  std::vector<Warp*> order;
  char* stacks = (char*)mmap(nullptr, ALL * STACK, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  given = step, has_failed = false;
  for (Program& p : programs) {
    p.memory = (char*)aligned_alloc(16, (sizeof(Shared) + 15) / 16 * 16);
    memset(p.memory, 0xff, sizeof(Shared));  // no number
  }
  for (int i = 0; i < ALL; i++) {
    Thread& t = threads[i];
    t.thread.x = i % THREADS, t.block.x = i / THREADS;
    t.program = &programs[i / THREADS], t.warp = &warps[i / 32];
    t.warp->threads[i % 32] = &t;
    t.copies.emplace_back();
    getcontext(&t.begin);
    t.begin.uc_stack.ss_sp = stacks + i * STACK, t.begin.uc_stack.ss_size = STACK;
    t.begin.uc_link = nullptr;
    makecontext(&t.begin, enter, 0);
  }
  for (Warp& w : warps) order.push_back(&w);
  std::mt19937 random(seed);
  bool are_done = false;
  for (int idle = 0; !are_done && !has_failed && idle < 64;) {
    has_moved = false, are_done = true;
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random() % i]);
    for (Warp* w : order) {
      const bool rests = seed && random() % 4 == 0;
      for (Thread* t : w->threads)
        if (!t->is_done) {
          are_done = false;
          if (rests) continue;
          go_on(t);
        }
    }
    idle = has_moved ? 0 : idle + 1;
  }
  for (Program& p : programs) free(p.memory);
  munmap(stacks, ALL * STACK);
  return has_failed ? 1 : are_done ? 0 : 2;
}
