#include "core/threads/pieces.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace kiln {
namespace {

TEST(Pieces, EachRunsOnceOnAnyNumberOfThreads) {
  for (const int64_t threads : {1, 2, 3, 5, 64})
    for (const int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      run_pieces(count, threads, [&](int64_t piece) { ++runs[static_cast<size_t>(piece)]; });
      for (const std::atomic<int>& of_piece : runs) EXPECT_EQ(of_piece, 1) << threads << ", " << count;
    }
}

TEST(Pieces, SumsInTheOrderOfPiecesHaveTheSameBits) {
  const auto sum_on = [](int64_t threads) {
    std::vector<float> sums(100);
    run_pieces(100, threads, [&](int64_t piece) {
      for (int i = 1; i < 1000; ++i)
        sums[static_cast<size_t>(piece)] += 1 / static_cast<float>(i + 1000 * piece);
    });
    return std::accumulate(sums.begin(), sums.end(), 0.0F);
  };
  for (const int64_t threads : {2, 3, 5}) EXPECT_EQ(sum_on(threads), sum_on(1));
}

// As if another program had its processor: the first piece ends when all others have run.
TEST(Pieces, AThreadThatIsHeldUpHoldsUpNoOther) {
  constexpr int kCount = 50;
  std::atomic<int> others{0};
  run_pieces(kCount, 2, [&](int64_t piece) {
    if (piece > 0) {
      ++others;
      return;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (others < kCount - 1 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  EXPECT_EQ(others, kCount - 1);
}

TEST(Pieces, WithinAPieceItsThreadRunsAll) {
  std::atomic<int> inner{0};
  run_pieces(8, 3, [&](int64_t) {
    const std::thread::id own = std::this_thread::get_id();
    run_pieces(5, 3, [&](int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), own);
      ++inner;
    });
  });
  EXPECT_EQ(inner, 40);
}

TEST(Pieces, SeveralCallersGetTheirOwn) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([caller] {
      for (int turn = 0; turn < 200; ++turn) {
        std::atomic<int64_t> sum{0};
        run_pieces(20, 3, [&](int64_t piece) { sum += piece + caller; });
        ASSERT_EQ(sum, 190 + 20 * caller);
      }
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(Pieces, AnErrorReachesTheCallerAndTheNextWorkRuns) {
  const auto fails = [](int64_t piece) {
    if (piece == 7) throw std::runtime_error("piece 7");
  };
  for (const int64_t threads : {1, 3}) {
    try {
      run_pieces(20, threads, fails);
      FAIL() << "expected an error";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), "piece 7");
    }
    std::atomic<int> runs{0};
    run_pieces(20, threads, [&](int64_t) { ++runs; });
    EXPECT_EQ(runs, 20);
  }
}

}  // namespace
}  // namespace kiln
