// The bytes of a pickle, read from the front. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"

namespace kiln {

// Every read throws Error if the bytes end too early. REQUIRES: bytes and name outlive this.
class PickleReader {
 public:
  PickleReader(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  const std::string& name() const { return name_; }  // of the file
  uint8_t next_opcode() {
    opcode_position_ = position_;
    return number<uint8_t>();
  }
  // text() returns the next bytes, number() a little-endian number, line() the bytes up to the end of the
  // line.
  std::string_view text(uint64_t size) {
    if (size > bytes_.size() - position_) complain("the pickle ends too early");
    const std::string_view view(reinterpret_cast<const char*>(bytes_.data()) + position_, size);
    position_ += size;
    return view;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, text(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view line() {
    const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + position_,
                                bytes_.size() - position_);
    const std::size_t end = rest.find('\n');
    if (end == rest.npos) complain("the pickle ends too early");
    position_ += end + 1;
    return rest.substr(0, end);
  }

  // Throws Error about the last opcode.
  [[noreturn]] void complain(const std::string& what) const {
    fail("pickle", "{} at byte {} ({}): the file is damaged or not made by torch.save", what,
         opcode_position_, name_);
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& name_;
  std::size_t position_ = 0, opcode_position_ = 0;
};

}  // namespace kiln
