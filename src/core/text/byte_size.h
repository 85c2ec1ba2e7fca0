// Sizes as people write them. Torch-free.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

// Plain bytes, or with K, M, G, T: "12G" and "12GiB" are binary, "12GB" is decimal. 0 for what is no size.
int64_t byte_size(const std::string& text);

}  // namespace kiln
