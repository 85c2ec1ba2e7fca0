// One update by CAME of a unit, or of a rank's slice of it. Means over rows, columns and tensors that a slice
// holds parts of are summed over the slices.
#pragma once
#include <functional>
#include <vector>

#include "optim/came_shape.h"
#include "optim/optimizer.h"

namespace kiln {

class CameUpdate {
 public:
  // `buffers`: of slice.moments. REQUIRES: all outlive this.
  CameUpdate(const CameOptions& options, OptimizerSlice& slice, const std::vector<StateBuffer>& buffers,
             const OptimizerStep& step);
  void run();

 private:
  // Elements of a slot that are a block of rows and columns in each of some matrices.
  struct Piece {
    int64_t begin = 0;  // in the slice
    int64_t matrix = 0, matrices = 1, row = 0, rows = 1, column = 0, columns = 1;
  };
  // Means over the rows and over the columns of the matrices that the slice touches.
  struct Factors {
    at::Tensor rows{}, columns{};  // (matrices, rows) f32, undefined without; (matrices, columns)
  };
  // A matrix that more than one slice touches.
  struct CutMatrix {
    int64_t matrix = 0;  // as Piece::matrix; not in [0, matrices) where this slice does not touch it
    int64_t sums = 0;    // where its sums are among those of all cut matrices: of its rows, then its columns
  };
  struct Slot {
    CameShape shape;
    int64_t numel = 0;     // of the whole tensor
    int64_t matrices = 0;  // that the slice touches
    std::vector<Piece> pieces{};
    Factors square{}, distance{};
    std::vector<CutMatrix> cut{};
  };
  using PieceValues = std::function<at::Tensor(const Piece&)>;

  Slot slot_of(size_t index);
  Factors factors_of(const Slot& slot, size_t index, size_t rows, size_t columns) const;
  at::Tensor of_piece(const at::Tensor& flat, const Piece& piece) const;
  at::Tensor gradient(const Piece& piece) const;
  static Factors reciprocal_roots(const Factors& factors);
  static at::Tensor scaled(const Factors& roots, const Piece& piece, const at::Tensor& values);

  void run_divided(const std::vector<Slot>& slots);
  // The passes: between them sums go over the slices.
  void average_squares(const Slot& slot);
  std::vector<at::Tensor> updates_of(const Slot& slot) const;               // by piece, not clipped yet
  at::Tensor sum_of_squares(const std::vector<at::Tensor>& updates) const;  // 0-d f64
  void average_updates(const Slot& slot, const std::vector<at::Tensor>& updates,
                       const at::Tensor& sum_of_squares);
  void move(const Slot& slot);

  void average(const Slot& slot, const Factors& factors, double beta, const PieceValues& values);
  void average_cut(const std::vector<Slot>& slots, Factors Slot::*factors, double beta);

  const CameOptions& options_;
  OptimizerSlice& slice_;
  const std::vector<StateBuffer>& buffers_;
  const OptimizerStep& step_;
  std::vector<std::vector<StateRun>> runs_;  // by buffer, by slot
  int64_t num_cut_sums_ = 0;
  at::Tensor cut_sums_;  // (num_cut_sums) f32
};

}  // namespace kiln
