#include "core/control_groups.h"

#include <gmock/gmock.h>

#include "test_files.h"

namespace kiln {
namespace {

// A machine whose folders of proc and sys are its own.
struct GroupedMachine {
  TempFolder root;

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root / path).parent_path());
    test::write_bytes(root / path, text);
  }
  std::optional<double> quota() const { return cpu_quota(root.path().string()); }
};

TEST(CpuQuota, IsNoneWithoutALimit) {
  const GroupedMachine machine;
  EXPECT_EQ(machine.quota(), std::nullopt) << "no control groups";
  machine.write("proc/self/cgroup", "0::/user.slice\n");
  EXPECT_EQ(machine.quota(), std::nullopt) << "no file of a quota";
  machine.write("sys/fs/cgroup/user.slice/cpu.max", "max 100000\n");
  EXPECT_EQ(machine.quota(), std::nullopt);
}

TEST(CpuQuota, IsTheLowestOfAllGroupsAbove) {
  const GroupedMachine machine;
  machine.write("proc/self/cgroup", "0::/pods/one\n");
  machine.write("sys/fs/cgroup/pods/one/cpu.max", "max 100000\n");
  machine.write("sys/fs/cgroup/pods/cpu.max", "150000 100000\n");
  machine.write("sys/fs/cgroup/cpu.max", "400000 100000\n");
  EXPECT_EQ(machine.quota(), 1.5);
}

TEST(CpuQuota, OfVersion1IsInTwoFiles) {
  const GroupedMachine machine;
  machine.write("proc/self/cgroup", "4:memory:/other\n2:cpu,cpuacct:/job\n0::/\n");
  const std::string group = "sys/fs/cgroup/cpu/job/";
  machine.write(group + "cpu.cfs_period_us", "50000\n");
  machine.write(group + "cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(machine.quota(), std::nullopt);
  machine.write(group + "cpu.cfs_quota_us", "200000\n");
  EXPECT_EQ(machine.quota(), 4);
}

TEST(ControlGroups, AreTheProcesssAndThoseAbove) {
  const GroupedMachine machine;
  machine.write("proc/self/cgroup", "3:cpuset:/\n2:cpu,cpuacct:/job\n0::/a/b\n");
  machine.write("sys/fs/cgroup/cpu/job/cpu.shares", "1024\n");
  machine.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  std::vector<std::string> folders;
  for (const ControlGroup& group : control_groups("cpu", machine.root.path().string()))
    folders.push_back(
        std::filesystem::relative(group.folder, machine.root.path() / "sys/fs/cgroup").string());
  EXPECT_THAT(folders, ::testing::ElementsAre("cpu/job", "cpu", "a/b", "a", "."));
}

}  // namespace
}  // namespace kiln
