#include "models/conditioning.h"

#include <ATen/ops/bucketize.h>

#include <algorithm>

#include "core/aten.h"
#include "core/error.h"
#include "ops/ops.h"

namespace kiln {
namespace {

at::Tensor offsets_tensor(const std::vector<int64_t>& host_offsets, at::Device device) {
  return ops::on_device(at::tensor(host_offsets, at::kInt), device);
}

TextRows slice_text(const TextRows& all, int64_t first, int64_t size) {
  if (!all.defined()) return {};
  const int64_t begin = all.host_offsets[first], end = all.host_offsets[first + size];
  TextRows slice{.rows = all.rows.narrow(0, begin, end - begin)};
  for (int64_t b = first; b <= first + size; ++b) slice.host_offsets.push_back(all.host_offsets[b] - begin);
  slice.offsets = offsets_tensor(slice.host_offsets, all.offsets.device());
  if (all.dropped.defined()) slice.dropped = all.dropped.narrow(0, first, size);
  if (all.positions.defined()) slice.positions = all.positions.narrow(0, begin, end - begin);
  return slice;
}

TextRows joined_text(const TextRows& a, const TextRows& b) {
  if (!a.defined()) return {};
  TextRows both{.rows = at::cat({a.rows, b.rows}), .host_offsets = a.host_offsets};
  for (size_t i = 1; i < b.host_offsets.size(); ++i)
    both.host_offsets.push_back(a.host_offsets.back() + b.host_offsets[i]);
  both.offsets = offsets_tensor(both.host_offsets, a.offsets.device());
  if (a.dropped.defined() || b.dropped.defined()) {
    const auto dropped_of = [](const TextRows& text) {
      return text.dropped.defined()
                 ? text.dropped
                 : at::zeros({text.num_samples()}, text.offsets.options().dtype(at::kBool));
    };
    both.dropped = at::cat({dropped_of(a), dropped_of(b)});
  }
  if (a.positions.defined() || b.positions.defined())
    both.positions = at::cat({row_positions(a), row_positions(b)});
  return both;
}

}  // namespace

std::span<const SampleCondition> sample_conditions() {
  using Shape = ConditioningShape;
  static const SampleCondition table[] = {
      {&Conditioning::class_labels,
       [](const Shape& shape) { return shape.takes_labels(); },
       {1},
       at::kLong,
       "class_labels are missing: the model takes classes"},
      {&Conditioning::image_hw,
       [](const Shape& shape) { return shape.takes_image_size; },
       {1, 2},
       at::kFloat,
       "the picture's size is missing: the model takes image_hw and aspect_ratio"},
      {&Conditioning::aspect_ratio,
       [](const Shape& shape) { return shape.takes_image_size; },
       {1, 1},
       at::kFloat,
       "the picture's size is missing: the model takes image_hw and aspect_ratio"},
      {&Conditioning::guidance,
       [](const Shape& shape) { return shape.takes_guidance; },
       {1},
       at::kFloat,
       "guidance is missing: the model takes the guidance scale that it imitates"}};
  return table;
}

int64_t TextRows::longest() const {
  int64_t longest = 0;
  for (size_t b = 1; b < host_offsets.size(); ++b)
    longest = std::max(longest, host_offsets[b] - host_offsets[b - 1]);
  return longest;
}

// Stays on the rows' device: the host does not wait, and a graph can capture it.
at::Tensor row_positions(const TextRows& text) {
  if (text.positions.defined()) return text.positions;
  const at::Tensor rows = at::arange(text.rows.size(0), text.offsets.options()),
                   starts = text.offsets.narrow(0, 0, text.num_samples());
  const at::Tensor samples = at::bucketize(rows, starts, /*out_int32=*/false, /*right=*/true) - 1;
  return (rows - starts.index_select(0, samples)).to(at::kLong);
}

TextRows text_rows_of(const at::Tensor& embeds, const at::Tensor& mask) {
  const int64_t batch = embeds.size(0), length = embeds.size(1);
  TextRows text{.host_offsets = {0}};
  if (!mask.defined()) {
    for (int64_t b = 1; b <= batch; ++b) text.host_offsets.push_back(b * length);
    text.rows = embeds.flatten(0, 1);
  } else {
    const at::Tensor kept = mask.to(at::kCPU, at::kBool).contiguous();
    std::vector<int64_t> indices, positions;
    bool has_gaps = false;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t l = 0; l < length; ++l) {
        if (!kept.const_data_ptr<bool>()[b * length + l]) continue;
        has_gaps = has_gaps || static_cast<int64_t>(indices.size()) - text.host_offsets.back() != l;
        indices.push_back(b * length + l);
        positions.push_back(l);
      }
      text.host_offsets.push_back(static_cast<int64_t>(indices.size()));
    }
    text.rows = embeds.flatten(0, 1).index_select(0, at::tensor(indices, at::kLong).to(embeds.device()));
    if (has_gaps) text.positions = at::tensor(positions, at::kLong).to(embeds.device());
  }
  text.offsets = offsets_tensor(text.host_offsets, embeds.device());
  return text;
}

