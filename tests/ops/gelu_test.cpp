#include "ops/gelu.h"

#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

at::Tensor forward(const at::Tensor& in) {
  at::Tensor out = at::empty_like(in);
  gelu_tanh_forward(in, out);
  return out;
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& in) {
  at::Tensor grad_in = at::empty_like(in);
  gelu_tanh_backward(grad, in, grad_in);
  return grad_in;
}

// Every finite value of a 16-bit type.
at::Tensor all_values(at::ScalarType dtype) {
  const at::Tensor values = at::arange(0, 65536, at::kInt).to(at::kShort).view(dtype);
  return values.masked_select(values.isfinite());
}

at::Tensor exact(const at::Tensor& in) { return at::gelu(in.to(at::kDouble), "tanh"); }
at::Tensor exact_slope(const at::Tensor& in) {
  const at::Tensor wide = in.to(at::kDouble);
  return at::gelu_backward(at::ones_like(wide), wide, "tanh");
}

// Where the formula in f64 itself cancels (x below -5) results are below 1e-6 of x: an absolute term covers
// them.
TEST(GeluTanh, F32IsWithinOnePartInAMillion) {
  const at::Tensor x =
      at::cat({at::linspace(-12, 12, 100003, at::kFloat), at::logspace(-30, 0, 1001, 10, at::kFloat)});
  const at::Tensor error = (forward(x).to(at::kDouble) - exact(x)).abs();
  EXPECT_LE((error - (exact(x).abs() * 1e-6 + 2e-9)).max().item<double>(), 0);
  const at::Tensor slope_error = (backward(at::ones_like(x), x).to(at::kDouble) - exact_slope(x)).abs();
  EXPECT_LE((slope_error - 1e-6).max().item<double>(), 0);
}

TEST(GeluTanh, EveryBf16AndFp16ValueIsCorrectlyRounded) {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = all_values(dtype);
    const at::Tensor got = forward(x).to(at::kDouble), expected = exact(x);
    const at::Tensor rounded = expected.to(at::kFloat).to(dtype).to(at::kDouble);
    // A result next to a tie may fall to its other side: a few of the 64,000.
    EXPECT_LE((got != rounded).logical_and(expected.abs() > 1e-7).sum().item<int64_t>(), 8);
    const double ulp = dtype == at::kBFloat16 ? 1.0 / 128 : 1.0 / 1024;
    EXPECT_LE(((got - expected).abs() - expected.abs() * ulp - 1e-7).max().item<double>(), 0);
    const at::Tensor slope = backward(at::ones_like(x), x).to(at::kDouble), slope_expected = exact_slope(x);
    EXPECT_LE(((slope - slope_expected).abs() - slope_expected.abs() * ulp - 1e-6).max().item<double>(), 0);
  }
}

TEST(GeluTanh, TheNumberOfThreadsDoesNotMatter) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = randn({100'003}, dtype, 1), grad = randn({100'003}, dtype, 2);
    expect_same_bits_on_threads([&] { return Tensors{forward(x), backward(grad, x)}; });
  }
}

TEST(GeluTanh, RaggedSizesAndInPlaceGradients) {
  for (int64_t n : {0, 1, 7, 15, 16, 17, 72, 384, 1152, 40000}) {
    const at::Tensor x = randn({n}, at::kFloat, 1), grad = randn({n}, at::kFloat, 2);
    expect_close(forward(x), exact(x), 1e-6, 1e-7);
    const at::Tensor expected = at::gelu_backward(grad.to(at::kDouble), x.to(at::kDouble), "tanh");
    expect_close(backward(grad, x), expected, 1e-6, 1e-7);
    at::Tensor in_place = grad.clone();
    gelu_tanh_backward(in_place, x, in_place);
    EXPECT_TRUE(bitwise_equal(in_place, backward(grad, x)));
  }
}

TEST(GeluTanh, WritesNothingBeyondTheEnd) {
  at::Tensor buffer = at::full({64}, 5, at::kBFloat16);
  at::Tensor out = buffer.narrow(0, 0, 19);
  gelu_tanh_forward(randn({19}, at::kBFloat16), out);
  EXPECT_TRUE((buffer.narrow(0, 19, 45) == 5).all().item<bool>());
}

