// Prices of a GPU against a program that is not Kiln's: the operations of fast-DiT's eager step on DiT-XL/2,
// which benchmarks/peers/eager_dit.py recorded, priced by the profile of an A100, against what fast-DiT
// measured there.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>

#include "core/json.h"
#include "plan/price/price.h"

namespace kiln {
namespace {

// Of its README: one A100 with 80 GB, 128 images a step.
struct FastDitRow {
  const char* row;
  double steps_per_s;  // 0: out of memory
};
constexpr FastDitRow kFastDitRows[] = {
    {"original", 0}, {"recompute", 0.43}, {"amp", 0.56}, {"features", 0.84}};
constexpr double kAllowedOfFastDit = 0.2;

// As recorded: [name, class, dtype, flops, bytes, m, n, k, times].
OpRecord eager_op(const nlohmann::json& recorded) {
  static const std::map<std::string, OpClass> classes = {{"matmul", OpClass::kMatmul},
                                                         {"convolution", OpClass::kConvolution},
                                                         {"elementwise", OpClass::kElementwise}};
  static const std::map<std::string, at::ScalarType> dtypes = {{"f32", at::kFloat},
                                                               {"fp16", at::kHalf},
                                                               {"f64", at::kDouble},
                                                               {"i64", at::kLong},
                                                               {"bool", at::kBool}};
  return {.name = recorded.at(0).get<std::string>(),
          .op_class = classes.at(recorded.at(1).get<std::string>()),
          .dtype = dtypes.at(recorded.at(2).get<std::string>()),
          .flops = recorded.at(3),
          .bytes = recorded.at(4),
          .m = recorded.at(5),
          .n = recorded.at(6),
          .k = recorded.at(7)};
}

TEST(EagerPrices, OfFastDitsStepsAreWhatItMeasured) {
  const auto recorded =
      nlohmann::json::parse(std::ifstream(std::string(KILN_SOURCE_DIR) + "/tests/plan/eager_dit.json"));
  const MachineProfile a100 = with_tf32(find_profile("A100-80G"));
  for (const FastDitRow& published : kFastDitRows) {
    const nlohmann::json& row = recorded.at("rows").at(published.row);
    const bool fits = row.at("peak_bytes").get<int64_t>() < a100.memory_bytes;
    EXPECT_EQ(fits, published.steps_per_s > 0) << published.row;
    double seconds = 0;
    for (const nlohmann::json& op : row.at("ops"))
      seconds += op.at(8).get<double>() * price(eager_op(op), a100);
    RecordProperty(published.row, std::to_string(1 / seconds));
    if (published.steps_per_s > 0) {
      EXPECT_NEAR(1 / seconds / published.steps_per_s, 1, kAllowedOfFastDit) << published.row;
    }
  }
}

}  // namespace
}  // namespace kiln
