#include "download/hub.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/entries.h"
#include "core/json.h"
#include "core/text/json_text.h"
#include "core/text/printable.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

fs::path hub_home() {
  if (const std::string home = environment("HF_HOME"); !home.empty()) return home;
  if (const std::string cache = environment("XDG_CACHE_HOME"); !cache.empty())
    return fs::path(cache) / "huggingface";
  return fs::path(environment("HOME")) / ".cache" / "huggingface";
}

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string hub_token() {
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
    if (std::string token = environment(name); !token.empty()) return token;
  const std::string path = environment("HF_TOKEN_PATH");
  return first_line(path.empty() ? hub_home() / "token" : fs::path(path));
}

std::string endpoint() {
  std::string address = environment("HF_ENDPOINT");
  if (address.empty()) address = "https://huggingface.co";
  while (address.ends_with('/')) address.pop_back();
  return address;
}

// models--org--name
fs::path folder_of(const std::string& repository) {
  std::string name = "models--" + repository;
  for (size_t at = name.find('/'); at != name.npos; at = name.find('/', at)) name.replace(at, 1, "--");
  return fs::path(hub_cache()) / name;
}

bool is_wanted(const std::string& path, const std::vector<std::string>& files) {
  return std::any_of(files.begin(), files.end(), [&](const std::string& file) {
    return file.ends_with('/') ? path.starts_with(file) : path == file;
  });
}

// True if a folder has weights as loading looks for them: one file, or an index with all that it names. A
// variant (diffusion_pytorch_model.fp16.safetensors) does not count, nor a link without its blob.
bool holds_weights(const fs::path& folder) {
  if (!fs::is_directory(folder)) return false;
  for (const fs::directory_entry& entry : entries_of(folder))
    if (!fs::exists(entry.path())) return false;
  for (const std::string name : {"diffusion_pytorch_model.safetensors", "model.safetensors"}) {
    if (fs::exists(folder / name)) return true;
    const std::string path = (folder / (name + ".index.json")).string();
    const json index = fs::exists(path) ? read_json_or_discarded("download", path) : json();
    const json pieces = index.is_object() ? index.value("weight_map", json()) : json();
    const auto is_there = [&](const json& piece) {
      return piece.is_string() && fs::exists(folder / piece.get<std::string>());
    };
    if (pieces.is_object() && !pieces.empty() && std::all_of(pieces.begin(), pieces.end(), is_there))
      return true;
  }
  return false;
}

// True if a snapshot holds every file that was asked for.
bool holds_all(const fs::path& snapshot, const std::vector<std::string>& files) {
  return std::all_of(files.begin(), files.end(), [&](const std::string& file) {
    return file.ends_with('/') ? holds_weights(snapshot / file) : fs::exists(snapshot / file);
  });
}

struct RemoteFile {
  std::string path{}, blob{}, sha256{};
  int64_t bytes = 0;
};

json answer_of(const std::string& url, const std::string& token) {
  json answer = json_or_discarded("download", fetch_text(url, token), url);
  if (answer.is_discarded()) fail("download", "{} did not answer with JSON", url);
  return answer;
}

// True if a path of a server's listing lies below the snapshot.
bool is_safe(const std::string& path) {
  const fs::path parsed(path);
  return !path.empty() && parsed.is_relative() &&
         std::none_of(parsed.begin(), parsed.end(), [](const fs::path& part) { return part == ".."; });
}

bool is_hexadecimal(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789abcdef") == text.npos;
}

bool is_weights(const fs::path& path) {
  constexpr std::string_view kWeights[] = {".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".npz"};
  return std::ranges::find(kWeights, path.extension().string()) != std::end(kWeights);
}

std::vector<RemoteFile> files_of(const json& tree, const HubRequest& request, const std::string& url) try {
  constexpr size_t kSha256Digits = 64;
  std::vector<RemoteFile> files;
  if (!tree.is_array()) fail("download", "{} did not list any files", url);
  for (const json& entry : tree) {
    if (!entry.is_object() || entry.value("type", "") != "file") continue;
    RemoteFile file{.path = entry.value("path", ""),
                    .blob = entry.value("oid", ""),
                    .bytes = entry.value("size", int64_t{0})};
    if (!is_wanted(file.path, request.files)) continue;
    if (entry.contains("lfs") && entry.at("lfs").is_object())
      file.blob = file.sha256 = entry.at("lfs").value("oid", "");
    const bool is_hashed = !file.sha256.empty();
    if (!is_safe(file.path) || !is_hexadecimal(file.blob) ||
        (is_hashed && file.sha256.size() != kSha256Digits))
      fail("download", "{} lists a file that cannot be: \"{}\"", url, printable(file.path));
    if (!is_hashed && is_weights(file.path))
      fmt::print(stderr, "warning: {} names no SHA-256 of {}: only its size is checked\n", request.repository,
                 printable(file.path));
    files.push_back(std::move(file));
  }
  for (const std::string& wanted : request.files)
    if (std::none_of(files.begin(), files.end(),
                     [&](const RemoteFile& file) { return is_wanted(file.path, {wanted}); }))
      fail("download", "{} has no {}", request.repository, wanted);
  return files;
} catch (const json::exception& error) {
  fail("download", "{} lists files in another form than expected: {}", url, error.what());
}

// Makes snapshots/<commit>/<path> a relative link to blobs/<hash>, as the hub's tools do.
void link_snapshot(const fs::path& folder, const std::string& commit, const RemoteFile& file) {
  const fs::path link = folder / "snapshots" / commit / file.path, blob = folder / "blobs" / file.blob;
  fs::create_directories(link.parent_path());
  std::error_code ignored;
  fs::remove(link, ignored);
  fs::create_symlink(fs::relative(blob, link.parent_path()), link);
}

}  // namespace

std::string hub_cache() {
  const std::string cache = environment("HF_HUB_CACHE");
  return cache.empty() ? (hub_home() / "hub").string() : cache;
}

std::string fetch_from_hub(const HubRequest& request) {
  const fs::path folder = folder_of(request.repository), ref = folder / "refs" / request.revision;
  const std::string known = first_line(ref);
  if (!known.empty() && holds_all(folder / "snapshots" / known, request.files))
    return (folder / "snapshots" / known).string();
  if (request.offline)
    fail("download", "{} is not in {} and --offline forbids fetching it", request.repository, hub_cache());

  const std::string token = hub_token(), api = endpoint() + "/api/models/" + request.repository;
  const json revision = answer_of(api + "/revision/" + request.revision, token);
  const json sha = revision.is_object() ? revision.value("sha", json()) : json();
  const std::string commit = sha.is_string() ? sha.get<std::string>() : "";
  if (!is_hexadecimal(commit))
    fail("download", "{} did not name a commit of {}", endpoint(), request.revision);
  const std::string tree = api + "/tree/" + commit + "?recursive=true";
  for (const RemoteFile& file : files_of(answer_of(tree, token), request, tree)) {
    const fs::path blob = folder / "blobs" / file.blob;
    if (!fs::exists(blob))
      fetch_file(
          {.urls = {fmt::format("{}/{}/resolve/{}/{}", endpoint(), request.repository, commit, file.path)},
           .path = blob.string(),
           .token = token,
           .bytes = file.bytes,
           .sha256 = file.sha256,
           .name = request.name + " " + printable(file.path)});
    link_snapshot(folder, commit, file);
  }
  fs::create_directories(ref.parent_path());
  write_file_atomically("download", ref.string(), commit);
  return (folder / "snapshots" / commit).string();
}

}  // namespace kiln
