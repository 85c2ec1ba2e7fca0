// The speed of the disks that a run reads from and offloads to.
#pragma once
#include <string>
#include <vector>

namespace kiln {

struct DiskSpeed {
  std::string folder;       // where it was measured
  std::string file_system;  // "ext4", "NFS"; empty: not known
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;  // 0: not known
};

// Reads up to 256 MiB of the files below `path` that the system does not keep in memory, for at most about 5
// seconds. With `may_write` also writes a file there and reads it back, which takes as long again; it has no
// name while it is there. A speed of which too little could be measured is 0.
DiskSpeed measure_disk(const std::string& path, bool may_write);
// Returns the one whose reading was measured on the file system of `path`; null: none, or the path does not
// exist here.
const DiskSpeed* disk_of(const std::vector<DiskSpeed>& disks, const std::string& path);

}  // namespace kiln
