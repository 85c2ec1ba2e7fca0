#include "core/text/nearest_name.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(NearestName, HasTheFewestEdits) {
  const std::vector<std::string> names = {"lr", "lr-warmup", "global-batch", "micro-batch"};
  EXPECT_EQ(nearest_name("globl-batch", names), "global-batch");
  EXPECT_EQ(nearest_name("lr_warmup", names), "lr-warmup");
  EXPECT_EQ(nearest_name("l", names), "lr");
  EXPECT_EQ(nearest_name("x", {}), "");
  EXPECT_EQ(nearest_name("b", {"a", "c"}), "a");
}

TEST(NearestName, NewUser10NeighboursThatChangedPlacesAreOneEdit) {
  EXPECT_EQ(num_edits("bacth", "batch"), 1);
  EXPECT_EQ(num_edits("bacth", "depth"), 3);
  EXPECT_EQ(nearest_name("bacth", {"depth", "batch"}), "batch");
}

TEST(SimilarNames, NewUser10AreFoundByTheirWordsAndLettersOrNotAtAll) {
  const std::vector<std::string> names = {"--seed",         "--depth", "--num-sampling-steps",
                                          "--max-steps",    "--data",  "--micro-batch",
                                          "--global-batch", "--lr",    "--recompute"};
  EXPECT_THAT(similar_names("--steps", names, 3), ElementsAre("--max-steps", "--num-sampling-steps"));
  EXPECT_THAT(similar_names("--steps", names, 1), ElementsAre("--max-steps"));
  EXPECT_THAT(similar_names("--bacth", names, 3), ElementsAre("--micro-batch", "--global-batch"));
  EXPECT_THAT(similar_names("--max-setps", names, 3), ElementsAre("--max-steps"));
  EXPECT_THAT(similar_names("--MAX_STEPS", names, 3), ElementsAre("--max-steps"));
  EXPECT_THAT(similar_names("--data-dir", names, 3), ElementsAre("--data"));
  EXPECT_THAT(similar_names("--checkpoint-path", names, 3), IsEmpty());
  EXPECT_THAT(similar_names("--vae", names, 3), IsEmpty());
  EXPECT_THAT(similar_names("-n", names, 3), IsEmpty());
  EXPECT_THAT(similar_names("--", names, 3), IsEmpty());
}

}  // namespace
}  // namespace kiln
