#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/json_config.h"
#include "text/tokenizers/sentencepiece_model.h"
#include "text/tokenizers/subword_model.h"
#include "text/tokenizers/tokenizer.h"
#include "text/tokenizers/tokenizer_config.h"

namespace kiln::text {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kMostLength = 1'000'000'000;  // a model_max_length from here on means "none"
constexpr int64_t kT5ExtraIds = 100;

// The model and the tokens that a kind of tokenizer loads from its files.
struct Loaded {
  std::unique_ptr<SubwordModel> model;
  std::vector<AddedToken> own_tokens{};     // named by the vocabulary's file
  std::vector<AddedToken> unless_listed{};  // likewise; unused if the config lists special tokens
};

struct TokenizerKind {
  const char* name;
  std::vector<const char*> files;  // all must exist
  TokenRoles roles;
  // The roles of the tokens before a text, between two texts, and after the last.
  std::vector<const char*> before, between, after;
  Loaded (*load)(const fs::path& folder, const TokenizerConfig& config);
};

const JsonConfig settings_of(const TokenizerConfig& config) {
  return JsonConfig("tokenizer", config.settings);
}

Loaded load_wordpiece_kind(const fs::path& folder, const TokenizerConfig& config) {
  const JsonConfig settings = settings_of(config);
  WordPieceOptions options{.lower_case = settings.get("do_lower_case", true),
                           .separate_ideographs = settings.get("tokenize_chinese_chars", true),
                           .unknown = config.roles.at("unk_token")};
  options.strip_accents = settings.get("strip_accents", options.lower_case);
  return {load_wordpiece(folder / "vocab.txt", options)};
}

Loaded load_clip_kind(const fs::path& folder, const TokenizerConfig& config) {
  return {load_clip_bpe(folder / "vocab.json", folder / "merges.txt", config.roles.at("unk_token"))};
}

// Returns the control and user-defined pieces of a model.
std::vector<AddedToken> own_tokens_of(const SentencePieceModel& model) {
  std::vector<AddedToken> tokens;
  for (const auto& piece : model.pieces)
    if (piece.kind == SentencePieceModel::PieceKind::kControl ||
        piece.kind == SentencePieceModel::PieceKind::kUserDefined)
      tokens.push_back({.content = piece.text});
  return tokens;
}

SentencePieceModel read_model_of_kind(const fs::path& path, SentencePieceModel::Kind kind,
                                      const char* expected) {
  SentencePieceModel model = read_sentencepiece_model(path);
  if (model.kind != kind) fail("tokenizer", "expected {} to be a {} model", path.string(), expected);
  return model;
}

Loaded load_t5_kind(const fs::path& folder, const TokenizerConfig& config) {
  const fs::path path = folder / "spiece.model";
  const SentencePieceModel model = read_model_of_kind(path, SentencePieceModel::Kind::kUnigram, "unigram");
  const int64_t num_extra_ids = settings_of(config).get("extra_ids", kT5ExtraIds);
  if (num_extra_ids < 0 || num_extra_ids > 100'000)
    fail("tokenizer", "expected extra_ids of 0 to 100000, got {} ({})", num_extra_ids, folder.string());
  // A user-defined piece costs nothing, so the most probable pieces have it whole in any case.
  Loaded loaded{make_t5_unigram(model, num_extra_ids, path.string()), {}, own_tokens_of(model)};
  for (int64_t i = 0; i < num_extra_ids; ++i)
    loaded.unless_listed.push_back({.content = fmt::format("<extra_id_{}>", i)});
  return loaded;
}

// Merges never make or divide a user-defined piece, as SentencePiece has it, and as transformers has it with
// the published tokenizer.json. It forgets them for a tokenizer.model alone whose config lists special
// tokens.
Loaded load_gemma_kind(const fs::path& folder, const TokenizerConfig& config) {
  const fs::path path = folder / "tokenizer.model";
  const SentencePieceModel model = read_model_of_kind(path, SentencePieceModel::Kind::kBpe, "byte-pair");
  return {make_gemma_bpe(model, config.roles.at("unk_token"), path.string()), own_tokens_of(model)};
}

const std::vector<TokenizerKind>& kinds() {
  static const std::vector<TokenizerKind> all = {
      {"wordpiece",
       {"vocab.txt"},
       {{"unk_token", "[UNK]"},
        {"sep_token", "[SEP]"},
        {"pad_token", "[PAD]"},
        {"cls_token", "[CLS]"},
        {"mask_token", "[MASK]"}},
       {"cls_token"},
       {"sep_token"},
       {"sep_token"},
       load_wordpiece_kind},
      {"clip",
       {"vocab.json", "merges.txt"},
       {{"bos_token", "<|startoftext|>"},
        {"eos_token", "<|endoftext|>"},
        {"unk_token", "<|endoftext|>"},
        {"pad_token", "<|endoftext|>"}},
       {"bos_token"},
       {"eos_token", "eos_token"},
       {"eos_token"},
       load_clip_kind},
      {"t5",
       {"spiece.model"},
       {{"eos_token", "</s>"}, {"unk_token", "<unk>"}, {"pad_token", "<pad>"}},
       {},
       {"eos_token"},
       {"eos_token"},
       load_t5_kind},
      {"gemma",
       {"tokenizer.model"},
       {{"bos_token", "<bos>"},
        {"eos_token", "<eos>"},
        {"unk_token", "<unk>"},
        {"pad_token", "<pad>"},
        {"mask_token", "<mask>"}},
       {},
       {},
       {},
       load_gemma_kind},
  };
  return all;
}

fs::path tokenizer_folder(const fs::path& folder) {
  if (!fs::is_directory(folder)) fail("tokenizer", "{} is no folder", folder.string());
  return fs::exists(folder / "model_index.json") && fs::is_directory(folder / "tokenizer")
             ? folder / "tokenizer"
             : folder;
}

const TokenizerKind& kind_of(const fs::path& folder) {
  for (const TokenizerKind& kind : kinds())
    if (std::all_of(kind.files.begin(), kind.files.end(),
                    [&](const char* file) { return fs::exists(folder / file); }))
      return kind;
  if (fs::exists(folder / "vocab.json") || fs::exists(folder / "merges.txt"))
    fail("tokenizer", "{} holds only one of vocab.json and merges.txt: CLIP's tokenizer needs both",
         folder.string());
  fail("tokenizer",
       "{} holds no tokenizer: expected vocab.txt (WordPiece), vocab.json and merges.txt (CLIP), "
       "spiece.model (T5) or tokenizer.model (Gemma)",
       folder.string());
}

// Throws Error if no token has this role, or an empty one.
int64_t id_of_role(const char* role, const TokenizerConfig& config, const AddedTokens& tokens) {
  const auto content = config.roles.find(role);
  const auto id = content == config.roles.end() ? std::nullopt : tokens.id_of(content->second);
  if (!id) fail("tokenizer", "the tokenizer has no {}", role);
  return *id;
}

// Returns the kind's frame. A kind without one follows the settings add_bos_token and add_eos_token.
SpecialFrame frame_of(const TokenizerKind& kind, const TokenizerConfig& config, const AddedTokens& tokens) {
  const auto ids_of = [&](const std::vector<const char*>& roles) {
    TokenIds ids;
    for (const char* role : roles) ids.push_back(id_of_role(role, config, tokens));
    return ids;
  };
  const JsonConfig settings = settings_of(config);
  if (!kind.after.empty()) return {ids_of(kind.before), ids_of(kind.between), ids_of(kind.after)};
  const auto if_set = [&](const char* key, const char* role) {
    return settings.get(key, false) && config.roles.contains(role) ? ids_of({role}) : TokenIds();
  };
  SpecialFrame frame{.before = if_set("add_bos_token", "bos_token"),
                     .after = if_set("add_eos_token", "eos_token")};
  frame.between = frame.after;
  frame.between.insert(frame.between.end(), frame.before.begin(), frame.before.end());
  return frame;
}

constexpr size_t kMostFileBytes = size_t{256} << 20;  // of a tokenizer

std::string fingerprint_of(const fs::path& folder, const TokenizerKind& kind, const TokenizerConfig& config,
                           const AddedTokens& tokens, const SpecialFrame& frame) {
  std::string all = std::string(kind.name) + "\n" + tokens.description();
  for (const TokenIds* ids : {&frame.before, &frame.between, &frame.after}) {
    for (const int64_t id : *ids) all += fmt::format("{} ", id);
    all += '\n';
  }
  for (const char* key : {"do_lower_case", "strip_accents", "tokenize_chinese_chars"})
    if (config.settings.contains(key)) all += fmt::format("{}={}\n", key, config.settings.at(key).dump());
  for (const char* name : kind.files) {
    const fs::path path = folder / name;
    const std::string bytes = fs::exists(path) ? read_input("tokenizer", path.string(), kMostFileBytes) : "";
    all += fmt::format("{}:{}\n", name, bytes.size()) + bytes;
  }
  return fmt::format("xxh3:{:016x}", XXH3_64bits(all.data(), all.size()));
}

std::optional<int64_t> max_length_of(const JsonConfig& settings) {
  if (!settings.has("model_max_length") || !settings.at("model_max_length").is_number()) return std::nullopt;
  const double length = settings.get("model_max_length", 0.0);
  return length >= 1 && length < kMostLength ? std::optional(static_cast<int64_t>(length)) : std::nullopt;
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const fs::path& path) {
  const fs::path folder = tokenizer_folder(path);
  const TokenizerKind& kind = kind_of(folder);
  const bool is_sentencepiece = kind.files.front() == std::string_view("spiece.model") ||
                                kind.files.front() == std::string_view("tokenizer.model");
  const TokenizerConfig config = read_tokenizer_config(folder, kind.roles, is_sentencepiece);
  const JsonConfig settings = settings_of(config);
  if (!config.roles.contains("unk_token")) fail("tokenizer", "{} names no unk_token", folder.string());

  auto tokenizer = std::make_unique<Tokenizer>();
  tokenizer->kind_ = kind.name;
  Loaded loaded = kind.load(folder, config);
  tokenizer->model_ = std::move(loaded.model);
  tokenizer->tokens_ = std::make_unique<AddedTokens>(*tokenizer->model_);
  for (const AddedToken& token : config.added) tokenizer->tokens_->add(token);
  for (const AddedToken& token : loaded.own_tokens) tokenizer->tokens_->add(token);
  if (!config.lists_special_tokens)
    for (const AddedToken& token : loaded.unless_listed) tokenizer->tokens_->add(token);
  tokenizer->tokens_->index();
  tokenizer->frame_ = frame_of(kind, config, *tokenizer->tokens_);
  tokenizer->pads_left_ = settings.choice("padding_side", "right", {"left", "right"}) == "left";
  if (!config.roles.contains("pad_token")) fail("tokenizer", "{} names no pad_token", folder.string());
  tokenizer->pad_id_ = id_of_role("pad_token", config, *tokenizer->tokens_);
  tokenizer->max_length_ = max_length_of(settings);
  tokenizer->fingerprint_ = fingerprint_of(folder, kind, config, *tokenizer->tokens_, tokenizer->frame_);
  return tokenizer;
}

}  // namespace kiln::text
