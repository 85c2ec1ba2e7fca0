#include "text/tokenizers/subword_model.h"

#include <array>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/json.h"
#include "core/text/json_text.h"
#include "text/tokenizers/pair_merging.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

constexpr const char* kWordEnd = "</w>";
constexpr std::array<std::string_view, 7> kContractions = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
// CLIP's pattern of words names these. In a text each is three words, unless it is an added token.
constexpr std::array<std::string_view, 2> kMarkers = {"<|startoftext|>", "<|endoftext|>"};

// Returns a printable character for each byte: the byte itself where it is printable, else one from U+0100 on
// (GPT-2).
std::array<std::string, 256> byte_characters() {
  std::array<std::string, 256> characters;
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool is_printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    append_utf8(characters[byte], is_printable ? byte : next++);
  }
  return characters;
}

enum class CharacterKind { kSpace, kLetter, kNumber, kOther };

CharacterKind kind_of(char32_t c) {
  return is_space(c)    ? CharacterKind::kSpace
         : is_letter(c) ? CharacterKind::kLetter
         : is_number(c) ? CharacterKind::kNumber
                        : CharacterKind::kOther;
}

class ClipBpe : public SubwordModel {
 public:
  ClipBpe(Vocabulary vocabulary, std::unordered_map<uint64_t, Merge> merges, int64_t unknown_id)
      : vocabulary_(std::move(vocabulary)), merges_(std::move(merges)) {
    const auto characters = byte_characters();
    for (size_t byte = 0; byte < 256; ++byte) {
      inner_ids_[byte] = vocabulary_.find(characters[byte]).value_or(unknown_id);
      last_ids_[byte] = vocabulary_.find(characters[byte] + kWordEnd).value_or(unknown_id);
    }
  }

  std::string normalize(std::string_view text) const override {
    const std::string composed = nfc(text);
    std::string spaced;
    bool was_space = false;
    for (size_t i = 0; i < composed.size();) {
      const char32_t c = next_code_point(composed, i);
      const bool is_blank = is_space(c);
      if (!is_blank) append_utf8(spaced, c);
      if (is_blank && !was_space) spaced += ' ';
      was_space = is_blank;
    }
    return lower(spaced);
  }

  // Words are contractions, runs of letters, single digits and runs of other characters.
  void encode(std::string_view text, TokenIds& ids) const override {
    for (size_t i = 0; i < text.size();) {
      if (const size_t length = marker_at(text.substr(i))) {
        encode_word(text.substr(i, 2), ids);
        encode_word(text.substr(i + 2, length - 4), ids);
        encode_word(text.substr(i + length - 2, 2), ids);
        i += length;
        continue;
      }
      if (const size_t length = contraction_at(text.substr(i))) {
        encode_word(text.substr(i, length), ids);
        i += length;
        continue;
      }
      const size_t begin = i;
      const CharacterKind kind = kind_of(next_code_point(text, i));
      if (kind == CharacterKind::kSpace) continue;
      for (size_t end = i; kind != CharacterKind::kNumber && end < text.size(); i = end)
        if (kind_of(next_code_point(text, end)) != kind) break;
      encode_word(text.substr(begin, i - begin), ids);
    }
  }

  std::optional<int64_t> id_of(std::string_view token) const override { return vocabulary_.find(token); }
  int64_t vocabulary_size() const override { return vocabulary_.size(); }

 private:
  static size_t marker_at(std::string_view text) {
    for (const std::string_view marker : kMarkers)
      if (text.starts_with(marker)) return marker.size();
    return 0;
  }

  static size_t contraction_at(std::string_view text) {
    for (const std::string_view contraction : kContractions)
      if (text.starts_with(contraction)) return contraction.size();
    return 0;
  }

  void encode_word(std::string_view word, TokenIds& ids) const {
    TokenIds symbols;
    for (size_t i = 0; i < word.size(); ++i)
      symbols.push_back((i + 1 == word.size() ? last_ids_ : inner_ids_)[static_cast<unsigned char>(word[i])]);
    merge_pairs(symbols, [this](int64_t left, int64_t right) -> std::optional<Merge> {
      const auto found = merges_.find(pair_key(left, right));
      return found == merges_.end() ? std::nullopt : std::optional(found->second);
    });
    ids.insert(ids.end(), symbols.begin(), symbols.end());
  }

 public:
  static uint64_t pair_key(int64_t left, int64_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
  }

 private:
  Vocabulary vocabulary_;
  std::unordered_map<uint64_t, Merge> merges_;
  std::array<int64_t, 256> inner_ids_, last_ids_;  // by byte
};

Vocabulary read_vocabulary(const std::filesystem::path& path) {
  const nlohmann::json json = read_json_file("tokenizer", path.string());
  if (!json.is_object()) fail("tokenizer", "{} is no JSON object of tokens and ids", path.string());
  Vocabulary vocabulary;
  for (const auto& [token, id] : json.items()) {
    if (!is_integer(id) || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX)
      fail("tokenizer", "expected an id of token {:?}, got {} ({})", token, brief(id), path.string());
    vocabulary.set(token, id.get<int64_t>());
  }
  return vocabulary;
}

std::unordered_map<uint64_t, Merge> read_merges(const std::filesystem::path& path,
                                                const Vocabulary& vocabulary) {
  LineReader file("tokenizer", path.string());
  const auto id_of = [&](const std::string& token) {
    const std::optional<int64_t> id = vocabulary.find(token);
    if (!id) fail("tokenizer", "token {:?} of {} is not in vocab.json", token, path.string());
    return *id;
  };
  std::unordered_map<uint64_t, Merge> merges;
  std::string line;
  uint64_t rank = 0;
  for (int64_t number = 1; file.next(line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.starts_with("#version")) continue;
    const size_t blank = line.find(' ');
    if (blank == std::string::npos || line.find(' ', blank + 1) != std::string::npos)
      fail("tokenizer", "expected two tokens in line {} of {}, got {:?}", number, path.string(), line);
    const std::string left = line.substr(0, blank), right = line.substr(blank + 1);
    merges.insert_or_assign(ClipBpe::pair_key(id_of(left), id_of(right)), Merge{rank++, id_of(left + right)});
  }
  return merges;
}

}  // namespace

std::unique_ptr<SubwordModel> load_clip_bpe(const std::filesystem::path& vocabulary_path,
                                            const std::filesystem::path& merges_path,
                                            const std::string& unknown) {
  Vocabulary vocabulary = read_vocabulary(vocabulary_path);
  auto merges = read_merges(merges_path, vocabulary);
  const std::optional<int64_t> unknown_id = vocabulary.find(unknown);
  if (!unknown_id) fail("tokenizer", "{} has no token {}", vocabulary_path.string(), unknown);
  return std::make_unique<ClipBpe>(std::move(vocabulary), std::move(merges), *unknown_id);
}

}  // namespace kiln::text
