#include "plan/price/machine_profile.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "core/files/file_system.h"
#include "plan/price/machine_clock.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr size_t kChunk = 8 << 20, kBytes = 256 << 20, kLeastBytes = 32 << 20;
constexpr size_t kAlignment = 4096;  // of memory that goes past the page cache
constexpr double kMostSeconds = 5;   // enough to tell how fast a slow disk is

// Bytes that were read or written, and the time that took.
struct Transfer {
  size_t bytes = 0;
  double seconds = 0;

  bool is_long_enough() const { return bytes >= kBytes || seconds >= kMostSeconds; }
  double bytes_per_s() const {
    return bytes >= kLeastBytes || is_long_enough() ? static_cast<double>(bytes) / seconds : 0;
  }
};

// Reads an open file from its beginning. Has the system forget its pages first, so that they come from the
// disk; those that others have mapped stay.
void read_file(int fd, Transfer& reading, char* chunk) {
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  for (off_t offset = 0; !reading.is_long_enough();) {
    const auto begin = Clock::now();
    const ssize_t got = ::pread(fd, chunk, kChunk, offset);
    reading.seconds += elapsed_since(begin);
    if (got <= 0) return;
    reading.bytes += static_cast<size_t>(got);
    offset += got;
  }
}

void read_file(const std::string& path, Transfer& reading, char* chunk) {
  const auto begin = Clock::now();
  const int fd = ::open(path.c_str(), O_RDONLY);
  reading.seconds += elapsed_since(begin);  // of many small files on a network much of the time
  if (fd < 0) return;
  read_file(fd, reading, chunk);
  ::close(fd);
}

Transfer read_what_lies_at(const std::string& path, char* chunk) {
  Transfer reading;
  std::error_code error;
  if (fs::is_regular_file(path, error)) read_file(path, reading, chunk);
  const auto options = fs::directory_options::skip_permission_denied;
  for (fs::recursive_directory_iterator at(path, options, error), end; !error && at != end;
       at.increment(error)) {
    if (reading.is_long_enough()) break;
    if (std::error_code none; at->is_regular_file(none)) read_file(at->path(), reading, chunk);
  }
  return reading;
}

// Writes a file into the folder and, if nothing else was read there, reads it back. The file has no name, so
// that it goes with this process whatever happens.
void measure_by_writing(DiskSpeed& disk, char* chunk) {
  std::string path = disk.folder + "/disk-speed-XXXXXX";
  const int fd = ::mkstemp(path.data());
  if (fd < 0) return;
  ::unlink(path.c_str());
  // As BlockStore writes: past the page cache, unless the file system refuses that.
  const bool is_direct = ::fcntl(fd, F_SETFL, O_DIRECT) == 0;
  Transfer writing;
  while (!writing.is_long_enough()) {
    const auto begin = Clock::now();
    if (::write(fd, chunk, kChunk) != static_cast<ssize_t>(kChunk)) break;
    if (!is_direct && ::fdatasync(fd) != 0) break;
    writing.seconds += elapsed_since(begin);
    writing.bytes += kChunk;
  }
  disk.write_bytes_per_s = writing.bytes_per_s();
  Transfer reading;
  if (disk.write_bytes_per_s > 0 && disk.read_bytes_per_s == 0) read_file(fd, reading, chunk);
  if (reading.bytes > 0) disk.read_bytes_per_s = static_cast<double>(reading.bytes) / reading.seconds;
  ::close(fd);
}

}  // namespace

DiskSpeed measure_disk(const std::string& path, bool may_write) {
  DiskSpeed disk{.folder = existing_folder(path), .file_system = file_system_of(path).name};
  const std::unique_ptr<char, decltype(&std::free)> chunk(
      static_cast<char*>(std::aligned_alloc(kAlignment, kChunk)), std::free);
  std::memset(chunk.get(), 'k', kChunk);
  disk.read_bytes_per_s = read_what_lies_at(path, chunk.get()).bytes_per_s();
  if (may_write) measure_by_writing(disk, chunk.get());
  return disk;
}

const DiskSpeed* disk_of(const std::vector<DiskSpeed>& disks, const std::string& path) {
  struct stat wanted, known;
  if (path.empty() || ::stat(existing_folder(path).c_str(), &wanted) != 0) return nullptr;
  const auto found = std::ranges::find_if(disks, [&](const DiskSpeed& disk) {
    return disk.read_bytes_per_s > 0 && ::stat(disk.folder.c_str(), &known) == 0 &&
           known.st_dev == wanted.st_dev;
  });
  return found == disks.end() ? nullptr : &*found;
}

}  // namespace kiln
