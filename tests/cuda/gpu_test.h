// What the tests on a GPU share. Without one each of them is skipped and says why.
#pragma once
#include <gtest/gtest.h>

#include "core/aten.h"
#include "ops/cuda/launch.h"
#include "parallel/machine.h"

namespace kiln::test {

inline const at::Device kGpu(at::kCUDA, 0);

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!ops::cuda::kernels_compiled()) GTEST_SKIP() << "this build has no CUDA kernels";
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
    apply({.device = kGpu, .deterministic = true});
  }
};

// Lets torch choose among all kernels while this lives, the ones that add in any order among them.
class AnyOrder {
 public:
  AnyOrder() { set(false); }
  ~AnyOrder() { set(true); }
  AnyOrder(const AnyOrder&) = delete;

 private:
  static void set(bool deterministic) {
    at::globalContext().setDeterministicAlgorithms(deterministic, /*warn_only=*/false);
    at::globalContext().setDeterministicCuDNN(deterministic);
  }
};

}  // namespace kiln::test
