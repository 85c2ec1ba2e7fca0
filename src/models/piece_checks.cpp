#include "models/piece_checks.h"

#include <fmt/format.h>

#include <cmath>

namespace kiln {

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

int64_t pixels_of_latent(const ModelRecord::AutoencoderInfo& trained, const Family& family) {
  if (trained.downsample > 0) return trained.downsample;
  const KnownAutoencoder* const known = known_autoencoder(trained.name);
  return known ? known->downsample : family.latents.downsample;
}

}  // namespace kiln
