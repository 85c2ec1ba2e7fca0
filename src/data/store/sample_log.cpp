#include "data/store/sample_log.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/files/file_system.h"
#include "core/files/mapped_file.h"
#include "core/files/xxh3.h"

namespace kiln {
namespace {

// Stands before the bytes of name, caption, mean and logvar, which follow in this order.
struct Header {
  uint64_t checksum = 0;  // of the rest of the header and the bytes behind it
  int64_t sample = 0;
  int64_t label = -1;
  std::array<uint64_t, 4> num_bytes{};
  int64_t lane = 0;
  std::array<int64_t, 2> image_hw{};
};
static_assert(sizeof(Header) == 80);

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }
std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Returns the record at the front of `bytes` and its length; nothing if it is torn.
std::optional<std::pair<SampleLog::Record, size_t>> parse_record(std::span<const std::byte> bytes) {
  Header header;
  if (bytes.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof(header));
  size_t total = sizeof(header);
  for (const uint64_t part : header.num_bytes) {
    if (part > bytes.size() - total) return std::nullopt;
    total += part;
  }
  if (xxh3(bytes.subspan(sizeof(header.checksum), total - sizeof(header.checksum))) != header.checksum)
    return std::nullopt;
  std::array<std::span<const std::byte>, 4> parts;
  size_t begin = sizeof(header);
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = bytes.subspan(begin, header.num_bytes[i]);
    begin += header.num_bytes[i];
  }
  return std::pair(SampleLog::Record{header.sample, header.label, text_of(parts[0]), text_of(parts[1]),
                                     parts[2], parts[3], header.lane, header.image_hw},
                   total);
}

}  // namespace

SampleLog::SampleLog(std::string path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("feature store", "cannot write {}: {}", path_, std::strerror(errno));
}

SampleLog::~SampleLog() {
  if (fd_ >= 0) ::close(fd_);
}

void SampleLog::recover(const std::function<bool(const Record&)>& visit) {
  size_ = 0;
  if (std::filesystem::file_size(path_) > 0) {
    const MappedFile file("feature store", path_);
    while (const auto record = parse_record(file.bytes().subspan(size_))) {
      if (!visit(record->first)) break;
      size_ += static_cast<int64_t>(record->second);
    }
  }
  cut(size_);
}

void SampleLog::append(const Record& record) {
  Header header{0,
                record.sample,
                record.label,
                {record.name.size(), record.caption.size(), record.mean.size(), record.logvar.size()},
                record.lane,
                record.image_hw};
  std::vector<std::byte> bytes(sizeof(header));
  for (const auto part : {bytes_of(record.name), bytes_of(record.caption), record.mean, record.logvar})
    bytes.insert(bytes.end(), part.begin(), part.end());
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.checksum = xxh3(std::span<const std::byte>(bytes).subspan(sizeof(header.checksum)));
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (!write_at(fd_, bytes, size_)) {
    const int error = errno;
    cut(size_);
    fail("feature store",
         "cannot write {}: {}: make room and run the same command again; the samples so far are kept", path_,
         std::strerror(error));
  }
  size_ += static_cast<int64_t>(bytes.size());
}

void SampleLog::clear() {
  size_ = 0;
  cut(0);
}

void SampleLog::remove() {
  ::close(fd_);
  fd_ = -1;
  ::unlink(path_.c_str());
}

void SampleLog::cut(int64_t size) {
  if (::ftruncate(fd_, size) != 0) fail("feature store", "cannot write {}: {}", path_, std::strerror(errno));
}

}  // namespace kiln
