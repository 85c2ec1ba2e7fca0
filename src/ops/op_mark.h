// A fused operation, marked for whoever listens to torch's RecordFunction: profilers and their Chrome traces,
// the plan's recorder of operations. Free when nobody does.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <array>
#include <string_view>
#include <vector>

namespace kiln::ops {

inline c10::IValue mark_value(const at::Tensor& tensor) { return tensor; }

// Lives while the operation runs. No mark contains another one.
class OpMark {
 public:
  // `name`: "kiln::adaln_modulate_backward". `inputs`: what it reads; undefined tensors are welcome.
  template <class... Inputs>
  explicit OpMark(std::string_view name, const Inputs&... inputs) : record_(at::RecordScope::FUNCTION) {
    if (!record_.isActive()) return;
    const std::array<c10::IValue, sizeof...(inputs)> values{mark_value(inputs)...};
    record_.before(name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
  // What it writes.
  template <class... Outputs>
  void outputs(const Outputs&... outputs) {
    if (record_.isActive() && record_.needsOutputs())
      record_.setOutputs(std::vector<c10::IValue>{mark_value(outputs)...});
  }

 private:
  at::RecordFunction record_;
};

}  // namespace kiln::ops
