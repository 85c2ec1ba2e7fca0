#include "checkpoint/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/mapped_file.h"
#include "core/json.h"
#include "core/text/json_text.h"

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and mapped as is");

namespace kiln {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr uint64_t kDataAlignment = 64;

// One entry of the header, checked by itself.
struct Entry {
  std::string key;
  uint64_t begin = 0, end = 0;  // offsets into the data
};

uint64_t unsigned_or_fail(const json& value, const std::string& what, const std::string& key,
                          const std::string& name) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > std::numeric_limits<int64_t>::max())
    fail("safetensors", "{} of tensor {:?} is not a valid number ({})", what, key, name);
  return value.get<uint64_t>();
}

Entry parse_entry(const std::string& key, const json& fields, const std::string& name,
                  std::span<const std::byte> data, TensorView& view) {
  const auto complain = [&](const std::string& what) {
    fail("safetensors", "tensor {:?}: {} ({}): the file is damaged", key, what, name);
  };
  if (!fields.is_object()) complain("its header entry is not an object");
  for (const char* field : {"dtype", "shape", "data_offsets"})
    if (!fields.contains(field)) complain(fmt::format("\"{}\" is missing", field));
  const json& dtype = fields["dtype"];
  const json& shape = fields["shape"];
  const json& offsets = fields["data_offsets"];
  if (!dtype.is_string()) complain("\"dtype\" is not a string");
  if (!shape.is_array()) complain("\"shape\" is not a list");
  if (!offsets.is_array() || offsets.size() != 2) complain("\"data_offsets\" is not a pair");
  try {
    view.dtype = parse_dtype(dtype.get_ref<const std::string&>());
  } catch (const Error& error) {
    fail("safetensors", "tensor {:?}: {} ({})", key, message_of(error), name);
  }
  uint64_t num_bytes = dtype_size(view.dtype);
  for (const json& dimension : shape) {
    const uint64_t size = unsigned_or_fail(dimension, "the shape", key, name);
    view.shape.push_back(static_cast<int64_t>(size));
    if (__builtin_mul_overflow(num_bytes, size, &num_bytes)) complain("its shape is too large to count");
  }
  Entry entry{key, unsigned_or_fail(offsets[0], "an offset", key, name),
              unsigned_or_fail(offsets[1], "an offset", key, name)};
  if (entry.begin > entry.end) complain("it ends before it begins");
  if (entry.end > data.size())
    fail("safetensors",
         "tensor {:?} ends at byte {} of the data, which has {} bytes ({}): the file is truncated", key,
         entry.end, data.size(), name);
  if (entry.end - entry.begin != num_bytes)
    complain(fmt::format("expected {} bytes by dtype and shape, got {}", num_bytes, entry.end - entry.begin));
  view.bytes = data.subspan(entry.begin, num_bytes);
  return entry;
}

// The format allows neither overlaps nor holes: the tensors must tile the data.
void check_tiling(std::vector<Entry>& entries, uint64_t num_data_bytes, const std::string& name) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t position = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != position)
      fail("safetensors",
           "{} before tensor {:?}: expected it at byte {} of the data, got {} ({}): the file is damaged",
           entry.begin < position ? "overlap" : "hole", entry.key, position, entry.begin, name);
    position = entry.end;
  }
  if (position != num_data_bytes)
    fail("safetensors", "expected {} bytes of data, got {} ({}): the file is damaged", position,
         num_data_bytes, name);
}

class SafetensorsView : public TensorFile {
 public:
  SafetensorsView(std::span<const std::byte> bytes, const std::string& name) {
    if (bytes.size() < 8)
      fail("safetensors", "expected a header, got {} bytes ({}): not a safetensors file", bytes.size(), name);
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes.data(), 8);
    if (header_bytes > kMaxHeaderBytes)
      fail("safetensors", "the header claims {} bytes, at most {} are allowed ({}): not a safetensors file",
           header_bytes, kMaxHeaderBytes, name);
    if (header_bytes > bytes.size() - 8)
      fail("safetensors", "the header claims {} bytes, the file has {} ({}): the file is truncated",
           header_bytes, bytes.size(), name);
    const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + 8, header_bytes);
    const std::span<const std::byte> data = bytes.subspan(8 + header_bytes);
    const json parsed =
        parse_json("safetensors", header, "the header of " + name, {.refuses_duplicates = true});
    if (!parsed.is_object()) fail("safetensors", "the header is not an object ({})", name);

    std::vector<Entry> entries;
    for (const auto& [key, fields] : parsed.items()) {
      if (key == "__metadata__")
        read_metadata(fields, name);
      else
        entries.push_back(parse_entry(key, fields, name, data, tensors_[key]));
    }
    check_tiling(entries, data.size(), name);
  }

 private:
  void read_metadata(const json& fields, const std::string& name) {
    if (!fields.is_object()) fail("safetensors", "\"__metadata__\" is not an object ({})", name);
    for (const auto& [key, value] : fields.items()) {
      if (!value.is_string()) fail("safetensors", "metadata {:?} is not a string ({})", key, name);
      metadata_[key] = value.get<std::string>();
    }
  }
};

