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
    for (const auto& size : std::vector<std::array<int64_t, 3>>{{64, 64, 64},
                                                                {192, 64, 64},
                                                                {256, 64, 64},
                                                                {4, 384, 64},
                                                                {256, 48, 16},
                                                                {300, 128, 96},
                                                                {384, 384, 1024},
                                                                {1024, 384, 384},
                                                                {384, 1536, 512},
                                                                {64, 64, 2048},
                                                                {1024, 1024, 1024}}) {
      const int64_t m = size[0], n = size[1], k = size[2];
      const auto text = fmt::format("{} threads, {} x {} over {}", threads, m, n, k);
      const auto expect_said = [&](Product product, int64_t bytes) {
        const int64_t said = cpu::product_scratch_bytes(product, dtype, m, n, k);
        // Not all threads are in a piece at the same moment.
        const bool is_divided = cpu::product_pieces(product, dtype, m, n, k).count > 1;
        EXPECT_TRUE(is_divided ? bytes <= said && bytes * threads >= said : bytes == said)
            << text << ", product " << static_cast<int>(product) << ": " << bytes << ", said " << said;
      };
      const at::Tensor rows = randn({m, k}, dtype, 1), weight = randn({n, k}, dtype, 2),
                       bias = randn({n}, dtype, 3);
      expect_said(Product::kAffine, bytes_beside_result([&] { return affine(rows, weight, bias); }));
      const at::Tensor plain = weight.t().contiguous();  // (k, n)
      expect_said(Product::kPlain, bytes_beside_result([&] { return affine_grad_rows(rows, plain); }));
      const at::Tensor grad = rows.t().contiguous();  // (k, m)
      expect_said(Product::kTransposed,
                  bytes_beside_result([&] { return affine_grad_weight(grad, plain, {}); }));
    }
  }
}

TEST(ConvolutionScratch, CountsWholeBlocksOfChannels) {
  cpu::ConvolutionSize size{.batch = 2, .kernel_elements = 9, .in_height = 64, .in_width = 64};
  size.out_pixels = size.in_height * size.in_width;
  size.padding = 1;
  const auto forward = [&](int64_t channels) {
    size.in_channels = 64;
    size.out_channels = channels;
    return cpu::convolution_scratch_bytes(size);
  };
  const auto backward = [&](int64_t channels) {
    size.in_channels = channels;
    size.out_channels = 64;
    return cpu::convolution_grad_x_scratch_bytes(size);
  };
  EXPECT_EQ(forward(40), forward(48));
  EXPECT_LT(forward(8), forward(48));
  EXPECT_EQ(backward(40), backward(48));
  EXPECT_LT(backward(8), backward(48));
}

TEST(ProductPieces, HaveBordersThatDoNotDependOnTheThreads) {
  if (cpu_level() == CpuLevel::kAmx) GTEST_SKIP() << "products of f32 are MKL's";
  const int before = at::get_num_threads();
  const auto pieces_on = [](int threads, int64_t m, int64_t n, int64_t k) {
    at::set_num_threads(threads);
    return cpu::product_pieces(Product::kPlain, at::kFloat, m, n, k);
  };
  EXPECT_EQ(pieces_on(2, 16384, 1536, 384).count, pieces_on(3, 16384, 1536, 384).count);
  EXPECT_EQ(pieces_on(2, 16384, 1536, 384).size, pieces_on(3, 16384, 1536, 384).size);
  EXPECT_TRUE(pieces_on(2, 16384, 1536, 384).of_rows);
  EXPECT_FALSE(pieces_on(2, 1024, 4608, 2304).of_rows);
  EXPECT_EQ(pieces_on(1, 16384, 1536, 384).count, 1) << "nobody to share with";
  EXPECT_EQ(pieces_on(64, 16384, 1536, 384).count, 1) << "too few for so many threads";
  EXPECT_EQ(pieces_on(2, 1024, 1152, 384).count, 1) << "pieces would have few rows";
  at::set_num_threads(before);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ProductScratch, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace kiln::ops