TextRows select_texts(const TextRows& all, std::span<const int64_t> which) {
  TextRows chosen{.host_offsets = {0}};
  std::vector<at::Tensor> rows, dropped, positions;
  for (const int64_t text : which) {
    const TextRows one = slice_text(all, text, 1);
    rows.push_back(one.rows);
    if (one.dropped.defined()) dropped.push_back(one.dropped);
    if (one.positions.defined()) positions.push_back(one.positions);
    chosen.host_offsets.push_back(chosen.host_offsets.back() + one.rows.size(0));
  }
  chosen.rows = at::cat(rows);
  chosen.offsets = offsets_tensor(chosen.host_offsets, all.offsets.device());
  if (!dropped.empty()) chosen.dropped = at::cat(dropped);
  if (!positions.empty()) chosen.positions = at::cat(positions);
  return chosen;
}

Conditioning slice_rows(const Conditioning& all, int64_t first, int64_t size) {
  Conditioning slice{.text = slice_text(all.text, first, size)};
  for (const SampleCondition& condition : sample_conditions()) {
    const at::Tensor& rows = all.*condition.tensor;
    if (rows.defined()) slice.*condition.tensor = rows.narrow(0, first, size);
  }
  return slice;
}

Conditioning joined(const Conditioning& a, const Conditioning& b) {
  Conditioning both{.text = joined_text(a.text, b.text)};
  for (const SampleCondition& condition : sample_conditions()) {
    const at::Tensor& first = a.*condition.tensor;
    if (first.defined()) both.*condition.tensor = at::cat({first, b.*condition.tensor});
  }
  return both;
}

Conditioning to_device(Conditioning conditioning, at::Device device) {
  conditioning.visit([&](at::Tensor& tensor) { tensor = tensor.to(device, /*non_blocking=*/true); });
  return conditioning;
}

Conditioning unconditional(const ConditioningShape& shape, const Conditioning& conditioning,
                           const TextRows& null_text) {
  Conditioning uncond = conditioning;
  if (conditioning.text.defined() && null_text.defined()) {
    uncond.text = null_text;
  } else if (conditioning.text.defined() && shape.has_null_text) {
    const TextRows& text = conditioning.text;
    uncond.text.dropped = at::ones({text.num_samples()}, text.offsets.options().dtype(at::kBool));
  } else if (conditioning.class_labels.defined() && shape.has_null_class) {
    uncond.class_labels = at::full_like(conditioning.class_labels, shape.num_classes);
  } else {
    fail("models",
         "guidance needs a negative prompt or training with class or caption dropout: use --cfg-scale 1");
  }
  return uncond;
}

const char* unconditional_name(const ConditioningShape& shape) {
  if (shape.has_null_text) return "null_rows";
  if (shape.takes_text()) return "empty_caption";
  return shape.has_null_class ? "null_class" : "none";
}

const char* subject_name(const ConditioningShape& shape) {
  if (shape.takes_text()) return "captions";
  return shape.takes_labels() ? "classes" : "noise";
}

Conditioning outline_of_one(const ConditioningShape& shape, int64_t text_rows) {
  const at::TensorOptions meta(at::kMeta);
  Conditioning conditions;
  if (shape.takes_text())
    conditions.text = {.rows = at::empty({text_rows, shape.text_width}, meta),
                       .offsets = at::empty({2}, meta.dtype(at::kInt)),
                       .host_offsets = {0, text_rows}};
  for (const SampleCondition& condition : sample_conditions())
    if (condition.is_taken(shape))
      conditions.*condition.tensor = at::empty(condition.of_one, meta.dtype(condition.dtype));
  return conditions;
}

std::vector<int64_t> host_numbers(const Conditioning& conditioning) {
  const Conditioning& c = conditioning;
  std::vector<int64_t> numbers;
  for (const at::Tensor& part : {c.text.rows, c.text.offsets, c.text.dropped, c.text.positions})
    numbers.push_back(part.defined());
  for (const SampleCondition& condition : sample_conditions())
    numbers.push_back((c.*condition.tensor).defined());
  numbers.push_back(std::ssize(c.text.host_offsets));
  numbers.insert(numbers.end(), c.text.host_offsets.begin(), c.text.host_offsets.end());
  return numbers;
}

void check_conditioning(const ConditioningShape& shape, const Conditioning& conditioning, int64_t batch) {
  for (const SampleCondition& condition : sample_conditions())
    if (condition.is_taken(shape) && !(conditioning.*condition.tensor).defined())
      fail("models", "{}", condition.missing);
  if (shape.takes_text() && !conditioning.text.defined())
    fail("models", "captions are missing: the model takes rows of width {}", shape.text_width);
  if (!shape.takes_text()) return;
  const TextRows& text = conditioning.text;
  if (text.rows.size(1) != shape.text_width)
    fail("models", "expected captions of width {}, got {}: give the text encoder of the weights",
         shape.text_width, text.rows.size(1));
  if (text.num_samples() != batch)
    fail("models", "expected captions of {} samples, got {}", batch, text.num_samples());
}

}  // namespace kiln
