// Brings files of the Inception network's weights under one set of keys.
#include "core/aten.h"
#include "models/features/inception.h"
#include "models/features/inception_blocks.h"

namespace kiln {
namespace {

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

Weights torchvision_inception_weights(const Weights& weights) {
  if (weights.contains("conv/conv2d_params")) return renamed_graph(weights);
  Weights kept;
  for (const auto& [key, value] : weights)
    if (!key.starts_with("AuxLogits.") && !key.ends_with(".num_batches_tracked")) kept.emplace(key, value);
  return kept;
}

}  // namespace kiln
