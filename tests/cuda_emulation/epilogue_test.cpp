// Products with an epilogue, counted through a cuBLASLt that computes nothing.
#include <gtest/gtest.h>

#include <utility>

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
       {EpilogueProduct::kAffineGelu, EpilogueProduct::kGradRowsGelu, EpilogueProduct::kGradWeight}) {
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

}  // namespace
}  // namespace kiln::ops
