// Disk full, file too large, no permission: one clear line, and nothing left.
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>

#include "checkpoint/safetensors.h"
#include "checkpoint/weights_file.h"
#include "test_files.h"

namespace kiln {
namespace {

const std::vector<float>& two_megabytes() {
  static const std::vector<float> values(1 << 19, 1.5f);
  return values;
}

std::vector<NamedTensor> large_tensor() {
  return {{"w", {Dtype::kF32, {1 << 19}, std::as_bytes(std::span(two_megabytes()))}}};
}

// RLIMIT_FSIZE makes the kernel refuse like a full disk does, for any user.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    previous_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, previous_handler_);
  }

 private:
  rlimit before_ = {};
  void (*previous_handler_)(int) = nullptr;
};

TEST(AtomicWrite, FileTooLargeLeavesTheOldFileAndNothingElse) {
  const TempFolder folder;
  const std::vector<float> old_values = {7};
  write_safetensors(folder / "w.safetensors",
                    {{"old", {Dtype::kF32, {1}, std::as_bytes(std::span(old_values))}}});
  std::string messages[2];
  {
    const FileSizeLimit limit(1 << 20);
    messages[0] = message_of([&] { write_safetensors(folder / "w.safetensors", large_tensor()); });
    messages[1] = message_of([&] { write_pt(folder / "w.pt", {{"", large_tensor()}}); });
  }
  EXPECT_THAT(messages[0], has_all("[safetensors] cannot write", "w.safetensors", "free some space"));
  EXPECT_THAT(messages[1], has_all("[pt] cannot write", "free some space"));
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_TRUE(open_safetensors(folder / "w.safetensors")->tensors().contains("old"));
}

// A really full disk, where the user may mount one.
TEST(AtomicWrite, DiskFull) {
  const TempFolder folder;
  const std::string disk = folder / "disk";
  std::filesystem::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=1m") != 0)
    GTEST_SKIP() << "may not mount a tmpfs here";
  const std::string message = message_of([&] { write_safetensors(disk + "/w.safetensors", large_tensor()); });
  const bool is_empty = std::filesystem::is_empty(disk);
  ::umount(disk.c_str());
  EXPECT_THAT(message, has_all("No space left on device", "free some space"));
  EXPECT_TRUE(is_empty);
}

TEST(AtomicWrite, NoPermission) {
  const TempFolder folder;
  const std::string locked = folder / "locked";
  std::filesystem::create_directory(locked);
  std::filesystem::permissions(locked,
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  // root may write anywhere, so a child without its rights tries.
  std::filesystem::permissions(std::filesystem::path(locked).parent_path(), std::filesystem::perms::all);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) ::_exit(3);
    try {
      write_safetensors(locked + "/w.safetensors", large_tensor());
    } catch (const Error& error) {
      const std::string text = error.what();
      ::_exit(text.find("Permission denied: choose a folder you may write to") != text.npos ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(std::filesystem::is_empty(locked));
}

TEST(AtomicWrite, MissingFolderAndFolderAsTarget) {
  const TempFolder folder;
  EXPECT_ERROR(write_safetensors(folder / "no/w", large_tensor()), "the folder does not exist");
  EXPECT_ERROR(write_safetensors(folder / "", large_tensor()), "a file name is needed");
  EXPECT_EQ(folder.num_files(), 0u);
}

}  // namespace
}  // namespace kiln