TEST(GeluTanh, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = at::tensor({inf, nan, 1e4f, -1e4f, 0.0f}).to(dtype);
    const at::Tensor y = forward(x).to(at::kFloat), slope = backward(at::ones_like(x), x).to(at::kFloat);
    for (const at::Tensor& result : {y, slope}) EXPECT_TRUE(result[1].isnan().item<bool>());
    const float values[] = {inf, nan, x[2].item<float>(), 0, 0}, slopes[] = {1, nan, 1, 0, 0.5};
    for (const int i : {0, 2, 3, 4}) {
      EXPECT_EQ(y[i].item<float>(), values[i]) << i;
      EXPECT_NEAR(slope[i].item<float>(), slopes[i], i == 3 ? 1e-30 : 0) << i;
    }
    EXPECT_TRUE(backward(at::full({1}, nan, dtype), at::ones({1}, dtype)).isnan().item<bool>());
  }
}

TEST(GeluTanh, F64AndMetaGoTheirWay) {
  const at::Tensor x = randn({5, 3});
  expect_close(forward(x), exact(x), 1e-15);
  EXPECT_EQ(forward(at::empty({4, 6}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16))).scalar_type(),
            at::kBFloat16);
}

// geglu

at::Tensor geglu_of(const Tensors& in) { return geglu(in[0]); }

TEST(Geglu, IsTheReferenceWithItsGradient) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const int64_t width : {1, 7, 8, 17, 72, 5000}) {
      SCOPED_TRACE(::testing::Message() << dtype << " " << width);
      expect_equals_reference(geglu_of, [](const Tensors& in) { return reference::geglu(in[0]); },
                              {randn({3, 2, 2 * width}, dtype, 1) * 3}, {.gradients = 2});
    }
}

TEST(Geglu, F32IsWithinTwoPartsInAMillion) {
  const at::Tensor gate =
      at::cat({at::linspace(-12, 12, 100003, at::kFloat), at::logspace(-30, 0, 1001, 10, at::kFloat)});
  const at::Tensor h = at::stack({at::ones_like(gate), gate}, 1), wide = gate.to(at::kDouble);
  const at::Tensor expected = at::gelu(wide), error = (geglu(h).flatten().to(at::kDouble) - expected).abs();
  EXPECT_LE((error - (expected.abs() * 2e-6 + 2e-9)).max().item<double>(), 0);
  const at::Tensor grad = geglu_backward(at::ones({gate.size(0), 1}), h).to(at::kDouble);
  EXPECT_TRUE(bitwise_equal(grad.select(1, 0).to(at::kFloat), geglu(h).flatten()));
  const at::Tensor slope = at::gelu_backward(at::ones_like(wide), wide);
  EXPECT_LE((grad.select(1, 1) - slope).abs().max().item<double>(), 1e-6);
}

TEST(Geglu, TheNumberOfThreadsDoesNotMatter) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor h = randn({301, 2 * 333}, dtype, 1), grad = randn({301, 333}, dtype, 2);
    expect_same_bits_on_threads([&] { return Tensors{geglu(h), geglu_backward(grad, h)}; });
  }
}

TEST(Geglu, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor gate = at::tensor({inf, 1e4f, -1e4f, 0.0f, nan}).to(dtype),
                     h = at::stack({at::ones_like(gate), gate}, 1);
    const at::Tensor y = geglu(h).flatten().to(at::kFloat),
                     slope = geglu_backward(at::ones({5, 1}, h.options()), h).select(1, 1).to(at::kFloat);
    EXPECT_EQ(y[0].item<float>(), inf);
    const float values[] = {gate[1].item<float>(), 0, 0}, slopes[] = {1, 1, 0, 0.5};
    for (const int i : {0, 1, 2}) EXPECT_NEAR(y[i + 1].item<float>(), values[i], 1e-30) << i;
    for (const int i : {0, 1, 2, 3}) EXPECT_NEAR(slope[i].item<float>(), slopes[i], 1e-6) << i;
    for (const at::Tensor& result : {y, slope}) EXPECT_TRUE(result[4].isnan().item<bool>());
  }
}

}  // namespace
}  // namespace kiln::ops
