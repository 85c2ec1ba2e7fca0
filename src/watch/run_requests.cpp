#include "watch/run_requests.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/text/printable.h"
#include "core/text/some_of.h"

namespace kiln {

namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(200);

std::string requests_folder(const std::string& run) { return run + "/requests"; }

// A folder of requests, opened so that no link leads elsewhere. Without one, no request stands in it.
class RequestsFolder {
 public:
  explicit RequestsFolder(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) {}
  ~RequestsFolder() {
    if (fd_ >= 0) ::close(fd_);
  }
  RequestsFolder(const RequestsFolder&) = delete;

  bool is_open() const { return fd_ >= 0; }
  bool has(const char* request) const {
    struct stat info {};
    return is_open() && ::fstatat(fd_, request, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info.st_mode);
  }
  // Both return false with errno.
  bool add(const char* request) const {
    const int file = ::openat(fd_, request, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    return file >= 0 && ::close(file) == 0;
  }
  bool remove(const char* request) const { return !is_open() || ::unlinkat(fd_, request, 0) == 0; }

 private:
  int fd_;
};

}  // namespace

RunRequests::RunRequests(const std::string& run, bool forgets)
    : folder_(run.empty() ? "" : requests_folder(run)) {
  if (folder_.empty()) return;
  if (::mkdir(folder_.c_str(), 0777) != 0 && errno != EEXIST)
    warn_once(fmt::format("{} cannot be made: {}", folder_, std::strerror(errno)));
  if (forgets) forget();
}

int64_t RunRequests::take_new() {
  const auto now = std::chrono::steady_clock::now();
  if (folder_.empty() || now < looks_at_) return 0;
  looks_at_ = now + kBetweenLooks;
  const RequestsFolder folder(folder_);
  int64_t standing = 0;
  for (size_t i = 0; i < kRunRequests.size(); ++i)
    if (folder.has(kRunRequests[i])) standing |= bit_of(static_cast<RunRequest>(i));
  look_for_strange_names();
  return standing & ~std::exchange(taken_, taken_ | standing);
}

void RunRequests::served(RunRequest request) {
  const char* name = kRunRequests[static_cast<size_t>(request)];
  if (RequestsFolder(folder_).remove(name) || errno == ENOENT)
    taken_ &= ~bit_of(request);
  else  // it stays taken, so that it is not served again and again
    warn_once(fmt::format("{}/{} was served and cannot be removed: {}", folder_, name, std::strerror(errno)));
}

void RunRequests::forget() {
  const RequestsFolder folder(folder_);
  for (const char* name : kRunRequests)
    if (folder.has(name)) folder.remove(name);
  taken_ = 0;
}

// Whatever else has a name in the folder, or the name of a request without being a file. A folder of any
// number of entries costs no more than the first few.
void RunRequests::look_for_strange_names() {
  constexpr int kMostEntries = 16;
  if (has_warned_) return;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder_, error), end;
  for (int i = 0; i < kMostEntries && !error && entry != end; ++i, entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (std::ranges::find(kRunRequests, name) == kRunRequests.end() || !entry->is_regular_file(ignored) ||
        entry->is_symlink(ignored))
      return warn_once(fmt::format("{}/{} is no request: those are empty files named {}", folder_, name,
                                   some_of(kRunRequests)));
  }
}

void RunRequests::warn_once(const std::string& text) {
  if (!std::exchange(has_warned_, true)) fmt::print(stderr, "warning: {}\n", printable(text));
}

void ask_run(const std::string& run, const std::string& request) {
  const auto known = std::ranges::find(kRunRequests, request);
  if (known == kRunRequests.end()) fail("serve", "a run is not asked to {}", request);
  const std::string path = requests_folder(run);
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST)
    fail("serve", "cannot make {}: {}", path, std::strerror(errno));
  const RequestsFolder folder(path);
  if (!folder.is_open() || !folder.add(*known))
    fail("serve", "cannot write {}/{}: {}", path, request, std::strerror(errno));
}

std::vector<std::string> waiting_requests(const std::string& run) {
  const RequestsFolder folder(requests_folder(run));
  std::vector<std::string> waiting;
  for (const char* name : kRunRequests)
    if (folder.has(name)) waiting.emplace_back(name);
  return waiting;
}

}  // namespace kiln
