// kiln models: what can be trained, planned and fetched, from the registries of these.
#include "cli/commands.h"
#include "core/aten.h"
#include "core/json.h"
#include "core/units.h"
#include "download/download_command.h"
#include "models/registry.h"

namespace kiln::cli {

namespace {

using nlohmann::json;

// Returns the names of a model's published weights, with commas.
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
      int64_t num_weights = 0;
      const std::unique_ptr<Denoiser> model = build_denoiser(name, nullptr, {.device = at::kMeta});
      for (const auto& parameter : model->parameters())
        if (parameter->trainable) num_weights += parameter->value.numel();
      rows.push_back({{"model", name},
                      {"parameters", num_weights},
                      {"image_size", own_image_size(name)},
                      {"takes", subject_name(model->shape().conditioning)},
                      {"autoencoder", family.latents.autoencoder},
                      {"weights", weights_of(name)}});
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
    add_denoiser(text_of(row, "model"), number_text(row.at("parameters").get<double>() / 1e6, 3) + " M",
                 row.at("image_size").get<int64_t>(), text_of(row, "takes"), text_of(row, "autoencoder"),
                 text_of(row, "weights"));
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
    const json models = {{"denoisers", denoisers()}, {"downloads", downloads()}};
    fmt::print("{}", *as_json ? models.dump(1) + "\n" : models_text(models));
  });
}

}  // namespace kiln::cli
