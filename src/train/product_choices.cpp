#include "train/product_choices.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iterator>

#include "core/dtype.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/json_config.h"
#include "core/text/json_text.h"
#include "ops/cuda/launch.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

using ops::ProductChoice;

// Each word of cuBLASLt's description as 16 hexadecimal digits.
std::string words_text(const uint64_t (&words)[8]) {
  std::string text;
  for (const uint64_t word : words) text += fmt::format("{:016x}", word);
  return text;
}

bool parse_words(const std::string& text, uint64_t (&words)[8]) {
  constexpr size_t kDigits = 16;
  if (text.size() != kDigits * std::size(words)) return false;
  for (size_t i = 0; i < std::size(words); ++i) {
    const char* const begin = text.data() + i * kDigits;
    const auto [end, error] = std::from_chars(begin, begin + kDigits, words[i], 16);
    if (error != std::errc() || end != begin + kDigits) return false;
  }
  return true;
}

nlohmann::json json_of(const KeptChoice& kept) {
  const ProductChoice& of = kept.choice;
  return {{"gpu", kept.gpu},
          {"cublaslt", kept.cublaslt},
          {"product", ops::kEpilogueProductNames[static_cast<size_t>(of.product)]},
          {"dtype", dtype_name(of.dtype)},
          {"shape", {of.m, of.n, of.k}},
          {"bias", of.has_bias},
          {"alignments", {of.alignments[0], of.alignments[1], of.alignments[2]}},
          {"workspace_bytes", of.workspace_bytes},
          {"algorithm", words_text(of.algorithm)},
          {"us", of.microseconds},
          {"first_us", of.first_microseconds}};
}

Dtype dtype_of(const std::string& file, const std::string& name) try {
  return parse_dtype(name);
} catch (const Error& error) {
  fail("train", "{}: {}; remove the file to time the products again", file, message_of(error));
}

KeptChoice kept_choice(const std::string& file, const nlohmann::json& json) {
  const JsonConfig config(file, json);
  const auto shape = config.require<std::vector<int64_t>>("shape"),
             alignments = config.require<std::vector<int64_t>>("alignments");
  KeptChoice kept{.gpu = config.require<std::string>("gpu"), .cublaslt = config.require<int64_t>("cublaslt")};
  const auto product = std::ranges::find(ops::kEpilogueProductNames, config.require<std::string>("product"));
  const auto workspace_bytes = config.require<int64_t>("workspace_bytes");
  const auto is_negative = [](int64_t value) { return value < 0; };
  if (product == std::end(ops::kEpilogueProductNames) || shape.size() != 3 || alignments.size() != 3 ||
      std::ranges::any_of(shape, is_negative) || std::ranges::any_of(alignments, is_negative) ||
      workspace_bytes < 0 || !parse_words(config.require<std::string>("algorithm"), kept.choice.algorithm))
    fail("train", "{} holds no choice of an algorithm: {}; remove the file to time the products again", file,
         json.dump());
  kept.choice.product = static_cast<ops::EpilogueProduct>(product - std::begin(ops::kEpilogueProductNames));
  kept.choice.dtype = dtype_of(file, config.require<std::string>("dtype"));
  kept.choice.has_bias = config.require<bool>("bias");
  kept.choice.m = static_cast<size_t>(shape[0]);
  kept.choice.n = static_cast<size_t>(shape[1]);
  kept.choice.k = static_cast<size_t>(shape[2]);
  for (size_t i = 0; i < 3; ++i) kept.choice.alignments[i] = static_cast<int>(alignments[i]);
  kept.choice.workspace_bytes = static_cast<size_t>(workspace_bytes);
  kept.choice.microseconds = static_cast<float>(config.require<double>("us"));
  kept.choice.first_microseconds = static_cast<float>(config.require<double>("first_us"));
  return kept;
}

}  // namespace

nlohmann::json to_json(const std::vector<KeptChoice>& choices) {
  nlohmann::json list = nlohmann::json::array();
  for (const KeptChoice& choice : choices) list.push_back(json_of(choice));
  return {{"choices", std::move(list)}};
}

std::vector<KeptChoice> kept_choices(const std::string& file, const nlohmann::json& json) {
  std::vector<KeptChoice> choices;
  if (!json.is_object() || !json.contains("choices") || !json.at("choices").is_array())
    fail("train", "{} holds no list of choices: remove the file to time the products again", file);
  for (const nlohmann::json& choice : json.at("choices")) choices.push_back(kept_choice(file, choice));
  return choices;
}

ProductChoices::ProductChoices(const std::string& folder, int64_t rank, at::Device device)
    : path_(fmt::format("{}/gpu-products-{}.json", folder, rank)), gpu_(machine_name(device)) {
  std::vector<ProductChoice> mine;
  if (std::filesystem::exists(path_))
    for (const KeptChoice& kept : kept_choices(path_, read_json_file("train", path_))) {
      if (kept.gpu == gpu_ && kept.cublaslt == ops::cuda::cublaslt_version())
        mine.push_back(kept.choice);
      else
        of_others_.push_back(kept);
    }
  ops::cuda::set_product_choices(mine);
  num_kept_ = mine.size();
  ops::cuda::take_epilogue_algorithm(ops::cuda::kFastestEpilogueAlgorithm);
}

ProductChoices::~ProductChoices() {
  ops::cuda::take_epilogue_algorithm(0);
  try {
    keep();
  } catch (const std::exception&) {  // a run that goes on times them again
  }
}

void ProductChoices::keep() {
  const std::vector<ProductChoice> mine = ops::cuda::product_choices();
  if (mine.size() == num_kept_) return;
  std::vector<KeptChoice> all = of_others_;
  for (const ProductChoice& choice : mine) all.push_back({gpu_, ops::cuda::cublaslt_version(), choice});
  write_file_atomically("train", path_, to_json(all).dump(1) + "\n");
  num_kept_ = mine.size();
}

}  // namespace kiln
