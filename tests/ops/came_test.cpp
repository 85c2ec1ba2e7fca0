// CAME's passes against their composition, on whole matrices and rows of them, and on any number of threads.
#include "ops/update/came.h"

#include "ops/checks.h"

namespace kiln::ops {
namespace {

// Wide enough for several tasks; many small ones; one row, one column; nothing.
const std::vector<std::vector<int64_t>> kShapes = {{1, 300, 1000}, {2, 150, 1025}, {15'000, 3, 3},
                                                   {3, 1, 37},     {1, 40, 1},     {0, 5, 4}};

// What weights compute in beside such gradients.
at::ScalarType low_of(at::ScalarType grads) { return grads == at::kHalf ? at::kHalf : at::kBFloat16; }

// What all passes leave behind, one after another; `composed`: by the reference.
Tensors passes(const std::vector<int64_t>& shape, at::ScalarType dtype, bool composed) {
  const int64_t matrices = shape[0], rows = shape[1], columns = shape[2];
  const ScaledGradients grads{.values = randn(shape, dtype, 1), .scale = 0.3};
  const auto factors = [&](uint64_t seed) {
    return RowsAndColumns{.rows = randn({matrices, rows}, at::kFloat, seed).abs() + 0.1,
                          .columns = randn({matrices, columns}, at::kFloat, seed + 1).abs() + 0.1};
  };
  const RowsAndColumns sums = factors(2), roots = factors(4), distances = factors(6);
  const at::Tensor mean = randn(shape, at::kFloat, 8), weights = randn(shape, at::kFloat, 9),
                   divisor = at::full({}, 1.7f), compute = at::zeros(shape, low_of(dtype));
  at::Tensor squares;
  if (composed) {
    reference::came_add_squares(grads, 1e-3, sums);
    squares = reference::came_sum_of_squares(grads, roots);
    reference::came_move_mean(grads, roots, divisor, mean, 0.9, 1e-3, distances);
    reference::came_move_weights(weights, mean, roots, 0.01, 0.002, compute);
  } else {
    came_add_squares(grads, 1e-3, sums);
    squares = came_sum_of_squares(grads, roots);
    came_move_mean(grads, roots, divisor, mean, 0.9, 1e-3, distances);
    came_move_weights(weights, mean, roots, 0.01, 0.002, compute);
  }
  return {sums.rows, sums.columns, squares, mean, distances.rows, distances.columns, weights, compute};
}

Tensors passes_by_element(int64_t size, at::ScalarType dtype, bool has_distances, bool composed) {
  const ScaledGradients grads{.values = randn({size}, dtype, 1), .scale = 0.3};
  const CameElements e{.weights = randn({size}, at::kFloat, 2),
                       .mean = randn({size}, at::kFloat, 3),
                       .squares = randn({size}, at::kFloat, 4).square(),
                       .distances = has_distances ? randn({size}, at::kFloat, 5).square() : at::Tensor(),
                       .compute = has_distances ? at::zeros({size}, low_of(dtype)) : at::Tensor(),
                       .beta_mean = 0.9,
                       .beta_distance = 0.99,
                       .eps_distance = 1e-3,
                       .lr = 0.01,
                       .decay = 0.002};
  const at::Tensor divisor = at::full({}, 1.7f);
  at::Tensor sum;
  if (composed) {
    sum = reference::came_square_elements(grads, e.squares, 0.99, 1e-3);
    reference::came_move_elements(grads, divisor, e);
  } else {
    sum = came_square_elements(grads, e.squares, 0.99, 1e-3);
    came_move_elements(grads, divisor, e);
  }
  return {e.squares,
          sum,
          e.mean,
          e.weights,
          has_distances ? e.distances : e.mean,
          has_distances ? e.compute : e.mean};
}

void expect_all_close(const Tensors& actual, const Tensors& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE(i);
    const at::ScalarType dtype = expected[i].scalar_type();
    expect_close(actual[i], expected[i], tolerance_of(dtype == at::kDouble ? at::kFloat : dtype));
  }
}

TEST(Came, PassesAreTheirComposition) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& shape : kShapes) {
      SCOPED_TRACE(c10::str(shape));
      expect_all_close(passes(shape, dtype, false), passes(shape, dtype, true));
    }
    for (const int64_t size : {0, 5, 300'001})
      for (const bool has_distances : {false, true})
        expect_all_close(passes_by_element(size, dtype, has_distances, false),
                         passes_by_element(size, dtype, has_distances, true));
  }
}

// Rows of 1002 begin on aligned addresses and on others.
TEST(Came, LargeTensorsAreRoundedAsSmallOnes) {
  const at::Tensor weights = at::full({1, 1050, 1002}, 1.01f), mean = at::full({1, 1050, 1002}, 1.0f),
                   compute = at::zeros({1, 1050, 1002}, at::kBFloat16);
  const RowsAndColumns roots{.rows = at::linspace(1, 2, 1050).unsqueeze(0),
                             .columns = at::linspace(1, 2, 1002).unsqueeze(0)};
  came_move_weights(weights, mean, roots, 0.1, 0, compute);
  EXPECT_TRUE(bitwise_equal(compute, weights.to(at::kBFloat16)));
}

TEST(Came, ThreadsChangeNoBit) {
  expect_same_bits_on_threads([] {
    Tensors results = passes_by_element(300'001, at::kBFloat16, true, false);
    for (const auto& shape : kShapes)
      for (const at::Tensor& result : passes(shape, at::kFloat, false)) results.push_back(result);
    return results;
  });
}

}  // namespace
}  // namespace kiln::ops
