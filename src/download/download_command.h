// `kiln download`: published weights by name. Torch-free.
#pragma once
#include <string>
#include <vector>

namespace kiln {

struct DownloadOptions {
  bool offline = false;              // fetch nothing
  std::vector<std::string> mirrors;  // addresses that have the table's files by name; asked first
};

// Fetches the weights of a row of the table unless they are there, and returns their path: a file, or a path
// within a snapshot. First prints what is fetched, its size and its licence on stderr. Throws Error.
std::string download_weights(const std::string& name, const DownloadOptions& options);

// Prints the table on stdout.
void list_published_weights();

}  // namespace kiln
