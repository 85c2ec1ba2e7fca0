// A convolutional network whose weights nobody trained: fixed random ones, the same everywhere. Its distances
// follow progress on one data set without weights from elsewhere; they compare with no paper's.
#pragma once
#include <memory>
#include <string>

#include "models/features/feature_net.h"

namespace kiln {

// Three stages of 3x3 convolutions of stride 2 with ReLU; the features are mean and deviation of each channel
// of each stage, so that pictures of any size fit.
std::unique_ptr<FeatureNet> make_random_net(const std::string& weights, const std::string& resize,
                                            at::Device device);

}  // namespace kiln
