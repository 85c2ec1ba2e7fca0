// Weights that others publish, by name: an explicit table. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

struct PublishedWeights {
  const char* name;
  const char* licence;
  // Either a file at an address of its own. Without a published hash the first download is trusted, and its
  // hash noted beside the file.
  const char* url = nullptr;
  int64_t bytes = 0;             // 0: not published
  const char* sha256 = nullptr;  // null: not published
  // Or files of a repository of the Hugging Face hub, which publishes their sizes and hashes itself.
  const char* repository = nullptr;
  std::vector<std::string> files{};  // exact paths, or folders that end in "/"
  // The path within a repository that the caller gets; "" for the whole.
  const char* result = "";
  // For kiln sample: the denoiser's name in the registry. Null: the weights are for `use`.
  const char* model = nullptr;
  const char* use = "";
};
const std::vector<PublishedWeights>& published_weights();
// Throws Error naming the nearest name.
const PublishedWeights& find_published_weights(const std::string& name);

// A model that `kiln sample --model NAME` draws from without further options.
struct PublishedModel {
  const char* name;     // "DiT-XL/2-512"
  const char* weights;  // rows of published_weights()
  const char* autoencoder;
  const char* model;  // of the registry
  int64_t image_size;
  std::vector<std::string> classes;  // drawn when none are asked for
};
// Finds a model by its name or by that of its weights. Returns null for other names.
const PublishedModel* find_published_model(const std::string& name);
// Throws Error that says how kiln sample draws from `name`, which is no PublishedModel and was given without
// weights.
[[noreturn]] void refuse_without_weights(const std::string& name);

}  // namespace kiln
