// Little-endian bytes of numbers and texts, as file formats have them. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace kiln {

class ByteWriter {
 public:
  ByteWriter& u16(uint64_t value) { return little_endian(value, 2); }
  ByteWriter& u32(uint64_t value) { return little_endian(value, 4); }
  ByteWriter& u64(uint64_t value) { return little_endian(value, 8); }
  ByteWriter& text(std::string_view value) {
    bytes_ += value;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  ByteWriter& little_endian(uint64_t value, int count) {
    for (int i = 0; i < count; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xFF);
    return *this;
  }
  std::string bytes_;
};

}  // namespace kiln
