// Files over HTTP by libcurl: resumed, checked, and there whole or not at all. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

struct HttpFile {
  std::vector<std::string>
      urls{};            // the same content; the next one is asked when one cannot be reached or refuses
  std::string path{};    // where it goes
  std::string token{};   // Authorization: Bearer, for the host of the url alone; "" for none
  int64_t bytes = 0;     // 0: not known
  std::string sha256{};  // "": not known
  std::string name{};    // of progress lines
};

// Fetches into `path`.incomplete, checks, renames. An interrupted one goes on where it stopped while the
// server still has the same file (Range with If-Range). Redirects are followed. Returns the SHA-256 of the
// content. Throws Error in one line: no network, refused, cut too often (what came is kept for the next try),
// another hash or size, a full disk (nothing is left behind). `path`'s folder is made.
std::string fetch_file(const HttpFile& file);

// The body of a small answer. Throws Error as above; `status` 404 and 401 with what they mean.
std::string fetch_text(const std::string& url, const std::string& token);

}  // namespace kiln
