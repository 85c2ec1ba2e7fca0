#include "text/tokenizers/subword_model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.h"
#include "text/tokenizers/prefix_index.h"
#include "text/tokenizers/sentencepiece_model.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

constexpr double kUnknownPenalty = 10;  // below the worst piece

class Unigram : public SubwordModel {
 public:
  Unigram(const SentencePieceModel& model, int64_t num_extra_ids, const std::string& source)
      : charsmap_(model.charsmap, source) {
    std::vector<std::pair<std::string, int64_t>> entries;
    const auto add = [&](std::string text, double score) {
      const auto id = static_cast<int64_t>(scores_.size());
      if (text.empty()) fail("tokenizer", "piece {} of {} is empty", id, source);
      vocabulary_.set(text, id);
      entries.emplace_back(std::move(text), id);
      scores_.push_back(score);
    };
    for (const auto& piece : model.pieces) add(piece.text, static_cast<double>(piece.score));
    for (int64_t i = num_extra_ids - 1; i >= 0; --i) add(fmt::format("<extra_id_{}>", i), 0);
    const auto unknown =
        std::find_if(model.pieces.begin(), model.pieces.end(), [](const SentencePieceModel::Piece& piece) {
          return piece.kind == SentencePieceModel::PieceKind::kUnknown;
        });
    if (unknown == model.pieces.end()) fail("tokenizer", "{} has no unknown piece", source);
    unknown_id_ = unknown - model.pieces.begin();
    unknown_score_ = *std::min_element(scores_.begin(), scores_.end()) - kUnknownPenalty;
    index_ = PrefixIndex(std::move(entries));
  }

  std::string normalize(std::string_view text) const override { return charsmap_.apply(text); }

  // Words end at spaces, and each begins with a mark; a mark in the text begins a word as well.
  void encode(std::string_view text, TokenIds& ids) const override {
    std::string word;
    const auto finish = [&] {
      if (!word.empty()) encode_word(word, ids);
      word.clear();
    };
    for (size_t i = 0; i < text.size();) {
      const size_t begin = i;
      const char32_t c = next_code_point(text, i);
      if (is_space(c)) {
        finish();
        continue;
      }
      const std::string_view character = text.substr(begin, i - begin);
      if (character == kSpaceMark)
        finish();
      else if (word.empty())
        word = kSpaceMark;
      word += character;
    }
    finish();
  }

  std::optional<int64_t> id_of(std::string_view token) const override { return vocabulary_.find(token); }
  int64_t vocabulary_size() const override { return vocabulary_.size(); }

 private:
  // Appends the most probable pieces (Viterbi). Neighbouring unknown characters become one unknown piece.
  void encode_word(std::string_view word, TokenIds& ids) const {
    struct Best {
      double score = 0;
      size_t begin = kUnreached;
      int64_t id = 0;
    };
    std::vector<Best> best(word.size() + 1);  // of the pieces that end at each byte
    for (size_t i = 0; i < word.size();) {
      size_t next = i;
      next_code_point(word, next);
      const double here = best[i].score;
      const auto offer = [&](size_t end, double score, int64_t id) {
        if (best[end].begin == kUnreached || score > best[end].score) best[end] = {score, i, id};
      };
      bool has_character = false;
      index_.visit_prefixes(word.substr(i), [&](size_t length, int64_t id) {
        offer(i + length, scores_[id] + here, id);
        has_character = has_character || i + length == next;
      });
      if (!has_character) offer(next, unknown_score_ + here, unknown_id_);
      i = next;
    }
    TokenIds reversed;
    for (size_t end = word.size(); end > 0; end = best[end].begin)
      if (best[end].id != unknown_id_ || reversed.empty() || reversed.back() != unknown_id_)
        reversed.push_back(best[end].id);
    ids.insert(ids.end(), reversed.rbegin(), reversed.rend());
  }

  static constexpr size_t kUnreached = std::numeric_limits<size_t>::max();
  Charsmap charsmap_;
  Vocabulary vocabulary_;
  PrefixIndex index_;
  std::vector<double> scores_;  // log probabilities by id
  int64_t unknown_id_ = 0;
  double unknown_score_ = 0;
};

}  // namespace

std::unique_ptr<SubwordModel> make_t5_unigram(const SentencePieceModel& model, int64_t num_extra_ids,
                                              const std::string& source) {
  return std::make_unique<Unigram>(model, num_extra_ids, source);
}

}  // namespace kiln::text
