#include <cmath>
#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

struct State {
  at::Tensor master, grad, exp_avg, exp_avg_sq, compute;
  std::vector<EmaSlice> emas;

  template <class Change>
  State each(const Change& change) const {
    State s = {change(master), change(grad), change(exp_avg), change(exp_avg_sq), change(compute), {}};
    for (const EmaSlice& ema : emas) s.emas.push_back({change(ema.weights), ema.decay});
    return s;
  }
  State slice(int64_t begin, int64_t end) const {
    return each([&](const at::Tensor& tensor) { return tensor.slice(0, begin, end); });
  }
  State clone() const {
    return each([](const at::Tensor& tensor) { return tensor.clone(); });
  }
  Tensors results() const {
    Tensors all = {master, exp_avg, exp_avg_sq, compute};
    for (const EmaSlice& ema : emas) all.push_back(ema.weights);
    return all;
  }
  void run(const AdamWStep& options) {
    adamw_ema_step_(master, grad, exp_avg, exp_avg_sq, emas, &compute, options);
  }
};

State make_state(int64_t n, at::ScalarType grad_dtype = at::kFloat,
                 at::ScalarType compute_dtype = at::kBFloat16) {
  return {randn({n}, at::kFloat, 1),
          randn({n}, grad_dtype, 2),
          randn({n}, at::kFloat, 3) * 0.1,
          randn({n}, at::kFloat, 4).square() * 0.01,
          at::zeros({n}, compute_dtype),
          {{randn({n}, at::kFloat, 5), 0.9999}, {randn({n}, at::kFloat, 6), 0.5}}};
}

const AdamWStep kOptions = adamw_options(0.25, 7);

// The formulas of the paper in f64.
struct Exact {
  at::Tensor master, exp_avg, exp_avg_sq;
  std::vector<at::Tensor> emas;
};
Exact exact_step(const State& s, const AdamWStep& o) {
  const at::Tensor g = s.grad.to(at::kDouble) * o.grad_scale;
  Exact r;
  r.exp_avg = s.exp_avg.to(at::kDouble) * o.beta1 + g * (1 - o.beta1);
  r.exp_avg_sq = s.exp_avg_sq.to(at::kDouble) * o.beta2 + g * g * (1 - o.beta2);
  const at::Tensor m = r.exp_avg / (1 - std::pow(o.beta1, o.step));
  const at::Tensor v = r.exp_avg_sq / (1 - std::pow(o.beta2, o.step));
  r.master = s.master.to(at::kDouble) * (1 - o.lr * o.weight_decay) - o.lr * m / (v.sqrt() + o.eps);
  for (const EmaSlice& ema : s.emas) {
    r.emas.push_back(ema.weights.to(at::kDouble) * ema.decay + r.master * (1 - ema.decay));
  }
  return r;
}

TEST(AdamwEmaStep, MatchesTheFormulasInF64) {
  for (auto grad_dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int64_t n : {1, 7, 16, 33, 1000, 20001}) {
      State s = make_state(n, grad_dtype);
      const Exact expected = exact_step(s, kOptions);
      s.run(kOptions);
      expect_close(s.master, expected.master, 2e-7);
      expect_close(s.exp_avg, expected.exp_avg, 2e-7);
      expect_close(s.exp_avg_sq, expected.exp_avg_sq, 2e-7);
      for (size_t k = 0; k < s.emas.size(); ++k) expect_close(s.emas[k].weights, expected.emas[k], 2e-7);
    }
  }
}

TEST(AdamwEmaStep, DisplacementOverStepsMatchesTheReference) {
  State fused = make_state(5000), composed = fused.clone();
  const at::Tensor start = fused.master.clone();
  AdamWStep options = kOptions;
  for (options.step = 1; options.step <= 5; ++options.step) {
    fused.grad = composed.grad = randn({5000}, at::kFloat, 10 + options.step);
    fused.run(options);
    reference::adamw_ema_step_(composed.master, composed.grad, composed.exp_avg, composed.exp_avg_sq,
                               composed.emas, &composed.compute, options);
  }
  expect_close(fused.master - start, composed.master - start, 1e-4);
}

TEST(AdamwEmaStep, AnySplitGivesTheSameBits) {
  const int64_t n = 40000;
  State whole = make_state(n, at::kBFloat16), parts = whole.clone();
  whole.run(kOptions);
  const std::vector<int64_t> cuts = {0, 1, 3, 19, 4096, 4099, 20000, 39999, n};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) parts.slice(cuts[i], cuts[i + 1]).run(kOptions);
  expect_same_bits(whole.results(), parts.results());
}

TEST(AdamwEmaStep, ThreadCountDoesNotMatter) {
  expect_same_bits_on_threads([] {
    State state = make_state(100003);
    state.run(kOptions);
    return state.results();
  });
}

TEST(AdamwEmaStep, ComputeWeightsAreTheMasterRoundedToEven) {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    State s = make_state(3001, at::kFloat, dtype);
    s.run(kOptions);
    EXPECT_TRUE(bitwise_equal(s.compute, s.master.to(dtype)));
    // Exact ties, subnormals and extremes of every exponent: grad and decay zero leave the master as it is.
    AdamWStep still = kOptions;
    still.lr = 0;
    s.master = at::arange(0, 3001, at::kInt).mul(0x15b7f1).bitwise_and(0x7f7fffff).view(at::kFloat);
    s.master.slice(0, 0, 200).copy_((at::arange(0, 200, at::kInt).mul(0x8000) + 0x3f800000).view(at::kFloat));
    s.grad.zero_();
    s.exp_avg.zero_();
    s.run(still);
    EXPECT_TRUE(bitwise_equal(s.compute, s.master.to(dtype)));
  }
}

