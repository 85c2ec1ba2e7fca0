#include "download/download_command.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/entries.h"
#include "core/files/input_file.h"
#include "download/hub.h"
#include "download/published.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

// Returns the folder of files that no hub keeps: KILN_CACHE, XDG_CACHE_HOME/kiln or ~/.cache/kiln.
fs::path weights_cache() {
  const auto environment = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (const std::string cache = environment("KILN_CACHE"); !cache.empty()) return cache;
  if (const std::string cache = environment("XDG_CACHE_HOME"); !cache.empty())
    return fs::path(cache) / "kiln";
  return fs::path(environment("HOME")) / ".cache" / "kiln";
}

std::string size_text(int64_t bytes) {
  return bytes > 0 ? fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9) : "size not published";
}

// Returns the hash that was trusted at the first download; "" before it.
std::string trusted_hash(const fs::path& file) {
  constexpr size_t kMostBytes = 1 << 10;
  const std::string path = file.string() + ".sha256";
  const std::string text = fs::exists(path) ? read_input("download", path, kMostBytes) : "";
  return text.substr(0, text.find_first_of(" \t\r\n"));
}

std::string fetch_own_file(const PublishedWeights& row, const DownloadOptions& options) {
  const std::string address = row.url, file_name = address.substr(address.rfind('/') + 1);
  const fs::path path = weights_cache() / file_name;
  if (fs::exists(path)) return path.string();
  if (options.offline)
    fail("download", "{} is not in {} and --offline forbids fetching it", row.name, weights_cache().string());
  HttpFile file{.path = path.string(),
                .bytes = row.bytes,
                .sha256 = row.sha256 ? row.sha256 : trusted_hash(path),
                .name = row.name};
  for (std::string mirror : options.mirrors) {
    while (mirror.ends_with('/')) mirror.pop_back();
    file.urls.push_back(mirror.append("/").append(file_name));
  }
  file.urls.push_back(address);
  fmt::print(stderr, "kiln download: {} ({}, {}) from {}\n", row.name, size_text(row.bytes), row.licence,
             file.urls.front());
  const std::string hash = fetch_file(file);
  if (file.sha256.empty())
    fmt::print(stderr, "note: no SHA-256 of {} is published; this one is trusted from now on: {}\n", row.name,
               hash);
  write_file_atomically("download", path.string() + ".sha256", hash + "  " + file_name + "\n");
  return path.string();
}

// Returns the folder of the snapshot.
std::string fetch_repository(const PublishedWeights& row, const DownloadOptions& options) {
  HubRequest request{.repository = row.repository, .files = row.files, .offline = true, .name = row.name};
  try {
    return fetch_from_hub(request);  // throws if it is not in the cache
  } catch (const Error&) {
    if (options.offline) throw;
    fmt::print(stderr, "kiln download: {} ({}) from the repository {}\n", row.name, row.licence,
               row.repository);
    request.offline = false;
    return fetch_from_hub(request);
  }
}

int64_t bytes_at(const fs::path& path) {
  if (!fs::is_directory(path)) return static_cast<int64_t>(fs::file_size(path));
  int64_t sum = 0;
  for (const fs::directory_entry& entry : entries_below(path))
    if (entry.is_regular_file()) sum += static_cast<int64_t>(entry.file_size());
  return sum;
}

}  // namespace

std::string download_weights(const std::string& name, const DownloadOptions& options) {
  const PublishedWeights& row = find_published_weights(name);
  return row.url ? fetch_own_file(row, options)
                 : (fs::path(fetch_repository(row, options)) / row.result).string();
}

int64_t fetched_bytes(const PublishedWeights& row) {
  const DownloadOptions fetch_nothing{.offline = true, .mirrors = {}};
  try {
    if (row.url) return bytes_at(fetch_own_file(row, fetch_nothing));
    const fs::path snapshot = fetch_repository(row, fetch_nothing);
    int64_t sum = 0;
    for (const std::string& file : row.files) sum += bytes_at(snapshot / file);
    return sum;
  } catch (const Error&) {
    return 0;
  }
}

void list_published_weights() {
  for (const PublishedWeights& row : published_weights())
    fmt::print("{:24} {:20} {}\n{:24} licence: {}\n{:24} SHA-256: {}\n", row.name,
               row.url ? size_text(row.bytes) : "size from the hub", row.url ? row.url : row.repository, "",
               row.licence, "",
               !row.url     ? "from the hub"
               : row.sha256 ? row.sha256
                            : "not published: trusted at the first download");
}

}  // namespace kiln
