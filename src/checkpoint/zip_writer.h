// Zip archives of stored members, as torch's and numpy's files are. Torch-free.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/files/atomic_file.h"

namespace kiln {

// Writes an archive, each member with its size and checksum in front and its content at a multiple of 64
// bytes. Uses zip64 where a size or an offset needs it. The same members give the same bytes. Throws Error of
// `who`.
class ZipWriter {
 public:
  ZipWriter(std::string who, std::string path) : file_(std::move(who), std::move(path)) {}

  void add(const std::string& name, std::span<const std::byte> content);
  void add(const std::string& name, std::string_view content) {
    add(name, std::as_bytes(std::span(content.data(), content.size())));
  }
  void commit();

 private:
  struct Member {
    std::string name;
    uint32_t crc;
    uint64_t size, offset;
  };
  static std::string directory_entry(const Member& member);
  std::string end_records(uint64_t directory_at) const;

  AtomicFile file_;
  std::vector<Member> members_;
};

}  // namespace kiln
