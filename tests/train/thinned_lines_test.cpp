// Long logs in few lines.
#include "watch/thinned_lines.h"

#include <gtest/gtest.h>

#include "test_files.h"
#include "watch/reported_run.h"
#include "watch/run_log.h"

namespace kiln {
namespace {

using Json = nlohmann::json;

TEST(ThinnedLines, StandForThemselvesWhileTheyAreFew) {
  ThinnedLines thinned(8);
  for (int i = 1; i <= 8; ++i) thinned.add({{"step", i}, {"loss", 1.0 / i}});
  ASSERT_EQ(thinned.lines().size(), 8u);
  EXPECT_EQ(thinned.lines()[2], Json({{"step", 3}, {"loss", 1.0 / 3}}));
}

TEST(ThinnedLines, AreMeansWithTheirExtremes) {
  ThinnedLines thinned(8);
  for (int i = 1; i <= 1000; ++i)
    thinned.add({{"step", i},
                 {"loss", i % 4},
                 {"peak_host_bytes", i},
                 {"phase_s", {{"forward", 2 * i}}},
                 {"name", "x"}});
  const std::vector<Json>& lines = thinned.lines();
  ASSERT_GE(lines.size(), 4u);
  ASSERT_LE(lines.size(), 8u);
  const int64_t stride = 128;  // the least power of two of which eight reach 1000
  for (size_t i = 0; i + 1 < lines.size(); ++i) {
    const double middle = static_cast<double>(stride) * (static_cast<double>(i) + 0.5) + 0.5;
    EXPECT_NEAR(lines[i]["step"].get<double>(), middle, 1e-9);
    EXPECT_NEAR(lines[i]["phase_s"]["forward"].get<double>(), 2 * middle, 1e-9);
    EXPECT_NEAR(lines[i]["loss"].get<double>(), 1.5, 1e-9);
    EXPECT_EQ(lines[i][kLowest]["loss"], 0);
    EXPECT_EQ(lines[i][kHighest]["loss"], 3);
    EXPECT_EQ(lines[i]["peak_host_bytes"], stride * static_cast<int64_t>(i + 1));
    EXPECT_EQ(lines[i]["name"], "x");
  }
}

TEST(ThinnedLines, WhatIsNoNumberLeavesAMeanAlone) {
  ThinnedLines thinned(2);
  for (const char* line :
       {R"({"loss": null, "gpus": [{"watts": 1}]})", R"({"loss": 2, "gpus": [{"watts": 3}]})",
        R"({"loss": null, "gpus": [{"watts": 5}]})", R"({"loss": 4, "lowest": 3, "gpus": "no"})"})
    thinned.add(Json::parse(line));
  ASSERT_EQ(thinned.lines().size(), 2u);
  EXPECT_EQ(thinned.lines()[0]["loss"], 2);
  EXPECT_EQ(thinned.lines()[0]["gpus"], Json::parse(R"([{"watts": 2}])"));
  EXPECT_EQ(thinned.lines()[1]["loss"], 4);
  thinned.add("no line");
  EXPECT_EQ(thinned.lines().size(), 2u);
}

// Training reads its own log every half minute: all lines of a long one in memory made the run grow.
TEST(ThinnedLines, AReportKeepsFewOfALongLog) {
  const TempFolder run;
  constexpr int64_t kSteps = 5000;
  RunLog log(run.path().string(), 0);
  for (int64_t step = 1; step <= kSteps; ++step) {
    log.append({{"step", step}, {"loss", 2}, {"images_seen", 4 * step}, {"peak_host_bytes", step}});
    if (step % 1000 == 0) log.append({{"event", "validation"}, {"step", step}, {"validation_loss", 3}});
  }
  const ReportedRun read = read_reported_run(run.path().string());
  EXPECT_LE(read.steps.size(), 2000u);
  EXPECT_EQ(read.log.size(), 5u);
  EXPECT_EQ(read.validation().size(), 5u);
  EXPECT_EQ(read.last_step, kSteps);
  EXPECT_EQ(read.images, 4 * kSteps);
  EXPECT_EQ(read.median("loss"), 2);
  EXPECT_EQ(read.highest("peak_host_bytes"), kSteps);
}

}  // namespace
}  // namespace kiln
