#include "checkpoint/zip_view.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/error.h"

namespace kiln {
namespace {

constexpr uint32_t kLocalSignature = 0x04034b50, kDirectorySignature = 0x02014b50, kEndSignature = 0x06054b50;
constexpr uint32_t kEnd64Signature = 0x06064b50, kLocator64Signature = 0x07064b50;
constexpr std::size_t kLocalBytes = 30, kDirectoryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                      kLocator64Bytes = 20;
constexpr uint16_t kStored = 0, kDeflated = 8, kEncryptedFlag = 1, kZip64Extra = 1;
constexpr uint64_t kMaxDeflateRatio = 1032;  // what the format can reach at most

// Unchecked little-endian read; callers have checked the bounds.
template <class T>
T read_at(std::span<const std::byte> bytes, uint64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

bool in_bounds(std::span<const std::byte> bytes, uint64_t offset, uint64_t size) {
  return offset <= bytes.size() && size <= bytes.size() - offset;
}

std::optional<uint64_t> find_end_record(std::span<const std::byte> bytes) {
  if (bytes.size() < kEndBytes) return std::nullopt;
  const uint64_t last = bytes.size() - kEndBytes;
  const uint64_t first = last > 0xffff ? last - 0xffff : 0;  // a comment of up to 65,535 bytes may follow
  for (uint64_t offset = last + 1; offset-- > first;)
    if (read_at<uint32_t>(bytes, offset) == kEndSignature &&
        offset + kEndBytes + read_at<uint16_t>(bytes, offset + 20) == bytes.size())
      return offset;
  return std::nullopt;
}

}  // namespace

uint32_t zip_crc(std::span<const std::byte> bytes) {
  return static_cast<uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

ZipView::ZipView(std::span<const std::byte> bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {
  const auto end = find_end_record(bytes_);
  if (!end) fail("zip", "no end of the archive was found ({}): the file is truncated", name_);
  uint64_t num_members = read_at<uint16_t>(bytes_, *end + 10);
  uint64_t directory_bytes = read_at<uint32_t>(bytes_, *end + 12);
  uint64_t directory_offset = read_at<uint32_t>(bytes_, *end + 16);
  if (*end >= kLocator64Bytes && read_at<uint32_t>(bytes_, *end - kLocator64Bytes) == kLocator64Signature) {
    const uint64_t end64 = read_at<uint64_t>(bytes_, *end - kLocator64Bytes + 8);
    if (!in_bounds(bytes_, end64, kEnd64Bytes) || read_at<uint32_t>(bytes_, end64) != kEnd64Signature)
      fail("zip", "the zip64 end record is out of bounds ({}): the file is damaged", name_);
    num_members = read_at<uint64_t>(bytes_, end64 + 32);
    directory_bytes = read_at<uint64_t>(bytes_, end64 + 40);
    directory_offset = read_at<uint64_t>(bytes_, end64 + 48);
  }
  if (!in_bounds(bytes_, directory_offset, directory_bytes))
    fail("zip", "the directory is out of bounds ({}): the file is damaged", name_);
  read_directory(directory_offset, directory_bytes, num_members);
  refuse_overlaps();
}

void ZipView::refuse_overlaps() const {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;  // begin of the header, end of the data
  for (const auto& [name, member] : members_) {
    const auto data = packed(name, member);
    ranges.emplace_back(member.header_offset,
                        static_cast<uint64_t>(data.data() - bytes_.data()) + data.size());
  }
  std::ranges::sort(ranges);
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].second)
      fail("zip", "members overlap ({}): the file is damaged or made to unpack without end", name_);
}

void ZipView::read_directory(uint64_t offset, uint64_t num_bytes, uint64_t num_members) {
  const auto directory = bytes_.subspan(offset, num_bytes);
  const auto complain = [&] { fail("zip", "the directory is damaged ({})", name_); };
  uint64_t position = 0;
  for (uint64_t i = 0; i < num_members; ++i) {
    if (!in_bounds(directory, position, kDirectoryBytes) ||
        read_at<uint32_t>(directory, position) != kDirectorySignature)
      complain();
    Member member{.flags = read_at<uint16_t>(directory, position + 8),
                  .method = read_at<uint16_t>(directory, position + 10),
                  .crc = read_at<uint32_t>(directory, position + 16),
                  .packed_bytes = read_at<uint32_t>(directory, position + 20),
                  .unpacked_bytes = read_at<uint32_t>(directory, position + 24),
                  .header_offset = read_at<uint32_t>(directory, position + 42)};
    const uint16_t name_bytes = read_at<uint16_t>(directory, position + 28);
    const uint16_t extra_bytes = read_at<uint16_t>(directory, position + 30);
    const uint16_t comment_bytes = read_at<uint16_t>(directory, position + 32);
    position += kDirectoryBytes;
    if (!in_bounds(directory, position, uint64_t{name_bytes} + extra_bytes + comment_bytes)) complain();
    const std::string member_name(reinterpret_cast<const char*>(directory.data()) + position, name_bytes);

    // Sizes that do not fit in 32 bits stand in the zip64 extra field, in this order, only where needed.
    auto extra = directory.subspan(position + name_bytes, extra_bytes);
    while (extra.size() >= 4) {
      const uint16_t id = read_at<uint16_t>(extra, 0), size = read_at<uint16_t>(extra, 2);
      if (size > extra.size() - 4) break;  // writers pad with anything; only zip64's own field matters
      if (id == kZip64Extra) {
        uint64_t at = 4;
        for (uint64_t* field : {&member.unpacked_bytes, &member.packed_bytes, &member.header_offset}) {
          if (*field != 0xffffffff) continue;
          if (at + 8 > 4u + size) complain();
          *field = read_at<uint64_t>(extra, at);
          at += 8;
        }
      }
      extra = extra.subspan(4 + size);
    }
    position += uint64_t{name_bytes} + extra_bytes + comment_bytes;
    if (!members_.emplace(member_name, member).second)
      fail("zip", "member {:?} occurs twice ({})", member_name, name_);
  }
}

std::vector<std::string> ZipView::member_names() const {
  std::vector<std::string> names;
  for (const auto& [name, member] : members_) names.push_back(name);
  return names;
}

uint64_t ZipView::member_size(const std::string& member) const {
  const auto found = members_.find(member);
  return found == members_.end() ? 0 : found->second.unpacked_bytes;
}

std::span<const std::byte> ZipView::packed(const std::string& name, const Member& member) const {
  if (!in_bounds(bytes_, member.header_offset, kLocalBytes) ||
      read_at<uint32_t>(bytes_, member.header_offset) != kLocalSignature)
    fail("zip", "member {:?} is out of bounds ({}): the file is damaged", name, name_);
  const uint64_t data = member.header_offset + kLocalBytes +
                        read_at<uint16_t>(bytes_, member.header_offset + 26) +
                        read_at<uint16_t>(bytes_, member.header_offset + 28);
  if (!in_bounds(bytes_, data, member.packed_bytes))
    fail("zip", "member {:?} is out of bounds ({}): the file is truncated", name, name_);
  return bytes_.subspan(data, member.packed_bytes);
}

std::span<const std::byte> ZipView::read(const std::string& name, bool verify) {
  const auto found = members_.find(name);
  if (found == members_.end()) fail("zip", "member {:?} is missing ({}): the file is damaged", name, name_);
  const Member& member = found->second;
  if (member.flags & kEncryptedFlag) fail("zip", "member {:?} is encrypted ({})", name, name_);
  const auto source = packed(name, member);
  const auto check_crc = [&](std::span<const std::byte> bytes) {
    if (zip_crc(bytes) != member.crc)
      fail("zip", "member {:?} has a wrong checksum ({}): the file is damaged", name, name_);
  };
  if (member.method == kStored) {
    if (member.packed_bytes != member.unpacked_bytes)
      fail("zip", "stored member {:?} has two sizes ({}): the file is damaged", name, name_);
    if (verify) check_crc(source);
    return source;
  }
  if (member.method != kDeflated)
    fail("zip", "member {:?} is packed by method {} ({}): only stored and deflated are read", name,
         member.method, name_);
  if (const auto known = unpacked_.find(name); known != unpacked_.end()) return known->second;
  if (member.unpacked_bytes / kMaxDeflateRatio > member.packed_bytes)
    fail("zip", "member {:?} claims to unpack to {} bytes ({}): the file is damaged", name,
         member.unpacked_bytes, name_);

  std::vector<std::byte> target(member.unpacked_bytes);
  z_stream stream = {};
  if (::inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
  constexpr std::size_t kMaxChunk = std::size_t{1} << 30;  // zlib counts in 32 bits
  std::size_t fed = 0, made = 0;
  int status = Z_OK;
  while (status == Z_OK) {
    const std::size_t in = std::min(source.size() - fed, kMaxChunk),
                      out = std::min(target.size() - made, kMaxChunk);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(source.data()) + fed);
    stream.avail_in = static_cast<uInt>(in);
    stream.next_out = reinterpret_cast<Bytef*>(target.data() + made);
    stream.avail_out = static_cast<uInt>(out);
    status = ::inflate(&stream, Z_NO_FLUSH);
    fed += in - stream.avail_in;
    made += out - stream.avail_out;
  }
  ::inflateEnd(&stream);
  if (status != Z_STREAM_END || made != target.size())
    fail("zip", "member {:?} cannot be unpacked ({}): the file is damaged", name, name_);
  check_crc(target);
  return unpacked_.emplace(name, std::move(target)).first->second;
}

}  // namespace kiln
