#include "core/files/file_system.h"

#include <fcntl.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

namespace kiln {

namespace {

struct KnownType {
  const char* name;
  uint32_t magic;
  bool is_network = false;
};

// From linux/magic.h and the sources of those that are not part of the kernel (Lustre, GPFS, BeeGFS, PanFS).
constexpr KnownType kTypes[] = {{"ext4", 0x0000EF53},
                                {"XFS", 0x58465342},
                                {"btrfs", 0x9123683E},
                                {"ZFS", 0x2FC12FC1},
                                {"F2FS", 0xF2F52010},
                                {"tmpfs", 0x01021994},
                                {"ramfs", 0x858458F6},
                                {"overlayfs", 0x794C7630},
                                {"squashfs", 0x73717368},
                                {"NFS", 0x00006969, true},
                                {"SMB", 0x0000517B, true},
                                {"SMB2", 0xFE534D42, true},
                                {"CIFS", 0xFF534D42, true},
                                {"Lustre", 0x0BD00BD0, true},
                                {"GPFS", 0x47504653, true},
                                {"BeeGFS", 0x19830326, true},
                                {"PanFS", 0xAAD7AAEA, true},
                                {"Ceph", 0x00C36400, true},
                                {"OrangeFS", 0x20030528, true},
                                {"9P", 0x01021997, true},
                                {"AFS", 0x5346414F, true},
                                {"AFS", 0x6B414653, true},
                                {"GFS2", 0x01161970, true},
                                {"OCFS2", 0x7461636F, true},
                                {"FUSE", 0x65735546}};

}  // namespace

FileSystem file_system_of_type(int64_t magic) {
  const auto* const known =
      std::ranges::find(kTypes, static_cast<uint32_t>(magic), &KnownType::magic);  // sign-extended on some
  if (known == std::end(kTypes)) return {};
  return {.name = known->name, .is_network = known->is_network};
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

int reserve_file_space(int fd, int64_t bytes) {
  if (bytes == 0) return 0;
  int result = 0;
  do result = ::fallocate(fd, 0, 0, bytes);
  while (result != 0 && errno == EINTR);
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) result = ::ftruncate(fd, bytes);
  return result == 0 ? 0 : errno;
}

int64_t read_at(int fd, std::span<std::byte> to, int64_t offset) {
  const int64_t begin = offset;
  while (!to.empty()) {
    const ssize_t got = ::pread(fd, to.data(), to.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    to = to.subspan(static_cast<size_t>(got));
    offset += got;
  }
  return offset - begin;
}

bool write_at(int fd, std::span<const std::byte> bytes, int64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
  return true;
}

}  // namespace kiln
