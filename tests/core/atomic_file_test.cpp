// Finding 5: a partial file or folder is new and has a lock; only what Kiln made is removed.
#include "core/files/atomic_file.h"

#include <sys/file.h>
#include <sys/wait.h>

#include <csignal>
#include <functional>

#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

// Runs work(), which kills its process, in one of its own.
void run_killed(const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
}

TEST(AtomicFile, Finding5FollowsNoLinkAndOverwritesNothing) {
  const TempFolder folder;
  const std::string path = folder / "weights", victim = folder / "victim";
  write_bytes(victim, "precious");
  fs::create_symlink(victim, path + ".kiln.partial");
  fs::create_directory(path + ".kiln-2.partial");  // of another kind, so it is nobody's partial file
  write_file_atomically("test", path, "new");
  EXPECT_EQ(read_bytes(path), "new");
  EXPECT_EQ(read_bytes(victim), "precious");
  EXPECT_TRUE(fs::is_symlink(path + ".kiln.partial"));
  EXPECT_TRUE(fs::is_directory(path + ".kiln-2.partial"));
  EXPECT_EQ(folder.num_files(), 4u);
}

TEST(AtomicFile, Finding5TwoWritersOfOneNameDoNotMix) {
  const TempFolder folder;
  const std::string path = folder / "weights";
  AtomicFile first("test", path);
  first.write("first");
  {
    AtomicFile second("test", path);
    second.write("second");
    AtomicFile third("test", path);
    second.commit();
  }
  EXPECT_EQ(read_bytes(path), "second");
  first.commit();
  EXPECT_EQ(read_bytes(path), "first");
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(AtomicFile, Finding5WhatAKilledProcessLeftIsRemoved) {
  const TempFolder folder;
  const std::string path = folder / "weights";
  run_killed([&] {
    AtomicFile left("test", path);
    left.write("half");
    raise(SIGKILL);
  });
  ASSERT_EQ(read_bytes(path + ".kiln.partial"), "half");
  write_file_atomically("test", path, "whole");
  EXPECT_EQ(read_bytes(path), "whole");
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(AtomicFile, KeepsTheOldFileUntilTheNewOneIsWhole) {
  const TempFolder folder;
  const std::string path = folder / "weights";
  write_bytes(path, "old");
  {
    AtomicFile file("test", path);
    file.write("new");
  }
  EXPECT_EQ(read_bytes(path), "old");
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_ERROR(AtomicFile("test", folder.path()), "it is a folder");
  EXPECT_THAT(message_of([&] { AtomicFile("test", folder / "absent/file"); }),
              EndsWith("the folder does not exist"));
}

TEST(AtomicFolder, Finding5AStrangersFolderStays) {
  const TempFolder folder;
  const std::string path = folder / "out";
  for (const char* name : {"out.partial", "out.kiln.partial"}) {
    fs::create_directory(folder / name);
    write_bytes((folder / name) + "/file", "precious");
  }
  // Somebody is at work in it.
  const int held = ::open((path + ".kiln.partial").c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::flock(held, LOCK_EX | LOCK_NB), 0);
  {
    AtomicFolder out("test", path);
    write_bytes(out.folder() + "/file", "new");
    out.commit();
  }
  ::close(held);
  EXPECT_EQ(read_bytes(path + "/file"), "new");
  EXPECT_EQ(read_bytes(path + ".partial/file"), "precious");
  EXPECT_EQ(read_bytes(path + ".kiln.partial/file"), "precious");
}

TEST(AtomicFolder, Finding5OnlyAWholeFolderGetsItsName) {
  const TempFolder folder;
  const std::string path = folder / "out";
  run_killed([&] {
    const AtomicFolder left("test", path);
    write_bytes(left.folder() + "/file", "half");
    raise(SIGKILL);
  });
  ASSERT_EQ(read_bytes(path + ".kiln.partial/file"), "half");
  {
    const AtomicFolder out("test", path);
    EXPECT_EQ(out.folder(), path + ".kiln.partial");
    EXPECT_TRUE(fs::is_empty(out.folder()));
    write_bytes(out.folder() + "/file", "abandoned");
  }
  EXPECT_EQ(folder.num_files(), 0u);
}

}  // namespace
}  // namespace kiln
