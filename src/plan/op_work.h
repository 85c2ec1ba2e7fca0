// What one operation reads, writes and multiplies, from its name and the shapes of its tensors.
#pragma once
#include <ATen/core/ivalue.h>

#include <string_view>

#include "plan/op_recorder.h"

namespace kiln {

enum class OpKind {
  kComposed,  // of other operations, which count instead
  kFree,      // moves no data
  kWhole,     // counts, and what it calls is part of it
};
// Of an operator's name and overload as torch's RecordFunction tells them.
OpKind kind_of(std::string_view name, std::string_view overload);

// Fills everything that the inputs tell of the operation `op.name`.
void describe_inputs(OpRecord& op, std::string_view overload, c10::ArrayRef<const c10::IValue> inputs);
// And the outputs, afterwards.
void describe_outputs(OpRecord& op, c10::ArrayRef<c10::IValue> outputs);

}  // namespace kiln
