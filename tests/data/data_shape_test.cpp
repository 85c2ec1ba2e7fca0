#include "data/store/data_shape.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

int64_t side_of(std::vector<Lane> lanes) {
  return DataShape{.channels = 4, .lanes = std::move(lanes)}.side();
}

TEST(DataShape, OneShapeIsItsOwnSide) {
  EXPECT_EQ(side_of({{.height = 9, .width = 9}}), 9);
  EXPECT_EQ(side_of({{.height = 8, .width = 12}}), 12);
}

// Shapes of a table have about the same area, whichever of them comes first or is the largest.
TEST(DataShape, TheSideOfBucketsIsThatOfTheirSquare) {
  EXPECT_EQ(side_of({{.height = 8, .width = 32}, {.height = 16, .width = 16}}), 16);
  EXPECT_EQ(side_of({{.height = 60, .width = 68}, {.height = 32, .width = 128}}), 64);
  EXPECT_EQ(side_of({{.height = 128, .width = 32}, {.height = 48, .width = 88}}), 64);
}

}  // namespace
}  // namespace kiln
