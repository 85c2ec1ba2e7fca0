#include "download/hub.h"

#include <curl/curl.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/file_lock.h"
#include "core/files/sha256.h"
#include "core/text/progress_line.h"
#include "core/text/some_of.h"
#include "core/units.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int kTries = 5;  // of a connection that is cut
constexpr size_t kMostText = 64 << 20;

struct CloseCurl {
  void operator()(CURL* curl) const { curl_easy_cleanup(curl); }
};
struct FreeHeaders {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};

// The answer, while it comes.
struct Answer {
  long status = 0;
  std::map<std::string, std::string> headers{};  // of the last hop, lower-case names
  std::string text{};                            // of small answers
  int fd = -1;                                   // of files
  int64_t written = 0, offset = 0, total = 0;    // total: of the whole file; 0: not known
  bool has_begun = false;                        // its headers were looked at
  bool does_not_fit = false;                     // it is of another version than what is there
  std::exception_ptr failure{};                  // thrown while it came: libcurl passes none on
  std::string name{};                            // of progress lines; "" for none
  LiveLine line{};
};

std::string header_of(const Answer& answer, const std::string& name) {
  const auto found = answer.headers.find(name);
  return found == answer.headers.end() ? "" : found->second;
}

// What the server calls this version of the file; "" if it does not say. A weak tag does not promise the same
// bytes.
std::string version_of(const Answer& answer) {
  const std::string tag = header_of(answer, "etag");
  return tag.empty() || tag.starts_with("W/") ? header_of(answer, "last-modified") : tag;
}

// Holds what "bytes 1000-1999/2000", "bytes 1000-1999/*" or "bytes */2000" say: -1 is nothing.
struct ContentRange {
  int64_t first = -1, total = -1;
};

ContentRange content_range_of(const Answer& answer) {
  constexpr std::string_view kBegin = "bytes ";
  const std::string text = header_of(answer, "content-range");
  const size_t slash = text.find('/');
  if (!text.starts_with(kBegin) || slash == text.npos) return {};
  const auto number_at = [&](size_t begin) {
    int64_t number = -1;
    std::from_chars(text.data() + begin, text.data() + text.size(), number);
    return number;
  };
  return {.first = number_at(kBegin.size()), .total = number_at(slash + 1)};
}

size_t take_header(char* data, size_t, size_t size, void* to) {
  auto& answer = *static_cast<Answer*>(to);
  const std::string_view line(data, size);
  if (line.starts_with("HTTP/")) {
    answer.headers.clear();
    return size;
  }
  const size_t colon = line.find(':');
  if (colon == line.npos) return size;
  std::string name(line.substr(0, colon));
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  std::string_view value = line.substr(colon + 1);
  while (!value.empty() && std::isspace(static_cast<unsigned char>(value.front()))) value.remove_prefix(1);
  while (!value.empty() && std::isspace(static_cast<unsigned char>(value.back()))) value.remove_suffix(1);
  answer.headers[name] = value;
  return size;
}

// "sd-vae-ft-mse: 120.0 of 334.6 MB  12.3 MB/s  0m 17s left" on stderr.
void print_progress(Answer& answer, bool is_last) {
  if (answer.name.empty() || (!is_last && !answer.line.is_due())) return;
  const double rate = static_cast<double>(answer.written) / std::max(answer.line.seconds(), 1e-9);
  const int64_t here = answer.offset + answer.written;
  const std::string left =
      answer.total > here && rate > 0
          ? "  " + duration_text(static_cast<double>(answer.total - here) / rate) + " left"
          : "";
  answer.line.show(
      fmt::format("{}: {:.1f} of {} MB  {:.1f} MB/s{}", answer.name, static_cast<double>(here) / 1e6,
                  answer.total > 0 ? fmt::format("{:.1f}", static_cast<double>(answer.total) / 1e6) : "?",
                  rate / 1e6, left));
  if (is_last) answer.line.end();
}

size_t take_text(char* data, size_t, size_t size, void* to) {
  auto& answer = *static_cast<Answer*>(to);
  if (answer.text.size() + size > kMostText) return 0;
  answer.text.append(data, size);
  return size;
}

