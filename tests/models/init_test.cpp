#include "models/parts/init.h"
#include "core/aten.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

namespace kiln {
namespace {

at::Tensor drawn(const Init& init, at::IntArrayRef shape, uint64_t seed = 1,
                 const std::string& key = "a.weight") {
  at::Tensor out = at::full(shape, std::nanf(""), at::kFloat);
  initialize(init, seed, key, out);
  return out;
}

TEST(Initialize, UniformFillsItsInterval) {
  const at::Tensor x = drawn(Init::uniform(0.5), {100003});  // not a multiple of a Philox block
  EXPECT_LE(x.abs().max().item<double>(), 0.5);
  EXPECT_GT(x.max().item<double>(), 0.499);
  EXPECT_LT(x.min().item<double>(), -0.499);
  EXPECT_NEAR(x.mean().item<double>(), 0, 4 * 0.5 / std::sqrt(3 * 100003.0));
  EXPECT_NEAR(x.std().item<double>(), 0.5 / std::sqrt(3), 2e-3);
}

TEST(Initialize, XavierBoundUsesBothFans) {
  const at::Tensor x = drawn(Init::xavier_uniform(200, 100), {100, 200});
  const double bound = std::sqrt(6.0 / 300);
  EXPECT_LE(x.abs().max().item<double>(), bound);
  EXPECT_NEAR(x.std().item<double>(), bound / std::sqrt(3), 0.02 * bound);
}

TEST(Initialize, NormalHasItsDeviation) {
  const at::Tensor x = drawn(Init::normal(0.02), {100000});
  EXPECT_NEAR(x.std().item<double>(), 0.02, 2e-4);
  EXPECT_NEAR(x.mean().item<double>(), 0, 4 * 0.02 / std::sqrt(1e5));
}

TEST(Initialize, ConstantsAreExact) {
  EXPECT_TRUE(at::equal(drawn(Init::zeros(), {3}), at::zeros({3})));
  EXPECT_TRUE(at::equal(drawn(Init::ones(), {3}), at::ones({3})));
  EXPECT_TRUE(at::equal(drawn(Init::constant(at::arange(3)), {3}), at::arange(3).to(at::kFloat)));
}

TEST(Initialize, SeedAndKeyAloneDecide) {
  for (const Init& init : {Init::uniform(1), Init::normal(1)}) {
    const at::Tensor x = drawn(init, {300000});
    EXPECT_TRUE(at::equal(x, drawn(init, {300000})));
    EXPECT_TRUE(at::equal(x.slice(0, 0, 1001), drawn(init, {1001})))
        << "a draw depends on the number of draws";
    EXPECT_FALSE(at::equal(x, drawn(init, {300000}, /*seed=*/2)));
    EXPECT_FALSE(at::equal(x, drawn(init, {300000}, 1, "b.weight")));
    const int threads = at::get_num_threads();
    at::set_num_threads(1);
    EXPECT_TRUE(at::equal(x, drawn(init, {300000})));
    at::set_num_threads(threads);
  }
}

}  // namespace
}  // namespace kiln
