#include "core/text/nearest_name.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace kiln
