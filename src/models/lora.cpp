#include "models/lora.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>
#include <utility>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json.h"
#include "core/json_config.h"
#include "core/text/json_text.h"
#include "core/text/name_pattern.h"
#include "core/text/some_of.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kDown = ".lora_A.weight", kUp = ".lora_B.weight";

json read_adapter_config(const fs::path& path) {
  if (!fs::exists(path))
    fail("lora", "{} is missing: PEFT's adapters have it beside their weights", path.string());
  json config = read_json_file("lora", path.string());
  if (!config.is_object()) fail("lora", "{} is not a JSON object", path.string());
  return config;
}

// Reads rank_pattern or alpha_pattern. The first pattern that fits a module's name counts.
template <class T>
std::vector<std::pair<NamePattern, T>> patterns(const JsonConfig& config, const std::string& key) {
  std::vector<std::pair<NamePattern, T>> compiled;
  const json object = config.object(key);
  const JsonConfig values(config.who(), object);
  for (const auto& [pattern, value] : object.items())
    compiled.emplace_back(NamePattern("lora", key, pattern), values.require<T>(pattern));
  return compiled;
}

// The scale of each module by adapter_config.json.
class LoraScales {
 public:
  explicit LoraScales(const json& json_config) {
    const JsonConfig config("lora", json_config);
    const std::string type = config.get<std::string>("peft_type", "LORA");
    if (type != "LORA") fail("lora", "the adapter is of type {}; only LORA is built", type);
    for (const char* key : {"use_dora", "fan_in_fan_out", "use_qalora"}) config.refuse(key, false);
    config.refuse("bias", "none");
    rank_ = config.positive("r", 8);
    alpha_ = config.get("lora_alpha", 8.0);
    by_root_ = config.get("use_rslora", false);
    ranks_ = patterns<int64_t>(config, "rank_pattern");
    alphas_ = patterns<double>(config, "alpha_pattern");
  }

  // Throws Error unless `rank`, that of the file's tensors, agrees with the config.
  double scale_of(const std::string& module, int64_t rank) const {
    const int64_t said = found(ranks_, module, rank_);
    if (said != rank)
      fail("lora", "{} is of rank {} in the weights, of rank {} in adapter_config.json", module, rank, said);
    const double r = static_cast<double>(rank);
    return found(alphas_, module, alpha_) / (by_root_ ? std::sqrt(r) : r);
  }

 private:
  template <class T>
  static T found(const std::vector<std::pair<NamePattern, T>>& table, const std::string& module,
                 T otherwise) {
    for (const auto& [pattern, value] : table)
      if (pattern.matches(module)) return value;
    return otherwise;
  }

  int64_t rank_ = 8;
  double alpha_ = 8;
  bool by_root_ = false;
  std::vector<std::pair<NamePattern, int64_t>> ranks_;
  std::vector<std::pair<NamePattern, double>> alphas_;
};

std::string shape_text(const at::Tensor& tensor) {
  return fmt::format("({})", fmt::join(tensor.sizes(), ", "));
}

// Returns "" if the layer's factors fit these rows of the weight, else the problem.
std::string misfit(const LoraLayer& layer, const LoraTarget& target, const at::Tensor& weight) {
  const int64_t rows = target.num_rows > 0 ? target.num_rows : weight.size(0);
  bool fits = layer.down.dim() == weight.dim() && layer.up.dim() == weight.dim() && weight.dim() >= 2 &&
              layer.up.size(0) == rows && layer.up.size(1) == layer.down.size(0);
  for (int64_t d = 1; fits && d < weight.dim(); ++d) fits = layer.down.size(d) == weight.size(d);
  for (int64_t d = 2; fits && d < weight.dim(); ++d) fits = layer.up.size(d) == 1;
  if (fits) return "";
  return fmt::format("{}: lora_A {} and lora_B {} do not fit a weight {}", layer.module,
                     shape_text(layer.down), shape_text(layer.up), shape_text(weight));
}

// Checks that all layers fit, then calls visit(layer, target) for each. weight_of(key) returns an undefined
// tensor for an unknown key.
template <class WeightOf, class Visit>
void for_each_target(const std::vector<LoraLayer>& layers, const LoraTargetFn& target_of,
                     const WeightOf& weight_of, const Visit& visit) {
  std::vector<std::string> unknown, wrong;
  for (const LoraLayer& layer : layers) {
    const LoraTarget target = target_of(layer.module);
    const at::Tensor weight = weight_of(target.weight_key);
    if (!weight.defined()) {
      unknown.push_back(layer.module);
    } else if (const std::string problem = misfit(layer, target, weight); !problem.empty()) {
      wrong.push_back(problem);
    }
  }
  if (!unknown.empty())
    fail("lora", "the adapter is of another base: the model lacks {} of its {} modules ({})", unknown.size(),
         layers.size(), some_of(unknown));
  if (!wrong.empty())
    fail("lora", "the adapter is of another base: {} of its {} modules have other shapes: {}", wrong.size(),
         layers.size(), wrong.front());
  for (const LoraLayer& layer : layers) visit(layer, target_of(layer.module));
}

