#include <charconv>
#include <cstring>

#include "core/error.h"
#include "core/files/input_file.h"
#include "data/images/npz.h"

namespace kiln {
namespace {

constexpr int kMaxDims = 32;

// Reads the header, a Python dict literal: {'descr': '<f4', 'fortran_order': False, 'shape': (1, 4), }.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  Dtype dtype() const {
    const auto value = value_of("descr");
    if (value.size() < 4 || (value[0] != '\'' && value[0] != '"'))
      fail("npy", "expected a plain element type, got {} ({})", value.substr(0, 40), name_);
    const auto code = value.substr(1, value.find(value[0], 1) - 1);
    struct Code {
      std::string_view text;
      Dtype dtype;
    };
    constexpr Code kCodes[] = {{"|b1", Dtype::kBool}, {"|u1", Dtype::kU8},  {"|i1", Dtype::kI8},
                               {"<i2", Dtype::kI16},  {"<i4", Dtype::kI32}, {"<i8", Dtype::kI64},
                               {"<f2", Dtype::kF16},  {"<f4", Dtype::kF32}, {"<f8", Dtype::kF64}};
    for (const Code& known : kCodes)
      if (known.text == code) return known.dtype;
    fail("npy", "expected little-endian numbers, got element type '{}' ({})", code, name_);
  }

  bool is_fortran_order() const { return value_of("fortran_order").starts_with("True"); }

  std::vector<int64_t> shape() const {
    auto value = value_of("shape");
    if (!value.starts_with('(') || value.find(')') == std::string_view::npos) fail_malformed();
    value = value.substr(1, value.find(')') - 1);
    std::vector<int64_t> shape;
    while (!(value = skip_separators(value)).empty()) {
      int64_t dim = 0;
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), dim);
      if (error != std::errc() || dim < 0 || shape.size() == kMaxDims) fail_malformed();
      shape.push_back(dim);
      value.remove_prefix(end - value.data());
    }
    return shape;
  }

 private:
  static std::string_view skip_separators(std::string_view text) {
    const auto first = text.find_first_not_of(" ,");
    return first == std::string_view::npos ? std::string_view() : text.substr(first);
  }

  std::string_view value_of(std::string_view key) const {
    const auto found = text_.find(fmt::format("'{}':", key));
    if (found == std::string_view::npos) fail_malformed();
    return skip_separators(text_.substr(found + key.size() + 3));
  }

  [[noreturn]] void fail_malformed() const {
    fail("npy", "expected an array's header, got a malformed one ({})", name_);
  }

  std::string_view text_;
  const std::string& name_;
};

}  // namespace

size_t npy_header_bytes(std::span<const std::byte> begin, const std::string& name) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  if (begin.size() < 12 || std::memcmp(begin.data(), kMagic.data(), kMagic.size()) != 0)
    fail("npy", "expected a .npy array, got something else ({})", name);
  const auto byte_at = [&](size_t i) { return static_cast<size_t>(begin[i]); };
  const size_t version = byte_at(6);
  if (version < 1 || version > 3) fail("npy", "expected format version 1 to 3, got {} ({})", version, name);
  if (version == 1) return 10 + (byte_at(8) | byte_at(9) << 8);
  return 12 + (byte_at(8) | byte_at(9) << 8 | byte_at(10) << 16 | byte_at(11) << 24);
}

NpyHeader parse_npy_header(std::span<const std::byte> begin, const std::string& name) {
  const size_t end = npy_header_bytes(begin, name), prefix = begin[6] == std::byte{1} ? 10 : 12;
  if (end > begin.size()) fail("npy", "the file is truncated ({})", name);
  const HeaderParser parser({reinterpret_cast<const char*>(begin.data()) + prefix, end - prefix}, name);
  NpyHeader header{.dtype = parser.dtype(), .shape = parser.shape(), .data_offset = end};
  if (parser.is_fortran_order() && header.shape.size() > 1)
    fail("npy", "expected C order, got Fortran order ({}): save numpy.ascontiguousarray of it", name);
  header.data_bytes = dtype_size(header.dtype);
  for (int64_t dim : header.shape)
    if (__builtin_mul_overflow(header.data_bytes, static_cast<uint64_t>(dim), &header.data_bytes))
      fail("npy", "the array's shape is too large ({})", name);
  return header;
}

NpyArray parse_npy(std::span<const std::byte> bytes, const std::string& name) {
  const NpyHeader header = parse_npy_header(bytes, name);
  const auto data = bytes.subspan(header.data_offset);
  if (header.data_bytes != data.size())
    fail("npy", "expected {} bytes of data, got {} ({})", header.data_bytes, data.size(), name);
  return {header.dtype, header.shape, {data.begin(), data.end()}};
}

NpyArray read_npy(const std::string& path) { return parse_npy(read_file("npy", path), path); }

}  // namespace kiln
