#include "core/files/file_system.h"

#include <sys/vfs.h>

#include <algorithm>
#include <filesystem>

namespace kiln {

namespace {

struct KnownType {
  uint32_t magic;
  const char* name;
  bool is_network = false, is_user_space = false;
};

// From linux/magic.h and the sources of those that are not part of the kernel (Lustre, GPFS, BeeGFS, PanFS).
constexpr KnownType kTypes[] = {{0x0000EF53, "ext4"},
                                {0x58465342, "XFS"},
                                {0x9123683E, "btrfs"},
                                {0x2FC12FC1, "ZFS"},
                                {0xF2F52010, "F2FS"},
                                {0x01021994, "tmpfs"},
                                {0x858458F6, "ramfs"},
                                {0x794C7630, "overlayfs"},
                                {0x73717368, "squashfs"},
                                {0x00006969, "NFS", true},
                                {0x0000517B, "SMB", true},
                                {0xFE534D42, "SMB2", true},
                                {0xFF534D42, "CIFS", true},
                                {0x0BD00BD0, "Lustre", true},
                                {0x47504653, "GPFS", true},
                                {0x19830326, "BeeGFS", true},
                                {0xAAD7AAEA, "PanFS", true},
                                {0x00C36400, "Ceph", true},
                                {0x20030528, "OrangeFS", true},
                                {0x01021997, "9P", true},
                                {0x5346414F, "AFS", true},
                                {0x6B414653, "AFS", true},
                                {0x01161970, "GFS2", true},
                                {0x7461636F, "OCFS2", true},
                                {0x65735546, "FUSE", false, true}};

}  // namespace

FileSystem file_system_of_type(int64_t magic) {
  const auto* const known =
      std::ranges::find(kTypes, static_cast<uint32_t>(magic), &KnownType::magic);  // sign-extended on some
  if (known == std::end(kTypes)) return {};
  return {.name = known->name, .is_network = known->is_network, .is_user_space = known->is_user_space};
}

std::string existing_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::path folder = std::filesystem::absolute(path, error).lexically_normal();
  while (!std::filesystem::is_directory(folder, error) && folder.has_relative_path())
    folder = folder.parent_path();
  return folder.empty() ? "." : folder.string();
}

FileSystem file_system_of(const std::string& path) {
  struct statfs found;
  return ::statfs(existing_folder(path).c_str(), &found) == 0
             ? file_system_of_type(static_cast<int64_t>(found.f_type))
             : FileSystem{};
}

}  // namespace kiln
