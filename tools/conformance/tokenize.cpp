// tokenize: the ids of texts as a model's tokenizer gives them.
#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json.h"
#include "core/json_config.h"
#include "io.h"
#include "text/tokenizers/tokenizer.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct TokenizeVerbOptions {
  std::string tokenizer, config, inputs, outputs;
};

struct TokenizeConfig {
  std::optional<int64_t> padded_length;  // unset: the longest of the file
  text::TokenizeOptions encoding;
};

TokenizeConfig parse_tokenize_config(const nlohmann::json& json) {
  const JsonConfig config("tokenize", json);
  TokenizeConfig result;
  result.encoding.add_special_tokens = config.get("add_special_tokens", true);
  const bool truncates = config.get("truncation", false);
  const bool pads_to_length = config.choice("padding", "longest", {"max_length", "longest"}) == "max_length";
  if (!truncates && !pads_to_length) return result;
  const int64_t max_length = config.require<int64_t>("max_length");
  if (max_length < 1) fail("tokenize", "expected a max_length of at least 1, got {}", max_length);
  if (truncates) result.encoding.max_length = max_length;
  if (pads_to_length) result.padded_length = max_length;
  return result;
}

text::TokenIds encode_line(const text::Tokenizer& tokenizer, const std::string& line,
                           const text::TokenizeOptions& options) {
  const nlohmann::json object = nlohmann::json::parse(line);
  const JsonConfig fields("tokenize", object);
  const auto text = fields.require<std::string>("text");
  return fields.has("pair") ? tokenizer.encode(text, fields.require<std::string>("pair"), options)
                            : tokenizer.encode(text, options);
}

std::vector<text::TokenIds> encode_file(const text::Tokenizer& tokenizer, const std::string& path,
                                        const text::TokenizeOptions& options) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("tokenize", "cannot read {}", path);
  std::vector<text::TokenIds> rows;
  std::string line;
  while (std::getline(file, line)) {
    try {
      rows.push_back(encode_line(tokenizer, line, options));
    } catch (const nlohmann::json::parse_error& error) {
      fail("tokenize", "line {} of {} is no JSON in UTF-8: byte {}", rows.size() + 1, path, error.byte);
    } catch (const Error& error) {
      throw Error(fmt::format("{} (line {} of {})", error.what(), rows.size() + 1, path));
    }
  }
  if (rows.empty()) fail("tokenize", "expected at least one line in {}", path);
  return rows;
}

void run_tokenize(const TokenizeVerbOptions& options) {
  const TokenizeConfig config = parse_config(options.config, parse_tokenize_config);
  const auto tokenizer = text::load_tokenizer(options.tokenizer);
  const std::vector<text::TokenIds> rows = encode_file(*tokenizer, options.inputs, config.encoding);
  int64_t length = config.padded_length.value_or(0);
  for (const auto& row : rows) length = std::max(length, static_cast<int64_t>(row.size()));
  const auto num_rows = static_cast<int64_t>(rows.size());
  const at::Tensor ids = at::full({num_rows, length}, tokenizer->pad_id(), at::kLong);
  const at::Tensor mask = at::zeros({num_rows, length}, at::kLong);
  for (int64_t i = 0; i < num_rows; ++i) {
    const text::TokenIds& row = rows[i];
    const int64_t first = tokenizer->pads_left() ? length - static_cast<int64_t>(row.size()) : 0;
    std::copy(row.begin(), row.end(), ids.mutable_data_ptr<int64_t>() + i * length + first);
    std::fill_n(mask.mutable_data_ptr<int64_t>() + i * length + first, row.size(), 1);
  }
  save_tensors(options.outputs, {{"input_ids", ids}, {"attention_mask", mask}});
}

}  // namespace

void add_tokenize_verb(CLI::App& app) {
  auto options = std::make_shared<TokenizeVerbOptions>();
  CLI::App* verb = app.add_subcommand("tokenize", "Token ids of texts");
  verb->add_option("--tokenizer", options->tokenizer, "Folder of a tokenizer's files")->required();
  verb->add_option("--config", options->config, "JSON config: lengths and padding")->required();
  verb->add_option("--inputs", options->inputs, "A JSON object with text, and pair, in each line")
      ->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_tokenize(*options); });
}

}  // namespace kiln::conformance
