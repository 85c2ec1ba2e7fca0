#include "models/piece_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "models/weights_source.h"

namespace kiln {
namespace {

// The tables of tokens of T5, CLIP, BERT and Gemma. Files may lack or have the prefixes.
constexpr const char* kTokenTables[] = {"shared.weight",
                                        "encoder.embed_tokens.weight",
                                        "text_model.embeddings.token_embedding.weight",
                                        "embeddings.token_embedding.weight",
                                        "bert.embeddings.word_embeddings.weight",
                                        "embeddings.word_embeddings.weight",
                                        "model.embed_tokens.weight",
                                        "embed_tokens.weight"};

// Returns the class that a config.json of diffusers or transformers beside the file names, or "".
std::string class_beside(const std::string& file) {
  const auto path = std::filesystem::path(file).parent_path() / "config.json";
  if (!std::filesystem::exists(path)) return "";
  const nlohmann::json config = read_json(path.string());
  for (const char* place : {"/_class_name", "/architectures/0"}) {
    const nlohmann::json::json_pointer name(place);
    if (config.contains(name) && config.at(name).is_string()) return config.at(name).get<std::string>();
  }
  return "";
}

}  // namespace

std::string autoencoder_mismatch(const ModelRecord::AutoencoderInfo& trained, const Autoencoder& given,
                                 const std::string& named) {
  if (trained.name.empty()) return "";
  const auto differs = [](double a, double b) { return std::abs(a - b) > 1e-6 * std::abs(b); };
  if (given.name != trained.name || differs(given.scaling_factor, trained.scaling_factor) ||
      differs(given.shift_factor, trained.shift_factor))
    return fmt::format(
        "the latents of the weights come from {} with scaling factor {} and shift {}, "
        "but {} is {} with {} and {}",
        trained.name, trained.scaling_factor, trained.shift_factor, named, given.name, given.scaling_factor,
        given.shift_factor);
  if (trained.fingerprint.empty() || given.fingerprint == trained.fingerprint) return "";
  return fmt::format("{} is another autoencoder ({}) than that of the weights' latents ({})", named,
                     given.fingerprint, trained.fingerprint);
}

std::string text_encoder_mismatch(const ModelRecord::TextInfo& trained, const ModelRecord::TextInfo& given,
                                  const std::string& named) {
  if (trained.encoder_fingerprint.empty()) return "";  // another program encoded the captions
  if (given.encoder_fingerprint != trained.encoder_fingerprint)
    return fmt::format("{} is another text encoder ({} {}) than the captions' ({} {})", named, given.encoder,
                       given.encoder_fingerprint, trained.encoder, trained.encoder_fingerprint);
  if (trained.tokenizer_fingerprint.empty() || given.tokenizer_fingerprint == trained.tokenizer_fingerprint)
    return "";
  return fmt::format("{} has another tokenizer ({}) than the captions were made with ({})", named,
                     given.tokenizer_fingerprint, trained.tokenizer_fingerprint);
}

void refuse_other_piece(const std::string& source, const TensorMap& weights) {
  const auto has = [&](const char* key) { return weights.contains(key); };
  const bool is_autoencoder = has("decoder.conv_in.weight");
  if (!is_autoencoder && std::ranges::none_of(kTokenTables, has)) return;
  const std::string class_name = class_beside(source);
  fail("weights",
       "{} is {}{}: expected a denoiser (a pipeline's unet or transformer), and {} takes this piece", source,
       is_autoencoder ? "an autoencoder" : "a text encoder",
       class_name.empty() ? "" : fmt::format(" ({})", class_name),
       is_autoencoder ? "--autoencoder" : "--text-encoder");
}

int64_t pixels_of_latent(const ModelRecord::AutoencoderInfo& trained, const Family& family) {
  if (trained.downsample > 0) return trained.downsample;
  const KnownAutoencoder* const known = known_autoencoder(trained.name);
  return known ? known->downsample : family.latents.downsample;
}

}  // namespace kiln
