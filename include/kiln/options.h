// Options of a run, and the errors of all functions. Needs no torch.
//
// Everything of these headers is in kiln::v0, whose number grows when something in it changes otherwise than
// by an addition: a program that names it is compiled or refused, never misread. What else libkiln.so exports
// is no interface.
#pragma once
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace kiln::v0 {

// What was expected, what came and what to do, in one line. All functions may throw it.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Options of `kiln train` by their names without dashes: {{"model", "DiT-S/2"}, {"global-batch", 64}, {"lr",
// 1e-4}}. docs/options.md lists them. What is left open has the command's defaults: the model's size of
// pictures and its published objective.
using Value = std::variant<bool, int64_t, double, std::string, std::vector<std::string>>;
using Options = std::map<std::string, Value>;

}  // namespace kiln::v0
