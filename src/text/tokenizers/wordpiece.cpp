#include "text/tokenizers/subword_model.h"

#include <utility>

#include "core/error.h"
#include "core/files/input_file.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

constexpr int64_t kLongestWord = 100;  // characters; a longer one is unknown
constexpr const char* kContinuation = "##";

// Removes control characters and makes every space a plain one.
std::string without_controls(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (is_bert_control(c)) continue;
    append_utf8(result, is_space(c) ? U' ' : c);
  }
  return result;
}

std::string with_separate_ideographs(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    const bool is_ideograph = is_bert_ideograph(c);
    if (is_ideograph) result += ' ';
    append_utf8(result, c);
    if (is_ideograph) result += ' ';
  }
  return result;
}

std::string without_accents(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (!is_bert_nonspacing_mark(c)) append_utf8(result, c);
  }
  return result;
}

class WordPiece : public SubwordModel {
 public:
  WordPiece(Vocabulary vocabulary, const WordPieceOptions& options, int64_t unknown_id)
      : vocabulary_(std::move(vocabulary)), options_(options), unknown_id_(unknown_id) {}

  std::string normalize(std::string_view text) const override {
    std::string result = without_controls(text);
    if (options_.separate_ideographs) result = with_separate_ideographs(result);
    if (options_.strip_accents) result = without_accents(nfd(result));
    return options_.lower_case ? lower(result) : result;
  }

  // Words end at spaces; every punctuation mark is a word.
  void encode(std::string_view text, TokenIds& ids) const override {
    size_t word = 0;
    for (size_t i = 0; i < text.size();) {
      const size_t here = i;
      const char32_t c = next_code_point(text, i);
      const bool is_mark = is_bert_punctuation(c);
      if (!is_mark && !is_space(c)) continue;
      encode_word(text.substr(word, here - word), ids);
      if (is_mark) encode_word(text.substr(here, i - here), ids);
      word = i;
    }
    encode_word(text.substr(word), ids);
  }

  std::optional<int64_t> id_of(std::string_view token) const override { return vocabulary_.find(token); }
  int64_t vocabulary_size() const override { return vocabulary_.size(); }

 private:
  void encode_word(std::string_view word, TokenIds& ids) const {
    if (word.empty()) return;
    const size_t before = ids.size();
    const bool fits = count_code_points(word) <= kLongestWord;
    for (size_t begin = 0; fits && begin < word.size();) {
      size_t end = word.size();
      std::optional<int64_t> id;
      for (; end > begin; end = previous_boundary(word, end)) {
        const std::string_view part = word.substr(begin, end - begin);
        id = begin == 0 ? vocabulary_.find(part) : vocabulary_.find(kContinuation + std::string(part));
        if (id) break;
      }
      if (!id) {
        ids.resize(before);
        break;
      }
      ids.push_back(*id);
      begin = end;
    }
    if (ids.size() == before) ids.push_back(unknown_id_);
  }

  Vocabulary vocabulary_;
  WordPieceOptions options_;
  int64_t unknown_id_;
};

}  // namespace

std::unique_ptr<SubwordModel> load_wordpiece(const std::filesystem::path& path,
                                             const WordPieceOptions& options) {
  LineReader file("tokenizer", path.string());
  Vocabulary vocabulary;
  std::string line;
  for (int64_t id = 0; file.next(line); ++id) {
    while (!line.empty() && std::string_view(" \t\r\n\v\f").find(line.back()) != std::string_view::npos)
      line.pop_back();
    check_utf8(line);
    vocabulary.set(line, id);
  }
  const std::optional<int64_t> unknown = vocabulary.find(options.unknown);
  if (!unknown) fail("tokenizer", "{} has no token {}", path.string(), options.unknown);
  return std::make_unique<WordPiece>(std::move(vocabulary), options, *unknown);
}

}  // namespace kiln::text
