// The kind of file system that a file lies on. Torch-free.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct FileSystem {
  std::string name{};       // "ext4", "NFS"; "FUSE": a program serves it; empty: not known
  bool is_network = false;  // its speed depends on a network and on its other users
};

// `magic`: f_type of statfs(2).
FileSystem file_system_of_type(int64_t magic);
// Returns that of the file or folder, or of the nearest folder above that exists.
FileSystem file_system_of(const std::string& path);
// Returns the nearest folder of `path` that exists, or "." for a relative path without one.
std::string existing_folder(const std::string& path);

}  // namespace kiln
