#include "core/files/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/text/printable.h"

namespace kiln {
namespace {

struct Mapping {
  std::size_t size = 0;
  std::string path;
};

// Where the files of this process are mapped, by their first address.
struct Mappings {
  std::mutex mutex;
  std::map<std::uintptr_t, Mapping> all;

  // Returns the mapping around these bytes, nullptr for none. REQUIRES: `mutex` is held.
  const Mapping* around(std::uintptr_t begin, std::size_t num_bytes) const {
    const auto after = all.upper_bound(begin);
    if (after == all.begin()) return nullptr;
    const auto& [first, mapping] = *std::prev(after);
    return begin + num_bytes <= first + mapping.size ? &mapping : nullptr;
  }
  bool contains(std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex);
    return around(reinterpret_cast<std::uintptr_t>(bytes.data()), bytes.size()) != nullptr;
  }
};

Mappings& mappings() {
  static Mappings all;
  return all;
}

// Ends the process with the name of the file of which a page could not be read. A page is never touched while
// the mutex is held, so the thread that comes here can take it.
void name_unreadable(int signal, siginfo_t* info, void*) {
  Mappings& files = mappings();
  {
    const std::lock_guard lock(files.mutex);
    if (const Mapping* file = files.around(reinterpret_cast<std::uintptr_t>(info->si_addr), 1)) {
      constexpr std::string_view kBegin = "kiln: ";
      constexpr std::string_view kEnd =
          " can no longer be read: it was cut while it was in use, or its disk fails\n";
      for (const std::string_view text : {kBegin, std::string_view(file->path), kEnd})
        if (::write(STDERR_FILENO, text.data(), text.size()) < 0) break;
      ::_exit(1);
    }
  }
  std::signal(signal, SIG_DFL);  // not ours: what comes again ends the process as usual
}

void watch_for_unreadable() {
  struct sigaction action {};
  action.sa_sigaction = name_unreadable;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

std::uintptr_t page_bytes() {
  static const auto size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

MappedFile::MappedFile(std::string_view who, const std::string& path) {
  const int fd = open_input(who, path);
  struct stat status = {};
  if (::fstat(fd, &status) == 0) size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) {
    ::close(fd);
    fail(who, "the file is empty ({}): it was cut off or never written", path);
  }
  // NORESERVE: a writable private mapping larger than memory would be refused otherwise.
  data_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (data_ == MAP_FAILED) fail(who, "cannot map {} ({} bytes): {}", path, size_, std::strerror(error));
  Mappings& files = mappings();
  const std::lock_guard lock(files.mutex);
  if (files.all.empty()) watch_for_unreadable();
  // On a terminal its name may not command anything.
  files.all.emplace(reinterpret_cast<std::uintptr_t>(data_), Mapping{.size = size_, .path = printable(path)});
}

MappedFile::~MappedFile() {
  Mappings& files = mappings();
  const std::lock_guard lock(files.mutex);
  files.all.erase(reinterpret_cast<std::uintptr_t>(data_));
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

void MappedFile::prefetch(std::span<const std::byte> bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()), end = begin + bytes.size();
  const std::uintptr_t first = begin / page_bytes() * page_bytes();
  if (end > first) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_WILLNEED);
}

void MappedFile::release(std::span<const std::byte> bytes) {
  if (!mappings().contains(bytes)) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()), end = begin + bytes.size();
  const std::uintptr_t first = (begin + page_bytes() - 1) / page_bytes() * page_bytes(),
                       last = end / page_bytes() * page_bytes();
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace kiln
