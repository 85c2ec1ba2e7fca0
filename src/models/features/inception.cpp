#include "models/features/inception.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

#include "core/aten.h"
#include "core/error.h"
#include "models/features/inception_blocks.h"
#include "models/features/picture_input.h"
#include "models/parts/layers.h"
#include "models/weights.h"

namespace kiln {

namespace {

constexpr double kBatchNormEps = 1e-3;
constexpr int64_t kSide = 299, kSpatialChannels = 7;
constexpr const char* kSpatialBlock = "Mixed_6d";

// A convolution with its batch norm folded into weight and bias, then ReLU.
struct FoldedUnit {
  at::Tensor weight{}, bias{};
  int64_t stride = 1, padding_h = 0, padding_w = 0;

  at::Tensor forward(const at::Tensor& x) const {
    return at::conv2d(x, weight, bias, {stride, stride}, {padding_h, padding_w}).relu_();
  }
};

// The weights of a unit under a file's names.
struct UnitWeights {
  InceptionUnit unit;
  std::shared_ptr<Parameter> conv, gamma, beta, mean, variance;

  UnitWeights(const InceptionUnit& of, const ParameterScope& scope)
      : unit(of),
        conv(scope.add("conv.weight", {of.out, of.in, of.kernel_h, of.kernel_w}, Init::zeros())),
        gamma(scope.add("bn.weight", {of.out}, Init::ones())),
        beta(scope.add("bn.bias", {of.out}, Init::zeros())),
        mean(scope.add("bn.running_mean", {of.out}, Init::zeros(), /*trainable=*/false)),
        variance(scope.add("bn.running_var", {of.out}, Init::ones(), /*trainable=*/false)) {}

  // Folds in f64, so that the result is rounded once.
  FoldedUnit folded(at::Device device) const {
    const auto f64 = [](const std::shared_ptr<Parameter>& parameter) {
      return parameter->value.to(at::kDouble);
    };
    const at::Tensor scale = f64(gamma) / (f64(variance) + kBatchNormEps).sqrt();
    const auto place = [&](const at::Tensor& value) { return value.to(device, at::kFloat); };
    return {.weight = place(f64(conv) * scale.view({-1, 1, 1, 1})).contiguous(at::MemoryFormat::ChannelsLast),
            .bias = place(f64(beta) - f64(mean) * scale),
            .stride = unit.stride,
            .padding_h = unit.padded ? unit.kernel_h / 2 : 0,
            .padding_w = unit.padded ? unit.kernel_w / 2 : 0};
  }
};

struct FoldedBranch {
  std::vector<FoldedUnit> chain{}, fork{};

  // `x`: the output of the chain's first unit.
  at::Tensor forward_rest(at::Tensor x) const {
    for (size_t i = 1; i < chain.size(); ++i) x = chain[i].forward(x);
    if (fork.empty()) return x;
    return at::cat({fork[0].forward(x), fork[1].forward(x)}, 1);
  }
};

// A block. The 1x1 units that begin its branches read the same input, so they run as one convolution.
struct FoldedBlock {
  InceptionPool pool = InceptionPool::kAverage;
  std::vector<FoldedBranch> branches{};
  std::vector<FoldedUnit> pool_unit{};
  std::optional<FoldedUnit> heads{};   // the first units of the branches that begin with a 1x1 unit
  std::vector<int64_t> head_widths{};  // output channels of those units; 0 for other branches

  void join_heads() {
    std::vector<at::Tensor> weights, biases;
    for (const FoldedBranch& branch : branches) {
      const FoldedUnit& head = branch.chain.front();
      const bool is_1x1 = head.weight.size(2) == 1 && head.weight.size(3) == 1;
      head_widths.push_back(is_1x1 ? head.weight.size(0) : 0);
      if (!is_1x1) continue;
      weights.push_back(head.weight);
      biases.push_back(head.bias);
    }
    heads = FoldedUnit{.weight = at::cat(weights).contiguous(at::MemoryFormat::ChannelsLast),
                       .bias = at::cat(biases)};
  }

  // `first_branch`, when given, receives the output of the first branch.
  at::Tensor forward(const at::Tensor& x, at::Tensor* first_branch) const {
    const at::Tensor head_outputs = heads->forward(x);
    std::vector<at::Tensor> outputs;
    int64_t first = 0;
    for (size_t i = 0; i < branches.size(); ++i) {
      const int64_t width = head_widths[i];
      const at::Tensor head =
          width > 0 ? head_outputs.narrow(1, first, width) : branches[i].chain.front().forward(x);
      first += width;
      const bool is_read_again = width > 0 && branches[i].chain.size() + branches[i].fork.size() > 1;
      outputs.push_back(
          branches[i].forward_rest(is_read_again ? head.contiguous(at::MemoryFormat::ChannelsLast) : head));
    }
    if (first_branch) *first_branch = outputs.front();
    outputs.push_back(pooled(x));
    return at::cat(outputs, 1);
  }

