#include "optim/came_shape.h"

namespace kiln {

namespace {

// True if Sana's variant sees the tensor as one matrix with a row for every output channel.
bool is_matrix_to_sana(const std::vector<int64_t>& shape) {
  return shape.size() == 2 || (shape.size() == 4 && shape[2] == 1 && shape[3] == 1);
}

// Keeps a mean for every element: each one is a matrix by itself.
CameShape by_element(const std::vector<int64_t>& shape, bool is_factored) {
  int64_t numel = 1;
  for (const int64_t extent : shape) numel *= extent;
  return {.matrices = numel, .is_factored = is_factored, .column_shape = shape};
}

}  // namespace

CameShape came_shape(CameVariant variant, const std::vector<int64_t>& shape) {
  const bool is_sana = variant == CameVariant::kSana;
  if (is_sana ? !is_matrix_to_sana(shape) : shape.size() < 2) return by_element(shape, false);
  const std::vector<int64_t> as_matrices = is_sana ? std::vector<int64_t>{shape[0], shape[1]} : shape;
  const int64_t rows = as_matrices[as_matrices.size() - 2], columns = as_matrices.back();
  CameShape seen = by_element(as_matrices, true);
  seen.column_shape.erase(seen.column_shape.end() - 2);
  if (rows == 1) return seen;
  seen.matrices = seen.matrices == 0 ? 0 : seen.matrices / (rows * columns);
  seen.rows = rows;
  seen.columns = columns;
  seen.row_shape.assign(as_matrices.begin(), as_matrices.end() - 1);
  return seen;
}

}  // namespace kiln
