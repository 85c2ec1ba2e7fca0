#include "text/tokenizers/tokenizer_config.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/json_config.h"
#include "core/text/json_text.h"

namespace kiln::text {
namespace {

using nlohmann::json;

constexpr std::array<const char*, 7> kRoles = {"bos_token", "eos_token", "unk_token", "sep_token",
                                               "pad_token", "cls_token", "mask_token"};

bool is_role(const std::string& key) {
  return std::any_of(kRoles.begin(), kRoles.end(), [&](const char* role) { return key == role; });
}

json read_object(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return json::object();
  json object = read_json_file("tokenizer", path.string());
  if (!object.is_object()) fail("tokenizer", "{} is no JSON object", path.string());
  return object;
}

// Parses a string, or an object that says how the token is recognised.
AddedToken parse_token(const json& value, bool special, const std::string& where) {
  if (value.is_string()) return {.content = value, .normalized = !special};
  if (!value.is_object()) fail("tokenizer", "expected a token, got {} ({})", brief(value), where);
  const JsonConfig fields(where, value);
  return {.content = fields.require<std::string>("content"),
          .single_word = fields.get("single_word", false),
          .strips_left = fields.get("lstrip", false),
          .strips_right = fields.get("rstrip", false),
          .normalized = fields.get("normalized", !special)};
}

// The special tokens collected from the files so far: those with roles, and the others in their order.
struct SpecialTokens {
  std::map<std::string, AddedToken> roles;
  std::vector<AddedToken> others;

  bool contains(const std::string& content) const {
    return std::any_of(roles.begin(), roles.end(),
                       [&](const auto& role) { return role.second.content == content; }) ||
           std::any_of(others.begin(), others.end(),
                       [&](const AddedToken& token) { return token.content == content; });
  }
};

void read_roles(const json& object, const std::string& where, SpecialTokens& special) {
  for (const auto& [key, value] : object.items()) {
    if (!is_role(key)) continue;
    if (value.is_null())
      special.roles.erase(key);
    else
      special.roles[key] = parse_token(value, /*special=*/true, where);
  }
}

void append_tokens(const json& list, const std::string& where, std::vector<AddedToken>& tokens) {
  if (list.is_null()) return;
  if (!list.is_array() && !list.is_object())
    fail("tokenizer", "expected a list of tokens, got {} ({})", brief(list), where);
  for (const json& value : list) tokens.push_back(parse_token(value, /*special=*/true, where));
}

// Reads the tokens of tokenizer_config.json without a role: those of its list, then every other key that
// names a token.
void read_others(const json& settings, const std::string& where, SpecialTokens& special) {
  const auto list = [&](const char* key) { return settings.contains(key) ? settings.at(key) : json(); };
  append_tokens(
      list("extra_special_tokens").empty() ? list("additional_special_tokens") : list("extra_special_tokens"),
      where, special.others);
  for (const auto& [key, value] : settings.items())
    if (key.ends_with("_token") && !is_role(key) && value.is_string())
      special.others.push_back(parse_token(value, true, where));
}

// Parses added_tokens_decoder, whose keys are the ids of the tokens.
std::map<int64_t, AddedToken> parse_decoder(const json& decoder, const std::string& where) {
  if (!decoder.is_object()) fail("tokenizer", "expected added_tokens_decoder to be an object ({})", where);
  std::map<int64_t, AddedToken> by_id;
  for (const auto& [id, token] : decoder.items()) {
    if (id.empty() || id.size() > 9 || id.find_first_not_of("0123456789") != std::string::npos)
      fail("tokenizer", "expected an id in added_tokens_decoder, got {:?} ({})", id, where);
    const bool is_special = token.is_object() && token.value("special", json(false)) == true;
    by_id[std::stoll(id)] = parse_token(token, is_special, where);
  }
  return by_id;
}

std::map<int64_t, AddedToken> read_added_tokens(const std::filesystem::path& path,
                                                const SpecialTokens& special) {
  std::map<int64_t, AddedToken> by_id;
  const json tokens = read_object(path);
  for (const auto& [content, id] : tokens.items()) {
    if (!is_integer(id))
      fail("tokenizer", "expected an id of token {:?}, got {} ({})", content, brief(id), path.string());
    by_id[id.get<int64_t>()] = {.content = content, .normalized = !special.contains(content)};
  }
  return by_id;
}

// Returns the tokens that transformers adds if a tokenizer.json lies beside the vocabulary, by their ids.
std::map<int64_t, AddedToken> read_tokenizer_json(const std::filesystem::path& path) {
  std::map<int64_t, AddedToken> by_id;
  if (!std::filesystem::exists(path)) return by_id;
  // The rest repeats the vocabulary.
  const json tokenizer = read_json_file("tokenizer", path.string(), {.only_key = "added_tokens"});
  if (!tokenizer.is_object()) fail("tokenizer", "{} is no JSON object", path.string());
  const json tokens = tokenizer.value("added_tokens", json::array());
  if (!tokens.is_array()) fail("tokenizer", "expected added_tokens to be a list ({})", path.string());
  for (const json& token : tokens) {
    const bool is_special = token.is_object() && token.value("special", json(false)) == true;
    const AddedToken added = parse_token(token, is_special, path.string());
    by_id[JsonConfig(path.string(), token).require<int64_t>("id")] = added;
  }
  return by_id;
}

}  // namespace

TokenizerConfig read_tokenizer_config(const std::filesystem::path& folder, const TokenRoles& defaults,
                                      bool has_own_tokens) {
  const std::filesystem::path settings_path = folder / "tokenizer_config.json";
  TokenizerConfig config{.settings = read_object(settings_path)};
  for (const char* key : {"extra_special_tokens", "additional_special_tokens"})
    if (config.settings.contains(key) && !config.settings.at(key).is_object())
      config.lists_special_tokens = true;
  SpecialTokens special;
  for (const auto& [role, content] : defaults) special.roles[role] = {.content = content};
  read_roles(config.settings, settings_path.string(), special);
  read_others(config.settings, settings_path.string(), special);

  std::map<int64_t, AddedToken> by_id;
  std::vector<AddedToken> map_tokens;
  if (config.settings.contains("added_tokens_decoder")) {
    by_id = parse_decoder(config.settings.at("added_tokens_decoder"), settings_path.string());
  } else {
    const std::filesystem::path map_path = folder / "special_tokens_map.json";
    const json map = read_object(map_path);
    read_roles(map, map_path.string(), special);
    by_id = read_added_tokens(folder / "added_tokens.json", special);
    if (!has_own_tokens && !config.lists_special_tokens && map.contains("additional_special_tokens"))
      append_tokens(map.at("additional_special_tokens"), map_path.string(), map_tokens);
  }
  for (const auto& [id, token] : by_id) config.added.push_back(token);
  for (const char* role : kRoles) {
    const auto found = special.roles.find(role);
    if (found == special.roles.end()) continue;
    config.roles[role] = found->second.content;
    config.added.push_back(found->second);
  }
  config.added.insert(config.added.end(), special.others.begin(), special.others.end());
  config.added.insert(config.added.end(), map_tokens.begin(), map_tokens.end());
  for (const auto& [id, token] : read_tokenizer_json(folder / "tokenizer.json"))
    config.added.push_back(token);
  return config;
}

}  // namespace kiln::text
