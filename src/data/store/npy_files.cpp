#include "core/files/entries.h"
#include "data/store/other_caches.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/units.h"

namespace kiln {
namespace fs = std::filesystem;
namespace {

// Returns 12 for "12.npy": fast-DiT's names sort as numbers.
std::optional<int64_t> number_of(const std::string& name) {
  return whole_number(name.substr(0, name.size() - std::strlen(".npy")));
}

}  // namespace

std::vector<std::string> list_npy(const std::string& folder, int64_t& num_other_files) {
  if (!fs::is_directory(folder)) fail("store import", "expected a folder of .npy files, got {}", folder);
  std::vector<std::string> names;
  for (const auto& entry : entries_below(folder)) {
    if (!entry.is_regular_file()) continue;
    if (entry.path().extension() == ".npy") {
      names.push_back(fs::relative(entry.path(), folder).string());
    } else {
      ++num_other_files;
    }
  }
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    const auto x = number_of(a), y = number_of(b);
    if (x.has_value() != y.has_value()) return x.has_value();
    return x != y ? x < y : a < b;
  });
  return names;
}

std::string find_folder(const std::string& parent, std::string_view suffix) {
  std::string found;
  if (!fs::is_directory(parent)) return found;
  for (const auto& entry : entries_of(parent)) {
    if (!entry.is_directory() || !entry.path().filename().string().ends_with(suffix)) continue;
    if (!found.empty())
      fail("store import", "expected one folder *{} in {}, got {} and {}: give the folder itself", suffix,
           parent, found, entry.path().string());
    found = entry.path().string();
  }
  return found;
}

std::vector<float> float_values(const NpyArray& array, const std::string& path) {
  const size_t element = dtype_size(array.dtype);
  std::vector<float> values(array.bytes.size() / element);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::byte* p = array.bytes.data() + i * element;
    if (array.dtype == Dtype::kF32) {
      std::memcpy(&values[i], p, 4);
    } else if (array.dtype == Dtype::kF16) {
      uint16_t bits;
      std::memcpy(&bits, p, 2);
      values[i] = fp16_to_float(bits);
    } else if (array.dtype == Dtype::kF64) {
      double value;
      std::memcpy(&value, p, 8);
      values[i] = static_cast<float>(value);
    } else {
      fail("store import", "expected floating point values, got {} ({})", dtype_name(array.dtype), path);
    }
  }
  return values;
}

int64_t read_label(const std::string& path) {
  const NpyArray array = read_npy(path);
  const bool is_integer = array.dtype == Dtype::kI64 || array.dtype == Dtype::kI32;
  if (!is_integer || array.bytes.size() != dtype_size(array.dtype))
    fail("store import", "expected one integer label, got {} ({}) ({})", dtype_name(array.dtype),
         fmt::join(array.shape, ", "), path);
  int64_t label = 0;
  int32_t narrow = 0;
  if (array.dtype == Dtype::kI64) {
    std::memcpy(&label, array.bytes.data(), sizeof(label));
  } else {
    std::memcpy(&narrow, array.bytes.data(), sizeof(narrow));
    label = narrow;
  }
  if (label < 0) fail("store import", "expected a label from 0 on, got {} ({})", label, path);
  return label;
}

NpyHeader read_npy_header(const std::string& path) {
  const RandomAccessFile file("store import", path);
  constexpr int64_t kBegin = 12;
  const size_t header_bytes = npy_header_bytes(file.read(0, std::min(kBegin, file.size())), path);
  return parse_npy_header(file.read(0, static_cast<int64_t>(header_bytes)), path);
}

}  // namespace kiln
