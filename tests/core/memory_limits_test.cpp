#include "core/memory_limits.h"

#include "test_files.h"

namespace kiln {
namespace {

constexpr int64_t kMiB = 1 << 20;

// A machine of 16 GiB, 12 GiB of them available.
struct Machine {
  TempFolder root;

  Machine() {
    write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   12582912 kB\n");
  }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root / path).parent_path());
    test::write_bytes(root / path, text);
  }
  // Writes what a group says of itself: its limit, its use, cached files among that.
  void group(const std::string& path, const std::string& limit, int64_t used, int64_t cached) const {
    write(path + "/memory.max", limit + "\n");
    write(path + "/memory.current", std::to_string(used) + "\n");
    write(path + "/memory.stat", "anon 5\nfile 99\ninactive_file " + std::to_string(cached / 4) +
                                     "\nactive_file " + std::to_string(cached - cached / 4) + "\n");
  }
  HostMemory memory() const { return host_memory(root.path().string()); }
};

TEST(HostMemory, IsTheMachinesWithoutLimits) {
  const Machine machine;
  EXPECT_EQ(machine.memory().total_bytes, 16384 * kMiB);
  EXPECT_EQ(machine.memory().available_bytes, 12288 * kMiB);
  machine.write("proc/self/cgroup", "0::/user.slice\n");
  machine.group("sys/fs/cgroup/user.slice", "max", 100 * kMiB, 0);
  EXPECT_EQ(machine.memory().total_bytes, 16384 * kMiB);
  EXPECT_EQ(machine.memory().available_bytes, 12288 * kMiB);
}

TEST(HostMemory, IsWhatAGroupLeaves) {
  const Machine machine;
  machine.write("proc/self/cgroup", "0::/\n");  // a container's own view
  machine.group("sys/fs/cgroup", std::to_string(4096 * kMiB), 1000 * kMiB, 400 * kMiB);
  EXPECT_EQ(machine.memory().total_bytes, 4096 * kMiB);
  EXPECT_EQ(machine.memory().available_bytes, (4096 - 600) * kMiB) << "cached files give way";
  machine.group("sys/fs/cgroup", std::to_string(4096 * kMiB), 5000 * kMiB, 0);
  EXPECT_EQ(machine.memory().available_bytes, 0);
}

TEST(HostMemory, EveryGroupAboveTheProcessCounts) {
  const Machine machine;
  machine.write("proc/self/cgroup", "0::/pods/one/run\n");
  machine.group("sys/fs/cgroup/pods/one/run", "max", 50 * kMiB, 0);
  machine.group("sys/fs/cgroup/pods/one", std::to_string(8000 * kMiB), 7000 * kMiB, 0);
  machine.group("sys/fs/cgroup/pods", std::to_string(6000 * kMiB), 3000 * kMiB, 0);
  EXPECT_EQ(machine.memory().total_bytes, 6000 * kMiB);
  EXPECT_EQ(machine.memory().available_bytes, 1000 * kMiB);
}

TEST(HostMemory, KnowsTheFirstVersionOfGroups) {
  const Machine machine;
  machine.write("proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n");
  // Within the container, whose group is the top of what it sees.
  machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(2048 * kMiB));
  machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(512 * kMiB));
  machine.write("sys/fs/cgroup/memory/memory.stat",
                "cache 7\ntotal_inactive_file 1048576\ntotal_active_file 0\n");
  EXPECT_EQ(machine.memory().total_bytes, 2048 * kMiB);
  EXPECT_EQ(machine.memory().available_bytes, (2048 - 511) * kMiB);
}

TEST(HostMemory, IsKnownHere) {
  const HostMemory memory = host_memory();
  EXPECT_GT(memory.available_bytes, 16 * kMiB);
  EXPECT_LE(memory.available_bytes, memory.total_bytes);
}

}  // namespace
}  // namespace kiln
