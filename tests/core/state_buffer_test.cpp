#include "core/flat_layout.h"

#include <gmock/gmock.h>

namespace kiln {
namespace {

FlatLayout layout_of_two() {
  FlatLayout layout;
  layout.add("matrix", {5, 8});  // 40 elements, at 0
  layout.add("vector", {100});   // at 64
  return layout;
}

// Row means of matrices of 2 x 4: two values for every 8 elements.
StateBuffer row_means() {
  return {
      .name = "rows",
      .packed = {{.shape = {5, 2}, .elements = 8, .values = 2}, {.shape = {}, .elements = 1, .values = 0}}};
}

TEST(StateBuffer, FlatBuffersHaveAValueForEachElementOrBlock) {
  const FlatLayout layout = layout_of_two();
  EXPECT_EQ(layout.size, 192);
  const StateBuffer each{.name = "mean"}, blocks{.name = "scale", .block = 32};
  EXPECT_EQ(state_values(each, layout, 192, 96), 96);
  EXPECT_EQ(state_values(blocks, layout, 192, 96), 3);
  const std::vector<StateRun> runs = state_runs(blocks, layout, 96, 192);
  EXPECT_EQ(runs[0].count, 0);
  EXPECT_EQ(runs[1].first, 1);  // the vector's second block begins at 96
  EXPECT_EQ(runs[1].place, 0);
  EXPECT_EQ(runs[1].count, 3);  // 32 + 32 + 4 elements
}

TEST(StateBuffer, ValuesOfCutGroupsAreInBothRangesAndBelongToTheFirst) {
  const FlatLayout layout = layout_of_two();
  const StateBuffer buffer = row_means();
  const StateRun before = state_runs(buffer, layout, 0, 20)[0],
                 behind = state_runs(buffer, layout, 20, 64)[0];
  EXPECT_EQ(before.first, 0);
  EXPECT_EQ(before.count, 6);
  EXPECT_EQ(behind.first, 4);  // the third matrix begins at 16
  EXPECT_EQ(behind.count, 6);
  EXPECT_EQ(part_of(before, buffer.packed[0], 0, 20).count, 6);
  const StateRun own = part_of(behind, buffer.packed[0], 20, 40);
  EXPECT_EQ(own.first, 6);
  EXPECT_EQ(own.place, 2);
  EXPECT_EQ(own.count, 4);
}

TEST(StateBuffer, HasRoomForTheFullestRange) {
  EXPECT_EQ(state_values(row_means(), layout_of_two(), 192, 192), 10);
  EXPECT_EQ(state_values(row_means(), layout_of_two(), 192, 96), 10);
  EXPECT_EQ(state_values(row_means(), layout_of_two(), 192, 32), 8);
}

}  // namespace
}  // namespace kiln
