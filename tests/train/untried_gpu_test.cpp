// --untried-gpu, as far as a CPU shows it: the update on a stream of its own, with emulated streams.
#include <gmock/gmock.h>

#include "core/dry_run.h"
#include "core/error.h"
#include "parallel/rank_threads.h"
#include "parallel/stream_emulation.h"
#include "test_files.h"
#include "train/checkpoints.h"
#include "train/placements.h"
#include "train/product_choices.h"
#include "train/setup.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using test::StreamEmulation, test::TinyOptions, test::TinyTraining;

void build_untried(DryRunDevice device) {
  TrainOptions options = test::tiny_dit_options();
  options.compute.untried_gpu = UntriedGpu::parse("all");
  const DryRunScope dry_run(device);
  build_training(options, synthetic_shape(options), at::kMeta);
}

TEST(UntriedGpu, IsRefusedOnACpu) {
  EXPECT_THAT([] { build_untried(DryRunDevice::kCpu); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("--untried-gpu changes what a GPU does")));
  EXPECT_NO_THROW(build_untried(DryRunDevice::kCuda));
}

// Marks what a step does on the stream that is then current: "1 forward 2" in step 1, and "1 forward 2 ends".
class StepMarks : public StepObserver {
 public:
  void begin(StepPhase phase, int64_t segment) override { StreamEmulation::mark(name(phase, segment)); }
  void end(StepPhase phase, int64_t segment) override {
    StreamEmulation::mark(name(phase, segment) + " ends");
  }
  int64_t step = 0;

 private:
  std::string name(StepPhase phase, int64_t segment) const {
    return fmt::format("{} {} {}", step, name_of(phase), segment);
  }
};

constexpr int64_t kGlobal = 6, kComputeStream = 0;

struct UpdateCase {
  int64_t world_size = 1, stage = 0;
  bool unread = true;
  Placement optimizer = Placement::kDevice;
};

class SideUpdate : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!StreamEmulation::is_possible()) GTEST_SKIP() << "a GPU's own streams are linked in";
    emulation_.emplace();
  }
  void TearDown() override { emulation_.reset(); }

  static TinyOptions options_of(const UpdateCase& c, const std::shared_ptr<ProcessGroup>& group,
                                bool beside) {
    TinyOptions options{.group = group, .zero = {.stage = c.stage}, .updates_unread = c.unread};
    if (c.optimizer != Placement::kDevice) options = test::placed(options, c.optimizer);
    if (beside) options.update_beside = StreamEmulation::device();
    return options;
  }

  // Takes two steps and waits for all weights, and calls look(names of the units) on each rank.
  template <class Look>
  void look_at_two_steps(const UpdateCase& c, const Look& look) const {
    SCOPED_TRACE(fmt::format("{} ranks, stage {}, unread {}", c.world_size, c.stage, c.unread));
    test::on_ranks(c.world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      StreamEmulation::forget();
      const TinyTraining tiny(options_of(c, group, /*beside=*/true));
      StepMarks marks;
      tiny.step->observe(&marks);
      for (marks.step = 1; marks.step <= 2; ++marks.step)
        tiny.step->run(test::rows_of(tiny.batch(kGlobal, static_cast<uint64_t>(marks.step)), *group), 1e-3);
      tiny.step->observe(nullptr);
      tiny.state->zero->finish_gathers();
      StreamEmulation::mark("read");
      look(static_cast<int64_t>(tiny.state->segments.size()));
    });
  }

  std::optional<StreamEmulation> emulation_;
};

void expect_before(const std::string& first, const std::string& second) {
  EXPECT_TRUE(StreamEmulation::is_before(first, second)) << first << " may run after " << second;
}

// A segment's forward waits for its own update, the update for the gradients of all, and readers for all
// updates.
TEST_F(SideUpdate, WaitsAreThoseThatAreNeeded) {
  for (const int64_t world_size : {1, 2})
    for (int64_t stage = 0; stage <= 3; ++stage)
      for (const bool unread : {true, false})
        look_at_two_steps({world_size, stage, unread}, [](int64_t num_units) {
          for (int64_t unit = 0; unit < num_units; ++unit) {
            expect_before(fmt::format("1 backward {} ends", unit), "1 optimizer 0");
            expect_before(fmt::format("1 optimizer {} ends", unit), fmt::format("2 forward {}", unit));
            expect_before(fmt::format("2 optimizer {} ends", unit), "read");
            EXPECT_NE(StreamEmulation::stream_of(fmt::format("1 optimizer {}", unit)), kComputeStream);
          }
        });
}

// The first segment of the next step does not wait for the last one's update. At stage 3 it waits for that of
// the segment that is gathered ahead.
TEST_F(SideUpdate, RunsBesideTheNextForward) {
  for (const int64_t stage : {0, 1, 2, 3})
    look_at_two_steps({2, stage}, [&](int64_t num_units) {
      const int64_t most_ahead = stage == 3 ? 1 : 0;
      for (int64_t unit = 0; unit + most_ahead + 1 < num_units; ++unit) {
        const std::string later = fmt::format("1 optimizer {} ends", unit + most_ahead + 1);
        EXPECT_FALSE(StreamEmulation::is_before(later, fmt::format("2 forward {}", unit))) << later;
      }
    });
}