// Long ranges are stored around the caches, but where they begin between vectors.
TEST(AdamwEmaStep, LongRangesGiveTheBitsOfShortOnes) {
  constexpr int64_t kSize = (int64_t{1} << 20) + 77;
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    for (int64_t begin : {0, 1}) {
      State whole = make_state(kSize + begin, at::kBFloat16, dtype), part = whole.slice(begin, kSize + begin);
      part.run(kOptions);
      EXPECT_TRUE(bitwise_equal(part.compute, part.master.to(dtype))) << begin;
      EXPECT_EQ(whole.compute.slice(0, 0, begin).count_nonzero().item<int64_t>(), 0);
    }
  }
  at::set_num_threads(threads);
}

TEST(AdamwEmaStep, WithoutEmaAndComputeWeights) {
  State s = make_state(100), full = s.clone();
  std::vector<EmaSlice> none;
  adamw_ema_step_(s.master, s.grad, s.exp_avg, s.exp_avg_sq, none, nullptr, kOptions);
  full.run(kOptions);
  EXPECT_TRUE(bitwise_equal(s.master, full.master));
}

// d e + (1 - d) p with d = 0.9999 rounded to f32 would shrink a converged average by 2e-8 a step.
TEST(AdamwEmaStep, ConvergedAverageStays) {
  State s = make_state(64);
  s.emas = {{s.master.clone(), 0.9999}};
  AdamWStep still = kOptions;
  still.lr = 0;
  for (int i = 0; i < 1000; ++i) s.run(still);
  EXPECT_TRUE(bitwise_equal(s.emas[0].weights, s.master));
}

TEST(AdamwEmaStep, NonFiniteGradientReachesItsElementAlone) {
  State s = make_state(40);
  s.grad[21] = std::numeric_limits<float>::quiet_NaN();
  s.run(kOptions);
  EXPECT_EQ(s.master.isnan().sum().item<int64_t>(), 1);
  EXPECT_TRUE(s.master[21].isnan().item<bool>() && s.compute[21].isnan().item<bool>());
}

TEST(AdamwEmaStep, MetaTouchesNothing) {
  const auto meta = at::TensorOptions(at::kMeta);
  at::Tensor master = at::empty({8}, meta), grad = at::empty({8}, meta.dtype(at::kBFloat16));
  at::Tensor m = at::empty({8}, meta), v = at::empty({8}, meta),
             compute = at::empty({8}, meta.dtype(at::kBFloat16));
  std::vector<EmaSlice> emas = {{at::empty({8}, meta), 0.9}};
  EXPECT_NO_THROW(adamw_ema_step_(master, grad, m, v, emas, &compute, kOptions));
}

TEST(AdamwEmaStep, NamesWhatIsWrong) {
  const auto message = [](State s, AdamWStep options = kOptions) {
    return message_of([&] { s.run(options); });
  };
  State s = make_state(8);
  s.exp_avg = at::zeros({7});
  EXPECT_THAT(message(s), HasSubstr("[adamw_ema_step_] exp_avg must be flat and dense with 8 elements"));
  s = make_state(8);
  s.master = s.master.to(at::kBFloat16);
  EXPECT_THAT(message(s), HasSubstr("master must be f32"));
  s = make_state(8, at::kDouble);
  EXPECT_THAT(message(s), HasSubstr("grad must be f32, bf16 or fp16"));
  EXPECT_THAT(message(make_state(8, at::kFloat, at::kFloat)),
              HasSubstr("compute_weights must be bf16 or fp16"));
  AdamWStep zero = kOptions;
  zero.step = 0;
  EXPECT_THAT(message(make_state(8), zero), HasSubstr("step counts from 1"));
}

TEST(SumOfSquares, MatchesF64) {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int64_t n : {0, 1, 15, 17, 4097, 100003}) {
      const at::Tensor g = randn({n}, dtype, 1);
      const double expected = g.to(at::kDouble).square().sum().item<double>();
      const at::Tensor sum = sum_of_squares(g);
      EXPECT_EQ(sum.scalar_type(), at::kDouble);
      EXPECT_EQ(sum.dim(), 0);
      EXPECT_NEAR(sum.item<double>(), expected, 1e-13 * expected);
    }
  }
}

TEST(SumOfSquares, DoesNotOverflowF32) {
  EXPECT_DOUBLE_EQ(sum_of_squares(at::full({32}, std::ldexp(1.0, 100), at::kFloat)).item<double>(),
                   std::ldexp(32.0, 200));
}

TEST(SumOfSquares, ThreadCountDoesNotMatter) {
  expect_same_bits_on_threads([] { return Tensors{sum_of_squares(randn({1000003}, at::kFloat, 1))}; });
}

TEST(SumOfSquares, NonFiniteValuesPropagate) {
  at::Tensor g = at::ones({100}, at::kHalf);
  g[99] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(sum_of_squares(g).isinf().item<bool>());
  g[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(sum_of_squares(g).isnan().item<bool>());
  EXPECT_TRUE(sum_of_squares(at::empty({4}, at::TensorOptions(at::kMeta))).is_meta());
}

}  // namespace
}  // namespace kiln::ops
