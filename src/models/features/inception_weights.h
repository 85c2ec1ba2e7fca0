// Files of the Inception network's weights under one set of keys.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace kiln {

// torchvision's keys and layouts. Those files (pytorch-fid's and torch-fidelity's .pth) pass as they are, but
// for counters and the auxiliary classifier, which no metric uses. Constants of TensorFlow's graph
// ("mixed/conv/conv2d_params" HWIO, ".../batchnorm/gamma", "softmax/weights") are renamed and transposed; a
// gamma that is missing there is 1.
std::map<std::string, at::Tensor> torchvision_inception_weights(
    const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
