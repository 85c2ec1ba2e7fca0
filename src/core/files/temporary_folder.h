// A new folder that is removed with its content.
#pragma once
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/error.h"

namespace kiln {

class TemporaryFolder {
 public:
  // Creates the folder in TMPDIR. `who` begins errors and is part of the folder's name. Throws Error.
  explicit TemporaryFolder(std::string_view who) {
    const std::string pattern = fmt::format("kiln-{}-XXXXXX", who);
    std::string name = (std::filesystem::temp_directory_path() / pattern).string();
    if (!::mkdtemp(name.data())) fail(who, "cannot create {}: {}", name, std::strerror(errno));
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace kiln
