// The members of a zip archive as views of its bytes. Torch-free.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace kiln {

// Reads the central directory (zip and zip64); stored members are views, deflated ones are unpacked into a
// copy. Members that overlap are refused: a small file could unpack to any size. Checksums are checked where
// a member is unpacked or asked for with `verify`. Torch's files are of this kind.
class ZipView {
 public:
  // `bytes` must outlive the object; `name` is for messages. Throws Error for anything out of bounds.
  ZipView(std::span<const std::byte> bytes, std::string name);

  bool contains(const std::string& member) const { return members_.contains(member); }
  std::vector<std::string> member_names() const;
  // Unpacked size in bytes, as the directory claims it; 0 for a member that is not there.
  uint64_t member_size(const std::string& member) const;
  // Throws Error: no such member, encrypted, unknown method, damaged.
  std::span<const std::byte> read(const std::string& member, bool verify = false);

 private:
  struct Member {
    uint16_t flags = 0, method = 0;
    uint32_t crc = 0;
    uint64_t packed_bytes = 0, unpacked_bytes = 0, header_offset = 0;
  };
  void read_directory(uint64_t offset, uint64_t num_bytes, uint64_t num_members);
  void refuse_overlaps() const;
  std::span<const std::byte> packed(const std::string& name, const Member& member) const;

  std::span<const std::byte> bytes_;
  std::string name_;
  std::map<std::string, Member> members_;
  std::map<std::string, std::vector<std::byte>> unpacked_;
};

// CRC-32 as zip defines it.
uint32_t zip_crc(std::span<const std::byte> bytes);

}  // namespace kiln