std::unique_ptr<CURL, CloseCurl> request(const std::string& url, Answer& answer, curl_slist* headers) {
  static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
  std::unique_ptr<CURL, CloseCurl> curl(started == CURLE_OK ? curl_easy_init() : nullptr);
  if (!curl) fail("download", "libcurl could not be started");
  curl_easy_setopt(curl.get(), CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl.get(), CURLOPT_FOLLOWLOCATION, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_MAXREDIRS, 10L);
  curl_easy_setopt(curl.get(), CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl.get(), CURLOPT_REDIR_PROTOCOLS_STR,
                   url.starts_with("https:") ? "https" : "http,https");
  curl_easy_setopt(curl.get(), CURLOPT_CONNECTTIMEOUT, 30L);
  // A connection with less than 1 byte a second for 60 seconds counts as cut.
  curl_easy_setopt(curl.get(), CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_LOW_SPEED_TIME, 60L);
  curl_easy_setopt(curl.get(), CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_HEADERFUNCTION, take_header);
  curl_easy_setopt(curl.get(), CURLOPT_HEADERDATA, &answer);
  curl_easy_setopt(curl.get(), CURLOPT_HTTPHEADER, headers);
  return curl;
}

// libcurl sends an Authorization header only to the first host.
std::unique_ptr<curl_slist, FreeHeaders> header_lines(const std::vector<std::string>& lines) {
  curl_slist* list = nullptr;
  for (const std::string& line : lines) list = curl_slist_append(list, line.c_str());
  return std::unique_ptr<curl_slist, FreeHeaders>(list);
}

std::vector<std::string> authorization(const std::string& token) {
  if (token.empty()) return {};
  return {"Authorization: Bearer " + token};
}

// Thrown where the next try of the same address would end the same way.
class Refused : public Error {
  using Error::Error;
};

[[noreturn]] void fail_with_status(const std::string& url, long status) {
  if (status == 401 || status == 403)
    throw Refused(
        fmt::format("{} refuses with status {}: accept its terms there and set HF_TOKEN", url, status));
  throw Refused(fmt::format("{} answered with status {}{}", url, status,
                            status == 404 ? ": there is no such file" : ""));
}

// A file that is being fetched: `path`.incomplete, and beside it what the server called that version of the
// file, and how long it is.
class PartialFile {
 public:
  explicit PartialFile(const HttpFile& file) : file_(file), path_(file.path + ".incomplete") {
    fs::create_directories(fs::path(file.path).parent_path());
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd_ < 0) fail_with_errno("download", "write", path_, errno);
    std::ifstream known(known_path());
    std::getline(known, version_);
    known >> total_;
  }
  ~PartialFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  PartialFile(const PartialFile&) = delete;

  // Fetches what is missing from `url`. Returns true when all of it is there, false when the connection was
  // cut. Throws Error when asking again is of no use.
  bool go_on(const std::string& url);
  // Checks size and hash, moves the file to its name and returns the hash. If it throws Error, it leaves
  // nothing behind.
  std::string finish();
  // Removes the file if nothing came. Call it when nothing more is asked for.
  void remove_if_empty() {
    if (size() == 0) remove();
  }
  int64_t size() const {
    struct stat status {};
    return ::fstat(fd_, &status) == 0 ? status.st_size : 0;
  }
  const std::string& why_cut() const { return why_cut_; }

 private:
  static size_t take_body(char* data, size_t, size_t size, void* to);
  void begin_body();
  void begin_whole();
  bool fits(const Answer& answer) const;
  void append(std::string_view bytes);
  void check_size(int64_t bytes);
  void forget();
  [[noreturn]] void fail_writing(int error);
  bool is_complete() const { return total_ > 0 ? size() == total_ : file_.bytes == 0; }
  void remove() {
    std::error_code ignored;
    fs::remove(path_, ignored);
    fs::remove(known_path(), ignored);
  }
  std::string known_path() const { return path_ + ".etag"; }

  const HttpFile& file_;
  std::string path_, why_cut_, url_;
  std::string version_;   // of what is there, as the server called it; "": it did not
  int64_t total_ = 0;     // of that version; 0: not known
  int num_versions_ = 0;  // that were begun and did not fit what came next
  int fd_ = -1;
  CURL* curl_ = nullptr;  // of the current request
  Answer answer_;
};