// Makes the weight of a factor with the values of the layer, or for a fresh layer those of `fresh`.
std::shared_ptr<Parameter> adapter_parameter(const std::string& key, const at::Tensor& value, bool is_fresh,
                                             const Init& fresh) {
  if (is_fresh) return std::make_shared<Parameter>(Parameter{.key = key, .value = value, .init = fresh});
  const at::Tensor own = value.to(at::kFloat).clone(at::MemoryFormat::Contiguous);
  return std::make_shared<Parameter>(Parameter{.key = key, .value = own, .init = Init::constant(value)});
}

// Kaiming's uniform draw with a = sqrt(5), with which PEFT and PyTorch start a layer.
Init fresh_down(const at::Tensor& down) {
  const int64_t fan_in = down.numel() / down.size(0);
  return Init::uniform(1 / std::sqrt(static_cast<double>(fan_in)));
}

constexpr std::string_view kAttention = R"(\w*attn\w*\..*)";
constexpr std::string_view kWeight = ".weight";

// Returns the layers that can carry an adapter: names and weights.
std::vector<std::pair<std::string, at::Tensor>> adaptable_layers(const SegmentModel& model) {
  std::vector<std::pair<std::string, at::Tensor>> layers;
  for (const auto& parameter : model.parameters())
    if (parameter->adaptable)
      layers.emplace_back(parameter->key.substr(0, parameter->key.size() - kWeight.size()), parameter->value);
  return layers;
}

// Makes factors (r, in, ..) and (out, r, 1..) on meta for a weight (out, in, ..).
LoraLayer outline_of(const std::string& module, const at::Tensor& weight, const LoraOptions& options) {
  std::vector<int64_t> down = weight.sizes().vec(), up(down.size(), 1);
  up[0] = std::exchange(down[0], options.rank);
  up[1] = options.rank;
  const double rank = static_cast<double>(options.rank);
  return {.module = module,
          .down = at::empty(down, at::TensorOptions(at::kMeta)),
          .up = at::empty(up, at::TensorOptions(at::kMeta)),
          .scale = options.alpha > 0 ? options.alpha / rank : 1,
          .is_fresh = true};
}

}  // namespace

std::vector<LoraLayer> read_peft_lora(const std::string& path) {
  const fs::path file =
      fs::is_directory(path) ? fs::path(path) / "adapter_model.safetensors" : fs::path(path);
  const json config = read_adapter_config(file.parent_path() / "adapter_config.json");
  return lora_layers(load_tensors(file.string()), config, file.string());
}

void check_factors(const std::vector<LoraLayer>& layers, const std::string& source) {
  for (const LoraLayer& layer : layers) {
    if (layer.down.dim() < 2 || layer.up.dim() < 2 || layer.down.size(0) < 1)
      fail("lora", "{} has no rank: lora_A is {} and lora_B {} ({})", layer.module, shape_text(layer.down),
           shape_text(layer.up), source);
    const auto is_finite = [](const at::Tensor& values) {
      return at::isfinite(values.to(at::kFloat)).all().item<bool>();
    };
    if (!std::isfinite(layer.scale) || !is_finite(layer.down) || !is_finite(layer.up))
      fail("lora", "{} has a scale or values that are not finite ({}): the file is damaged", layer.module,
           source);
  }
}

std::vector<LoraLayer> lora_layers(const std::map<std::string, at::Tensor>& tensors,
                                   const json& adapter_config, const std::string& source) {
  const LoraScales scales(adapter_config);
  std::vector<LoraLayer> layers;
  size_t num_used = 0;
  for (const auto& [key, down] : tensors) {
    if (!key.ends_with(kDown)) continue;
    const std::string stem = key.substr(0, key.size() - kDown.size());
    const auto up = tensors.find(stem + std::string(kUp));
    if (up == tensors.end()) fail("lora", "{} has {} but no lora_B beside it", source, key);
    const std::string module = stem.starts_with(kPrefix) ? stem.substr(kPrefix.size()) : stem;
    layers.push_back(
        {.module = module, .down = down, .up = up->second, .scale = scales.scale_of(module, rank_of(down))});
    num_used += 2;
  }
  for (const auto& [key, tensor] : tensors)
    if (!key.ends_with(kDown) && !key.ends_with(kUp))
      fail("lora", "{} holds {}: only lora_A.weight and lora_B.weight are built", source, key);
  if (num_used == 0 || num_used != tensors.size())
    fail("lora", "expected pairs of lora_A and lora_B in {}: of its {} tensors, {} are in pairs", source,
         tensors.size(), num_used);
  check_factors(layers, source);
  return layers;
}

