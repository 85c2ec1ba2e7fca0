#include "core/files/file_lock.h"

#include <sys/wait.h>

#include <csignal>
#include <memory>

#include "test_files.h"

namespace kiln {
namespace {

TEST(FileLock, KeepsOthersOutAndNamesItsHolder) {
  const test::TempFolder folder;
  const std::string path = folder / "lock";
  auto held = std::make_unique<FileLock>("run", path, "");
  EXPECT_ERROR(FileLock("run", path, "somebody is here"),
               "[run] somebody is here (process " + std::to_string(getpid()) + " on ");
  held.reset();
  EXPECT_NO_THROW(FileLock("run", path, ""));
}

TEST(FileLock, AFolderStaysEmpty) {
  const test::TempFolder folder;
  const FileLock held("store", folder.path(), "");
  EXPECT_EQ(message_of([&] { FileLock("store", folder.path(), "somebody is here"); }),
            "[store] somebody is here");
  EXPECT_EQ(folder.num_files(), 0u);
}

TEST(FileLock, EndsWithAKilledProcess) {
  const test::TempFolder folder;
  const std::string path = folder / "lock";
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const FileLock held("run", path, "");
    if (write(ready[1], "x", 1) != 1) _exit(1);
    pause();
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_ERROR(FileLock("run", path, "busy"), "process " + std::to_string(child));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_NO_THROW(FileLock("run", path, "busy"));
  for (const int end : ready) close(end);
}

TEST(FileLock, Finding5FollowsNoLink) {
  const test::TempFolder folder;
  test::write_bytes(folder / "victim", "precious");
  std::filesystem::create_symlink(folder / "victim", folder / "lock");
  EXPECT_ERROR(FileLock("run", folder / "lock", ""), "cannot open");
  EXPECT_EQ(test::read_bytes(folder / "victim"), "precious");
}

TEST(FileLock, SaysWhatCannotBeOpened) {
  EXPECT_ERROR(FileLock("run", "/absent/lock", ""), "cannot open /absent/lock: No such file or directory");
}

}  // namespace
}  // namespace kiln
