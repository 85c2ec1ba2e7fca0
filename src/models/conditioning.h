// The conditions of a denoiser: all inputs except the noised picture and the timestep. The loader, the step
// and the sampler use the same type.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kiln {

// Captions as a text encoder returns them, one after another without padding.
struct TextRows {
  at::Tensor rows{};                    // (T, D) f32, bf16 or f16
  at::Tensor offsets{};                 // (B + 1) i32: sample b has rows [offsets[b], offsets[b + 1])
  std::vector<int64_t> host_offsets{};  // the same numbers on the host, where rows are cut
  at::Tensor dropped{};                 // (B) bool: true where the model's learned null rows replace the
                                        // caption; undefined: nowhere
  at::Tensor positions{};  // (T) i64: the row's index in its padded caption; undefined: captions begin
                           // at row 0 and have no gaps

  bool defined() const { return rows.defined(); }
  int64_t num_samples() const { return static_cast<int64_t>(host_offsets.size()) - 1; }
  int64_t longest() const;  // rows of the longest caption
};

struct Conditioning;
struct ConditioningShape;

// A condition with a row for each sample.
struct SampleCondition {
  at::Tensor Conditioning::*tensor;
  bool (*is_taken)(const ConditioningShape& shape);
  std::vector<int64_t> of_one;  // sizes for one sample
  at::ScalarType dtype;
  const char* missing;  // the message of a model that takes it
};
// The table of all of them: what visits, slices, joins, checks and plans conditions takes them from here.
std::span<const SampleCondition> sample_conditions();

// A part is undefined where the model does not take it.
struct Conditioning {
  at::Tensor class_labels{};  // (B) i64; num_classes is the null class
  TextRows text{};
  at::Tensor image_hw{};      // (B, 2) f32: height and width of the original picture
  at::Tensor aspect_ratio{};  // (B, 1) f32: height / width of the bucket
  at::Tensor guidance{};      // (B) f32: the guidance scale that a distilled model imitates

  // Visits every defined tensor in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) {
    for (at::Tensor* tensor : {&text.rows, &text.offsets, &text.dropped, &text.positions})
      if (tensor->defined()) visitor(*tensor);
    for (const SampleCondition& condition : sample_conditions())
      if ((this->*condition.tensor).defined()) visitor(this->*condition.tensor);
  }
};

// Which conditions a denoiser takes, and how it represents a missing one.
struct ConditioningShape {
  int64_t num_classes = 0;        // if 0 and there is no null class, the model takes no labels
  bool has_null_class = false;    // label num_classes exists, for class dropout
  int64_t text_width = 0;         // D of captions; 0: the model takes none
  int64_t max_text_tokens = 0;    // the most rows of a caption
  bool has_null_text = false;     // has learned null rows and understands TextRows::dropped
  bool pads_text = false;         // every caption has max_text_tokens rows, padding included
  bool takes_image_size = false;  // takes image_hw and aspect_ratio
  bool takes_guidance = false;

  bool takes_labels() const { return num_classes > 0 || has_null_class; }
  bool takes_text() const { return text_width > 0; }
  bool can_be_guided() const { return has_null_class || takes_text(); }
};

// Returns the index of each row in its padded caption, (T) i64 on the rows' device.
at::Tensor row_positions(const TextRows& text);

// Converts embeds (B, L, D) to rows without padding. In mask (B, L) 1 is a token; undefined: all are.
TextRows text_rows_of(const at::Tensor& embeds, const at::Tensor& mask);

// Returns the texts with these indices in this order. An index may repeat.
TextRows select_texts(const TextRows& all, std::span<const int64_t> which);

// Returns samples [first, first + size).
Conditioning slice_rows(const Conditioning& all, int64_t first, int64_t size);
// Returns the samples of `a`, then those of `b`.
Conditioning joined(const Conditioning& a, const Conditioning& b);
// Returns a copy on `device`. The copy does not block if the source is in pinned memory.
Conditioning to_device(Conditioning conditioning, at::Device device);

// Returns the condition that guidance moves away from: the rows of `null_text` (B samples: an encoder's "" or
// negative prompts) if given, else the learned null rows, else the null class. Throws Error when the model
// has none of them.
Conditioning unconditional(const ConditioningShape& shape, const Conditioning& conditioning,
                           const TextRows& null_text = {});

// Returns what unconditional() moves away from where no text is given but that of the empty caption, as
// ModelRecord::DrawingInfo names it.
const char* unconditional_name(const ConditioningShape& shape);

// Returns what says what a picture shows: "captions", "classes" or "noise".
const char* subject_name(const ConditioningShape& shape);

// Returns all that a model of this shape is told of one image, on meta, with a caption of so many rows.
Conditioning outline_of_one(const ConditioningShape& shape, int64_t text_rows);

// Returns the numbers on the host that the kernels of a pass depend on besides shapes and values: which parts
// are defined, and where captions are cut.
std::vector<int64_t> host_numbers(const Conditioning& conditioning);

// Throws Error naming a condition that the model takes and that is missing or of another size.
void check_conditioning(const ConditioningShape& shape, const Conditioning& conditioning, int64_t batch);

}  // namespace kiln