// True if the rest of a file, or the news that there is none, is of the version that is there.
bool PartialFile::fits(const Answer& answer) const {
  const ContentRange range = content_range_of(answer);
  const std::string version = version_of(answer);
  if (range.total < 0 || (total_ > 0 && range.total != total_)) return false;
  if (answer.status == 416) return range.total == answer.offset && (version.empty() || version == version_);
  return range.first == answer.offset && version == version_;
}

// Called at the first bytes of a body, which is the rest of the file (206) or all of it (200), or at its end
// if it has none.
void PartialFile::begin_body() {
  answer_.has_begun = true;
  if (answer_.status == 200)
    begin_whole();
  else if (fits(answer_))
    total_ = content_range_of(answer_).total;
  else
    answer_.does_not_fit = true;
  if (answer_.does_not_fit) return;
  check_size(total_);
  answer_.total = total_;
  struct statvfs disk {};
  const int64_t needed = total_ - answer_.offset;
  if (::statvfs(path_.c_str(), &disk) == 0 &&
      needed > static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize))
    fail_writing(ENOSPC);
}

void PartialFile::check_size(int64_t bytes) {
  if (file_.bytes == 0 || bytes == file_.bytes) return;
  remove();
  fail("download", "{} has {} bytes, {} are published: nothing was kept", url_, bytes, file_.bytes);
}

void PartialFile::begin_whole() {
  forget();
  curl_off_t length = -1;
  curl_easy_getinfo(curl_, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
  if (length < 0 && file_.bytes == 0 && file_.sha256.empty())
    throw Refused(fmt::format(
        "{} does not say how long {} is, so a file cut short would pass for a whole one: try another mirror",
        url_, file_.name));
  answer_.offset = 0;
  version_ = version_of(answer_);
  total_ = length >= 0 ? length : file_.bytes;
  write_file_atomically("download", known_path(), fmt::format("{}\n{}\n", version_, total_));
}

void PartialFile::forget() {
  version_.clear();
  total_ = 0;
  if (::ftruncate(fd_, 0) != 0) fail_writing(errno);
}

void PartialFile::fail_writing(int error) {
  remove();
  fail_with_errno("download", "write", file_.path, error);
}

void PartialFile::append(std::string_view bytes) {
  if (total_ > 0 && answer_.offset + answer_.written + std::ssize(bytes) > total_) {
    remove();
    fail("download", "{} is longer than the {} bytes that it should have: nothing was kept", url_, total_);
  }
  while (!bytes.empty()) {
    const ssize_t got = ::pwrite(fd_, bytes.data(), bytes.size(), answer_.offset + answer_.written);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_writing(errno);
    bytes.remove_prefix(static_cast<size_t>(got));
    answer_.written += got;
  }
}

size_t PartialFile::take_body(char* data, size_t, size_t size, void* to) {
  auto& partial = *static_cast<PartialFile*>(to);
  Answer& answer = partial.answer_;
  curl_easy_getinfo(partial.curl_, CURLINFO_RESPONSE_CODE, &answer.status);
  if (answer.status != 200 && answer.status != 206) return size;  // an error's page
  try {
    if (!answer.has_begun) partial.begin_body();
    if (answer.does_not_fit) return 0;
    partial.append({data, size});
  } catch (const std::exception&) {
    answer.failure = std::current_exception();
    return 0;
  }
  print_progress(answer, false);
  return size;
}

bool PartialFile::go_on(const std::string& url) {
  url_ = url;
  const bool is_whole = total_ > 0 && size() == total_ && (file_.bytes == 0 || file_.bytes == total_);
  if (is_whole) return true;  // only its name is missing
  answer_ = {.offset = version_.empty() ? 0 : size(), .name = file_.name};
  std::vector<std::string> lines = authorization(file_.token);
  if (answer_.offset > 0) lines.push_back("If-Range: " + version_);
  const auto headers = header_lines(lines);
  const auto curl = request(url, answer_, headers.get());
  curl_ = curl.get();
  if (answer_.offset > 0) curl_easy_setopt(curl_, CURLOPT_RANGE, fmt::format("{}-", answer_.offset).c_str());
  curl_easy_setopt(curl_, CURLOPT_WRITEFUNCTION, &PartialFile::take_body);
  curl_easy_setopt(curl_, CURLOPT_WRITEDATA, this);
  const CURLcode code = curl_easy_perform(curl_);
  if (answer_.failure) std::rethrow_exception(answer_.failure);
  curl_easy_getinfo(curl_, CURLINFO_RESPONSE_CODE, &answer_.status);
  const bool is_body = answer_.status == 200 || answer_.status == 206;
  if (code == CURLE_OK && is_body && !answer_.has_begun) begin_body();
  const bool is_beyond = code == CURLE_OK && answer_.status == 416 && answer_.offset > 0;
  if (is_beyond && fits(answer_)) return true;
  if (is_beyond || answer_.does_not_fit) {
    forget();
    why_cut_ = "the rest was of another version";
    if (++num_versions_ < kTries) return false;
    throw Refused(fmt::format("{} sends parts of different versions: nothing was kept", url));
  }
  if (code == CURLE_OK && !is_body) {
    if (answer_.status >= 500) {
      why_cut_ = fmt::format("status {}", answer_.status);
      return false;
    }
    fail_with_status(url, answer_.status);
  }
  if (code == CURLE_OK) {
    if (answer_.written > 0) print_progress(answer_, true);
    why_cut_ = "the file ended early";
    return is_complete();
  }
  why_cut_ = curl_easy_strerror(code);
  const bool never_came = code == CURLE_COULDNT_RESOLVE_HOST || code == CURLE_COULDNT_CONNECT ||
                          code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_URL_MALFORMAT ||
                          code == CURLE_TOO_MANY_REDIRECTS || code == CURLE_PEER_FAILED_VERIFICATION;
  if (never_came) throw Refused(fmt::format("cannot reach {}: {}", url, why_cut_));
  return false;
}

std::string PartialFile::finish() {
  check_size(size());
  std::string hash = sha256_of_file(path_);
  if (!file_.sha256.empty() && hash != file_.sha256) {
    remove();
    fail("download", "{} has SHA-256 {}, published is {}: nothing was kept", url_, hash, file_.sha256);
  }
  if (::fsync(fd_) != 0) fail_with_errno("download", "write", path_, errno);
  fs::rename(path_, file_.path);
  std::error_code ignored;
  fs::remove(known_path(), ignored);
  return hash;
}

}  // namespace

