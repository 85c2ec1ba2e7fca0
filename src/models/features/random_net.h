// A convolutional network with fixed random weights that are the same everywhere. Its distances show progress
// on one data set without a download of weights. They do not compare with a paper's.
#pragma once
#include <memory>
#include <string>

#include "models/features/feature_net.h"

namespace kiln {

// Makes the net: three stages of 3x3 convolutions of stride 2 with ReLU. The features are mean and deviation
// of each channel of each stage, so that pictures of any size fit.
std::unique_ptr<FeatureNet> make_random_net(const std::string& weights, const std::string& resize,
                                            at::Device device);

}  // namespace kiln
