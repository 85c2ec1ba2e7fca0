#include "convert/inspect.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <map>

#include "checkpoint/weights_file.h"
#include "convert/dit_architecture.h"
#include "convert/dit_diffusers.h"
#include "convert/weights_source.h"
#include "core/error.h"
#include "models/registry.h"

namespace kiln {
namespace {

std::string describe(const DitConfig& c) {
  return fmt::format(
      "{} (input_size {}, patch_size {}, in_channels {}, hidden_size {}, depth {}, num_heads {}, "
      "num_classes {}, learn_sigma {})",
      dit_name(c), c.input_size, c.patch_size, c.in_channels, c.hidden_size, c.depth, c.num_heads,
      c.num_classes, c.learn_sigma);
}

void inspect_model(const InspectOptions& options, std::FILE* out, std::FILE* summary) {
  nlohmann::json config;
  if (!options.config.empty()) {
    if (std::filesystem::exists(options.config))
      config = read_json(options.config);
    else if (config = nlohmann::json::parse(options.config, nullptr, false); config.is_discarded())
      fail("inspect", "--config is neither a file nor JSON: {}", options.config);
  }
  const auto model = build_denoiser(options.model, config, {.device = at::kMeta});
  int64_t num_elements = 0, num_trainable = 0;
  const ParameterList parameters = model->parameters();
  for (const auto& parameter : parameters) {
    fmt::print(out, "{}\t{}\n", parameter->key, fmt::join(parameter->value.sizes(), ","));
    num_elements += parameter->value.numel();
    if (parameter->trainable) num_trainable += parameter->value.numel();
  }
  fmt::print(
      summary, "{}: {} tensors, {} elements, {} trainable parameters, {:.4g} GFLOP forward per image\n",
      options.model, parameters.size(), num_elements, num_trainable, model->shape().forward_flops / 1e9);
}

std::string format_name(const std::string& path) {
  switch (tensor_file_format(path)) {
    case TensorFileFormat::kSafetensors:
      return "safetensors";
    case TensorFileFormat::kSafetensorsIndex:
      return "safetensors, sharded";
    case TensorFileFormat::kPt:
      return "PyTorch";
  }
  throw std::logic_error("format_name: not a TensorFileFormat");
}

// For people: why a file is no DiT is not this command's concern, so a misfit is told, not thrown.
std::string architecture_of(const WeightsSource& source, const TensorFile& file) {
  try {
    if (!source.dit_diffusers.is_null())
      return describe(parse_dit_diffusers_config(source.dit_diffusers, source.path)) + ", diffusers keys";
    ShapeMap shapes;
    for (const auto& [key, view] : file.tensors()) shapes[key] = view.shape;
    const auto config = recognise_dit(shapes, dit_hints(source.run));
    return config ? describe(*config) : "unknown";
  } catch (const Error& error) {
    return fmt::format("unknown: {}", error.what());
  }
}

void inspect_file(const InspectOptions& options, std::FILE* out, std::FILE* summary) {
  const WeightsSource source = find_weights(options.path, options.ema);
  const auto file = open_tensor_file(source.path, options.ema);
  uint64_t num_elements = 0, num_bytes = 0;
  std::map<std::string_view, std::size_t> dtypes;
  for (const auto& [key, view] : file->tensors()) {
    fmt::print(out, "{}\t{}\t{}\n", key, fmt::join(view.shape, ","), dtype_name(view.dtype));
    num_elements += view.bytes.size() / dtype_size(view.dtype);
    num_bytes += view.bytes.size();
    ++dtypes[dtype_name(view.dtype)];
  }
  std::vector<std::string> dtype_counts;
  for (const auto& [dtype, count] : dtypes) dtype_counts.push_back(fmt::format("{} {}", count, dtype));
  fmt::print(summary, "{}: {}\n", source.path, format_name(source.path));
  if (!source.step.empty()) fmt::print(summary, "checkpoint: {}\n", source.step);
  for (const auto& [key, value] : file->metadata()) fmt::print(summary, "metadata: {} = {:?}\n", key, value);
  fmt::print(summary, "architecture: {}\n", architecture_of(source, *file));
  fmt::print(summary, "{} tensors ({}), {} elements, {} bytes\n", file->tensors().size(),
             fmt::join(dtype_counts, ", "), num_elements, num_bytes);
}

}  // namespace

void inspect(const InspectOptions& options, std::FILE* out, std::FILE* summary) {
  if (options.model.empty() == options.path.empty())
    fail("inspect", "expected either a path or --model NAME");
  if (!options.config.empty() && options.model.empty()) fail("inspect", "--config needs --model NAME");
  if (options.model.empty())
    inspect_file(options, out, summary);
  else
    inspect_model(options, out, summary);
}

}  // namespace kiln
