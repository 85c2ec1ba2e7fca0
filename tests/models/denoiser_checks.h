// What the tests of denoisers share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "models/model.h"

namespace kiln {

// The trainable weights, as leaves that collect gradients.
inline std::vector<at::Tensor> require_gradients(const ParameterList& parameters) {
  std::vector<at::Tensor> leaves;
  for (const auto& parameter : parameters)
    if (parameter->trainable) leaves.push_back(parameter->value.set_requires_grad(true));
  return leaves;
}

inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace kiln
