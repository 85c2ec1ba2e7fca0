// What LibTorch calls of OpenMP, as the program has it (src/cli/openmp.cpp): this test is linked with it. GCC
// would call other functions for some of its directives, so these are called by name.
#include <gtest/gtest.h>
#include <omp.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "core/threads/pieces.h"

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
void GOMP_barrier();
bool GOMP_single_start();
bool GOMP_loop_dynamic_start(long first, long last, long step, long chunk, long* begin, long* end);
bool GOMP_loop_dynamic_next(long* begin, long* end);
bool GOMP_loop_ordered_dynamic_start(long first, long last, long step, long chunk, long* begin, long* end);
bool GOMP_loop_ordered_dynamic_next(long* begin, long* end);
void GOMP_loop_end();
void GOMP_ordered_start();
void GOMP_ordered_end();
unsigned GOMP_sections_start(unsigned count);
unsigned GOMP_sections_next();
}

namespace kiln {
namespace {

template <class Body>
void in_parallel(int threads, const Body& body) {
  GOMP_parallel([](void* of) { (*static_cast<const Body*>(of))(); }, const_cast<Body*>(&body),
                static_cast<unsigned>(threads), 0);
}

TEST(OpenMp, ARegionHasTheThreadsAskedFor) {
  for (const int threads : {1, 2, 3, 5}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(threads));
    in_parallel(threads, [&] {
      EXPECT_EQ(omp_get_num_threads(), threads);
      EXPECT_EQ(omp_in_parallel() != 0, threads > 1);
      ++runs[static_cast<size_t>(omp_get_thread_num())];
    });
    for (const std::atomic<int>& of_thread : runs) EXPECT_EQ(of_thread, 1);
  }
  EXPECT_EQ(omp_get_num_threads(), 1);
  EXPECT_FALSE(omp_in_parallel());
}

TEST(OpenMp, ARegionWithinOneOrWithinAPieceHasOneThread) {
  const auto expect_one = [] { EXPECT_EQ(omp_get_num_threads(), 1); };
  in_parallel(3, [&] { in_parallel(3, expect_one); });
  run_pieces(4, 2, [&](int64_t) { in_parallel(3, expect_one); });
}

TEST(OpenMp, TheNumberOfThreadsIsEachThreadsOwn) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(7);
  EXPECT_EQ(omp_get_max_threads(), 7);
  std::thread([&] { EXPECT_EQ(omp_get_max_threads() == 7, before == 7); }).join();
  omp_set_num_threads(before);
}

TEST(OpenMp, NobodyPassesABarrierBeforeAll) {
  constexpr int kThreads = 4;
  std::atomic<int> arrived{0};
  in_parallel(kThreads, [&] {
    for (int turn = 1; turn <= 100; ++turn) {
      ++arrived;
      GOMP_barrier();
      EXPECT_EQ(arrived, turn * kThreads);
      GOMP_barrier();
    }
  });
}

TEST(OpenMp, ThreadsShareOutALoop) {
  for (const int threads : {1, 3}) {
    std::vector<std::atomic<int>> runs(100);
    std::atomic<int> singles{0};
    in_parallel(threads, [&] {
      for (int turn = 0; turn < 10; ++turn) {  // loops of one region follow one another
        long begin = 0, end = 0;
        for (bool any = GOMP_loop_dynamic_start(99, -1, -1, 7, &begin, &end); any;
             any = GOMP_loop_dynamic_next(&begin, &end))
          for (long i = begin; i > end; --i) ++runs[static_cast<size_t>(i)];
        if (GOMP_single_start()) ++singles;
        GOMP_loop_end();
      }
    });
    for (const std::atomic<int>& of_iteration : runs) EXPECT_EQ(of_iteration, 10);
    EXPECT_EQ(singles, 10);
  }
}

TEST(OpenMp, OrderedPartsRunInOrder) {
  std::vector<long> order;
  in_parallel(3, [&] {
    long begin = 0, end = 0;
    for (bool any = GOMP_loop_ordered_dynamic_start(0, 50, 1, 3, &begin, &end); any;
         any = GOMP_loop_ordered_dynamic_next(&begin, &end))
      for (long i = begin; i < end; ++i) {
        GOMP_ordered_start();
        order.push_back(i);
        GOMP_ordered_end();
      }
  });
  std::vector<long> expected(50);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST(OpenMp, EachSectionRunsOnce) {
  std::vector<std::atomic<int>> runs(6);
  in_parallel(2, [&] {
    for (unsigned section = GOMP_sections_start(5); section != 0; section = GOMP_sections_next())
      ++runs[section];
  });
  for (size_t section = 1; section < runs.size(); ++section) EXPECT_EQ(runs[section], 1);
}

}  // namespace
}  // namespace kiln
