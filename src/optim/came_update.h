// One update by CAME of a unit or of a rank's slice of it. If a slice holds only part of a row, column or
// tensor, its means are summed over the slices.
#pragma once
#include <functional>
#include <vector>

#include "ops/update/came.h"
#include "optim/came_shape.h"
#include "optim/optimizer.h"

namespace kiln {

class CameUpdate {
 public:
  // `buffers` describes slice.moments. REQUIRES: all outlive this.
  CameUpdate(const CameOptions& options, OptimizerSlice& slice, const std::vector<StateBuffer>& buffers,
             const OptimizerStep& step);
  void run();

 private:
  // A block of rows and columns, the same in each of some matrices of a slot.
  struct Piece {
    int64_t begin = 0;  // in the slice
    int64_t matrix = 0, matrices = 1, row = 0, rows = 1, column = 0, columns = 1;
  };
  // A matrix that more than one slice touches.
  struct CutMatrix {
    int64_t matrix = 0;  // as Piece::matrix; outside [0, matrices) if this slice does not touch it
    int64_t sums = 0;    // where its sums begin in cut_sums_: of its rows, then of its columns
  };
  struct Slot {
    CameShape shape;
    int64_t numel = 0;     // of the whole tensor
    int64_t matrices = 0;  // that the slice touches
    std::vector<Piece> pieces{};
    // Means of the matrices that the slice touches; without rows, of elements.
    ops::RowsAndColumns square{}, distance{};
    std::vector<CutMatrix> cut{};
    at::Tensor sum_of_squares{};  // of this slice's updates, 0-d f64
  };

  Slot slot_of(size_t index);
  ops::RowsAndColumns factors_of(const Slot& slot, size_t index, size_t rows, size_t columns) const;
  at::Tensor of_piece(const at::Tensor& flat, const Piece& piece) const;
  static ops::RowsAndColumns of_piece(const ops::RowsAndColumns& all, const Piece& piece);
  ops::ScaledGradients gradients(const Piece& piece) const;
  ops::ScaledGradients elements(const Slot& slot) const;
  static ops::RowsAndColumns reciprocal_roots(const ops::RowsAndColumns& factors);

  void run_divided(std::vector<Slot>& slots);
  // The passes. Between them, sums are exchanged over the slices.
  void average_squares(Slot& slot);
  void sum_updates(Slot& slot);
  void average_updates(const Slot& slot, const at::Tensor& sum_of_squares);
  void move_elements(const Slot& slot, const at::Tensor& divisor);
  void move(const Slot& slot);

  void average(const Slot& slot, const ops::RowsAndColumns& factors, double beta,
               const std::function<void(const Piece&, const ops::RowsAndColumns&)>& add);
  void average_cut(const std::vector<Slot>& slots, ops::RowsAndColumns Slot::*factors, double beta);

  const CameOptions& options_;
  OptimizerSlice& slice_;
  const std::vector<StateBuffer>& buffers_;
  const OptimizerStep& step_;
  const bool copies_;  // true on a CPU: the pass that moves the master writes the compute weights
  std::vector<std::vector<StateRun>> runs_;  // by buffer, by slot
  int64_t num_cut_sums_ = 0;
  at::Tensor cut_sums_;  // (num_cut_sums) f32
};

}  // namespace kiln
