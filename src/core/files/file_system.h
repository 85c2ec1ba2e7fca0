// The file system that a file lies on: its kind, and space on it. Torch-free.
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

// Makes the file `bytes` long and reserves its blocks. If the file system cannot reserve them, only sets the
// length. Returns 0 or the errno.
int reserve_file_space(int fd, int64_t bytes);

}  // namespace kiln
