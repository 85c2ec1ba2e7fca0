// Friction 26: a run says before its first step that its checkpoints do not fit, and makes room for the next.
#include "train/checkpoint_files.h"

#include "checkpoint/train_state.h"
#include "test_files.h"

namespace kiln {
namespace {

constexpr int64_t kBytes = 1000;

class Friction26 : public ::testing::Test {
 protected:
  void save(int64_t step) {
    CheckpointWriter writer(run_.path().string(), step);
    test::write_bytes(writer.folder() + "/model.safetensors", std::string(kBytes, 'x'));
    writer.commit({.step = step});
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> steps;
    for (const Checkpoint& checkpoint : list_checkpoints(run_.path().string()))
      steps.push_back(checkpoint.step);
    return steps;
  }
  CheckpointSpace space(int64_t keep, int64_t num_ahead, int64_t available) const {
    return {.run = run_.path().string(),
            .bytes = kBytes,
            .keep = keep,
            .num_ahead = num_ahead,
            .available = available};
  }

  test::TempFolder run_;
};

TEST_F(Friction26, NotEvenOneCheckpointIsAnError) {
  EXPECT_ERROR(check_space(space(0, 3, kBytes - 1)),
               "[train] " + run_.path().string() + " has room for 0.0 MB", "a checkpoint takes",
               "choose another --out");
  EXPECT_EQ(check_space(space(0, 0, 0)), "") << "none is written";
  save(1);
  EXPECT_ERROR(check_space(space(1, 3, kBytes - 1)),
               "beside the newest one, which stays until the next is whole");
}

TEST_F(Friction26, AWarningWhereNotAllFit) {
  EXPECT_EQ(check_space(space(0, 3, 3 * kBytes)), "");
  EXPECT_THAT(check_space(space(0, 3, 3 * kBytes - 1)),
              has_all("3 checkpoints of this run take", "--keep-checkpoints 2"));
  EXPECT_EQ(check_space(space(2, 30, 2 * kBytes)), "");
  EXPECT_EQ(check_space(space(1, 30, 2 * kBytes)), "");
  EXPECT_THAT(check_space(space(1, 30, 2 * kBytes - 1)), HasSubstr("2 checkpoints of this run take"))
      << "the newest stays until the next is whole";
  EXPECT_THAT(check_space(space(9, 30, 5 * kBytes)), HasSubstr("--keep-checkpoints 5 keeps the newest only"));
  save(1);
  save(2);
  EXPECT_EQ(check_space(space(0, 1, kBytes)), "") << "what is there needs no room";
  EXPECT_EQ(check_space(space(2, 30, 0)), "") << "the first makes room for the third";
}

// Friction 8 of a new user: the advice was --keep-checkpoints 2, and not even two fitted.
TEST_F(Friction26, WhereTwoDoNotFitNoNumberOfThemIsAdvised) {
  for (const int64_t keep : {0, 1, 2})
    EXPECT_THAT(check_space(space(keep, 4, 2 * kBytes - 1)),
                AllOf(HasSubstr("there must be room for two: free "), HasSubstr("choose another --out"),
                      ::testing::Not(HasSubstr("--keep-checkpoints"))))
        << keep;
}

TEST_F(Friction26, RoomIsMadeBeforeAndNeverOfTheNewest) {
  for (const int64_t step : {1, 2, 3, 4, 5}) save(step);
  make_room(space(0, 1, 0));
  EXPECT_EQ(steps().size(), 5U) << "all are to be kept";
  make_room(space(4, 1, kBytes));
  EXPECT_EQ(steps().size(), 5U) << "there is room";
  make_room(space(4, 1, kBytes - 1));
  EXPECT_EQ(steps(), (std::vector<int64_t>{3, 4, 5}));
  make_room(space(1, 1, 0));
  EXPECT_EQ(steps(), (std::vector<int64_t>{5}));
  make_room(space(1, 1, 0));
  EXPECT_EQ(steps(), (std::vector<int64_t>{5}));
}

}  // namespace
}  // namespace kiln
