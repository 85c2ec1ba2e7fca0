// kiln models: what can be trained, planned and fetched, from the registries of these.
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/aten.h"
#include "core/units.h"
#include "download/download_command.h"
#include "models/registry.h"
#include "models/text/text_registry.h"

namespace kiln::cli {

namespace {

using nlohmann::json;

int64_t num_elements(const ParameterList& parameters) {
  int64_t sum = 0;
  for (const auto& parameter : parameters)
    if (parameter->trainable) sum += parameter->value.numel();
  return sum;
}

// Returns the names of published weights of a model, with commas.
std::string weights_of(const std::string& model) {
  std::string names;
  for (const PublishedWeights& row : published_weights())
    if (row.model && model == row.model) names += (names.empty() ? "" : ",") + std::string(row.name);
  return names;
}

json denoisers() {
  json rows = json::array();
  for (const Family& family : denoiser_families())
    for (const auto& [name, preset] : family.presets()) {
      if (name == family.name) continue;  // of no size of its own
      const std::unique_ptr<Denoiser> model = build_denoiser(name, nullptr, {.device = at::kMeta});
      rows.push_back({{"model", name},
                      {"parameters", num_elements(model->parameters())},
                      {"image_size", own_image_size(name)},
                      {"takes", model->shape().conditioning.takes_text() ? "captions" : "classes"},
                      {"autoencoder", family.latents.autoencoder},
                      {"weights", weights_of(name)}});
    }
  return rows;
}

json text_encoders() {
  json rows = json::array();
  for (const PublishedTextEncoder& published : published_text_encoders()) {
    const auto encoder = build_text_encoder(published.family, published.config, {.device = at::kMeta});
    rows.push_back({{"encoder", published.name},
                    {"family", published.family},
                    {"parameters", num_elements(encoder->parameters())}});
  }
  return rows;
}

json downloads() {
  json rows = json::array();
  for (const PublishedWeights& row : published_weights()) {
    const int64_t fetched = fetched_bytes(row);
    rows.push_back({{"name", row.name},
                    {"licence", row.licence},
                    {"bytes", fetched > 0 ? fetched : row.bytes},
                    {"is_here", fetched > 0},
                    {"use", row.model ? "--weights, --model " + std::string(row.model) : row.use}});
  }
  return rows;
}

std::string millions(const json& row) {
  return number_text(row.at("parameters").get<double>() / 1e6, 3) + " M";
}

std::string models_text(const json& models) {
  const auto text_of = [](const json& row, const char* key) { return row.at(key).get<std::string>(); };
  std::string text = "kiln train and kiln plan --model NAME, or a family's own name with a shape:\n";
  const auto add_denoiser = [&](const auto& name, const auto& parameters, const auto& side, const auto& takes,
                                const auto& autoencoder, const auto& weights) {
    text += fmt::format("  {:24} {:>10} {:>6}  {:9} {:14} {}", name, parameters, side, takes, autoencoder,
                        weights);
    text.resize(text.find_last_not_of(' ') + 1);
    text += '\n';
  };
  add_denoiser("model", "parameters", "pixels", "takes", "latents of", "kiln download");
  for (const json& row : models.at("denoisers"))
    add_denoiser(text_of(row, "model"), millions(row), row.at("image_size").get<int64_t>(),
                 text_of(row, "takes"), text_of(row, "autoencoder"), text_of(row, "weights"));
  text += "\n--text-encoder FOLDER, of these kinds and sizes among others:\n";
  for (const json& row : models.at("text_encoders"))
    text +=
        fmt::format("  {:24} {:>10}  {}\n", text_of(row, "encoder"), millions(row), text_of(row, "family"));
  text += "\nkiln download NAME:\n";
  for (const json& row : models.at("downloads")) {
    const auto bytes = row.at("bytes").get<double>();
    text += fmt::format("  {:24} {:>14}  {:7}  {}; {}\n", text_of(row, "name"),
                        bytes > 0 ? number_text(bytes / 1e9, 3) + " GB" : "size not known",
                        row.at("is_here").get<bool>() ? "fetched" : "", text_of(row, "licence"),
                        text_of(row, "use"));
  }
  return text;
}

}  // namespace

void add_models_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("models", "List what can be trained, planned and fetched, with sizes and licences");
  auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Print one JSON object, with exact numbers");
  command->callback([as_json] {
    const json models = {
        {"denoisers", denoisers()}, {"text_encoders", text_encoders()}, {"downloads", downloads()}};
    fmt::print("{}", *as_json ? models.dump(1) + "\n" : models_text(models));
  });
}

}  // namespace kiln::cli
