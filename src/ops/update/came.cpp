#include "ops/update/came.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/aten.h"
#include "core/tensors.h"
#include "ops/cpu/came.h"
#include "ops/kernel_args.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"

namespace kiln::ops {

static c10::IValue mark_value(const RowsAndColumns& values) {
  return std::vector<at::Tensor>{values.rows, values.columns};
}

namespace {

constexpr int64_t kTaskElements = int64_t{1} << 17;  // elements that a thread takes at once
constexpr int64_t kElementsOfPiece = 8192;

// Divides matrices into tasks: several whole matrices, or rows of one. The division does not depend on the
// number of threads.
struct MatrixTasks {
  int64_t matrices, rows, columns;  // most of a task
  int64_t in_matrix, count;         // tasks of a matrix, and of all

  explicit MatrixTasks(at::IntArrayRef shape) : columns(shape[2]) {
    rows = std::clamp(kTaskElements / std::max<int64_t>(1, shape[2]), int64_t{1},
                      std::max<int64_t>(1, shape[1]));
    in_matrix = at::divup(shape[1], rows);
    matrices = in_matrix > 1 ? 1 : std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, rows * columns));
    count = in_matrix > 1 ? shape[0] * in_matrix : at::divup(shape[0], matrices);
  }
};

// Every other pass goes through the matrices backwards: the caches still hold the end of the pass before.
enum class Order { kForwards, kBackwards };

// The operands of a pass over the matrices of `shape`. A pass does not need those that are undefined.
struct MatrixOperands {
  at::IntArrayRef shape;
  Order order = Order::kForwards;
  at::Tensor grads{}, mean{}, weights{}, compute{};
  double scale = 1;
  RowsAndColumns roots{}, sums{};
};

void add_partials(const at::Tensor& columns, const at::Tensor& partial_sums) {
  columns.add_(partial_sums.sum(1));
}
float inverse(const at::Tensor& divisor) { return 1 / divisor.item<float>(); }

constexpr Kernel<decltype(add_partials)> kAddPartials{.cpu = add_partials};
constexpr Kernel<decltype(inverse)> kInverse{.cpu = inverse};

// Elements: where an operand's elements begin. Values: an operand's value for each row or column of the
// matrices. Both are found once for a thread, since there may be many small matrices.
struct Elements {
  explicit Elements(const at::Tensor& all)
      : begin(all.defined() ? static_cast<char*>(all.data_ptr()) : nullptr),
        size(all.defined() ? all.element_size() : 0) {}
  char* at(int64_t element) const { return begin + element * size; }
  char* begin;
  int64_t size;
};
struct Values {
  explicit Values(const at::Tensor& all)
      : begin(all.defined() ? static_cast<float*>(all.data_ptr()) : nullptr),
        stride(all.defined() ? all.stride(0) : 0) {}
  float* at(int64_t matrix, int64_t place) const { return begin ? begin + matrix * stride + place : nullptr; }
  float* begin;
  int64_t stride;
};

cpu::CameComputeWeights compute_weights(const at::Tensor& all, char* begin) {
  return {.values = begin,
          .dtype = all.defined() ? from_scalar_type(all.scalar_type()) : Dtype::kF32,
          .streams = all.defined() && all.numel() >= kStreamedElements};
}

