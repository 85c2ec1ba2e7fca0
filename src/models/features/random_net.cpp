#include "models/features/feature_nets.h"

#include <ATen/core/grad_mode.h>

#include <cmath>

#include "core/aten.h"
#include "models/features/picture_input.h"
#include "models/parts/init.h"

namespace kiln {
namespace {

constexpr int64_t kChannels[] = {3, 32, 64, 128};
constexpr uint64_t kSeed = 20150612;  // if this or the widths change, change the fingerprint too
constexpr const char* kFingerprint = "random-conv-1";

class RandomNet : public FeatureNet {
 public:
  explicit RandomNet(at::Device device) : device_(device) {
    for (size_t stage = 0; stage + 1 < std::size(kChannels); ++stage) {
      const int64_t in = kChannels[stage], out = kChannels[stage + 1];
      at::Tensor weight = at::empty({out, in, 3, 3}, at::kFloat);
      initialize(Init::normal(std::sqrt(2.0 / static_cast<double>(in * 9))), kSeed,
                 "stage." + std::to_string(stage), weight);
      weights_.push_back(weight.to(device));
    }
    fingerprint = kFingerprint;
  }

  std::vector<at::Tensor> weights() const override { return weights_; }
  PictureFeatures forward(const at::Tensor& pictures) const override {
    check_pictures("random", pictures);
    const at::NoGradGuard no_grad;
    at::Tensor x = (pictures.to(device_).to(at::kFloat) - 127.5) / 64;
    std::vector<at::Tensor> parts;
    for (const at::Tensor& weight : weights_) {
      x = at::conv2d(x, weight, {}, {2, 2}, {1, 1}).relu();
      const at::Tensor mean = x.mean({2, 3});
      parts.push_back(mean);
      parts.push_back((x - mean.unsqueeze(2).unsqueeze(3)).square().mean({2, 3}).sqrt());
    }
    return {.features = at::cat(parts, 1)};
  }

 private:
  at::Device device_;
  std::vector<at::Tensor> weights_;
};

}  // namespace

std::unique_ptr<FeatureNet> make_random_net(const std::string&, const std::string&, at::Device device) {
  return std::make_unique<RandomNet>(device);
}

}  // namespace kiln
