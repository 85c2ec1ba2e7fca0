#include "core/dtype.h"

#include <bit>
#include <cmath>
#include <limits>

#include "test_files.h"

namespace kiln {
namespace {

TEST(Dtype, NamesAndSizesGoBothWays) {
  const std::pair<const char*, std::size_t> expected[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"I16", 2},
                                                          {"I32", 4},  {"I64", 8}, {"F16", 2}, {"BF16", 2},
                                                          {"F32", 4},  {"F64", 8}};
  for (const auto& [name, size] : expected) {
    const Dtype dtype = parse_dtype(name);
    EXPECT_EQ(dtype_name(dtype), name);
    EXPECT_EQ(dtype_size(dtype), size) << name;
  }
}

TEST(Dtype, UnknownNameIsRefusedWithTheKnownOnes) { EXPECT_ERROR(parse_dtype("F8_E4M3"), "F8_E4M3", "BF16"); }

TEST(Fp16, EveryBitPatternSurvivesTheWayToFloatAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = fp16_to_float(half);
    if ((half & 0x7fff) > 0x7c00)
      EXPECT_TRUE(std::isnan(value) && std::isnan(fp16_to_float(float_to_fp16(value)))) << bits;
    else
      ASSERT_EQ(float_to_fp16(value), half) << bits;
  }
}

// The oracle: of the two neighbours the nearer, of equally near ones the even.
TEST(Fp16, RoundsToNearestEvenBetweenAllNeighbours) {
  for (uint16_t low = 0; low < 0x7bff; ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const float a = fp16_to_float(low), b = fp16_to_float(high), middle = a + (b - a) / 2;  // exact in float
    ASSERT_EQ(float_to_fp16(middle), low % 2 == 0 ? low : high) << low;
    ASSERT_EQ(float_to_fp16(std::nextafter(middle, a)), low) << low;
    ASSERT_EQ(float_to_fp16(std::nextafter(middle, b)), high) << low;
    ASSERT_EQ(float_to_fp16(-middle), (low % 2 == 0 ? low : high) | 0x8000) << low;
  }
}

TEST(Fp16, OverflowsToInfinityFromHalfWayOn) {
  EXPECT_EQ(float_to_fp16(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_fp16(-std::numeric_limits<float>::infinity()), 0xfc00);
  EXPECT_EQ(float_to_fp16(1e-30f), 0);
  EXPECT_EQ(float_to_fp16(-0.0f), 0x8000);
  EXPECT_EQ(fp16_to_float(0x0001), 0x1p-24f);
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNan) {
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const auto low = static_cast<uint16_t>(bits), high = static_cast<uint16_t>(bits + 1);
    const float middle = std::bit_cast<float>((bits << 16) + 0x8000);
    ASSERT_EQ(float_to_bf16(bf16_to_float(low)), low);
    ASSERT_EQ(float_to_bf16(middle), low % 2 == 0 ? low : high) << bits;
    ASSERT_EQ(float_to_bf16(std::bit_cast<float>((bits << 16) + 0x7fff)), low) << bits;
    ASSERT_EQ(float_to_bf16(std::bit_cast<float>((bits << 16) + 0x8001)), high) << bits;
  }
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  // A NaN whose payload lies only in the lower half must not become infinity.
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0xffffffffu)))));
}

}  // namespace
}  // namespace kiln