json lora_config(const std::vector<LoraLayer>& layers) {
  const int64_t rank = layers.front().down.size(0);
  const double alpha = layers.front().scale * static_cast<double>(rank);
  json config = {{"peft_type", "LORA"},
                 {"r", rank},
                 {"lora_alpha", alpha},
                 {"bias", "none"},
                 {"use_rslora", false},
                 {"lora_dropout", 0.0},
                 {"rank_pattern", json::object()},
                 {"alpha_pattern", json::object()},
                 {"target_modules", json::array()}};
  for (const LoraLayer& layer : layers) {
    const int64_t own_rank = layer.down.size(0);
    const double own_alpha = layer.scale * static_cast<double>(own_rank);
    config["target_modules"].push_back(layer.module);
    if (own_rank != rank) config["rank_pattern"][layer.module] = own_rank;
    if (own_alpha != alpha) config["alpha_pattern"][layer.module] = own_alpha;
  }
  return config;
}

std::vector<std::string> module_names(const SegmentModel& model) {
  std::vector<std::string> names;
  for (const auto& [module, weight] : adaptable_layers(model)) names.push_back(module);
  return names;
}

std::vector<LoraLayer> fresh_lora(const SegmentModel& model, const LoraOptions& options) {
  const std::string pattern = options.target.empty() ? std::string(kAttention) : options.target;
  const NamePattern name("lora", "--lora-target", pattern);
  const auto all = adaptable_layers(model);
  std::vector<LoraLayer> layers;
  for (const auto& [module, weight] : all)
    if (name.matches(module)) layers.push_back(outline_of(module, weight, options));
  if (layers.empty())
    fail("lora", "--lora-target {} matches none of the model's {} layers ({})", pattern, all.size(),
         all.empty() ? "" : all.front().first + " .. " + all.back().first);
  return layers;
}

LoraTarget whole_weight(const std::string& module) { return {.weight_key = module + ".weight"}; }

ParameterList attach_lora(const SegmentModel& model, const std::vector<LoraLayer>& layers, double dropout,
                          const LoraTargetFn& target) {
  struct Place {
    std::shared_ptr<Parameter> weight;
    Segment* segment;
  };
  std::map<std::string, Place> places;
  for (const auto& segment : model.segments())
    for (const auto& parameter : segment->parameters()) places[parameter->key] = {parameter, segment.get()};
  const auto weight_of = [&](const std::string& key) {
    const auto found = places.find(key);
    return found == places.end() ? at::Tensor() : found->second.weight->value;
  };
  ParameterList adapters;
  for_each_target(layers, target, weight_of, [&](const LoraLayer& layer, const LoraTarget& where) {
    const Place& place = places.at(where.weight_key);
    if (!place.weight->adaptable)
      fail("lora", "{} cannot carry an adapter: linear layers and convolutions without groups can",
           layer.module);
    const auto down = adapter_parameter(layer.down_key(), layer.down, layer.is_fresh, fresh_down(layer.down));
    const auto up = adapter_parameter(layer.up_key(), layer.up, layer.is_fresh, Init::zeros());
    place.weight->adapters.push_back(
        {.down = down, .up = up, .scale = layer.scale, .first_row = where.first_row, .dropout = dropout});
    for (const auto& parameter : {down, up}) {
      place.segment->adopt(parameter);
      adapters.push_back(parameter);
    }
  });
  for (const auto& [key, place] : places)
    place.weight->frozen = std::exchange(place.weight->trainable, false);
  return adapters;
}

void merge_lora(std::map<std::string, at::Tensor>& weights, const std::vector<LoraLayer>& layers,
                const LoraTargetFn& target) {
  const at::NoGradGuard no_grad;
  const auto weight_of = [&](const std::string& key) {
    const auto found = weights.find(key);
    return found == weights.end() ? at::Tensor() : found->second;
  };
  for_each_target(layers, target, weight_of, [&](const LoraLayer& layer, const LoraTarget& where) {
    at::Tensor& weight = weights.at(where.weight_key);
    const at::Tensor up = layer.up.to(at::kFloat).flatten(1), down = layer.down.to(at::kFloat).flatten(1);
    at::Tensor merged = weight.to(at::kFloat).clone(at::MemoryFormat::Contiguous);
    merged.narrow(0, where.first_row, up.size(0)).flatten(1).add_(at::mm(up, down), layer.scale);
    weight = merged;
  });
}

}  // namespace kiln
