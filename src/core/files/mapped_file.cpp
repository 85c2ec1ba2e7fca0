#include "core/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "core/error.h"

namespace kiln {
namespace {

// Where the files of this process are mapped: first address -> size.
struct Mappings {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> sizes;

  bool contains(std::span<const std::byte> bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
    const std::lock_guard lock(mutex);
    const auto after = sizes.upper_bound(begin);
    if (after == sizes.begin()) return false;
    const auto& [first, size] = *std::prev(after);
    return begin + bytes.size() <= first + size;
  }
};

Mappings& mappings() {
  static Mappings all;
  return all;
}

std::uintptr_t page_bytes() {
  static const auto size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

MappedFile::MappedFile(std::string_view who, const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // does not wait on a pipe
  if (fd < 0) fail(who, "cannot open {}: {}", path, std::strerror(errno));
  struct stat status = {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    fail(who, "expected a file, got something else ({})", path);
  }
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) {
    ::close(fd);
    fail(who, "the file is empty ({}): it was cut off or never written", path);
  }
  // NORESERVE: a writable private mapping larger than memory would be refused otherwise.
  data_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (data_ == MAP_FAILED) fail(who, "cannot map {} ({} bytes): {}", path, size_, std::strerror(error));
  Mappings& all = mappings();
  const std::lock_guard lock(all.mutex);
  all.sizes.emplace(reinterpret_cast<std::uintptr_t>(data_), size_);
}

MappedFile::~MappedFile() {
  Mappings& all = mappings();
  const std::lock_guard lock(all.mutex);
  all.sizes.erase(reinterpret_cast<std::uintptr_t>(data_));
  ::munmap(data_, size_);
}

void MappedFile::fetch(std::span<const std::byte> bytes) {
  if (bytes.empty() || !mappings().contains(bytes)) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()), end = begin + bytes.size();
  const std::uintptr_t first = begin / page_bytes() * page_bytes();
#ifdef MADV_POPULATE_READ
  if (::madvise(reinterpret_cast<void*>(first), end - first, MADV_POPULATE_READ) == 0) return;
#endif
  for (std::uintptr_t page = first; page < end; page += page_bytes())
    static_cast<void>(*reinterpret_cast<const volatile std::byte*>(std::max(page, begin)));
}

void MappedFile::release(std::span<const std::byte> bytes) {
  if (!mappings().contains(bytes)) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()), end = begin + bytes.size();
  const std::uintptr_t first = (begin + page_bytes() - 1) / page_bytes() * page_bytes(),
                       last = end / page_bytes() * page_bytes();
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace kiln
