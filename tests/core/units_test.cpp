#include "core/units.h"

#include <gtest/gtest.h>

#include <limits>

namespace kiln {
namespace {

TEST(Duration, HasTwoUnits) {
  EXPECT_EQ(duration_text(0), "0m 00s");
  EXPECT_EQ(duration_text(63.4), "1m 03s");
  EXPECT_EQ(duration_text(3599.6), "1h 00m");
  EXPECT_EQ(duration_text(2 * 3600 + 5 * 60), "2h 05m");
  EXPECT_EQ(duration_text(3 * 86400 + 4 * 3600 + 1800), "3d 04h");
}

TEST(Number, HasNoExponent) {
  EXPECT_EQ(number_text(0), "0");
  EXPECT_EQ(number_text(0.01234567), "0.01235");
  EXPECT_EQ(number_text(12.30), "12.3");
  EXPECT_EQ(number_text(100.0), "100");
  EXPECT_EQ(number_text(999.96), "1,000");
  EXPECT_EQ(number_text(2000, 3), "2,000");
  EXPECT_EQ(number_text(856'123), "856,100");
  EXPECT_EQ(number_text(856'123, 3), "856,000");
  EXPECT_EQ(number_text(-12'345'678, 2), "-12,000,000");
  EXPECT_EQ(number_text(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(number_text(-std::numeric_limits<double>::infinity()), "-inf");
  EXPECT_EQ(number_text(std::numeric_limits<double>::quiet_NaN()), "nan");
}

TEST(Units, SizesHaveThreePlacesWhereTwoSayLittle) {
  EXPECT_EQ(gib_text(5 << 20), "0.005");
  EXPECT_EQ(gib_text(int64_t{3} << 29), "1.50");
  EXPECT_EQ(gib_text(0), "0.000");
}

}  // namespace
}  // namespace kiln
