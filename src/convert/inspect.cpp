#include "convert/inspect.h"

#include <fmt/ranges.h>

#include <cctype>
#include <functional>
#include <map>

#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/text/nearest_name.h"
#include "core/text/printable.h"
#include "core/text/some_of.h"
#include "core/text/utf8.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/features/inception.h"
#include "models/forward_flops.h"
#include "models/load_model.h"
#include "models/registry.h"
#include "models/text/text_registry.h"

namespace kiln {
namespace {

// "DiT-S/2 (depth 12, ...)".
std::string describe(const Family& family, const nlohmann::json& config) {
  std::string settings;
  for (const auto& [key, value] : config.items())
    settings += fmt::format("{}{} {}", settings.empty() ? "" : ", ", key, value.dump());
  return fmt::format("{} ({})", preset_name(family, config), settings);
}

// Autoencoders by the names of the interface and of the published files, with the keys that those hold.
struct ListedAutoencoder {
  const char* name;
  std::string (*key)(const std::string& current_key);
};
constexpr ListedAutoencoder kAutoencoders[] = {{"autoencoder_kl", current_autoencoder_kl_key},
                                               {"sd-vae", current_autoencoder_kl_key},
                                               {"sd-vae-oldkeys", first_autoencoder_kl_key}};

// "dit-xl-2", as file names have it, is DiT-XL/2.
std::string as_file_name(std::string name) {
  for (char& c : name) c = c == '/' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

// Prints the lines; returns "3 tensors, 10 elements, 8 trainable parameters".
template <class KeyOf>
std::string list_parameters(const ParameterList& parameters, const KeyOf& key_of, std::FILE* out) {
  int64_t num_elements = 0, num_trainable = 0;
  for (const auto& parameter : parameters) {
    fmt::print(out, "{}\t{}\n", key_of(parameter->key), fmt::join(parameter->value.sizes(), ","));
    num_elements += parameter->value.numel();
    if (parameter->trainable) num_trainable += parameter->value.numel();
  }
  return fmt::format("{} tensors, {} elements, {} trainable parameters", parameters.size(), num_elements,
                     num_trainable);
}

void inspect_autoencoder(const ListedAutoencoder& listed, const nlohmann::json& given, std::FILE* out,
                         std::FILE* summary) {
  nlohmann::json config = sd_vae_config();
  config.update(given);
  const AutoencoderKl autoencoder(parse_autoencoder_kl_config(config), {.device = at::kMeta});
  fmt::print(summary, "{}: {}\n", listed.name, list_parameters(autoencoder.parameters(), listed.key, out));
}

// Text encoders by the names of the interface, and the published models of each.
struct ListedTextEncoder {
  std::string name, family;
  nlohmann::json config;
};

std::vector<ListedTextEncoder> listed_text_encoders() {
  std::vector<ListedTextEncoder> listed;
  for (const std::string& name : text_encoder_names())
    listed.push_back({name, name, nlohmann::json::object()});
  for (const PublishedTextEncoder& published : published_text_encoders())
    listed.push_back({published.name, published.family, published.config});
  return listed;
}

void inspect_text_encoder(const ListedTextEncoder& listed, const nlohmann::json& given, std::FILE* out,
                          std::FILE* summary) {
  nlohmann::json config = listed.config;
  config.update(given);
  const auto encoder = build_text_encoder(listed.family, config, {.device = at::kMeta});
  fmt::print(summary, "{}: {}\n", listed.name, list_parameters(encoder->parameters(), std::identity(), out));
}

void inspect_model(const InspectOptions& options, std::FILE* out, std::FILE* summary) {
  const nlohmann::json config = read_json_option("inspect", "--config", options.config);
  std::vector<std::string> known = denoiser_names();
  for (const std::string& name : known) {
    if (as_file_name(name) != as_file_name(options.model)) continue;
    const auto model = build_denoiser(name, config, {.device = at::kMeta});
    fmt::print(summary, "{}: {}, {:.4g} GFLOP forward per image\n", name,
               list_parameters(model->parameters(), std::identity(), out),
               ForwardFlops(name, config)(model->shape().native_extent()) / 1e9);
    return;
  }
  for (const ListedAutoencoder& listed : kAutoencoders) {
    if (options.model == listed.name) return inspect_autoencoder(listed, config, out, summary);
    known.push_back(listed.name);
  }
  for (const char* name : {"inception", "fid-inception"}) {
    if (options.model == name) {
      fmt::print(summary, "{}: {}\n", name,
                 list_parameters(published_inception_parameters(), std::identity(), out));
      return;
    }
    known.emplace_back(name);
  }
  for (const ListedTextEncoder& listed : listed_text_encoders()) {
    if (options.model == listed.name) return inspect_text_encoder(listed, config, out, summary);
    known.push_back(listed.name);
  }
  fail("inspect", "unknown model \"{}\": did you mean \"{}\"? (known are {})", options.model,
       nearest_name(options.model, known), some_of(nearest_names(options.model, known, known.size())));
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

// Describes the architecture to people. A file that fits no model is no error here: the text says why.
std::string architecture_of(const WeightsSource& source, const TensorFile& file) {
  try {
    if (!source.foreign.is_null()) {
      const auto [family, format] = foreign_family(source.foreign["_class_name"]);
      return describe(*family, format->config_from(source.foreign, source.path)) + ", diffusers keys";
    }
    WeightShapes shapes;
    for (const auto& [key, view] : file.tensors()) shapes[key] = view.shape;
    const auto found = recognise_denoiser(shapes, source.record.model_config);
    return found ? describe(*found->family, found->model.config) : "unknown";
  } catch (const Error& error) {
    return fmt::format("unknown: {}", message_of(error));
  }
}

void inspect_file(const InspectOptions& options, std::FILE* out, std::FILE* summary) {
  const WeightsSource source = find_weights(options.path, {.ema = options.ema});
  const auto file = open_tensor_file(source.path, options.ema);
  uint64_t num_elements = 0, num_bytes = 0;
  std::map<std::string_view, std::size_t> dtypes;
  for (const auto& [key, view] : file->tensors()) {
    fmt::print(out, "{}\t{}\t{}\n", printable(key), fmt::join(view.shape, ","), dtype_name(view.dtype));
    num_elements += view.bytes.size() / dtype_size(view.dtype);
    num_bytes += view.bytes.size();
    ++dtypes[dtype_name(view.dtype)];
  }
  std::vector<std::string> dtype_counts;
  dtype_counts.reserve(dtypes.size());
  for (const auto& [dtype, count] : dtypes) dtype_counts.push_back(fmt::format("{} {}", count, dtype));
  fmt::print(summary, "{}: {}\n", source.path, format_name(source.path));
  if (!source.step.empty()) fmt::print(summary, "checkpoint: {}\n", source.step);
  for (const auto& [key, value] : file->metadata())
    if (key != kRecordKey) fmt::print(summary, "metadata: {} = {:?}\n", printable(key), value);
  const nlohmann::json record = to_json(source.record);
  if (!source.record.model.empty())
    for (const auto& [key, value] : record.items())
      if (key != "model_config") fmt::print(summary, "record: {} = {}\n", key, printable(dump_utf8(value)));
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