 private:
  at::Tensor pooled(const at::Tensor& x) const {
    if (pool == InceptionPool::kMaxHalving) return at::max_pool2d(x, {3, 3}, {2, 2});
    const at::Tensor around =
        pool == InceptionPool::kMax
            ? at::max_pool2d(x, {3, 3}, {1, 1}, {1, 1})
            : at::avg_pool2d(x, {3, 3}, {1, 1}, {1, 1}, /*ceil_mode=*/false, /*count_include_pad=*/false);
    return pool_unit.front().forward(around);
  }
};

// The weights of a block under a file's names. They are folded after loading.
struct BlockWeights {
  const InceptionBlock* block;
  std::vector<std::vector<UnitWeights>> chains, forks;
  std::vector<UnitWeights> pool_unit;

  BlockWeights(const InceptionBlock& of, const ParameterScope& scope) : block(&of) {
    const auto add = [&](const std::vector<InceptionUnit>& units) {
      std::vector<UnitWeights> weights;
      weights.reserve(units.size());
      for (const InceptionUnit& unit : units) weights.emplace_back(unit, scope.under(unit.name));
      return weights;
    };
    for (const InceptionBranch& branch : of.branches) {
      chains.push_back(add(branch.chain));
      forks.push_back(add(branch.fork));
    }
    pool_unit = add(of.pool_unit);
  }

  FoldedBlock folded(at::Device device) const {
    const auto fold = [&](const std::vector<UnitWeights>& weights) {
      std::vector<FoldedUnit> units;
      units.reserve(weights.size());
      for (const UnitWeights& unit : weights) units.push_back(unit.folded(device));
      return units;
    };
    FoldedBlock folded{.pool = block->pool, .pool_unit = fold(pool_unit)};
    for (size_t i = 0; i < chains.size(); ++i)
      folded.branches.push_back({.chain = fold(chains[i]), .fork = fold(forks[i])});
    folded.join_heads();
    return folded;
  }
};

using Weights = std::map<std::string, at::Tensor>;

struct NormName {
  const char *tf_name, *name;
};
constexpr NormName kNormNames[] = {{"gamma", "weight"},
                                   {"beta", "bias"},
                                   {"moving_mean", "running_mean"},
                                   {"moving_variance", "running_var"}};

void rename_unit(const Weights& graph, const std::string& tf_name, const std::string& name,
                 Weights& renamed) {
  const auto find = [&](const std::string& key) {
    const auto found = graph.find(tf_name + key);
    return found == graph.end() ? at::Tensor() : found->second;
  };
  const at::Tensor kernel = find("/conv2d_params");  // (kh, kw, in, out)
  if (kernel.defined() && kernel.dim() == 4) renamed[name + ".conv.weight"] = kernel.permute({3, 2, 0, 1});
  for (const NormName& norm : kNormNames) {
    at::Tensor value = find(std::string("/batchnorm/") + norm.tf_name);
    if (!value.defined() && kernel.defined() && norm.name == std::string("weight"))
      value = at::ones({kernel.size(-1)});
    if (value.defined()) renamed[name + ".bn." + norm.name] = value;
  }
}

Weights renamed_graph(const Weights& graph) {
  Weights renamed;
  for (const InceptionUnit& unit : inception_stem()) rename_unit(graph, unit.tf_name, unit.name, renamed);
  for (const InceptionBlock& block : inception_blocks()) {
    const auto rename = [&](const InceptionUnit& unit) {
      rename_unit(graph, block.tf_name + "/" + unit.tf_name, block.name + "." + unit.name, renamed);
    };
    for (const InceptionBranch& branch : block.branches) {
      for (const InceptionUnit& unit : branch.chain) rename(unit);
      for (const InceptionUnit& unit : branch.fork) rename(unit);
    }
    for (const InceptionUnit& unit : block.pool_unit) rename(unit);
  }
  if (const auto found = graph.find("softmax/weights"); found != graph.end() && found->second.dim() == 2)
    renamed["fc.weight"] = found->second.t();
  if (const auto found = graph.find("softmax/biases"); found != graph.end())
    renamed["fc.bias"] = found->second;
  return renamed;
}

}  // namespace

struct Inception::Layers {
  std::vector<FoldedUnit> stem;
  std::vector<FoldedBlock> blocks;
  at::Tensor fc_weight, fc_bias;
};

InceptionResize parse_inception_resize(const std::string& name) {
  if (name == "torch") return InceptionResize::kTorch;
  if (name == "tf1") return InceptionResize::kTf1;
  fail("inception", "expected resize torch or tf1, got \"{}\"", name);
}

// The weights as files hold them.
struct Inception::Unfolded {
  ParameterList parameters{};
  std::vector<UnitWeights> stem{};
  std::vector<BlockWeights> blocks{};
  Linear fc{};