class SafetensorsFile : public TensorFile {
 public:
  explicit SafetensorsFile(const std::string& path) : file_("safetensors", path) {
    const SafetensorsView view(file_.bytes(), path);
    tensors_ = view.tensors();
    metadata_ = view.metadata();
  }

 private:
  MappedFile file_;
};

}  // namespace

std::unique_ptr<TensorFile> open_safetensors(const std::string& path) {
  return std::make_unique<SafetensorsFile>(path);
}

std::unique_ptr<TensorFile> parse_safetensors(std::span<const std::byte> bytes, const std::string& name) {
  return std::make_unique<SafetensorsView>(bytes, name);
}

namespace {

// Returns the text as a JSON string.
std::string quoted(const std::string& text) {
  const auto is_plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
  return std::ranges::all_of(text, is_plain) ? '"' + text + '"' : ordered_json(text).dump();
}

}  // namespace

SafetensorsLayout lay_out_safetensors(const std::vector<TensorSpec>& tensors,
                                      const std::map<std::string, std::string>& metadata) {
  // Written as text, entry by entry, to be fast: plans lay out the files of thousands of checkpoints.
  std::string text = "{";
  const auto add = [&](const std::string& name, const std::string& entry) {
    if (text.size() > 1) text += ',';
    text += quoted(name) + ':' + entry;
  };
  std::set<std::string_view> names = {"__metadata__"};
  if (!metadata.empty()) add("__metadata__", ordered_json(metadata).dump());
  SafetensorsLayout layout;
  uint64_t offset = 0;
  for (const auto& [name, dtype, shape] : tensors) {
    uint64_t num_bytes = dtype_size(dtype);
    for (const int64_t size : shape) num_bytes *= static_cast<uint64_t>(size);
    if (!names.insert(name).second) fail("safetensors", "cannot write two tensors named {:?}", name);
    add(name, fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", dtype_name(dtype),
                          fmt::join(shape, ","), offset, offset + num_bytes));
    layout.offsets.push_back(offset);
    offset += num_bytes;
  }
  text += "}";
  text.append((kDataAlignment - (8 + text.size()) % kDataAlignment) % kDataAlignment, ' ');
  const uint64_t header_bytes = text.size();
  layout.head.assign(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  layout.head += text;
  for (uint64_t& begin : layout.offsets) begin += layout.head.size();
  layout.file_bytes = layout.head.size() + offset;
  return layout;
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Larger elements come first: that keeps every tensor aligned to its elements without holes.
  std::vector<NamedTensor> ordered = tensors;
  std::stable_sort(ordered.begin(), ordered.end(), [](const NamedTensor& a, const NamedTensor& b) {
    return dtype_size(a.view.dtype) > dtype_size(b.view.dtype);
  });
  std::vector<TensorSpec> specs;
  specs.reserve(ordered.size());
  for (const auto& [name, view] : ordered) specs.push_back({name, view.dtype, view.shape});
  const SafetensorsLayout layout = lay_out_safetensors(specs, metadata);
  for (size_t i = 0; i < ordered.size(); ++i) {
    const uint64_t end = i + 1 < ordered.size() ? layout.offsets[i + 1] : layout.file_bytes;
    const auto& [name, view] = ordered[i];
    if (end - layout.offsets[i] != view.bytes.size())
      throw std::logic_error(fmt::format("write_safetensors: {} has {} bytes, its shape {}", name,
                                         view.bytes.size(), end - layout.offsets[i]));
  }
  AtomicFile file("safetensors", path);
  file.write(layout.head);
  for (const NamedTensor& tensor : ordered) file.write(tensor.view.bytes);
  file.commit();
}

}  // namespace kiln
