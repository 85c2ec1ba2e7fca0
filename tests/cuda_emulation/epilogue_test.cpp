// Products with an epilogue, counted through a cuBLASLt that computes nothing.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cuda_emulation/fake_cublaslt.h"
#include "ops/cuda/kernels.h"

namespace kiln::ops {
namespace {

using emulation::CublasLt;
using emulation::set_cublaslt;

std::pair<int64_t, int64_t> served_and_refused(EpilogueProduct product) {
  std::pair<int64_t, int64_t> counts;
  kiln_cuda_epilogue_counts(product, &counts.first, &counts.second);
  return counts;
}

// What the kernels answer to a product of `rows` rows. A refused shape is remembered, so each test has its
// own.
int ask(EpilogueProduct product, size_t rows) {
  EpilogueProductArgs args{};
  args.product = product;
  args.dtype = Dtype::kBF16;
  args.rows = rows;
  args.out_features = 4608;
  args.in_features = 1152;
  return kiln_cuda_epilogue_product(&args, nullptr, 0, nullptr);
}

TEST(EpilogueProducts, AreCountedProductByProduct) {
  for (const auto product :
       {EpilogueProduct::kAffineGelu, EpilogueProduct::kGradRowsGelu, EpilogueProduct::kGradWeight,
        EpilogueProduct::kAffine, EpilogueProduct::kGradRows}) {
    const auto [served, refused] = served_and_refused(product);
    set_cublaslt(CublasLt::kServes);
    EXPECT_EQ(ask(product, 101), 0);
    EXPECT_EQ(ask(product, 101), 0);
    set_cublaslt(CublasLt::kHasNone);
    EXPECT_EQ(ask(product, 102), int{kEpilogueNotServed});
    set_cublaslt(CublasLt::kRefusesToStart);
    EXPECT_EQ(ask(product, 103), int{kEpilogueNotServed});
    EXPECT_EQ(served_and_refused(product), std::pair(served + 2, refused + 2));
  }
}

TEST(EpilogueProducts, AreChosenOnceForAShape) {
  set_cublaslt(CublasLt::kServes);
  const int before = emulation::num_choices();
  for (int i = 0; i < 3; ++i) ask(EpilogueProduct::kAffineGelu, 104);
  EXPECT_EQ(emulation::num_choices(), before + 1);
}

TEST(EpilogueProducts, TheNthAlgorithmIsAnotherChoice) {
  set_cublaslt(CublasLt::kServes);
  for (const int nth : {0, 3, 0}) {
    kiln_cuda_take_epilogue_algorithm(nth);
    EXPECT_EQ(ask(EpilogueProduct::kGradWeight, 105), 0);
    EXPECT_EQ(emulation::last_algorithm(), nth);
  }
}

std::vector<ProductChoice> choices_of(size_t rows) {
  std::vector<ProductChoice> all(kiln_cuda_product_choices(nullptr, 0));
  kiln_cuda_product_choices(all.data(), all.size());
  std::erase_if(all, [&](const ProductChoice& choice) { return choice.n != rows; });
  return all;
}

class TimedProducts : public ::testing::Test {
 protected:
  void SetUp() override {
    set_cublaslt(CublasLt::kServes);
    kiln_cuda_take_epilogue_algorithm(kFastestAlgorithm);
    emulation::set_milliseconds({5, 4, -1, 3, 9, 2, 6, 7});
  }
  void TearDown() override {
    kiln_cuda_take_epilogue_algorithm(0);
    emulation::set_milliseconds({1, 1, 1, 1, 1, 1, 1, 1});
    emulation::set_recording(false);
  }
};

// All are timed at the first product; one that refuses to start is left out. From then on the shape is asked
// for once and started once.
TEST_F(TimedProducts, TheFastestIsTakenForAShape) {
  EXPECT_EQ(ask(EpilogueProduct::kAffine, 201), 0);
  EXPECT_EQ(emulation::last_algorithm(), 5);
  emulation::set_milliseconds({1, 1, 1, 1, 1, 9, 1, 1});
  const int choices = emulation::num_choices(), products = emulation::num_products();
  EXPECT_EQ(ask(EpilogueProduct::kAffine, 201), 0);
  EXPECT_EQ(emulation::last_algorithm(), 5);
  EXPECT_EQ(emulation::num_choices(), choices);
  EXPECT_EQ(emulation::num_products(), products + 1);
  ASSERT_EQ(choices_of(201).size(), 1u);
  EXPECT_FLOAT_EQ(choices_of(201)[0].microseconds, 2000);
  EXPECT_FLOAT_EQ(choices_of(201)[0].first_microseconds, 5000);
}

TEST_F(TimedProducts, AChoiceThatWasKeptIsTakenUntimed) {
  EXPECT_EQ(ask(EpilogueProduct::kGradRows, 202), 0);
  ProductChoice kept = choices_of(202).at(0);
  kept.n = 203;
  kept.algorithm[0] = 7;
  kiln_cuda_set_product_choice(&kept);
  const int choices = emulation::num_choices(), products = emulation::num_products();
  EXPECT_EQ(ask(EpilogueProduct::kGradRows, 203), 0);
  EXPECT_EQ(emulation::last_algorithm(), 7);
  EXPECT_EQ(emulation::num_choices(), choices);
  EXPECT_EQ(emulation::num_products(), products + 1);
}

// Nothing can be timed while a graph is recorded: the first proposal is taken, and is no choice.
TEST_F(TimedProducts, ARecordedProductIsNotTimed) {
  emulation::set_recording(true);
  EXPECT_EQ(ask(EpilogueProduct::kAffine, 204), 0);
  EXPECT_EQ(emulation::last_algorithm(), 0);
  EXPECT_TRUE(choices_of(204).empty());
  emulation::set_recording(false);
  EXPECT_EQ(ask(EpilogueProduct::kAffine, 204), 0);
  emulation::set_recording(true);
  EXPECT_EQ(ask(EpilogueProduct::kAffine, 204), 0);
  EXPECT_EQ(emulation::last_algorithm(), 5);
}

TEST_F(TimedProducts, AShapeThatNoneServesIsRefused) {
  emulation::set_milliseconds({-1, -1, -1, -1, -1, -1, -1, -1});
  EXPECT_EQ(ask(EpilogueProduct::kAffine, 205), int{kEpilogueNotServed});
  EXPECT_TRUE(choices_of(205).empty());
}

}  // namespace
}  // namespace kiln::ops
