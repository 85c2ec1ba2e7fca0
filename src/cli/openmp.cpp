// The part of OpenMP that LibTorch calls, in place of libgomp's: a program's own functions come before those
// of its libraries. So ATen, oneDNN and MKL work on the threads that run pieces (core/threads/pieces.h). A
// second pool of threads would take the processors from the first, and a region of libgomp's ends only when
// each of its threads has had a processor, even one that came too late to do anything. Names and arguments
// are GCC's. Criticals and atomics remain libgomp's: they know no teams. tests/reference/test_openmp.py finds
// what is missing.
#include <sched.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#include "core/threads/pieces.h"
#include "core/threads/waiting.h"

namespace {

using kiln::WaitWord;

// Iterations of a loop, or sections, that the threads of a team share out in chunks.
struct Loop {
  long next = 0, end = 0, step = 1, chunk = 1;
  uint32_t num_chunks = 0;  // that were taken
  WaitWord turn{0};         // the chunk whose ordered part may run
};

// The threads that run one region.
struct Team {
  explicit Team(int size_in) : size(size_in) {}

  const int size;
  std::mutex mutex;
  std::deque<Loop> loops;  // as the threads come to them; guarded by mutex, like Loop's numbers
  WaitWord num_waiting{0}, num_barriers{0};
};

// Where a thread is in its region.
struct Place {
  Team* team = nullptr;  // null outside of regions
  int number = 0;
  bool is_parallel = false;
  size_t num_loops = 0;  // that the thread has come to
  Loop* loop = nullptr;
  uint32_t chunk = UINT_MAX;  // UINT_MAX: none yet
};
thread_local Place place;
thread_local int max_threads = 0;  // of regions that this thread begins; 0: as the program began

// Those that the process may run on.
int num_processors() {
  std::array<cpu_set_t, 16> own;  // one is of 1,024 processors
  return sched_getaffinity(0, sizeof own, own.data()) == 0
             ? CPU_COUNT_S(sizeof own, own.data())
             : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int initial_threads() {
  const char* wanted = std::getenv("OMP_NUM_THREADS");
  const int threads = wanted != nullptr ? std::atoi(wanted) : 0;
  return threads > 0 ? threads : num_processors();
}

void run_region(void (*body)(void*), void* data, Team& team, int number) {
  const Place before = place;
  place = {.team = &team, .number = number, .is_parallel = before.is_parallel || team.size > 1};
  body(data);
  place = before;
}

Team& own_team() {
  thread_local Team alone(1);
  if (place.team == nullptr) place.team = &alone;
  return *place.team;
}

void wait_for_team() {
  Team& team = own_team();
  const uint32_t barrier = team.num_barriers.load();
  if (team.num_waiting.fetch_add(1) + 1 == static_cast<uint32_t>(team.size)) {
    team.num_waiting.store(0);
    team.num_barriers.fetch_add(1);
    if (team.size > 1) kiln::wake_sleepers(team.num_barriers, INT_MAX);
    return;
  }
  const auto is_over = [&] { return team.num_barriers.load() != barrier; };
  if (kiln::spin_until(is_over)) return;
  while (!is_over()) kiln::sleep_while(team.num_barriers, barrier);
}

// Comes to the next loop of the region. Returns true to the first thread of the team that does.
bool reach_loop(long begin, long end, long step, long chunk) {
  Team& team = own_team();
  const std::lock_guard lock(team.mutex);
  if (team.size == 1) {
    team.loops.clear();
    place.num_loops = 0;
  }
  const bool is_first = place.num_loops == team.loops.size();
  if (is_first) {
    Loop& loop = team.loops.emplace_back();
    loop.next = begin;
    loop.end = end;
    loop.step = step;
    loop.chunk = chunk;
  }
  place.loop = &team.loops[place.num_loops++];
  place.chunk = UINT_MAX;
  return is_first;
}

bool take_chunk(long* begin, long* end) {
  Loop& loop = *place.loop;
  const std::lock_guard lock(own_team().mutex);
  const bool goes_up = loop.step > 0;
  if (goes_up ? loop.next >= loop.end : loop.next <= loop.end) return false;
  *begin = loop.next;
  const long last = loop.next + loop.chunk * loop.step;
  *end = goes_up ? std::min(last, loop.end) : std::max(last, loop.end);
  loop.next = *end;
  place.chunk = loop.num_chunks++;
  return true;
}

void wait_for_turn() {
  WaitWord& turn = place.loop->turn;
  const auto is_own = [&] { return turn.load() == place.chunk; };
  if (kiln::spin_until(is_own)) return;
  for (uint32_t other = turn.load(); other != place.chunk; other = turn.load())
    kiln::sleep_while(turn, other);
}

void pass_turn() {
  if (place.chunk == UINT_MAX) return;
  wait_for_turn();
  place.loop->turn.fetch_add(1);
  kiln::wake_sleepers(place.loop->turn, INT_MAX);
}

}  // namespace

extern "C" {

int omp_get_max_threads() {
  static const int kInitial = initial_threads();
  return max_threads > 0 ? max_threads : kInitial;
}
void omp_set_num_threads(int threads) { max_threads = std::max(threads, 1); }
int omp_get_num_threads() { return place.team != nullptr ? place.team->size : 1; }
int omp_get_thread_num() { return place.number; }
int omp_in_parallel() { return place.is_parallel ? 1 : 0; }

// Within a region or a piece, a region has one thread, as libgomp's have.
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned) {
  const int wanted = num_threads > 0 ? static_cast<int>(num_threads) : omp_get_max_threads();
  if (wanted > 1 && !place.is_parallel) {
    Team team(wanted);
    const auto run = [&](int64_t number) { run_region(body, data, team, static_cast<int>(number)); };
    if (kiln::run_together(wanted, run)) return;
  }
  Team alone(1);
  run_region(body, data, alone, 0);
}

void GOMP_barrier() { wait_for_team(); }
bool GOMP_single_start() { return reach_loop(0, 0, 1, 1); }

bool GOMP_loop_dynamic_next(long* begin, long* end) { return take_chunk(begin, end); }
bool GOMP_loop_dynamic_start(long first, long last, long step, long chunk, long* begin, long* end) {
  reach_loop(first, last, step, chunk);
  return take_chunk(begin, end);
}
void GOMP_loop_end() { wait_for_team(); }
void GOMP_loop_end_nowait() {}

bool GOMP_loop_ordered_dynamic_next(long* begin, long* end) {
  pass_turn();
  return take_chunk(begin, end);
}
bool GOMP_loop_ordered_dynamic_start(long first, long last, long step, long chunk, long* begin, long* end) {
  return GOMP_loop_dynamic_start(first, last, step, chunk, begin, end);
}
void GOMP_ordered_start() { wait_for_turn(); }
void GOMP_ordered_end() {}

// Sections are numbered from 1; 0: none is left.
unsigned GOMP_sections_next() {
  long begin = 0, end = 0;
  return take_chunk(&begin, &end) ? static_cast<unsigned>(begin) : 0;
}
unsigned GOMP_sections_start(unsigned count) {
  reach_loop(1, static_cast<long>(count) + 1, 1, 1);
  return GOMP_sections_next();
}
void GOMP_sections_end_nowait() {}

}  // extern "C"
