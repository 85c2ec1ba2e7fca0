// `kiln download`: published weights by name. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "download/published.h"

namespace kiln {

struct DownloadOptions {
  bool offline = false;              // fetch nothing
  std::vector<std::string> mirrors;  // addresses that have the table's files by name; asked first
};

// Fetches the weights of a row of the table unless they are there, and returns their path: a file, or a path
// within a snapshot. First prints what is fetched, its size and its licence on stderr. Throws Error.
std::string download_weights(const std::string& name, const DownloadOptions& options);

// Returns the bytes on this machine of what a row names; 0 unless all of it was fetched.
int64_t fetched_bytes(const PublishedWeights& row);

// Prints the table on stdout.
void list_published_weights();

}  // namespace kiln
