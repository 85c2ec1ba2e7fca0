// What a denoiser is told beside the noised picture: one type from the loader to the sampler.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kiln {

// Captions as a text encoder gives them, one after another without padding.
struct TextRows {
  at::Tensor rows{};                    // (T, D) f32, bf16 or f16
  at::Tensor offsets{};                 // (B + 1) i32: sample b has rows [offsets[b], offsets[b + 1])
  std::vector<int64_t> host_offsets{};  // the same numbers on the host, by which rows are cut
  at::Tensor dropped{};                 // (B) bool: the model's learned null rows stand in for this caption;
                                        // undefined: for none
  at::Tensor positions{};  // (T) i64: which row of the padded caption it was; undefined: captions
                           // begin at row 0 and have no gaps

  bool defined() const { return rows.defined(); }
  int64_t num_samples() const { return static_cast<int64_t>(host_offsets.size()) - 1; }
  int64_t longest() const;  // rows of the longest caption
};

// Each part may be undefined: the model does not take it.
struct Conditioning {
  at::Tensor class_labels{};  // (B) i64; the null class = num_classes
  TextRows text{};
  at::Tensor image_hw{};      // (B, 2) f32: height and width of the original picture
  at::Tensor aspect_ratio{};  // (B, 1) f32: height / width of the bucket
  at::Tensor guidance{};      // (B) f32: the guidance scale that a distilled model imitates

  // Visits every defined tensor in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) {
    for (at::Tensor* tensor : {&class_labels, &text.rows, &text.offsets, &text.dropped, &text.positions,
                               &image_hw, &aspect_ratio, &guidance})
      if (tensor->defined()) visitor(*tensor);
  }
};

// What a denoiser takes of the above, and what stands for "nothing was said".
struct ConditioningShape {
  int64_t num_classes = 0;        // 0 without a null class: the model takes no labels
  bool has_null_class = false;    // label num_classes exists (class dropout)
  int64_t text_width = 0;         // D of its captions; 0: the model takes none
  int64_t max_text_tokens = 0;    // rows of a caption at most
  bool has_null_text = false;     // it has learned null rows and understands TextRows::dropped
  bool pads_text = false;         // every caption has max_text_tokens rows, padding included
  bool takes_image_size = false;  // image_hw and aspect_ratio
  bool takes_guidance = false;    // guidance

  bool takes_labels() const { return num_classes > 0 || has_null_class; }
  bool takes_text() const { return text_width > 0; }
};

// Where each row stood in its padded caption, (T) i64 on the rows' device.
at::Tensor row_positions(const TextRows& text);

// embeds (B, L, D) and mask (B, L), 1 = token (undefined: all are) as ragged rows.
TextRows text_rows_of(const at::Tensor& embeds, const at::Tensor& mask);

// The texts of these numbers, in this order; one may come several times.
TextRows select_texts(const TextRows& all, std::span<const int64_t> which);

// Samples [first, first + size).
Conditioning slice_rows(const Conditioning& all, int64_t first, int64_t size);
// The samples of `a`, then those of `b`.
Conditioning joined(const Conditioning& a, const Conditioning& b);
// A copy on `device`; non_blocking, for sources in pinned memory.
Conditioning to_device(Conditioning conditioning, at::Device device);

// What guidance moves away from: the null class, the learned null rows, or `null_text`'s rows (B samples, an
// encoder's "" or negative prompts), whichever the model knows. Throws Error when it knows none.
Conditioning unconditional(const ConditioningShape& shape, const Conditioning& conditioning,
                           const TextRows& null_text = {});

// What the kernels of a pass depend on beside shapes and values: which parts there are, and how captions are
// cut.
std::vector<int64_t> host_numbers(const Conditioning& conditioning);

// Throws Error, naming what the model takes and lacks or has not asked for.
void check_conditioning(const ConditioningShape& shape, const Conditioning& conditioning, int64_t batch);

}  // namespace kiln