// Calls body(part, task) for every part of every matrix. If several tasks divide a matrix, the sums over its
// columns are added in the end, in order.
template <class Body>
void for_each_part(const MatrixOperands& of, const Body& body) {
  const MatrixTasks tasks(of.shape);
  const bool partial = tasks.in_matrix > 1 && of.sums.columns.defined();
  const int64_t rows = of.shape[1], columns = of.shape[2];
  at::Tensor partial_sums;
  if (partial) partial_sums = at::zeros({of.shape[0], tasks.in_matrix, columns}, of.sums.columns.options());
  const at::Tensor& operand = of.grads.defined() ? of.grads : of.mean;
  kLoop.on(operand)(tasks.count, 1, [&](int64_t begin, int64_t end) {
    const Elements grads(of.grads), mean(of.mean), weights(of.weights), compute(of.compute);
    const Values row_roots(of.roots.rows), column_roots(of.roots.columns), row_sums(of.sums.rows),
        column_sums(of.sums.columns), task_sums(partial ? partial_sums.view({-1, columns}) : partial_sums);
    const cpu::CameRows all = {
        .columns = static_cast<size_t>(columns),
        .grads = {.dtype = of.grads.defined() ? from_scalar_type(of.grads.scalar_type()) : Dtype::kF32,
                  .scale = static_cast<float>(of.scale)},
        .compute = compute_weights(of.compute, nullptr)};
    const auto rows_of = [&](int64_t matrix, int64_t first_row, int64_t task) {
      const int64_t element = (matrix * rows + first_row) * columns;
      cpu::CameRows part = all;
      part.rows = static_cast<size_t>(std::min(tasks.rows, rows - first_row));
      part.grads.values = grads.at(element);
      part.row_roots = row_roots.at(matrix, first_row);
      part.column_roots = column_roots.at(matrix, 0);
      part.mean = reinterpret_cast<float*>(mean.at(element));
      part.weights = reinterpret_cast<float*>(weights.at(element));
      part.row_sums = row_sums.at(matrix, first_row);
      part.column_sums = partial ? task_sums.at(task, 0) : column_sums.at(matrix, 0);
      part.compute.values = compute.begin ? compute.at(element) : nullptr;
      return part;
    };
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = of.order == Order::kForwards ? i : tasks.count - 1 - i;
      if (tasks.in_matrix > 1) {
        body(rows_of(task / tasks.in_matrix, task % tasks.in_matrix * tasks.rows, task), task);
      } else {
        const int64_t last = std::min((task + 1) * tasks.matrices, of.shape[0]);
        for (int64_t matrix = task * tasks.matrices; matrix < last; ++matrix)
          body(rows_of(matrix, 0, task), task);
      }
    }
  });
  if (partial) kAddPartials.on(operand)(of.sums.columns, partial_sums);
}

at::Tensor sum_of(const std::vector<double>& sums, const at::Tensor& like) {
  return at::full({}, std::accumulate(sums.begin(), sums.end(), 0.0), like.options().dtype(at::kDouble));
}

}  // namespace

void came_add_squares(const ScaledGradients& grads, double eps, const RowsAndColumns& sums) {
  if (!computes_on_cpu(grads.values)) return reference::came_add_squares(grads, eps, sums);
  OpMark mark("kiln::came_add_squares", grads.values);
  mark.outputs(sums);
  for_each_part(
      {.shape = grads.values.sizes(), .grads = grads.values, .scale = grads.scale, .sums = sums},
      [&](const cpu::CameRows& part, int64_t) { cpu::came_add_squares(part, static_cast<float>(eps)); });
}

at::Tensor came_sum_of_squares(const ScaledGradients& grads, const RowsAndColumns& roots) {
  if (!computes_on_cpu(grads.values)) return reference::came_sum_of_squares(grads, roots);
  OpMark mark("kiln::came_sum_of_squares", grads.values, roots);
  std::vector<double> sums(static_cast<size_t>(MatrixTasks(grads.values.sizes()).count));
  for_each_part({.shape = grads.values.sizes(),
                 .order = Order::kBackwards,
                 .grads = grads.values,
                 .scale = grads.scale,
                 .roots = roots},
                [&](const cpu::CameRows& part, int64_t task) {
                  sums[static_cast<size_t>(task)] += cpu::came_sum_of_squares(part);
                });
  return sum_of(sums, grads.values);
}

void came_move_mean(const ScaledGradients& grads, const RowsAndColumns& roots, const at::Tensor& divisor,
                    const at::Tensor& mean, double beta, double eps, const RowsAndColumns& distances) {
  if (!computes_on_cpu(mean))
    return reference::came_move_mean(grads, roots, divisor, mean, beta, eps, distances);
  OpMark mark("kiln::came_move_mean", grads.values, roots, divisor, mean);
  mark.outputs(mean, distances);
  const float scale = kInverse.on(mean)(divisor);
  for_each_part({.shape = mean.sizes(),
                 .grads = grads.values,
                 .mean = mean,
                 .scale = grads.scale,
                 .roots = roots,
                 .sums = distances},
                [&](const cpu::CameRows& part, int64_t) {
                  cpu::came_move_mean(part, scale, cpu::CameAverage(beta), static_cast<float>(eps));
                });
}