TEST_F(SideUpdate, StaysAmongTheComputeWhereStateIsElsewhere) {
  for (const int64_t stage : {0, 3})
    look_at_two_steps({1, stage, true, Placement::kNvme}, [](int64_t num_units) {
      for (int64_t unit = 0; unit < num_units; ++unit)
        EXPECT_EQ(StreamEmulation::stream_of(fmt::format("1 optimizer {}", unit)), kComputeStream);
    });
}

TEST_F(SideUpdate, GivesTheSameBits) {
  for (const int64_t world_size : {1, 2})
    for (int64_t stage = 0; stage <= 3; ++stage)
      test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
        const UpdateCase c{world_size, stage};
        const test::Outcome among = test::train(options_of(c, group, false), kGlobal, 3),
                            beside = test::train(options_of(c, group, true), kGlobal, 3);
        EXPECT_EQ(beside.losses, among.losses) << stage;
        test::expect_equal(beside.state, among.state);
      });
}

// The checkpoint is written while the last update may still run.
TEST_F(SideUpdate, ResumesToTheSameBits) {
  const test::TempFolder run;
  const TinyOptions options = options_of({}, std::make_shared<ProcessGroup>(), true);
  const test::Outcome whole = test::train(options, kGlobal, 4);
  const TinyTraining first(options), second(options);
  StepMarks marks;
  first.step->observe(&marks);
  test::take_steps(first, kGlobal, 0, 2);
  first.step->observe(nullptr);
  save_checkpoint(run.path(), *first.state, {.step = 2});
  StreamEmulation::mark("saved");
  for (size_t unit = 0; unit < first.state->segments.size(); ++unit)
    expect_before(fmt::format("0 optimizer {} ends", unit), "saved");
  load_checkpoint(checkpoint_folder(run.path(), 2), *second.state);
  test::expect_equal(test::take_steps(second, kGlobal, 2, 4).state, whole.state);
}

// Every bit of cuBLASLt's description comes back, with what the choice holds for.
TEST(ProductChoices, ComeBackFromTheirFile) {
  KeptChoice kept{.gpu = "NVIDIA H200", .cublaslt = 130100, .choice = {}};
  kept.choice = {.product = ops::EpilogueProduct::kGradRows,
                 .dtype = Dtype::kBF16,
                 .has_bias = true,
                 .m = 1152,
                 .n = 8192,
                 .k = 4608,
                 .alignments = {16, 256, 64},
                 .workspace_bytes = 32 << 20,
                 .algorithm = {1, 0xfedcba9876543210, 3, 4, 5, 6, 7, ~uint64_t{0}},
                 .microseconds = 61.5F,
                 .first_microseconds = 64};
  KeptChoice other = kept;
  other.gpu = "NVIDIA H100";
  other.choice.product = ops::EpilogueProduct::kAffineGelu;
  const std::vector<KeptChoice> both = {kept, other};
  const nlohmann::json file = nlohmann::json::parse(to_json(both).dump());
  // Which a rehearsal of scripts/gpu reads.
  EXPECT_EQ(file, nlohmann::json::parse(read_bytes(KILN_SOURCE_DIR "/tests/fixtures/gpu-products-0.json")));
  const std::vector<KeptChoice> back = kept_choices("gpu-products-0.json", file);
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(to_json(back), file);
  EXPECT_TRUE(std::ranges::equal(back[0].choice.algorithm, kept.choice.algorithm));
  EXPECT_EQ(back[1].gpu, "NVIDIA H100");
}

TEST(ProductChoices, ADamagedFileIsNamed) {
  const std::vector<KeptChoice> one = {{.gpu = "NVIDIA H200", .cublaslt = 1, .choice = {}}};
  nlohmann::json file = to_json(one);
  const auto reads = [&] { kept_choices("run/gpu-products-0.json", file); };
  EXPECT_NO_THROW(reads());
  for (const auto& [key, value] : {std::pair<const char*, nlohmann::json>{"algorithm", "12"},
                                   {"product", "sum"},
                                   {"shape", {1, 2}},
                                   {"shape", {1, -2, 3}},
                                   {"dtype", "BF17"},
                                   {"gpu", nullptr}}) {
    const nlohmann::json before = std::exchange(file["choices"][0][key], value);
    EXPECT_THAT(reads, testing::ThrowsMessage<Error>(testing::HasSubstr("run/gpu-products-0.json"))) << key;
    file["choices"][0][key] = before;
  }
  file = {{"choices", 1}};
  EXPECT_THAT(reads, testing::ThrowsMessage<Error>(testing::HasSubstr("holds no list of choices")));
}

}  // namespace
}  // namespace kiln
