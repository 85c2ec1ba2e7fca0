#include "core/units.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

TEST(Duration, HasTwoUnits) {
  EXPECT_EQ(duration_text(0), "0m 00s");
  EXPECT_EQ(duration_text(63.4), "1m 03s");
  EXPECT_EQ(duration_text(3599.6), "1h 00m");
  EXPECT_EQ(duration_text(2 * 3600 + 5 * 60), "2h 05m");
  EXPECT_EQ(duration_text(3 * 86400 + 4 * 3600 + 1800), "3d 04h");
}

}  // namespace
}  // namespace kiln
