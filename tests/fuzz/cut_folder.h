// A folder whose files are cut from a fuzzer's input, for readers of folders. For each file the input holds
// the number of its name (u8), its length (u16, little-endian) and its bytes; the last one may be short.
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include "core/error.h"
#include "core/files/temporary_folder.h"

namespace kiln::test {

class CutFolder {
 public:
  // `names`: paths below the folder. Numbers beyond them begin again at the first.
  CutFolder(std::span<const char* const> names, const uint8_t* data, size_t size) : folder_("fuzz") {
    for (const char* name : names) std::filesystem::create_directories(path(name).parent_path());
    constexpr size_t kHeader = 3;
    while (size >= kHeader) {
      const size_t length = std::min<size_t>(data[1] | data[2] << 8, size - kHeader);
      std::ofstream file(path(names[data[0] % names.size()]), std::ios::binary);
      file.write(reinterpret_cast<const char*>(data) + kHeader, static_cast<std::streamsize>(length));
      data += kHeader + length;
      size -= kHeader + length;
    }
  }

  std::filesystem::path path(const std::string& name) const { return folder_.path() / name; }
  std::string name() const { return folder_.path().string(); }

 private:
  TemporaryFolder folder_;
};

// Returns the text of a file of the folder; empty if it is not there.
inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace kiln::test
