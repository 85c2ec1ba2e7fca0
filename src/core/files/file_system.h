// The file system that a file lies on: its kind, space on it, and calls of it that are done to their end.
// Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
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

// Reads `to` as a whole, however the system interrupts or shortens its calls. Returns the number of bytes,
// fewer only where the file ends, or -1 with errno.
int64_t read_at(int fd, std::span<std::byte> to, int64_t offset);
// Writes all bytes likewise. Returns false with errno.
bool write_at(int fd, std::span<const std::byte> bytes, int64_t offset);

}  // namespace kiln
