#include "checkpoint/zip_writer.h"

#include <algorithm>
#include <limits>

#include "checkpoint/zip_view.h"
#include "core/files/byte_writer.h"

namespace kiln {
namespace {

constexpr uint64_t kContentAlignment = 64;  // as torch.save aligns storages, so that they can be mapped
constexpr uint64_t kMax32 = std::numeric_limits<uint32_t>::max();
constexpr uint16_t kUtf8Names = 0x0800, kMethodStored = 0;
constexpr uint16_t kNoTime = 0, kEarliestDate = 0x21;  // 1980-01-01: the same input gives the same bytes

// Writes the fields that the local header and the directory entry share, from the version on.
ByteWriter& member_fields(ByteWriter& out, uint32_t crc, uint64_t size, bool needs_zip64,
                          bool size_in_extra) {
  const uint64_t shown = size_in_extra ? kMax32 : size;
  return out.u16(needs_zip64 ? 45 : 20)
      .u16(kUtf8Names)
      .u16(kMethodStored)
      .u16(kNoTime)
      .u16(kEarliestDate)
      .u32(crc)
      .u32(shown)
      .u32(shown);
}

}  // namespace

void ZipWriter::add(const std::string& name, std::span<const std::byte> content) {
  const Member member{name, zip_crc(content), content.size(), file_.size()};
  const bool is_large = member.size > kMax32;
  ByteWriter extra;
  if (is_large) extra.u16(1).u16(16).u64(member.size).u64(member.size);
  // A padding field ("FB", as torch uses) moves the content to the next boundary.
  const uint64_t content_at = file_.size() + 30 + name.size() + extra.bytes().size() + 4;
  const uint64_t padding = (kContentAlignment - content_at % kContentAlignment) % kContentAlignment;
  extra.text("FB").u16(padding).text(std::string(padding, 'Z'));
  ByteWriter header;
  member_fields(header.u32(0x04034b50), member.crc, member.size, is_large, is_large);
  header.u16(name.size()).u16(extra.bytes().size()).text(name).text(extra.bytes());
  file_.write(header.bytes());
  file_.write(content);
  members_.push_back(member);
}

void ZipWriter::commit() {
  const uint64_t directory_at = file_.size();
  for (const Member& member : members_) file_.write(directory_entry(member));
  file_.write(end_records(directory_at));
  file_.commit();
}

std::string ZipWriter::directory_entry(const Member& member) {
  const bool large_size = member.size > kMax32, large_offset = member.offset > kMax32;
  ByteWriter extra;
  if (large_size || large_offset) {
    extra.u16(1).u16((large_size ? 16 : 0) + (large_offset ? 8 : 0));
    if (large_size) extra.u64(member.size).u64(member.size);
    if (large_offset) extra.u64(member.offset);
  }
  ByteWriter entry;
  member_fields(entry.u32(0x02014b50).u16(45), member.crc, member.size, large_size || large_offset,
                large_size);
  // After the lengths of name and extra: comment, disk, and attributes.
  entry.u16(member.name.size()).u16(extra.bytes().size()).u16(0).u16(0).u16(0).u32(0);
  entry.u32(std::min(member.offset, kMax32)).text(member.name).text(extra.bytes());
  return entry.bytes();
}

std::string ZipWriter::end_records(uint64_t directory_at) const {
  const uint64_t end_at = file_.size(), directory_bytes = end_at - directory_at;
  const uint64_t num_members = members_.size(), shown = std::min<uint64_t>(num_members, 0xffff);
  ByteWriter end;
  if (directory_at > kMax32 || num_members >= 0xffff) {
    end.u32(0x06064b50).u64(44).u16(45).u16(45).u32(0).u32(0);  // 44 bytes follow
    end.u64(num_members).u64(num_members).u64(directory_bytes).u64(directory_at);
    end.u32(0x07064b50).u32(0).u64(end_at).u32(1);
  }
  end.u32(0x06054b50).u32(0).u16(shown).u16(shown);
  end.u32(std::min(directory_bytes, kMax32)).u32(std::min(directory_at, kMax32)).u16(0);
  return end.bytes();
}

}  // namespace kiln
