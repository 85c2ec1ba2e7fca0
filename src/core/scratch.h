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

class ScratchScope {
 public:
  explicit ScratchScope(Scratch scratch) : before_(current_) { current_ = {scratch, ++num_scopes_}; }
  ~ScratchScope() { current_ = before_; }
  ScratchScope(const ScratchScope&) = delete;
  static ScratchUse current() { return current_; }

 private:
  static inline thread_local ScratchUse current_;
  static inline thread_local uint64_t num_scopes_ = 0;
  ScratchUse before_;
};
inline ScratchUse current_scratch() { return ScratchScope::current(); }

}  // namespace kiln
