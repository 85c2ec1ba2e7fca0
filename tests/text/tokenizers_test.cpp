// What tests/reference/test_tokenizers.py cannot see: damaged files, the parts alone, fingerprints.

#include "test_files.h"
#include "text/tokenizers/added_tokens.h"
#include "text/tokenizers/pair_merging.h"
#include "text/tokenizers/prefix_index.h"
#include "text/tokenizers/sentencepiece_model.h"
#include "text/tokenizers/tokenizer.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

TEST(Unicode, RefusesWhatIsNotUtf8) {
  for (const char* good : {"", "a", "é", "한", "😀", "\xF4\x8F\xBF\xBF"})
    EXPECT_NO_THROW(check_utf8(good)) << good;
  for (const char* bad : {"\x80", "\xC0\x80", "\xC3", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
                          "\xF4\x90\x80\x80", "\xFF", "a\xE2\x82"})
    EXPECT_THROW(check_utf8(bad), Error);
}

TEST(Unicode, CodePointsGoBothWays) {
  std::string text;
  const std::vector<char32_t> all = {0, 'a', 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF};
  for (const char32_t c : all) append_utf8(text, c);
  EXPECT_EQ(count_code_points(text), 9);
  size_t position = 0;
  for (const char32_t c : all) EXPECT_EQ(next_code_point(text, position), c);
  for (int left = 9; left > 0; --left) position = previous_boundary(text, position);
  EXPECT_EQ(position, 0u);
}

TEST(Unicode, NormalForms) {
  EXPECT_EQ(nfc("e\u0301"), "é");
  EXPECT_EQ(nfd("é"), "e\u0301");
  EXPECT_EQ(nfd("ﷺ"), "ﷺ") << "compatibility forms stay";
  EXPECT_EQ(lower("İΑΣ"), "i\u0307ασ") << "each letter by itself";
}

TEST(PrefixIndex, VisitsShortestFirst) {
  const PrefixIndex index({{"ab", 1}, {"a", 0}, {"abcd", 2}, {"b", 3}, {"ac", 4}});
  std::vector<std::pair<size_t, int64_t>> found;
  index.visit_prefixes("abcde", [&](size_t bytes, int64_t id) { found.emplace_back(bytes, id); });
  EXPECT_THAT(found, ElementsAre(std::pair(1u, 0), std::pair(2u, 1), std::pair(4u, 2)));
}

TEST(PairMerging, LowestRankThenLeftmost) {
  // a a a a: rank 0 merges (a a) = b from the left, then (b b) = c.
  TokenIds symbols = {1, 1, 1, 1, 1};
  const auto merge_of = [](int64_t left, int64_t right) -> std::optional<Merge> {
    if (left == 1 && right == 1) return Merge{0, 2};
    if (left == 2 && right == 2) return Merge{1, 3};
    return std::nullopt;
  };
  merge_pairs(symbols, merge_of);
  EXPECT_THAT(symbols, ElementsAre(3, 1));
}

TEST(Charsmap, BrokenRulesAreRefused) {
  EXPECT_EQ(Charsmap("", "x").apply("é"), "é");
  EXPECT_THROW(Charsmap("abc", "x"), Error);
  const std::string size_beyond("\x40\0\0\0abcd", 8);
  EXPECT_THROW(Charsmap(size_beyond, "x"), Error);
}

// A field of a protocol buffer: `number`, then a string of less than 128 bytes.
std::string field(int number, const std::string& bytes) {
  return static_cast<char>(number << 3 | 2) + std::string(1, static_cast<char>(bytes.size())) + bytes;
}

TEST(SentencePieceModel, EveryTruncationIsAnError) {
  const std::string score("\x15\0\0\x80\x3F", 5), kind("\x18\x04", 2);
  const std::string bytes = field(1, field(1, "▁a") + score) + field(1, field(1, "<x>") + kind) +
                            field(2, std::string("\x18\x02", 2)) + field(3, field(2, "map"));
  const SentencePieceModel model = parse_sentencepiece_model(bytes, "x");
  ASSERT_EQ(model.pieces.size(), 2u);
  EXPECT_EQ(model.pieces[0].score, 1);
  EXPECT_EQ(model.pieces[1].kind, SentencePieceModel::PieceKind::kUserDefined);
  EXPECT_EQ(model.kind, SentencePieceModel::Kind::kBpe);
  EXPECT_EQ(model.charsmap, "map");
  int num_errors = 0;
  for (size_t size = 0; size < bytes.size(); ++size) {
    try {
      parse_sentencepiece_model(bytes.substr(0, size), "x");
    } catch (const Error&) {
      ++num_errors;
    }
  }
  EXPECT_GE(num_errors, static_cast<int>(bytes.size()) - 4) << "only between its fields a file may end";
}

// A tiny WordPiece.
std::string write_wordpiece(const kiln::test::TempFolder& folder, const std::string& extra_config = "{}") {
  std::ofstream(folder.path() / "vocab.txt") << "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##b\n!\n";
  std::ofstream(folder.path() / "tokenizer_config.json") << extra_config;
  return folder.path().string();
}

TEST(Tokenizer, FramesTruncatesAndPairs) {
  const kiln::test::TempFolder folder;
  const auto tokenizer = load_tokenizer(write_wordpiece(folder));
  EXPECT_EQ(tokenizer->kind(), "wordpiece");
  EXPECT_EQ(tokenizer->vocabulary_size(), 9);
  EXPECT_THAT(tokenizer->encode("AB! z"), ElementsAre(2, 5, 7, 8, 1, 3));
  EXPECT_THAT(tokenizer->encode("ab!", {.max_length = 3}), ElementsAre(2, 5, 3));
  EXPECT_THAT(tokenizer->encode("ab!", {.add_special_tokens = false}), ElementsAre(5, 7, 8));
  EXPECT_THAT(tokenizer->encode("a a a a", "b", {.max_length = 6}), ElementsAre(2, 5, 5, 3, 6, 3));
  EXPECT_THROW(tokenizer->encode("a", {.max_length = 1}), Error);
  EXPECT_THROW(tokenizer->encode("\xFF"), Error);
}

TEST(Tokenizer, FingerprintIsOfWhatDecidesAboutIds) {
  const kiln::test::TempFolder first, same, other;
  const auto fingerprint = load_tokenizer(write_wordpiece(first))->fingerprint();
  EXPECT_THAT(fingerprint, testing::StartsWith("xxh3:"));
  EXPECT_EQ(load_tokenizer(write_wordpiece(same, R"({"model_max_length": 7})"))->fingerprint(), fingerprint);
  EXPECT_NE(load_tokenizer(write_wordpiece(other, R"({"do_lower_case": false})"))->fingerprint(),
            fingerprint);
}

TEST(Tokenizer, BrokenConfigsNameTheFile) {
  for (const char* config : {"[]", "{", R"({"pad_token": 3})", R"({"added_tokens_decoder": {"x": {}}})",
                             R"({"do_lower_case": "yes"})", R"({"padding_side": "up"})"}) {
    const kiln::test::TempFolder folder;
    EXPECT_THROW(load_tokenizer(write_wordpiece(folder, config)), Error) << config;
  }
}

}  // namespace
}  // namespace kiln::text
