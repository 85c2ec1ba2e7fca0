#include "optim/came_update.h"

#include <algorithm>
#include <utility>

#include "core/aten.h"
#include "ops/kernels.h"

namespace kiln {

namespace {

// factor = beta * factor + (1 - beta) * mean
void move_average(const at::Tensor& factor, const at::Tensor& mean, double beta) {
  factor.mul_(beta).add_(mean, 1 - beta);
}

}  // namespace

CameUpdate::CameUpdate(const CameOptions& options, OptimizerSlice& slice,
                       const std::vector<StateBuffer>& buffers, const OptimizerStep& step)
    : options_(options),
      slice_(slice),
      buffers_(buffers),
      step_(step),
      copies_(slice.compute_weights && ops::computes_on_cpu(slice.master)) {
  for (const StateBuffer& buffer : buffers_)
    runs_.push_back(state_runs(buffer, *slice_.layout, slice_.offset, slice_.offset + slice_.master.numel()));
}

void CameUpdate::run() {
  at::NoGradGuard no_grad;
  std::vector<Slot> slots;
  for (size_t i = 0; i < slice_.layout->slots.size(); ++i) slots.push_back(slot_of(i));
  if (slice_.sum)
    run_divided(slots);
  else
    for (Slot& slot : slots) {
      average_squares(slot);
      sum_updates(slot);
      average_updates(slot, slot.sum_of_squares);
      move(slot);
    }
  if (copies_)
    follow_master_between_slots(slice_);
  else
    slice_.follow_master();
}

// Takes all slots through each pass, then sums over the slices.
void CameUpdate::run_divided(std::vector<Slot>& slots) {
  cut_sums_ = at::zeros({num_cut_sums_}, slice_.master.options());
  for (Slot& slot : slots) average_squares(slot);
  average_cut(slots, &Slot::square, options_.beta2);
  std::vector<at::Tensor> squares;
  for (Slot& slot : slots) {
    sum_updates(slot);
    squares.push_back(slot.sum_of_squares);
  }
  at::Tensor sums = at::stack(squares);
  slice_.sum(sums);
  cut_sums_.zero_();
  for (size_t i = 0; i < slots.size(); ++i) average_updates(slots[i], sums[static_cast<int64_t>(i)]);
  average_cut(slots, &Slot::distance, options_.beta3);
  for (const Slot& slot : slots) move(slot);
}

CameUpdate::Slot CameUpdate::slot_of(size_t index) {
  const FlatSlot& place = slice_.layout->slots[index];
  Slot slot{.shape = came_shape(options_.variant, place.shape), .numel = place.numel};
  const auto [matrices, rows, columns, is_factored, row_shape, column_shape] = slot.shape;
  const int64_t in_matrix = rows * columns, length = slice_.master.numel();
  const int64_t begin = std::clamp(slice_.offset - place.offset, int64_t{0}, place.numel),
                end = std::clamp(slice_.offset + length - place.offset, int64_t{0}, place.numel);
  const int64_t first_matrix = begin / in_matrix;
  if (begin < end) slot.matrices = (end + in_matrix - 1) / in_matrix - first_matrix;
  for (int64_t at = begin; at < end;) {
    Piece piece{.begin = place.offset + at - slice_.offset,
                .matrix = at / in_matrix - first_matrix,
                .row = at / columns % rows,
                .column = at % columns,
                .columns = columns};
    if (piece.column > 0 || end - at < columns) {
      piece.columns = std::min(columns - piece.column, end - at);
    } else if (piece.row > 0 || end - at < in_matrix) {
      piece.rows = std::min(rows - piece.row, (end - at) / columns);
    } else {
      piece.rows = rows;
      piece.matrices = (end - at) / in_matrix;
    }
    at += piece.matrices * piece.rows * piece.columns;
    slot.pieces.push_back(piece);
  }
  if (slice_.sum)
    for (int64_t cut = (place.offset / length + 1) * length; cut < place.offset + place.numel;
         cut += length) {
      const int64_t matrix = (cut - place.offset) / in_matrix - first_matrix;
      if ((cut - place.offset) % in_matrix == 0 || (!slot.cut.empty() && slot.cut.back().matrix == matrix))
        continue;
      slot.cut.push_back({.matrix = matrix, .sums = num_cut_sums_});
      num_cut_sums_ += rows + columns;
    }
  const bool keeps_distance = slot.shape.is_factored;
  slot.square = factors_of(slot, index, kCameSquareRow, keeps_distance ? kCameSquareColumn : kCameSquare);
  if (keeps_distance) slot.distance = factors_of(slot, index, kCameDistanceRow, kCameDistanceColumn);
  return slot;
}

ops::RowsAndColumns CameUpdate::factors_of(const Slot& slot, size_t index, size_t rows,
                                           size_t columns) const {
  const auto view = [&](size_t buffer, int64_t width) {
    const StateRun& run = runs_[buffer][index];
    return slice_.moments.at(buffer).narrow(0, run.place, run.count).view({slot.matrices, width});
  };
  return {.rows = slot.shape.has_rows() ? view(rows, slot.shape.rows) : at::Tensor(),
          .columns = view(columns, slot.shape.columns)};
}

at::Tensor CameUpdate::of_piece(const at::Tensor& flat, const Piece& piece) const {
  return flat.narrow(0, piece.begin, piece.matrices * piece.rows * piece.columns)
      .view({piece.matrices, piece.rows, piece.columns});
}

ops::ScaledGradients CameUpdate::gradients(const Piece& piece) const {
  return {.values = of_piece(slice_.grads, piece), .scale = step_.grad_scale};
}

// Returns the part of `all`, which is a whole slot's, that belongs to `piece`.
ops::RowsAndColumns CameUpdate::of_piece(const ops::RowsAndColumns& all, const Piece& piece) {
  const auto part = [&](const at::Tensor& values, int64_t first, int64_t count) {
    return values.narrow(0, piece.matrix, piece.matrices).narrow(1, first, count);
  };
  return {.rows = part(all.rows, piece.row, piece.rows),
          .columns = part(all.columns, piece.column, piece.columns)};
}

// Returns what elements are multiplied by: the reciprocal roots of columns, and of rows divided by their
// mean.
ops::RowsAndColumns CameUpdate::reciprocal_roots(const ops::RowsAndColumns& factors) {
  return {.rows = (factors.rows / factors.rows.mean(-1, /*keepdim=*/true)).rsqrt_(),
          .columns = factors.columns.rsqrt()};
}

// Moves `factors` towards the means of what `add` adds up for each piece. For cut matrices it only notes the
// sums.
void CameUpdate::average(const Slot& slot, const ops::RowsAndColumns& factors, double beta,
                         const std::function<void(const Piece&, const ops::RowsAndColumns&)>& add) {
  const auto [rows, columns] = std::pair(slot.shape.rows, slot.shape.columns);
  const ops::RowsAndColumns sums{.rows = at::zeros({slot.matrices, rows}, slice_.master.options()),
                                 .columns = at::zeros({slot.matrices, columns}, slice_.master.options())};
  for (const Piece& piece : slot.pieces) add(piece, of_piece(sums, piece));
  int64_t first = 0, last = slot.matrices;
  for (const CutMatrix& cut : slot.cut) {
    if (cut.matrix < 0 || cut.matrix >= slot.matrices) continue;
    cut_sums_.narrow(0, cut.sums, rows).copy_(sums.rows[cut.matrix]);
    cut_sums_.narrow(0, cut.sums + rows, columns).copy_(sums.columns[cut.matrix]);
    if (cut.matrix == 0) first = 1;
    if (cut.matrix == slot.matrices - 1) last = slot.matrices - 1;
  }
  if (first >= last) return;
  const auto uncut = [&](const at::Tensor& all) { return all.narrow(0, first, last - first); };
  move_average(uncut(factors.columns), uncut(sums.columns).div_(rows), beta);
  move_average(uncut(factors.rows), uncut(sums.rows).div_(columns), beta);
}

// The same for cut matrices, once all slices have noted their sums.
void CameUpdate::average_cut(const std::vector<Slot>& slots, ops::RowsAndColumns Slot::*factors,
                             double beta) {
  if (num_cut_sums_ == 0) return;
  slice_.sum(cut_sums_);
  for (const Slot& slot : slots)
    for (const CutMatrix& cut : slot.cut) {
      if (cut.matrix < 0 || cut.matrix >= slot.matrices) continue;
      const int64_t rows = slot.shape.rows, columns = slot.shape.columns;
      move_average((slot.*factors).rows[cut.matrix], cut_sums_.narrow(0, cut.sums, rows) / columns, beta);
      move_average((slot.*factors).columns[cut.matrix], cut_sums_.narrow(0, cut.sums + rows, columns) / rows,
                   beta);
    }
}

// Averages the squared gradients. A slot that keeps a mean for every element is one piece, and a single pass
// also sums the squares of its updates.
void CameUpdate::average_squares(Slot& slot) {
  slot.sum_of_squares = at::zeros({}, slice_.master.options().dtype(at::kDouble));
  if (slot.pieces.empty()) return;
  if (slot.shape.has_rows())
    return average(slot, slot.square, options_.beta2,
                   [&](const Piece& piece, const ops::RowsAndColumns& sums) {
                     ops::came_add_squares(gradients(piece), options_.eps_square, sums);
                   });
  slot.sum_of_squares = ops::came_square_elements(elements(slot), slot.square.columns.view(-1),
                                                  options_.beta2, options_.eps_square);
}

// Sums the squares of updates before they are clipped.
void CameUpdate::sum_updates(Slot& slot) {
  if (slot.pieces.empty() || !slot.shape.has_rows()) return;
  const ops::RowsAndColumns roots = reciprocal_roots(slot.square);
  for (const Piece& piece : slot.pieces)
    slot.sum_of_squares.add_(ops::came_sum_of_squares(gradients(piece), of_piece(roots, piece)));
}

// Clips the root mean square of the updates to the threshold. Then it moves the averages of the updates, and
// of their distances from these. In tensors with a mean for every element it moves the weights too.
void CameUpdate::average_updates(const Slot& slot, const at::Tensor& sum_of_squares) {
  if (slot.pieces.empty()) return;
  const at::Tensor divisor =
      ((sum_of_squares / slot.numel).sqrt() / options_.clip_threshold).clamp_min(1).to(at::kFloat);
  if (!slot.shape.has_rows()) return move_elements(slot, divisor);
  const ops::RowsAndColumns roots = reciprocal_roots(slot.square);
  average(slot, slot.distance, options_.beta3, [&](const Piece& piece, const ops::RowsAndColumns& sums) {
    ops::came_move_mean(gradients(piece), of_piece(roots, piece), divisor,
                        of_piece(slice_.moments[kCameMean], piece), options_.beta1, options_.eps_distance,
                        sums);
  });
}

ops::ScaledGradients CameUpdate::elements(const Slot& slot) const {
  ops::ScaledGradients grads = gradients(slot.pieces.front());
  grads.values = grads.values.view(-1);
  return grads;
}

void CameUpdate::move_elements(const Slot& slot, const at::Tensor& divisor) {
  const auto flat = [&](const at::Tensor& all) { return of_piece(all, slot.pieces.front()).view(-1); };
  ops::came_move_elements(
      elements(slot), divisor,
      {.weights = flat(slice_.master),
       .mean = flat(slice_.moments[kCameMean]),
       .squares = slot.square.columns.view(-1),
       .distances = slot.shape.is_factored ? slot.distance.columns.view(-1) : at::Tensor(),
       .compute = copies_ ? flat(*slice_.compute_weights) : at::Tensor(),
       .beta_mean = options_.beta1,
       .beta_distance = options_.beta3,
       .eps_distance = options_.eps_distance,
       .lr = step_.lr,
       .decay = options_.weight_decay * step_.lr});
}

void CameUpdate::move(const Slot& slot) {
  if (slot.pieces.empty() || !slot.shape.has_rows()) return;
  const ops::RowsAndColumns roots = reciprocal_roots(slot.distance);
  for (const Piece& piece : slot.pieces)
    ops::came_move_weights(of_piece(slice_.master, piece), of_piece(slice_.moments[kCameMean], piece),
                           of_piece(roots, piece), step_.lr, options_.weight_decay * step_.lr,
                           copies_ ? of_piece(*slice_.compute_weights, piece) : at::Tensor());
}

}  // namespace kiln