void came_move_weights(const at::Tensor& weights, const at::Tensor& mean, const RowsAndColumns& roots,
                       double lr, double decay, const at::Tensor& compute) {
  if (!computes_on_cpu(mean)) return reference::came_move_weights(weights, mean, roots, lr, decay, compute);
  OpMark mark("kiln::came_move_weights", weights, mean, roots);
  mark.outputs(weights, compute);
  for_each_part({.shape = mean.sizes(),
                 .order = Order::kBackwards,
                 .mean = mean,
                 .weights = weights,
                 .compute = compute,
                 .roots = roots},
                [&](const cpu::CameRows& part, int64_t) {
                  cpu::came_move_weights(part, static_cast<float>(lr), static_cast<float>(decay));
                });
}

namespace {

// Returns elements [begin, begin + count) of the operands, which may be undefined.
cpu::CameElementRange range_of(const ScaledGradients& grads, const CameElements& e, int64_t begin,
                               int64_t count) {
  const auto from = [&](const at::Tensor& all) {
    return all.defined() ? static_cast<float*>(all.data_ptr()) + begin : nullptr;
  };
  return {.size = static_cast<size_t>(count),
          .grads = {.values = static_cast<const char*>(grads.values.const_data_ptr()) +
                              begin * grads.values.element_size(),
                    .dtype = from_scalar_type(grads.values.scalar_type()),
                    .scale = static_cast<float>(grads.scale)},
          .weights = from(e.weights),
          .mean = from(e.mean),
          .squares = from(e.squares),
          .distances = from(e.distances),
          .compute = compute_weights(
              e.compute, e.compute.defined()
                             ? static_cast<char*>(e.compute.data_ptr()) + begin * e.compute.element_size()
                             : nullptr)};
}

}  // namespace

at::Tensor came_square_elements(const ScaledGradients& grads, const at::Tensor& squares, double beta,
                                double eps) {
  if (!computes_on_cpu(squares)) return reference::came_square_elements(grads, squares, beta, eps);
  OpMark mark("kiln::came_square_elements", grads.values, squares);
  mark.outputs(squares);
  std::vector<double> sums(static_cast<size_t>(at::divup(squares.numel(), kTaskElements)));
  kLoop.on(squares)(static_cast<int64_t>(sums.size()), 1, [&](int64_t first, int64_t end) {
    for (int64_t task = first; task < end; ++task) {
      const int64_t begin = task * kTaskElements, count = std::min(kTaskElements, squares.numel() - begin);
      sums[static_cast<size_t>(task)] =
          cpu::came_square_elements(range_of(grads, {.squares = squares}, begin, count),
                                    cpu::CameAverage(beta), static_cast<float>(eps));
    }
  });
  return sum_of(sums, squares);
}

void came_move_elements(const ScaledGradients& grads, const at::Tensor& divisor, const CameElements& e) {
  if (!computes_on_cpu(e.mean)) return reference::came_move_elements(grads, divisor, e);
  OpMark mark("kiln::came_move_elements", grads.values, e.weights, e.mean, e.squares, e.distances);
  mark.outputs(e.weights, e.mean, e.distances, e.compute);
  const cpu::CameElementStep step = {.update_scale = kInverse.on(e.mean)(divisor),
                                     .mean = cpu::CameAverage(e.beta_mean),
                                     .distance = cpu::CameAverage(e.beta_distance),
                                     .eps_distance = static_cast<float>(e.eps_distance),
                                     .lr = static_cast<float>(e.lr),
                                     .decay = static_cast<float>(e.decay)};
  kLoop.on(e.mean)(e.mean.numel(), kElementsOfPiece, [&](int64_t begin, int64_t end) {
    cpu::came_move_elements(range_of(grads, e, begin, end - begin), step);
  });
}

}  // namespace kiln::ops
