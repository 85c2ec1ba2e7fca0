#include "plan/price/disks.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "core/files/file_system.h"
#include "plan/price/machine_clock.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr size_t kChunk = 8 << 20, kBytes = 256 << 20, kLeastBytes = 32 << 20;
constexpr double kMostSeconds = 5;

// Has the system forget the file's pages, so that the next read comes from the disk. Pages that others have
// mapped stay.
void forget_pages(int fd) { ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }

struct Reading {
  size_t bytes = 0;
  double seconds = 0;
};

void read_file(const std::string& path, Reading& reading, std::vector<char>& chunk) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  if (fd < 0) return;
  forget_pages(fd);
  const auto begin = Clock::now();
  for (ssize_t got = 1; got > 0 && reading.bytes < kBytes;) {
    got = ::read(fd, chunk.data(), chunk.size());
    if (got > 0) reading.bytes += static_cast<size_t>(got);
  }
  reading.seconds += elapsed_since(begin);
  ::close(fd);
}

// Reads what lies at `path`. Returns 0 if that is too little to tell.
double read_bytes_per_s(const std::string& path) {
  std::vector<char> chunk(kChunk);
  Reading reading;
  std::error_code error;
  if (fs::is_regular_file(path, error)) read_file(path, reading, chunk);
  const auto options = fs::directory_options::skip_permission_denied;
  for (fs::recursive_directory_iterator at(path, options, error), end; !error && at != end;
       at.increment(error)) {
    if (reading.bytes >= kBytes || reading.seconds > kMostSeconds) break;
    if (std::error_code none; at->is_regular_file(none)) read_file(at->path(), reading, chunk);
  }
  return reading.bytes < kLeastBytes ? 0 : static_cast<double>(reading.bytes) / reading.seconds;
}

// Writes a file into the folder and reads it back.
void measure_by_writing(DiskSpeed& disk) {
  const std::string path = disk.folder + "/disk-speed.partial";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (fd < 0) return;
  std::vector<char> chunk(kChunk, 'k');
  size_t written = 0;
  bool is_good = true;
  const auto begin = Clock::now();
  while (is_good && written < kBytes && elapsed_since(begin) < kMostSeconds) {
    is_good = ::write(fd, chunk.data(), kChunk) == static_cast<ssize_t>(kChunk);
    written += kChunk;
  }
  is_good = ::fsync(fd) == 0 && is_good;
  const double write_s = elapsed_since(begin);
  ::close(fd);
  if (is_good) {
    disk.write_bytes_per_s = static_cast<double>(written) / write_s;
    Reading reading;
    read_file(path, reading, chunk);
    if (disk.read_bytes_per_s == 0 && reading.bytes == written)
      disk.read_bytes_per_s = static_cast<double>(reading.bytes) / reading.seconds;
  }
  std::error_code error;
  fs::remove(path, error);
}

}  // namespace

DiskSpeed measure_disk(const std::string& path) {
  DiskSpeed disk{.folder = existing_folder(path), .file_system = file_system_of(path).name};
  disk.read_bytes_per_s = read_bytes_per_s(path);
  measure_by_writing(disk);
  return disk;
}

const DiskSpeed* disk_of(const std::vector<DiskSpeed>& disks, const std::string& path) {
  struct stat wanted, known;
  if (path.empty() || ::stat(existing_folder(path).c_str(), &wanted) != 0) return nullptr;
  const auto found = std::ranges::find_if(disks, [&](const DiskSpeed& disk) {
    return ::stat(disk.folder.c_str(), &known) == 0 && known.st_dev == wanted.st_dev;
  });
  return found == disks.end() ? nullptr : &*found;
}

}  // namespace kiln
