// Fetches files over HTTP with libcurl: resumed, checked, and there whole or not at all. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

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
