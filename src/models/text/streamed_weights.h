// Runs a frozen text encoder whose weights are not all in memory. They stay in their files and are read
// segment by segment, the next one while one computes.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <future>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "models/text/text_encoder.h"

namespace kiln {

class StreamedWeights {
 public:
  // `encoder` has its weights on meta in their final dtypes, before and after each pass. `stored` holds the
  // mapped values by key. On a CPU values of the right dtype are used where they are mapped.
  StreamedWeights(const TextEncoder& encoder, std::map<std::string, at::Tensor> stored, at::Device device);

  // Makes one pass over the weights, with all batches through one segment before the next. Calls `take` with
  // the index and the last features (T, D) f32 of each batch. The bits are those of
  // TextEncoder::encode_batch() with weights in memory. REQUIRES: a batch that fills a prefix comes before
  // those that continue it. Throws Error as encode_batch() does.
  void encode(std::span<const TextBatch> batches, const std::function<void(size_t, at::Tensor)>& take);

  int64_t resident_bytes() const { return resident_bytes_; }  // the most bytes of weights at once
  int64_t bytes_of_pass() const { return bytes_of_pass_; }    // bytes that a pass reads

 private:
  class Entered;
  using Values = std::vector<at::Tensor>;  // of a segment's parameters; undefined: the token table

  Values read(size_t segment) const;
  void enter(size_t segment);
  void leave(size_t segment);
  State embed(const TokenRows& tokens) const;
  bool is_table(const Parameter& parameter) const { return &parameter == encoder_.token_table().get(); }

  const TextEncoder& encoder_;
  const std::map<std::string, at::Tensor> stored_;
  const at::Device device_;
  std::vector<Values> outlines_;  // by segment
  int64_t resident_bytes_ = 0, bytes_of_pass_ = 0;
  size_t next_ = 0;  // the segment that is being read, if `reading_` is valid
  std::future<Values> reading_;
};

}  // namespace kiln
