// Files over HTTP with libcurl, and repositories of the Hugging Face hub in the cache that diffusers and
// transformers use too: each finds what the other has fetched. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

// Returns HF_HUB_CACHE, HF_HOME/hub, XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub.
std::string hub_cache();

struct HubRequest {
  std::string repository{};          // "stabilityai/sd-vae-ft-mse"
  std::vector<std::string> files{};  // exact paths, or folders that end in "/"
  std::string revision = "main";
  bool offline = false;
  std::string name{};  // shown in progress lines
};

// Returns the snapshot's folder, with those files in it. Files in the cache are taken as they are, without
// asking the hub. The rest is fetched from HF_ENDPOINT (default: the hub) with HF_TOKEN or the token that the
// hub's own tools left. Files of the hub's large storage are checked against the SHA-256 that it publishes.
// Throws Error: offline and not there, what fetch_file() throws, a repository without such files.
std::string fetch_from_hub(const HubRequest& request);

struct HttpFile {
  // Addresses of the same content. The next one is asked when one cannot be reached or refuses.
  std::vector<std::string> urls{};
  std::string path{};    // the file to write
  std::string token{};   // sent as Authorization: Bearer, only to the host of the url; "" for none
  int64_t bytes = 0;     // 0: not known
  std::string sha256{};  // "": not known
  std::string name{};    // shown in progress lines
};

// Fetches into `path`.incomplete, checks the file and renames it. Makes the folder of `path`. An interrupted
// download continues where it stopped if the server still has the same file: Range with If-Range, and an
// answer of the same ETag (or Last-Modified), place and length. Follows redirects. Returns the SHA-256 of the
// content. Throws Error in one line: no network, refused, cut too often (what came is kept for the next try),
// no length where neither size nor hash is known, another hash or size, a full disk (nothing is left behind).
std::string fetch_file(const HttpFile& file);

// Returns the body of a small answer. Throws Error as above; the message says what status 404 and 401 mean.
std::string fetch_text(const std::string& url, const std::string& token);

}  // namespace kiln
