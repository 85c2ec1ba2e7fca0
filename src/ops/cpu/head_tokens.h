// The tokens of one attention head in a tensor of tokens.
#pragma once
#include <cstddef>

namespace kiln::ops::cpu {

// Rows of head_dim elements, `stride` elements apart.
struct HeadTokens {
  void* data;
  size_t stride;
};

}  // namespace kiln::ops::cpu
