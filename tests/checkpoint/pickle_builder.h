// Hand-written pickles and zip archives for the tests and seeds of the .pt reader.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/zip_view.h"

namespace kiln::test {

inline std::string little_endian(uint64_t value, std::size_t num_bytes) {
  std::string bytes;
  for (std::size_t i = 0; i < num_bytes; ++i, value >>= 8) bytes.push_back(static_cast<char>(value));
  return bytes;
}

inline std::string pickled(const std::string& text) { return "X" + little_endian(text.size(), 4) + text; }
inline std::string pickled(int32_t value) { return "J" + little_endian(static_cast<uint32_t>(value), 4); }
inline std::string pickled(const std::vector<int32_t>& values) {
  std::string tuple = "(";
  for (const int32_t value : values) tuple += pickled(value);
  return tuple + "t";
}
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}

// What torch.save writes for a tensor.
struct PickledTensor {
  std::string storage = "0", type = "FloatStorage", function = "_rebuild_tensor_v2";
  int32_t storage_elements = 6, offset = 0;
  std::vector<int32_t> shape = {2, 3}, strides = {3, 1};
};
inline std::string pickled(const PickledTensor& t) {
  return global("torch._utils", t.function) + "((" + pickled("storage") + global("torch", t.type) +
         pickled(t.storage) + pickled("cpu") + pickled(t.storage_elements) + "tQ" + pickled(t.offset) +
         pickled(t.shape) + pickled(t.strides) + "\x89" + global("collections", "OrderedDict") + ")RtR";
}
// items: alternating pickled keys and values.
inline std::string pickled_dict(const std::string& items) { return "}(" + items + "u"; }
inline std::string program(const std::string& body) { return "\x80\x02" + body + "."; }

struct ZipMember {
  std::string name, content;
  uint16_t method = 0;
  std::string packed = content;
};
inline std::string zip_archive(const std::vector<ZipMember>& members) {
  std::string file, directory;
  for (const ZipMember& member : members) {
    const std::span content(member.content.data(), member.content.size());
    const std::string shared =
        little_endian(20, 2) + little_endian(0, 2) + little_endian(member.method, 2) + little_endian(0, 4) +
        little_endian(zip_crc(std::as_bytes(content)), 4) + little_endian(member.packed.size(), 4) +
        little_endian(member.content.size(), 4) + little_endian(member.name.size(), 2) + little_endian(0, 2);
    directory += "PK\x01\x02" + little_endian(20, 2) + shared + little_endian(0, 10) +
                 little_endian(file.size(), 4) + member.name;
    file += "PK\x03\x04" + shared + member.name + member.packed;
  }
  const std::string counts = little_endian(members.size(), 2);
  return file + directory + "PK\x05\x06" + little_endian(0, 4) + counts + counts +
         little_endian(directory.size(), 4) + little_endian(file.size(), 4) + little_endian(0, 2);
}

// A .pt file: the pickle's body, and storages 0, 1, ...
inline std::string pt_archive(const std::string& body, const std::vector<std::string>& storages) {
  std::vector<ZipMember> members = {{"archive/data.pkl", program(body)}, {"archive/version", "3\n"}};
  for (std::size_t i = 0; i < storages.size(); ++i)
    members.push_back({"archive/data/" + std::to_string(i), storages[i]});
  return zip_archive(members);
}

}  // namespace kiln::test
