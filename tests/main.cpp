// The main program of every test program. KILN_CPU lowers it as it lowers kiln.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/cpu_level.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    kiln::lower_cpu_level();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return RUN_ALL_TESTS();
}
