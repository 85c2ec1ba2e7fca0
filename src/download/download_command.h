// `kiln download`: published weights by name. Torch-free.
#pragma once
#include <string>
#include <vector>

namespace kiln {

struct DownloadOptions {
  bool offline = false;              // nothing but what is there
  std::vector<std::string> mirrors;  // addresses that hold the table's files under their names, asked first
};

// The weights of a row of the table, fetched unless they are there: a file, or a snapshot's folder. Says what
// is fetched, how large it is and under which licence on stderr first. Throws Error.
std::string download_weights(const std::string& name, const DownloadOptions& options);

// The table on stdout.
void list_published_weights();

}  // namespace kiln