std::string fetch_file(const HttpFile& file) {
  fs::create_directories(fs::path(file.path).parent_path());
  const FileLock lock("download", file.path + ".lock",
                      fmt::format("{} is being downloaded already", file.path));
  PartialFile partial(file);
  std::vector<std::string> refused;  // why, by each address
  for (const std::string& url : file.urls) {
    try {
      for (int tries = 0; tries < kTries; ++tries) {
        const int64_t before = partial.size();
        if (partial.go_on(url)) {
          std::string hash = partial.finish();
          std::error_code ignored;
          fs::remove(file.path + ".lock", ignored);
          return hash;
        }
        if (partial.size() > before) tries = 0;  // it goes on, however slowly
        std::this_thread::sleep_for(std::chrono::milliseconds(200 << tries));
      }
      refused.push_back(fmt::format("{} was cut after {} bytes ({}): the same command goes on from there",
                                    url, partial.size(), partial.why_cut()));
    } catch (const Refused& error) {
      refused.push_back(error.what());
    }
  }
  partial.remove_if_empty();
  throw Error(some_of(refused, "; "));
}

std::string fetch_text(const std::string& url, const std::string& token) {
  Answer answer;
  const auto headers = header_lines(authorization(token));
  for (int tries = 0;; ++tries) {
    answer = {};
    const auto curl = request(url, answer, headers.get());
    curl_easy_setopt(curl.get(), CURLOPT_WRITEFUNCTION, take_text);
    curl_easy_setopt(curl.get(), CURLOPT_WRITEDATA, &answer);
    const CURLcode code = curl_easy_perform(curl.get());
    curl_easy_getinfo(curl.get(), CURLINFO_RESPONSE_CODE, &answer.status);
    if (code == CURLE_OK && answer.status == 200) return answer.text;
    const bool may_pass = code == CURLE_OK
                              ? answer.status >= 500
                              : code != CURLE_COULDNT_RESOLVE_HOST && code != CURLE_COULDNT_CONNECT;
    if (may_pass && tries + 1 < kTries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200 << tries));
      continue;
    }
    if (code != CURLE_OK) fail("download", "cannot reach {}: {}", url, curl_easy_strerror(code));
    fail_with_status(url, answer.status);
  }
}

}  // namespace kiln
