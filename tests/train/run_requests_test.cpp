// What is asked of a run by files in its folder.
#include "watch/run_requests.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "core/error.h"
#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

class RequestsOfARun : public testing::Test {
 protected:
  void touch(const std::string& name) { std::ofstream(folder_ / name) << ""; }
  static int64_t look(RunRequests& requests) {
    std::this_thread::sleep_for(std::chrono::milliseconds(210));
    return requests.take_new();
  }

  test::TempFolder temporary_;
  const std::string run_ = temporary_.path();
  const fs::path folder_ = fs::path(run_) / "requests";
};

TEST_F(RequestsOfARun, AreTakenOnceAndRemovedWhenServed) {
  RunRequests requests(run_, /*forgets=*/true);
  EXPECT_EQ(requests.take_new(), 0);
  touch("checkpoint");
  EXPECT_EQ(requests.take_new(), 0) << "it has just looked";
  EXPECT_EQ(look(requests), bit_of(RunRequest::kCheckpoint));
  touch("sample");
  EXPECT_EQ(look(requests), bit_of(RunRequest::kSample)) << "the other one is being served";
  EXPECT_EQ(waiting_requests(run_), (std::vector<std::string>{"checkpoint", "sample"}));
  requests.served(RunRequest::kCheckpoint);
  EXPECT_FALSE(fs::exists(folder_ / "checkpoint"));
  touch("checkpoint");
  EXPECT_EQ(look(requests), bit_of(RunRequest::kCheckpoint)) << "asked again";
}

TEST_F(RequestsOfARun, OfAnEarlierProcessAreForgotten) {
  fs::create_directories(folder_);
  touch("stop");
  { const RunRequests next_stage(run_, /*forgets=*/false); }
  EXPECT_TRUE(fs::exists(folder_ / "stop"));
  RunRequests requests(run_, /*forgets=*/true);
  EXPECT_FALSE(fs::exists(folder_ / "stop"));
  EXPECT_EQ(look(requests), 0);
}

TEST_F(RequestsOfARun, OfStrangeKindsAreLeftAloneWithOneWarning) {
  RunRequests requests(run_, /*forgets=*/true);
  touch("secret");
  fs::create_symlink(folder_ / "secret", folder_ / "stop");
  fs::create_directory(folder_ / "checkpoint");
  ::mkfifo((folder_ / "sample").c_str(), 0600);
  testing::internal::CaptureStderr();
  EXPECT_EQ(look(requests), 0);
  EXPECT_EQ(look(requests), 0);
  requests.forget();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_TRUE(fs::exists(folder_ / "secret") && fs::is_symlink(folder_ / "stop") &&
              fs::exists(folder_ / "checkpoint"));
}

TEST_F(RequestsOfARun, AreNotLookedForBehindALink) {
  fs::create_directories(fs::path(run_) / "elsewhere");
  std::ofstream(fs::path(run_) / "elsewhere/stop") << "";
  fs::create_directory_symlink(fs::path(run_) / "elsewhere", folder_);
  RunRequests requests(run_, /*forgets=*/true);
  EXPECT_EQ(look(requests), 0);
  EXPECT_TRUE(fs::exists(fs::path(run_) / "elsewhere/stop"));
  EXPECT_THROW(ask_run(run_, "sample"), Error);
}

TEST_F(RequestsOfARun, AreMadeByTheirNamesOnly) {
  for (const char* name : {"", "../stop", "stop/", "kill"}) EXPECT_THROW(ask_run(run_, name), Error) << name;
  EXPECT_FALSE(fs::exists(folder_));
  ask_run(run_, "stop");
  ask_run(run_, "stop");
  EXPECT_EQ(waiting_requests(run_), std::vector<std::string>{"stop"});
}

}  // namespace
}  // namespace kiln
