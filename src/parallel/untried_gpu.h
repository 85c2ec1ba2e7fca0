// The faster ways of a GPU that have not run on one yet. A run takes them by name.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/choices.h"

namespace kiln {

enum class Untried {
  kUpdate,           // the update beside the next forward
  kProducts,         // the best of timed products
  kPackedGradients,  // gradients of q, k and v in one packed memory
  kHandedOnBranch,   // a block's residual in the pass of the next one's norm
  kKeepGelu,         // --keep-gelu where memory is free
};
template <>
struct Choices<Untried> {
  static constexpr std::pair<Untried, const char*> kAll[] = {{Untried::kUpdate, "update"},
                                                             {Untried::kProducts, "products"},
                                                             {Untried::kPackedGradients, "packed-gradients"},
                                                             {Untried::kHandedOnBranch, "handed-on-branch"},
                                                             {Untried::kKeepGelu, "keep-gelu"}};
};

class UntriedGpu {
 public:
  // What the option means without a value.
  static constexpr const char* kAlone = "all";

  // Parses "none", "all", or names with commas between them. Throws Error.
  static UntriedGpu parse(const std::string& text);
  std::string text() const;
  bool is_none() const { return ways_.empty(); }
  bool has(Untried way) const { return ways_.contains(way); }
  void leave_out(Untried way) { ways_.erase(way); }

 private:
  std::set<Untried> ways_;
};

}  // namespace kiln
