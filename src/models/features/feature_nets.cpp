#include "models/features/feature_nets.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text/json_text.h"
#include "core/text/some_of.h"
#include "models/features/dinov2.h"
#include "models/features/inception.h"
#include "models/weights.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

class InceptionNet : public FeatureNet {
 public:
  InceptionNet(const std::string& weights, const std::string& how, at::Device device)
      : net_(load_tensors(weights), weights, device), resize_(parse_inception_resize(how)) {}
  explicit InceptionNet(const std::string& how) : resize_(parse_inception_resize(how)) {}
  std::vector<at::Tensor> weights() const override { return net_.weights(); }
  PictureFeatures forward(const at::Tensor& pictures) const override {
    const InceptionFeatures features = net_.forward(pictures, resize_);
    return {.features = features.pool3, .spatial = features.spatial, .logits = features.logits_unbiased};
  }

 private:
  Inception net_;
  InceptionResize resize_;
};

// Reads the config beside the weights, or derives it from their shapes.
Dinov2Config config_beside(const std::string& path, const std::map<std::string, at::Tensor>& weights) {
  const fs::path config =
      (fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path()) / "config.json";
  if (!std::filesystem::exists(config)) return dinov2_config_of(weights, path);
  const nlohmann::json json = read_json_file("dinov2", config.string());
  if (!json.is_object()) fail("dinov2", "{} is not a JSON object", config.string());
  return parse_dinov2_config(json);
}

class Dinov2Net : public FeatureNet {
 public:
  Dinov2Net(const std::string& path, const std::string& how, at::Device device) : device_(device), how_(how) {
    const auto weights = dinov2_weights(load_tensors(path));
    net_ = std::make_unique<Dinov2>(config_beside(path, weights), BuildOptions{.device = device});
    load_weights(net_->parameters(), weights, path);
  }
  Dinov2Net(const Dinov2Config& config, const std::string& how)
      : device_(at::kMeta),
        how_(how),
        net_(std::make_unique<Dinov2>(config, BuildOptions{.device = at::kMeta})) {}
  std::vector<at::Tensor> weights() const override {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : net_->parameters()) tensors.push_back(parameter->value);
    return tensors;
  }
  PictureFeatures forward(const at::Tensor& pictures) const override {
    const at::NoGradGuard no_grad;
    return {.features = net_->forward(dinov2_input(pictures.to(device_), how_)).pooler_output};
  }

 private:
  at::Device device_;
  std::string how_;
  std::unique_ptr<Dinov2> net_;
};

// Returns the default config if there is no file. Reads only shapes of the weights.
Dinov2Config dinov2_config_at(const std::string& path) {
  return fs::exists(path) ? config_beside(path, dinov2_weights(load_tensors(path))) : Dinov2Config();
}

std::unique_ptr<FeatureNet> outline_inception(const std::string&, const std::string& resize) {
  return std::make_unique<InceptionNet>(resize);
}
std::unique_ptr<FeatureNet> outline_dinov2(const std::string& weights, const std::string& resize) {
  return std::make_unique<Dinov2Net>(dinov2_config_at(weights), resize);
}
std::unique_ptr<FeatureNet> outline_random(const std::string& weights, const std::string& resize) {
  return make_random_net(weights, resize, at::kMeta);
}

template <class Net>
std::unique_ptr<FeatureNet> load(const std::string& weights, const std::string& resize, at::Device device) {
  auto net = std::make_unique<Net>(weights, resize, device);
  net->fingerprint = "xxh3:" + digest_of_weights(weights);
  return net;
}

}  // namespace

const std::vector<FeatureNetKind>& feature_net_kinds() {
  static const std::vector<FeatureNetKind> kinds = {
      {"inception", {"tf1", "torch"}, true, true, true, true, load<InceptionNet>, outline_inception},
      {"dinov2", {"pillow", "tf1"}, true, false, false, false, load<Dinov2Net>, outline_dinov2},
      {"random", {"none"}, false, false, false, false, make_random_net, outline_random},
  };
  return kinds;
}

const FeatureNetKind& feature_net_kind(const std::string& name) {
  std::vector<std::string> names;
  for (const FeatureNetKind& kind : feature_net_kinds()) {
    if (kind.name == name) return kind;
    names.emplace_back(kind.name);
  }
  fail("evaluate", "unknown feature net \"{}\"; known are {}", name, some_of(names));
}

std::unique_ptr<FeatureNet> load_feature_net(const std::string& name, const std::string& weights,
                                             const std::string& resize, at::Device device) {
  const FeatureNetKind& kind = feature_net_kind(name);
  const std::string how = resize.empty() ? kind.resizes.front() : resize;
  if (std::find(kind.resizes.begin(), kind.resizes.end(), how) == kind.resizes.end())
    fail("evaluate", "the net {} resizes by {}, got \"{}\"", name, fmt::join(kind.resizes, " or "), how);
  if (kind.takes_weights && weights.empty())
    fail("evaluate", "the net {} needs its weights: give --net-weights FILE (docs/evaluation.md says which)",
         name);
  if (!kind.takes_weights && !weights.empty())
    fail("evaluate", "the net {} has no weights of its own to load: leave out --net-weights", name);
  auto net = kind.load(weights, how, device);
  net->name = name;
  net->resize = how;
  return net;
}

std::unique_ptr<FeatureNet> outline_feature_net(const std::string& name, const std::string& weights) {
  const FeatureNetKind& kind = feature_net_kind(name);
  if (kind.takes_weights && weights.empty())
    fail("evaluate",
         "the net {} needs its weights: give --evaluate-net-weights FILE (docs/evaluation.md says which)",
         name);
  auto net = kind.outline(weights, kind.resizes.front());
  net->name = name;
  net->resize = kind.resizes.front();
  return net;
}

}  // namespace kiln
