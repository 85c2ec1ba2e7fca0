// The scratch that oneDNN takes inside a matrix product, against what the allocator sees.
#include "core/allocations.h"
#include "core/cpu_level.h"
#include "core/tensors.h"
#include "ops/checks.h"
#include "ops/cpu/onednn_scratch.h"
#include "ops/matrix_products.h"

namespace kiln::ops {
namespace {

using cpu::Product;

// Bytes at the peak of f beside its result, the second time: the first one compiles oneDNN's kernels.
int64_t bytes_beside_result(const std::function<at::Tensor()>& f) {
  f();
  const int64_t before = live_cpu_bytes().live;
  reset_peak_cpu_bytes();
  const at::Tensor result = f();
  return live_cpu_bytes().peak - before - static_cast<int64_t>(result.nbytes());
}

class ProductScratch : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  static void SetUpTestSuite() { install_tracking_cpu_allocator(); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_P(ProductScratch, IsWhatTheAllocatorSees) {
  const at::ScalarType dtype = GetParam();
  if (dtype == at::kBFloat16 && (cpu_product_dtype(dtype) != dtype || cpu_level() == CpuLevel::kAmx))
    GTEST_SKIP() << "bf16 is only stored, or oneDNN's blocks depend on the caches";
  at::globalContext().setFloat32MatmulPrecision("medium");  // as kiln does: oneDNN's products in f32
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{{64, 64, 64},
                                                                     {192, 64, 64},
                                                                     {256, 64, 64},
                                                                     {4, 384, 64},
                                                                     {256, 48, 16},
                                                                     {300, 128, 96},
                                                                     {384, 384, 1024},
                                                                     {1024, 384, 384},
                                                                     {384, 1536, 512},
                                                                     {64, 64, 2048}}) {
      const auto text = fmt::format("{} threads, {} x {} over {}", threads, m, n, k);
      const at::Tensor rows = randn({m, k}, dtype, 1), weight = randn({n, k}, dtype, 2),
                       bias = randn({n}, dtype, 3);
      EXPECT_EQ(bytes_beside_result([&] { return affine(rows, weight, bias); }),
                cpu::product_scratch_bytes(Product::kAffine, dtype, m, n, k))
          << "affine, " << text;
      const at::Tensor plain = weight.t().contiguous();  // (k, n)
      EXPECT_EQ(bytes_beside_result([&] { return affine_grad_rows(rows, plain); }),
                cpu::product_scratch_bytes(Product::kPlain, dtype, m, n, k))
          << "plain, " << text;
      const at::Tensor grad = rows.t().contiguous();  // (k, m)
      EXPECT_EQ(bytes_beside_result([&] { return affine_grad_weight(grad, plain, {}); }),
                cpu::product_scratch_bytes(Product::kTransposed, dtype, m, n, k))
          << "transposed, " << text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ProductScratch, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace kiln::ops
