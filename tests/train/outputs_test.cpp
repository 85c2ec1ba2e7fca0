// What a run writes beside its checkpoints: the log, event records, the report.

#include <string_view>

#include "page_data.h"
#include "test_files.h"
#include "watch/report.h"
#include "watch/run_log.h"
#include "watch/tensorboard.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

class Outputs : public ::testing::Test {
 protected:
  std::string text(const std::string& name) const { return test::read_bytes(run_ / name); }
  test::TempFolder folder_;
  const fs::path run_ = folder_.path();
};

TEST_F(Outputs, LogIsCutBehindTheCheckpointAndAtOddLines) {
  std::ofstream(run_ / "log.jsonl")
      << "{\"step\":1,\"loss\":1}\n{\"event\":\"resume\",\"step\":1}\n{\"step\":2,\"loss\":2}\n"
      << "{\"step\":3,\"loss\":3}\n{\"step\":1e92}\n{\"step\":\"1\"}\n{\"step\":2,\"lo";
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
  const nlohmann::json data = nlohmann::json::parse(test::data_text(text("report.html")));
  const nlohmann::json plots = test::parts_of(data, "plot");
  EXPECT_EQ(plots.at(0).at("title"), "Loss");
  EXPECT_EQ(plots.at(0).at("series").at(0).at("x").size(), 50u);
  const nlohmann::json quartiles = plots.at(1).at("series");
  ASSERT_EQ(quartiles.size(), 4u);
  EXPECT_EQ(quartiles.at(1).at("x"), nlohmann::json::array()) << "without images";
  EXPECT_EQ(quartiles.at(2).at("name"), "50-75 %");
  EXPECT_EQ(quartiles.at(2).at("y").at(0), 0.3);
  const nlohmann::json pictures = test::parts_of(data, "pictures").at(0).at("items");
  ASSERT_EQ(pictures.size(), 12u);
  EXPECT_EQ(pictures.at(0).at(0), "data:image/png;base64,cG5nMA==");   // "png0", the first
  EXPECT_EQ(pictures.at(11).at(0), "data:image/png;base64,cG5nMjk=");  // "png29", the last
  const nlohmann::json events = test::parts_of(data, "table").back();
  EXPECT_EQ(events.at("rows"), nlohmann::json::parse(R"([["step 50", "skipped"]])"));
}

TEST_F(Outputs, ReportOfARunWithoutALogIsStillAPage) {
  write_report(run_);
  const nlohmann::json data = nlohmann::json::parse(test::data_text(text("report.html")));
  EXPECT_EQ(data.at("title"), run_.filename().string());
}

}  // namespace
}  // namespace kiln
