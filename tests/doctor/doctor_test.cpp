// What kiln doctor says of machines that are written as files.
#include "doctor/doctor.h"

#include <gtest/gtest.h>

#include "test_files.h"

namespace kiln {
namespace {

using test::TempFolder;
using ::testing::HasSubstr;

// A machine of 16 GiB with a network of 10 Gbit/s and no driver.
class Doctor : public ::testing::Test {
 protected:
  Doctor() {
    write("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:   12582912 kB\n");
    write("sys/class/net/lo/operstate", "unknown\n");
    write("sys/class/net/eth0/operstate", "up\n");
    write("sys/class/net/eth0/speed", "10000\n");
    write("sys/class/net/eth1/operstate", "down\n");
    write("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n");
    ::setenv("LC_ALL", "C.UTF-8", /*overwrite=*/1);
  }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ / path).parent_path());
    test::write_bytes(root_ / path, text);
  }

  std::vector<MachineFinding> findings() const {
    return examine({.folder = root_.path(), .measures_peak = false, .root = root_.path()});
  }

  MachineFinding found(const std::string& about) const {
    for (const MachineFinding& finding : findings())
      if (finding.about == about) return finding;
    ADD_FAILURE() << "nothing is said about " << about;
    return {};
  }

 private:
  TempFolder root_;
};

TEST_F(Doctor, SaysWhatEachPartOfTheMachineHas) {
  std::vector<std::string> abouts;
  for (const MachineFinding& finding : findings()) {
    abouts.push_back(finding.about);
    EXPECT_NE(finding.text, "") << finding.about;
    EXPECT_EQ(finding.advice.empty(), finding.diagnosis == Diagnosis::kHas) << finding.about;
  }
  EXPECT_THAT(abouts,
              ::testing::ElementsAre("instructions", "threads", "memory", "disk of runs", "temporary disk",
                                     "drivers", "links", "clock", "locale", "profile"));
  EXPECT_EQ(found("memory").text, "12.00 of 16.00 GiB are free");
  EXPECT_EQ(found("memory").values.at("available_bytes"), int64_t{12} << 30);
  EXPECT_EQ(found("links").text, "eth0 10 Gbit/s");
  EXPECT_THAT(found("clock").text, HasSubstr("by tsc"));
  EXPECT_EQ(found("locale").diagnosis, Diagnosis::kHas);
  EXPECT_NO_THROW(check_nothing_lacks({found("memory"), found("links"), found("locale")}));
}

TEST_F(Doctor, TooLittleMemoryIsAnError) {
  write("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:   524288 kB\n");
  EXPECT_EQ(found("memory").diagnosis, Diagnosis::kLacks);
  EXPECT_EQ(to_json(findings()).at("diagnosis"), "lacks");
  EXPECT_THAT(test::message_of([&] { check_nothing_lacks({found("memory")}); }),
              HasSubstr("memory: end other programs"));
}

TEST_F(Doctor, AControlGroupMayGiveLessTimeThanThreads) {
  EXPECT_EQ(found("threads").values.at("quota"), found("threads").values.at("own"));
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(found("threads").values.at("quota"), 0.5);
  EXPECT_THAT(found("threads").advice, HasSubstr("the time of 0.5 processors"));
  EXPECT_THAT(found("threads").advice, HasSubstr("for 1 threads: raise its limit"));
  EXPECT_EQ(found("threads").values.at("own"), 1);
}

TEST_F(Doctor, ADriverWithoutAProgramForItGains) {
  EXPECT_THAT(found("drivers").text, HasSubstr("on the CPU"));
  write("proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sat Aug 2 08:00:00 UTC 2025\n");
  const MachineFinding drivers = found("drivers");
  EXPECT_EQ(drivers.values.at("nvidia"), "580.65.06");
  if (!drivers.values.at("program_for_gpus").get<bool>()) {
    EXPECT_EQ(drivers.diagnosis, Diagnosis::kGains);
    EXPECT_THAT(drivers.advice, HasSubstr("scripts/setup --cuda"));
  }
}

TEST_F(Doctor, AGpuThatLacksLanesGains) {
  const std::string card = "sys/bus/pci/devices/0000:3b:00.0/";
  write(card + "vendor", "0x10de\n");
  write(card + "class", "0x030200\n");
  write(card + "max_link_width", "16\n");
  EXPECT_EQ(found("links").diagnosis, Diagnosis::kHas) << "a virtual machine may not say how many it has";
  write(card + "current_link_width", "8\n");
  EXPECT_THAT(found("links").text, HasSubstr("GPU 0000:3b:00.0 has 8 of 16 PCIe lanes"));
  EXPECT_EQ(found("links").diagnosis, Diagnosis::kGains);
}

TEST_F(Doctor, SlowClocksAndOtherLocalesGain) {
  write("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n");
  EXPECT_THAT(found("clock").advice, HasSubstr("clocksource=tsc"));
  ::setenv("LC_ALL", "C", 1);
  EXPECT_THAT(found("locale").advice, HasSubstr("C.UTF-8"));
}

TEST_F(Doctor, TheTextHasALineForEachFinding) {
  const std::string text = findings_text(
      {{.about = "memory", .text = "little"},
       {.about = "clock", .text = "slow", .diagnosis = Diagnosis::kGains, .advice = "another one"}});
  EXPECT_EQ(text,
            "has    memory          little\n"
            "gains  clock           slow\n"
            "                       another one\n");
}

}  // namespace
}  // namespace kiln
