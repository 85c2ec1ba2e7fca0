#include "checkpoint/file_checksum.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/json.h"

#define XXH_INLINE_ALL  // hashes of a length that the compiler knows
#include <xxhash.h>

namespace kiln {

namespace {

constexpr uint64_t kWholeBlock = ~uint64_t{0};

// Bits [begin, begin + count).
uint64_t bits(uint64_t begin, uint64_t count) {
  return (count == 64 ? kWholeBlock : (uint64_t{1} << count) - 1) << begin;
}

}  // namespace

void FileChecksum::add(uint64_t offset, std::span<const std::byte> bytes) {
  num_bytes_ += bytes.size();
  while (!bytes.empty()) {
    const uint64_t block = offset / kBlockBytes, begin = offset % kBlockBytes;
    uint64_t count = std::min<uint64_t>(kBlockBytes - begin, bytes.size());
    if (count == kBlockBytes) {
      count = bytes.size() / kBlockBytes * kBlockBytes;
      add_blocks(block, bytes.first(count));
    } else {
      Fragment fragment{.present = bits(begin, count)};
      std::memcpy(fragment.bytes.data() + begin, bytes.data(), count);
      add_fragment(block, fragment);
    }
    bytes = bytes.subspan(count);
    offset += count;
  }
}

void FileChecksum::add_blocks(uint64_t first, std::span<const std::byte> bytes) {
  uint64_t sum = 0;
  for (uint64_t block = 0; block < bytes.size() / kBlockBytes; ++block)
    sum += XXH3_64bits_withSeed(bytes.data() + block * kBlockBytes, kBlockBytes, first + block);
  sum_ += sum;
}

void FileChecksum::add_fragment(uint64_t block, const Fragment& fragment) {
  Fragment& known = fragments_[block];
  if ((known.present & fragment.present) != 0)
    throw std::logic_error("bytes of a file were added to its checksum twice");
  known.present |= fragment.present;
  for (uint64_t i = 0; i < kBlockBytes; ++i)
    if ((fragment.present & bits(i, 1)) != 0) known.bytes[i] = fragment.bytes[i];
  if (known.present != kWholeBlock) return;
  add_blocks(block, known.bytes);
  fragments_.erase(block);
}

void FileChecksum::merge(const FileChecksum& other) {
  sum_ += other.sum_;
  num_bytes_ += other.num_bytes_;
  for (const auto& [block, fragment] : other.fragments_) add_fragment(block, fragment);
}

std::optional<std::string> FileChecksum::of_file(uint64_t file_bytes) const {
  const uint64_t last = file_bytes / kBlockBytes, tail = file_bytes % kBlockBytes;
  if (num_bytes_ != file_bytes || fragments_.size() != (tail > 0 ? 1 : 0)) return std::nullopt;
  uint64_t sum = sum_;
  if (tail > 0) {
    const auto& [block, fragment] = *fragments_.begin();
    if (block != last || fragment.present != bits(0, tail)) return std::nullopt;
    sum += XXH3_64bits_withSeed(fragment.bytes.data(), tail, last);
  }
  return fmt::format("{:016x}", sum);
}

void to_json(nlohmann::json& json, const FileChecksum& checksum) {
  json = {{"sum", checksum.sum_}, {"bytes", checksum.num_bytes_}, {"fragments", nlohmann::json::array()}};
  for (const auto& [block, fragment] : checksum.fragments_) {
    std::vector<int> values;
    for (const std::byte byte : fragment.bytes) values.push_back(std::to_integer<int>(byte));
    json["fragments"].push_back({block, fragment.present, values});
  }
}

void from_json(const nlohmann::json& json, FileChecksum& checksum) {
  checksum.sum_ = json.at("sum");
  checksum.num_bytes_ = json.at("bytes");
  checksum.fragments_.clear();
  for (const nlohmann::json& entry : json.at("fragments")) {
    auto& fragment = checksum.fragments_[entry.at(0).get<uint64_t>()];
    fragment.present = entry.at(1);
    const auto values = entry.at(2).get<std::array<int, FileChecksum::kBlockBytes>>();
    std::ranges::transform(values, fragment.bytes.begin(), [](int value) { return std::byte(value); });
  }
}

FileChecksum checksum_of_bytes(const std::string& path, uint64_t begin, uint64_t end) {
  constexpr uint64_t kAtOnce = uint64_t{1} << 20;  // stays in a core's cache
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_with_errno("checkpoint", "read", path, errno);
  FileChecksum checksum;
  std::vector<std::byte> buffer(std::min(kAtOnce, end - begin));
  ssize_t count = 1;
  int error = 0;
  while (begin < end && count != 0 && error == 0) {
    count = ::pread(fd, buffer.data(), std::min(kAtOnce, end - begin), static_cast<off_t>(begin));
    if (count < 0) {
      error = errno == EINTR ? 0 : errno;
      continue;
    }
    checksum.add(begin, std::span(buffer).first(static_cast<size_t>(count)));
    begin += static_cast<uint64_t>(count);
  }
  ::close(fd);
  if (error != 0) fail_with_errno("checkpoint", "read", path, error);
  if (begin < end) fail("checkpoint", "{} has fewer than the {} bytes that were there", path, end);
  return checksum;
}

}  // namespace kiln
