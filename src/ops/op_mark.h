// Marks a fused operation for the listeners of torch's RecordFunction: profilers with their Chrome traces,
// and the plan's recorder of operations. It costs nothing when nobody listens.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <array>
#include <string_view>
#include <vector>

namespace kiln::ops {

inline c10::IValue mark_value(const at::Tensor& tensor) { return tensor; }

// Lives while the operation runs. Marks never nest.
class OpMark {
 public:
  // `name` is for example "kiln::adaln_modulate_backward". `inputs` are the tensors that the operation reads;
  // some may be undefined.
  template <class... Inputs>
  explicit OpMark(std::string_view name, const Inputs&... inputs) : record_(at::RecordScope::FUNCTION) {
    if (!record_.isActive()) return;
    const std::array<c10::IValue, sizeof...(inputs)> values{mark_value(inputs)...};
    record_.before(name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
  // Records the tensors that the operation writes.
  template <class... Outputs>
  void outputs(const Outputs&... outputs) {
    if (record_.isActive() && record_.needsOutputs())
      record_.setOutputs(std::vector<c10::IValue>{mark_value(outputs)...});
  }

 private:
  at::RecordFunction record_;
};

}  // namespace kiln::ops
