// A frozen text encoder whose weights are not all in memory: they stay in their files, and are read segment
// by segment, the next one while one computes.
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
  // `encoder`: its weights are on meta, of the dtypes they are to have, and are so again after each pass.
  // `stored`: their values by key, mapped. What has the right dtype is used where it is mapped, on a CPU.
  StreamedWeights(const TextEncoder& encoder, std::map<std::string, at::Tensor> stored, at::Device device);

  // One pass over the weights, all batches through one segment before the next. Gives `take` the number and
  // the last features (T, D) f32 of each batch: the same bits as TextEncoder::encode_batch() with weights in
  // memory. A batch that fills a prefix comes before those that go on after it. Throws Error as that does.
  void encode(std::span<const TextBatch> batches, const std::function<void(size_t, at::Tensor)>& take);

  int64_t resident_bytes() const { return resident_bytes_; }  // of weights, at most
  int64_t bytes_of_pass() const { return bytes_of_pass_; }    // that a pass reads

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
  size_t next_ = 0;  // the segment that is being read, if any is
  std::future<Values> reading_;
};

}  // namespace kiln
