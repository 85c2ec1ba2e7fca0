#include "optim/came_update.h"

#include <algorithm>
#include <tuple>

#include "core/aten.h"

namespace kiln {

namespace {

// factor = beta * factor + (1 - beta) * mean
void move_average(at::Tensor factor, const at::Tensor& mean, double beta) {
  factor.mul_(beta).add_(mean, 1 - beta);
}

}  // namespace

CameUpdate::CameUpdate(const CameOptions& options, OptimizerSlice& slice,
                       const std::vector<StateBuffer>& buffers, const OptimizerStep& step)
    : options_(options), slice_(slice), buffers_(buffers), step_(step) {
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
    for (const Slot& slot : slots) {
      average_squares(slot);
      const std::vector<at::Tensor> updates = updates_of(slot);
      average_updates(slot, updates, sum_of_squares(updates));
      move(slot);
    }
  slice_.follow_master();
}

// All slots go through a pass before its sums go over the slices. Updates are computed twice: a whole slice
// of them is not kept.
void CameUpdate::run_divided(const std::vector<Slot>& slots) {
  cut_sums_ = at::zeros({num_cut_sums_}, slice_.master.options());
  for (const Slot& slot : slots) average_squares(slot);
  average_cut(slots, &Slot::square, options_.beta2);
  std::vector<at::Tensor> squares;
  for (const Slot& slot : slots) squares.push_back(sum_of_squares(updates_of(slot)));
  at::Tensor sums = at::stack(squares);
  slice_.sum(sums);
  cut_sums_.zero_();
  for (size_t i = 0; i < slots.size(); ++i)
    average_updates(slots[i], updates_of(slots[i]), sums[static_cast<int64_t>(i)]);
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

CameUpdate::Factors CameUpdate::factors_of(const Slot& slot, size_t index, size_t rows,
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

at::Tensor CameUpdate::gradient(const Piece& piece) const {
  const at::Tensor gradient = of_piece(slice_.grads, piece).to(at::kFloat);
  return step_.grad_scale == 1 ? gradient : gradient * step_.grad_scale;
}

// `values` times the reciprocal roots of what the factors approximate. `roots`: of a whole slot.
at::Tensor CameUpdate::scaled(const Factors& roots, const Piece& piece, const at::Tensor& values) {
  const at::Tensor columns = roots.columns.narrow(0, piece.matrix, piece.matrices)
                                 .narrow(1, piece.column, piece.columns)
                                 .unsqueeze(-2);
  if (!roots.rows.defined()) return columns * values;
  const at::Tensor rows =
      roots.rows.narrow(0, piece.matrix, piece.matrices).narrow(1, piece.row, piece.rows).unsqueeze(-1);
  return (rows * columns).mul_(values);
}

// The rows' as shares of their mean.
CameUpdate::Factors CameUpdate::reciprocal_roots(const Factors& factors) {
  Factors roots{.columns = factors.columns.rsqrt()};
  if (factors.rows.defined()) roots.rows = (factors.rows / factors.rows.mean(-1, /*keepdim=*/true)).rsqrt_();
  return roots;
}

// Moves `factors` to the means of what `values` gives for each piece; of cut matrices only the sums are
// noted.
void CameUpdate::average(const Slot& slot, const Factors& factors, double beta, const PieceValues& values) {
  if (slot.pieces.empty()) return;
  const auto [rows, columns, has_rows] =
      std::tuple(slot.shape.rows, slot.shape.columns, slot.shape.has_rows());
  Factors sums{.columns = at::zeros({slot.matrices, columns}, slice_.master.options())};
  if (has_rows) sums.rows = at::zeros({slot.matrices, rows}, slice_.master.options());
  for (const Piece& piece : slot.pieces) {
    const at::Tensor x = values(piece);
    const auto part = [&](const at::Tensor& all, int64_t first, int64_t count) {
      return all.narrow(0, piece.matrix, piece.matrices).narrow(1, first, count);
    };
    part(sums.columns, piece.column, piece.columns).add_(x.sum(-2));
    if (has_rows) part(sums.rows, piece.row, piece.rows).add_(x.sum(-1));
  }
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
  if (has_rows) move_average(uncut(factors.rows), uncut(sums.rows).div_(columns), beta);
}

// The same of cut matrices, whose sums all slices have noted.
void CameUpdate::average_cut(const std::vector<Slot>& slots, Factors Slot::*factors, double beta) {
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

void CameUpdate::average_squares(const Slot& slot) {
  average(slot, slot.square, options_.beta2,
          [&](const Piece& piece) { return gradient(piece).square().add_(options_.eps_square); });
}

std::vector<at::Tensor> CameUpdate::updates_of(const Slot& slot) const {
  std::vector<at::Tensor> updates;
  if (slot.pieces.empty()) return updates;
  const Factors roots = reciprocal_roots(slot.square);
  for (const Piece& piece : slot.pieces) updates.push_back(scaled(roots, piece, gradient(piece)));
  return updates;
}

at::Tensor CameUpdate::sum_of_squares(const std::vector<at::Tensor>& updates) const {
  at::Tensor sum = at::zeros({}, slice_.master.options().dtype(at::kDouble));
  for (const at::Tensor& update : updates) sum.add_(ops::sum_of_squares(update.view(-1)));
  return sum;
}

// Brings the root mean square of the updates down to the threshold, then the averages of updates, and of
// their distances from these, on.
void CameUpdate::average_updates(const Slot& slot, const std::vector<at::Tensor>& updates,
                                 const at::Tensor& sum_of_squares) {
  if (slot.pieces.empty()) return;
  const at::Tensor divisor =
      ((sum_of_squares / slot.numel).sqrt() / options_.clip_threshold).clamp_min(1).to(at::kFloat);
  const auto distance = [&](const Piece& piece) {
    at::Tensor update = updates[static_cast<size_t>(&piece - slot.pieces.data())];
    const at::Tensor mean = of_piece(slice_.moments[kCameMean], piece);
    move_average(mean, update.div_(divisor), options_.beta1);
    return slot.shape.is_factored ? update.sub_(mean).square_().add_(options_.eps_distance) : update;
  };
  if (slot.shape.is_factored) {
    average(slot, slot.distance, options_.beta3, distance);
  } else {
    for (const Piece& piece : slot.pieces) distance(piece);
  }
}

void CameUpdate::move(const Slot& slot) {
  if (slot.pieces.empty()) return;
  const Factors roots = slot.shape.is_factored ? reciprocal_roots(slot.distance) : Factors();
  for (const Piece& piece : slot.pieces) {
    const at::Tensor mean = of_piece(slice_.moments[kCameMean], piece);
    at::Tensor weights = of_piece(slice_.master, piece);
    if (options_.weight_decay != 0) weights.add_(weights, -options_.weight_decay * step_.lr);
    weights.sub_((slot.shape.is_factored ? scaled(roots, piece, mean) : mean.clone()).mul_(step_.lr));
  }
}

}  // namespace kiln
