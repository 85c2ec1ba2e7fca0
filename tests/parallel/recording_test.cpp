// What a recording that fails leaves behind, with a graph and a generator that behave as torch's do
// (CUDAGraph.cpp, CUDAGeneratorImpl.cpp): capture_end() of a broken recording throws before the generator
// hears of it.
#include "parallel/recording.h"

#include <gmock/gmock.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace kiln {
namespace {

struct FakeDevice {
  bool is_recording = false, is_broken = false, generator_records = false;
  std::vector<std::string> events;

  void randn() const {
    if (generator_records && !is_recording) throw std::logic_error("a draw outside of its recording");
  }
} fake_device;

struct FakeGraph {
  void begin() {
    if (fake_device.is_recording) throw std::logic_error("two recordings at once");
    fake_device.is_recording = fake_device.generator_records = true;
    fake_device.is_broken = false;
  }
  void capture_end() {
    if (!fake_device.is_recording) throw std::logic_error("no recording");
    fake_device.is_recording = false;
    if (fake_device.is_broken) throw std::runtime_error("the recording is broken");
    fake_device.generator_records = false;
  }
  void reset() { fake_device.events.emplace_back("reset"); }
};

// Returns what was thrown.
std::string recorded(const std::function<void()>& work) {
  fake_device = {};
  FakeGraph graph;
  graph.begin();
  try {
    end_recording(
        graph, work, [] { fake_device.events.emplace_back("left"); },
        [] { fake_device.events.emplace_back("least"); });
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Recording, OneThatSucceedsIsEndedOnce) {
  EXPECT_EQ(recorded([] { fake_device.randn(); }), "");
  EXPECT_FALSE(fake_device.is_recording);
  EXPECT_THAT(fake_device.events, testing::IsEmpty());
  EXPECT_NO_THROW(fake_device.randn());
}

TEST(Recording, AfterABrokenOneTheGeneratorDraws) {
  const auto read_on_host = [] {
    fake_device.is_broken = true;
    throw std::runtime_error("a host's read");
  };
  EXPECT_EQ(recorded(read_on_host), "a host's read");
  EXPECT_FALSE(fake_device.is_recording);
  EXPECT_NO_THROW(fake_device.randn());
  EXPECT_THAT(fake_device.events, testing::ElementsAre("left", "reset", "least"));
}

TEST(Recording, WorkThatThrowsInAWholeRecordingLeavesNothing) {
  EXPECT_EQ(recorded([] { throw std::runtime_error("a shape"); }), "a shape");
  EXPECT_FALSE(fake_device.is_recording);
  EXPECT_NO_THROW(fake_device.randn());
  EXPECT_THAT(fake_device.events, testing::ElementsAre("reset", "least"));
}

// The end itself finds that it is broken; a second end finds no recording.
TEST(Recording, OneThatBreaksUnnoticedIsRefused) {
  EXPECT_EQ(recorded([] { fake_device.is_broken = true; }), "the recording is broken");
  EXPECT_NO_THROW(fake_device.randn());
  EXPECT_THAT(fake_device.events, testing::ElementsAre("left", "reset", "least"));
}

}  // namespace
}  // namespace kiln
