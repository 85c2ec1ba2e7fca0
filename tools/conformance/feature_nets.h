// The verb forward for networks that turn pictures into features: they have no gradients.
#pragma once
#include <string>

#include "io.h"

namespace kiln::conformance {

struct FeatureNetRun {
  std::string config, weights, inputs, dtype;
};
Tensors run_inception(const FeatureNetRun& run);
Tensors run_dinov2(const FeatureNetRun& run);

}  // namespace kiln::conformance