  explicit Unfolded(at::Device device) {
    const ParameterScope scope(parameters, {.device = device});
    for (const InceptionUnit& unit : inception_stem()) stem.emplace_back(unit, scope.under(unit.name));
    for (const InceptionBlock& block : inception_blocks())
      blocks.emplace_back(block, scope.under(block.name));
    fc = scope.linear("fc", kInceptionWidth, kInceptionClasses, Init::zeros());
  }
};

Inception::Inception(const std::map<std::string, at::Tensor>& weights, const std::string& source,
                     at::Device device)
    : device_(device) {
  const at::NoGradGuard no_grad;
  const Unfolded unfolded(at::kCPU);
  load_weights(unfolded.parameters, torchvision_inception_weights(weights), source);
  fold(unfolded);
}

ParameterList published_inception_parameters() {
  constexpr std::string_view kVariance = "running_var", kCounter = "num_batches_tracked";
  ParameterList published;
  for (const auto& parameter : Inception::Unfolded(at::kMeta).parameters) {
    published.push_back(parameter);
    if (!parameter->key.ends_with(kVariance)) continue;
    published.push_back(std::make_shared<Parameter>(Parameter{
        .key = parameter->key.substr(0, parameter->key.size() - kVariance.size()) + std::string(kCounter),
        .value = at::empty({}, at::TensorOptions(at::kLong).device(at::kMeta)),
        .init = Init::zeros(),
        .trainable = false}));
  }
  return published;
}

Inception::Inception() : device_(at::kMeta) {
  const at::NoGradGuard no_grad;
  fold(Unfolded(at::kMeta));
}

void Inception::fold(const Unfolded& weights) {
  auto layers = std::make_unique<Layers>();
  for (const UnitWeights& unit : weights.stem) layers->stem.push_back(unit.folded(device_));
  for (const BlockWeights& block : weights.blocks) layers->blocks.push_back(block.folded(device_));
  layers->fc_weight = weights.fc.weight->value.to(device_);
  layers->fc_bias = weights.fc.bias->value.to(device_);
  layers_ = std::move(layers);
}

std::vector<at::Tensor> Inception::weights() const {
  std::vector<at::Tensor> tensors = {layers_->fc_weight, layers_->fc_bias};
  const auto add = [&](const FoldedUnit& unit) {
    tensors.push_back(unit.weight);
    tensors.push_back(unit.bias);
  };
  std::ranges::for_each(layers_->stem, add);
  for (const FoldedBlock& block : layers_->blocks) {
    for (const FoldedBranch& branch : block.branches) {
      std::ranges::for_each(branch.chain, add);
      std::ranges::for_each(branch.fork, add);
    }
    std::ranges::for_each(block.pool_unit, add);
    if (block.heads) add(*block.heads);
  }
  return tensors;
}

Inception::~Inception() = default;

InceptionFeatures Inception::forward(const at::Tensor& pictures, InceptionResize resize) const {
  check_pictures("inception", pictures);
  const at::NoGradGuard no_grad;
  const at::Tensor values = pictures.to(device_).to(at::kFloat);
  at::Tensor x = resize == InceptionResize::kTorch
                     ? 2 * at::upsample_bilinear2d(values / 255, {kSide, kSide}, /*align_corners=*/false) - 1
                     : (resize_like_tensorflow1(values, kSide) - 128) / 128;
  x = x.contiguous(at::MemoryFormat::ChannelsLast);
  constexpr size_t kUnitsBeforeFirstPool = 3;
  for (size_t i = 0; i < layers_->stem.size(); ++i) {
    x = layers_->stem[i].forward(x);
    if (i + 1 == kUnitsBeforeFirstPool || i + 1 == layers_->stem.size())
      x = at::max_pool2d(x, {3, 3}, {2, 2});
  }
  InceptionFeatures features;
  for (size_t i = 0; i < layers_->blocks.size(); ++i) {
    const bool is_spatial = inception_blocks()[i].name == kSpatialBlock;
    at::Tensor first_branch;
    x = layers_->blocks[i].forward(x, is_spatial ? &first_branch : nullptr);
    if (is_spatial)
      features.spatial =
          first_branch.narrow(1, 0, kSpatialChannels).permute({0, 2, 3, 1}).contiguous().flatten(1);
  }
  features.pool3 = x.mean({2, 3});
  features.logits_unbiased = at::linear(features.pool3, layers_->fc_weight);
  features.logits = features.logits_unbiased + layers_->fc_bias;
  return features;
}

Weights torchvision_inception_weights(const Weights& weights) {
  if (weights.contains("conv/conv2d_params")) return renamed_graph(weights);
  Weights kept;
  for (const auto& [key, value] : weights)
    if (!key.starts_with("AuxLogits.") && !key.ends_with(".num_batches_tracked")) kept.emplace(key, value);
  return kept;
}

}  // namespace kiln
