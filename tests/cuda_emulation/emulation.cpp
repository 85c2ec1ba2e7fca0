#include "cuda_emulation/emulation.h"

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace kiln::emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kLanes = 32;

// Threads that arrive wait until all have.
struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

// A fiber begins as a context; from then on it gives way by _setjmp and _longjmp, which make no system call.
struct Fiber {
  ucontext_t context{};
  jmp_buf position{};
  bool begun = false;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  uint3 index{};
  bool done = false;
};

struct Warp {
  Barrier barrier{};
  float values[kLanes] = {};
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier{};
  ucontext_t scheduler{};
  jmp_buf turn{};  // of the scheduler, while a fiber has its turn
  size_t current = 0;
  const std::function<void()>* thread = nullptr;
  bool progressed = false;  // in this round of turns
};

Block* block = nullptr;
Order order = Order::kAscending;
std::vector<size_t>* counted = nullptr;  // the blocks of each launch, where none is run

void enter_fiber() {
  (*block->thread)();
  block->fibers[block->current].done = true;
  block->progressed = true;
  _longjmp(block->turn, 1);
}

void wait(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    block->progressed = true;
    return;
  }
  while (barrier.generation == generation) {
    if (_setjmp(block->fibers[block->current].position) == 0) _longjmp(block->turn, 1);
  }
}

void take_turn(Fiber& fiber) {
  threadIdx = fiber.index;
  if (_setjmp(block->turn) != 0) return;
  if (fiber.begun) _longjmp(fiber.position, 1);
  fiber.begun = true;
  swapcontext(&block->scheduler, &fiber.context);
}

// A turn of each thread that has not ended; false: none is left.
bool run_round() {
  const size_t count = block->fibers.size();
  bool any = false;
  block->progressed = false;
  for (size_t i = 0; i < count; ++i) {
    block->current = order == Order::kAscending ? i : count - 1 - i;
    Fiber& fiber = block->fibers[block->current];
    if (fiber.done) continue;
    any = true;
    take_turn(fiber);
  }
  if (any && !block->progressed) throw std::logic_error("a barrier that not all threads of a block reach");
  return any;
}

void start(Fiber& fiber, size_t index) {
  fiber.done = fiber.begun = false;
  fiber.index = {static_cast<unsigned>(index % blockDim.x),
                 static_cast<unsigned>(index / blockDim.x % blockDim.y),
                 static_cast<unsigned>(index / blockDim.x / blockDim.y)};
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = &block->scheduler;
  makecontext(&fiber.context, enter_fiber, 0);
}

}  // namespace

void set_order(Order wanted) { order = wanted; }

std::vector<size_t> blocks_of(const std::function<void()>& launches) {
  std::vector<size_t> blocks;
  counted = &blocks;
  launches();
  counted = nullptr;
  return blocks;
}

void run(dim3 grid, dim3 threads, const std::function<void()>& thread) {
  if (counted != nullptr) return counted->push_back(size_t{grid.x} * grid.y * grid.z);
  Block state;
  block = &state;
  blockDim = threads;
  gridDim = grid;
  const size_t count = size_t{threads.x} * threads.y * threads.z;
  if (count == 0 || count > 1024) throw std::logic_error("a block of no or more than 1024 threads");
  state.fibers = std::vector<Fiber>(count);
  state.thread = &thread;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        state.barrier = {.expected = static_cast<unsigned>(count)};
        state.warps.assign((count + kLanes - 1) / kLanes, {});
        for (size_t w = 0; w < state.warps.size(); ++w)
          state.warps[w].barrier.expected =
              static_cast<unsigned>(std::min<size_t>(kLanes, count - w * kLanes));
        for (size_t i = 0; i < count; ++i) start(state.fibers[i], i);
        while (run_round()) {
        }
      }
    }
  }
  block = nullptr;
}

void run_uneven_barrier() {
  run(dim3(1), dim3(64), [] {
    if (threadIdx.x < 32) block_barrier();
  });
}

void block_barrier() { wait(block->barrier); }

float exchange(float value, int lane_mask) {
  const size_t lane = block->current % kLanes;
  Warp& warp = block->warps[block->current / kLanes];
  warp.values[lane] = value;
  wait(warp.barrier);
  const float other = warp.values[lane ^ static_cast<size_t>(lane_mask)];
  wait(warp.barrier);
  return other;
}

}  // namespace kiln::emulation
