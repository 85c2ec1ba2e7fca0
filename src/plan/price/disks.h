// The speed of the disks that a run reads from and offloads to.
#pragma once
#include <string>
#include <vector>

namespace kiln {

struct DiskSpeed {
  std::string folder;       // where it was measured
  std::string file_system;  // "ext4", "NFS"; empty: not known
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;  // 0: the folder cannot be written
};

// Reads up to 256 MiB of the files below `path` that the system does not keep in memory, or else writes a
// file there and reads it back. Takes seconds. Returns no speed if the folder can be neither read so nor
// written.
DiskSpeed measure_disk(const std::string& path);
// Returns the one that was measured on the file system of `path`; null: none, or the path does not exist
// here.
const DiskSpeed* disk_of(const std::vector<DiskSpeed>& disks, const std::string& path);

}  // namespace kiln
