// Runs that are read while they grow.
#include "serve/live_run.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "page_data.h"
#include "serve/run_pages.h"
#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

class LiveRuns : public testing::Test {
 protected:
  void add(const std::string& text) { std::ofstream(folder_ / "log.jsonl", std::ios::app) << text; }
  void add_steps(int first, int last) {
    for (int step = first; step <= last; ++step)
      add(fmt::format(
          "{{\"step\":{},\"images_seen\":{},\"loss\":{},\"phase_s\":{{\"forward\":0.03,\"data\":0.01}}}}\n",
          step, 8 * step, step % 5));
  }

  test::TempFolder temporary_;
  const fs::path folder_ = temporary_.path();
  LiveRun live_{folder_.string()};
};

TEST_F(LiveRuns, ReadsWhatIsNew) {
  EXPECT_TRUE(live_.update()) << "for the first time";
  EXPECT_FALSE(live_.update());
  add_steps(1, 3);
  add("{\"event\":\"validation\",\"step\":3,\"validation_loss\":0.5,\"seconds\":2}\n{\"step\":4,\"lo");
  EXPECT_TRUE(live_.update());
  EXPECT_EQ(live_.run().steps.size(), 3u);
  EXPECT_EQ(live_.run().log.size(), 1u);
  EXPECT_EQ(live_.run().last_step, 3);
  EXPECT_FALSE(live_.update()) << "the line is not whole";
  EXPECT_FALSE(live_.has_more());
  add("ss\":1}\n");
  EXPECT_TRUE(live_.update());
  EXPECT_EQ(live_.run().last_step, 4);
}

TEST_F(LiveRuns, ReadsALogThatWasWrittenAnew) {
  add_steps(1, 9);
  live_.update();
  std::ofstream(folder_ / "new") << "{\"step\":2,\"loss\":1}\n";
  fs::rename(folder_ / "new", folder_ / "log.jsonl");
  EXPECT_TRUE(live_.update());
  EXPECT_EQ(live_.run().steps.size(), 1u);
  EXPECT_EQ(live_.run().last_step, 2);
}

TEST_F(LiveRuns, TakesEachLineOnceWhateverItIs) {
  add_steps(1, 2);
  add(std::string(100, '[') + "\n{\"event\":\"checkpoint\",\"step\":2}\n");
  add("{\"step\":18446744073709551615,\"images_seen\":1e92}\n");
  EXPECT_TRUE(live_.update());
  add_steps(3, 3);
  EXPECT_TRUE(live_.update());
  EXPECT_FALSE(live_.update());
  EXPECT_EQ(live_.run().steps.size(), 3u);
  EXPECT_EQ(live_.run().log.size(), 1u);
}

TEST_F(LiveRuns, DoNotWaitForALogThatIsGone) {
  add_steps(1, 20000);
  EXPECT_TRUE(live_.update());
  EXPECT_TRUE(live_.has_more());
  fs::remove(folder_ / "log.jsonl");
  live_.update();
  EXPECT_FALSE(live_.has_more());
}

TEST_F(LiveRuns, PassesOverALineWithoutAnEnd) {
  add(std::string((9 << 20) + 5, 'x'));
  add_steps(1, 2);
  do live_.update();
  while (live_.has_more());
  EXPECT_EQ(live_.run().steps.size(), 1u) << "the first one belongs to the long line";
  EXPECT_EQ(live_.problem(), "");
}

TEST_F(LiveRuns, ShowsNewGridsByAddressesOfItsOwn) {
  fs::create_directories(folder_ / "samples");
  std::ofstream(folder_ / "samples/step-00000001.png") << "png";
  live_.update();
  ASSERT_EQ(live_.run().grids.size(), 1u);
  EXPECT_EQ(live_.run().grids[0].source, "samples/step-00000001.png");
  std::ofstream(folder_ / "samples/step-00000002.png") << "png";
  EXPECT_TRUE(live_.update());
  EXPECT_EQ(live_.pictures().at("step-00000002.png"), (folder_ / "samples/step-00000002.png").string());
}

TEST_F(LiveRuns, TheirPageNamesStallsByCause) {
  add_steps(1, 20);
  add("{\"event\":\"validation\",\"step\":20,\"validation_loss\":0.5,\"seconds\":90}\n");
  live_.update();
  const nlohmann::json tables = test::parts_of(live_page(live_, {}, {}).json(), "table");
  EXPECT_EQ(tables.at(0).at("rows"),
            nlohmann::json::parse(R"([["waiting for the loader", "10 ms", "25.0 %", "25.0 %"]])"));
  EXPECT_EQ(tables.at(1).at("rows").at(0).at(0), "validation");
}

TEST_F(LiveRuns, APageForReadingHasNoButtons) {
  live_.update();
  EXPECT_EQ(test::parts_of(live_page(live_, {}, {}).json(), "forms").size(), 1u);
  const nlohmann::json page = live_page(live_, {}, {.has_overview = true, .is_read_only = true}).json();
  EXPECT_EQ(test::parts_of(page, "forms").size(), 0u);
  EXPECT_EQ(test::parts_of(page, "links").at(0).at("items"),
            nlohmann::json::parse(R"([["all runs", "../"]])"));
}

}  // namespace
}  // namespace kiln
