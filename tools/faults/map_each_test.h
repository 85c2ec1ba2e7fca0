// tools/plant_faults puts this file into a copy of the tests: each of a program's tests gets a map of its
// own, the file FILE~Suite.Test with / as !, where KILN_FAULT_MAP=FILE.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "core/fault_switch.h"

class MapEachTest : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override {
    std::string name = std::string(test.test_suite_name()) + "." + test.name();
    std::replace(name.begin(), name.end(), '/', '!');
    setenv("KILN_FAULT_MAP", (file_ + "~" + name).c_str(), 1);
    kiln::planted::map_to((file_ + "~" + name).c_str());
  }
  const std::string file_ = std::getenv("KILN_FAULT_MAP");
};

inline int run_mapped_tests() {
  if (std::getenv("KILN_FAULT_MAP")) ::testing::UnitTest::GetInstance()->listeners().Append(new MapEachTest);
  return RUN_ALL_TESTS();
}
