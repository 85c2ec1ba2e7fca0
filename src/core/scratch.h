// Says what memory is being allocated for, so that a memory recorder can tell the scratch of large kernels
// from other temporaries.
#pragma once
#include <cstdint>

namespace kiln {

enum class Scratch { kNone, kAttention, kMatmul };

// This thread's innermost scope.
struct ScratchUse {
  Scratch scratch = Scratch::kNone;
  uint64_t scope = 0;  // unique per scope and thread: a block freed in the scope that made it was scratch
};
ScratchUse current_scratch();

class ScratchScope {
 public:
  explicit ScratchScope(Scratch scratch);
  ~ScratchScope();
  ScratchScope(const ScratchScope&) = delete;

 private:
  ScratchUse before_;
};

}  // namespace kiln
