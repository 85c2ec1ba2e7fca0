// That memory which was freed is used again, as the program has it (src/cli/before_main.cpp): this test is
// linked with it.
#include <gtest/gtest.h>
#include <jemalloc/jemalloc.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/memory_limits.h"
#include "test_files.h"

namespace kiln {
namespace {

double resident_bytes() {
  uint64_t epoch = 1;
  size_t bytes = 0, size = sizeof(epoch);
  mallctl("epoch", &epoch, &size, &epoch, size);  // the counters are of the last one
  size = sizeof(bytes);
  EXPECT_EQ(mallctl("stats.resident", &bytes, &size, nullptr, 0), 0);
  return static_cast<double>(bytes);
}

// Allocates as many blocks of up to `most` bytes and frees them all. What is free lies in one block then.
void use_memory(size_t count, size_t least, size_t most, std::mt19937& random) {
  std::vector<void*> blocks(count);
  for (void*& block : blocks) block = std::malloc(least + random() % (most - least));
  for (void* block : blocks) std::free(block);
}

TEST(FreedMemory, StaysAsItIsHoweverOftenManyTensorsAndThenFewAreMade) {
  std::mt19937 random(1);
  const auto evaluate_and_train = [&] {
    use_memory(300, 20'000, 420'000, random);
    for (int step = 0; step < 50; ++step) use_memory(20, 16'000, 96'000, random);
  };
  for (int i = 0; i < 5; ++i) evaluate_and_train();
  const double early = resident_bytes();
  for (int i = 0; i < 200; ++i) evaluate_and_train();
  EXPECT_LT(resident_bytes(), 1.1 * early);
}

TEST(FreedMemory, GoesBackToTheSystemWhereItIsTrimmed) {
  constexpr size_t kLeast = 20'000, kMost = 420'000, kCount = 300;
  std::mt19937 random(1);
  use_memory(kCount, kLeast, kMost, random);
  const double used = resident_bytes();
  trim_heap();
  EXPECT_LT(resident_bytes(), used - kCount * kLeast);
}

TEST(FreedMemory, OfSmallBlocksGoesBackWithoutThatOfLargeTensors) {
  install_tracking_cpu_allocator();
  constexpr size_t kLeast = 20'000, kMost = 420'000, kCount = 300;
  constexpr int64_t kLarge = 40'000'000;
  std::mt19937 random(1);
  trim_heap();
  at::ones({kLarge}, at::kByte);
  use_memory(kCount, kLeast, kMost, random);
  const double used = resident_bytes();
  trim_small_blocks();
  const double rest = resident_bytes();
  EXPECT_LT(rest, used - kCount * kLeast);
  trim_heap();
  EXPECT_LT(resident_bytes(), rest - 0.9 * kLarge);
}

TEST(FreedMemory, ATensorThatFindsNoneSaysHowMuchItTakes) {
  install_tracking_cpu_allocator();
  EXPECT_ERROR(at::empty({int64_t{1} << 50}), "there is not enough memory for a tensor of 4194304");
}

unsigned arena_of(const void* block) {
  unsigned arena = 0;
  size_t size = sizeof(arena);
  EXPECT_EQ(mallctl("arenas.lookup", &arena, &size, &block, sizeof(block)), 0);
  return arena;
}

TEST(FreedMemory, OfLargeTensorsOfSmallerOnesAndOfSmallBlocksLiesApart) {
  install_tracking_cpu_allocator();
  const auto block_of = [](const at::Tensor& tensor) {
    return static_cast<const char*>(tensor.data_ptr()) - 64;
  };
  const std::unique_ptr<void, decltype(&std::free)> small(std::malloc(1000), std::free);
  const at::Tensor tensor = at::empty({25'000}), other = at::empty({200'000}), large = at::empty({600'000});
  const unsigned of_tensors = arena_of(block_of(tensor)), of_large = arena_of(block_of(large));
  EXPECT_EQ(arena_of(block_of(other)), of_tensors);
  EXPECT_EQ(arena_of(block_of(at::empty({1'000'000}))), of_large);
  EXPECT_EQ((std::set{arena_of(small.get()), of_tensors, of_large}).size(), 3);
}

}  // namespace
}  // namespace kiln
