// What a run writes beside its checkpoints: plots, the log, event records, the report.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string_view>

#include "core/error.h"
#include "test_files.h"
#include "watch/plot.h"
#include "watch/report.h"
#include "watch/run_log.h"
#include "watch/tensorboard.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class Outputs : public ::testing::Test {
 protected:
  std::string text(const std::string& name) const { return test::read_bytes(run_ / name); }
  test::TempFolder folder_;
  const fs::path run_ = folder_.path();
};

TEST(Plot, TicksAreRoundNumbersInside) {
  EXPECT_THAT(nice_ticks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(nice_ticks(130, 480, 4), ElementsAre(200, 300, 400));
  EXPECT_THAT(nice_ticks(3, 3, 4), ElementsAre(3));
}

TEST(Plot, LeavesOutWhatIsNotFiniteAndThinsTheRest) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  PlotSeries series{.name = "a < b", .color = "red", .points = {{0, kNan}}};
  EXPECT_EQ(line_plot({.title = "empty", .x_label = "step"}, {series}), "");
  for (int i = 0; i < 20000; ++i) series.points.push_back({double(i), i % 7 == 0 ? kNan : 2.0});
  const std::string svg = line_plot({.title = "t", .x_label = "step", .log_y = true}, {series});
  EXPECT_THAT(svg, HasSubstr("a &lt; b"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_LT(svg.size(), 20000u);
}

TEST_F(Outputs, LogIsCutBehindTheCheckpointAndAtATornLine) {
  std::ofstream(run_ / "log.jsonl")
      << "{\"step\":1,\"loss\":1}\n{\"event\":\"resume\",\"step\":1}\n{\"step\":2,\"loss\":2}\n"
      << "{\"step\":3,\"loss\":3}\n{\"step\":2,\"lo";
  { RunLog(run_, 2).append({{"event", "resume"}, {"step", 2}}); }
  EXPECT_EQ(text("log.jsonl"),
            "{\"step\":1,\"loss\":1}\n{\"event\":\"resume\",\"step\":1}\n{\"step\":2,\"loss\":2}\n"
            "{\"event\":\"resume\",\"step\":2}\n");
  { RunLog(run_, 0); }
  EXPECT_EQ(text("log.jsonl"), "");
}

TEST(EventWriter, ChecksumIsCrc32c) {
  constexpr std::string_view kCheck = "123456789";  // the check value of the Castagnoli polynomial
  EXPECT_EQ(crc32c({reinterpret_cast<const uint8_t*>(kCheck.data()), kCheck.size()}), 0xE3069283u);
}

TEST_F(Outputs, EventFilesOfOneSecondHaveTheirOwnNames) {
  EventWriter first(run_, 1), second(run_, 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(run_), {}), 2);
  EXPECT_THROW(EventWriter((run_ / "absent").string(), 1), Error);
}

TEST_F(Outputs, ReportIsOneFileWithPlotsAndPictures) {
  std::ofstream log(run_ / "log.jsonl");
  for (int step = 1; step <= 50; ++step)
    log << nlohmann::json{{"step", step},          {"images_seen", 8 * step},
                          {"loss", 1.0 / step},    {"lr", 1e-4},
                          {"grad_norm", 0.5},      {"images_per_s", 100},
                          {"tflops", 0.5},         {"peak_share", 0.5},
                          {"host_bytes", 1e9},     {"peak_host_bytes", 1e9},
                          {"train_seconds", step}, {"loss_quartiles", {0.1, nullptr, 0.3, 0.4}}}
               .dump()
        << "\n";
  log << "{\"event\":\"skipped\",\"step\":50}\n";
  log.close();
  fs::create_directories(run_ / "samples");
  for (int i = 0; i < 30; ++i)
    std::ofstream(run_ / "samples" / fmt::format("step-{:08}.png", i)) << "png" << i;
  write_report(run_);
  const std::string html = text("report.html");
  EXPECT_THAT(html, HasSubstr("<svg"));
  EXPECT_THAT(html, HasSubstr("base64,cG5nMA=="));  // "png0", the first
  EXPECT_THAT(html, HasSubstr("base64,cG5nMjk="));  // "png29", the last
  EXPECT_THAT(html, HasSubstr("skipped"));
  EXPECT_THAT(html, Not(HasSubstr("http")));  // nothing is loaded from elsewhere
  size_t figures = 0;
  for (size_t at = html.find("<figure>"); at != std::string::npos; at = html.find("<figure>", at + 1))
    ++figures;
  EXPECT_EQ(figures, 12u);
}

TEST_F(Outputs, ReportOfARunWithoutALogIsStillAPage) {
  write_report(run_);
  EXPECT_THAT(text("report.html"), HasSubstr("</html>"));
}

}  // namespace
}  // namespace kiln
