// The prefix that pays most among texts, and what passes over the rest of them give.
#include "models/text/caption_encoder.h"

#include <ATen/core/grad_mode.h>

#include "core/aten.h"
#include "models/text/text_registry.h"
#include "models/weights.h"
#include "test_files.h"

namespace kiln {
namespace {

using ::testing::ElementsAreArray;
using Text = std::vector<int64_t>;

Text counted(int64_t first, int64_t count, std::initializer_list<int64_t> more = {}) {
  Text text;
  for (int64_t i = 0; i < count; ++i) text.push_back(first + i);
  text.insert(text.end(), more);
  return text;
}

TEST(SharedPrefix, IsTheOneThatSavesMost) {
  const Text instruction = counted(100, 20);
  EXPECT_THAT(best_shared_prefix(std::vector<Text>{}), IsEmpty());
  EXPECT_THAT(best_shared_prefix(std::vector<Text>{counted(100, 30)}), IsEmpty());
  // An empty caption among those with an instruction does not hide it.
  EXPECT_THAT(best_shared_prefix(std::vector<Text>{counted(100, 20, {1, 2}), {7}, counted(100, 20, {3}), {}}),
              ElementsAreArray(instruction));
  // Two share 40 tokens, four share 20: 40 x 1 against 20 x 3.
  EXPECT_THAT(best_shared_prefix(std::vector<Text>{counted(100, 40, {1}), counted(100, 20, {2}),
                                                   counted(100, 40, {3}), counted(100, 20, {4})}),
              ElementsAreArray(instruction));
  // Equal texts keep a token for themselves; short prefixes are left alone.
  EXPECT_THAT(best_shared_prefix(std::vector<Text>{counted(100, 21), counted(100, 21)}),
              ElementsAreArray(instruction));
  EXPECT_THAT(best_shared_prefix(std::vector<Text>{counted(100, 15, {1}), counted(100, 15, {2})}), IsEmpty());
}

TEST(SharedPrefix, IsFollowedByTextsWithATokenMore) {
  EXPECT_TRUE(goes_on_after(Text{1, 2, 3}, Text{1, 2}));
  EXPECT_FALSE(goes_on_after(Text{1, 2}, Text{1, 2}));
  EXPECT_FALSE(goes_on_after(Text{1, 3, 3}, Text{1, 2}));
  EXPECT_FALSE(goes_on_after(Text{1, 2}, Text{}));
}

// Texts of several lengths after a prefix that is longer than the window of every second layer.
TEST(SharedPrefix, GivesTheFeaturesOfWholeTexts) {
  const at::NoGradGuard no_grad;
  const auto config = nlohmann::json::parse(
      R"({"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3,
          "head_dim": 16, "intermediate_size": 72, "vocab_size": 900, "sliding_window": 5})");
  const auto encoder = build_text_encoder("gemma2", config);
  initialize_weights(encoder->parameters(), 0);
  for (const auto& parameter : encoder->parameters()) parameter->value.mul_(10);
  const std::vector<Text> rests = {counted(30, 1), counted(40, 7), counted(50, 7), counted(60, 3)};
  TokenPrefix prefix{.ids = counted(1, 9)};
  const auto rows_of = [](const std::vector<Text>& texts) {
    TokenRows tokens{.host_offsets = {0}};
    Text all;
    for (const Text& text : texts) {
      all.insert(all.end(), text.begin(), text.end());
      tokens.host_offsets.push_back(static_cast<int64_t>(all.size()));
    }
    tokens.ids = at::tensor(all, at::kLong);
    return tokens;
  };
  prefix.last_hidden = encoder->encode_batch({.tokens = rows_of({prefix.ids}), .fills = &prefix});
  const at::Tensor rows = encoder->encode_batch({.tokens = rows_of(rests), .after = &prefix});
  int64_t row = 0, kept = 0;
  for (const Text& rest : rests) {
    Text whole = prefix.ids;
    whole.insert(whole.end(), rest.begin(), rest.end());
    const at::Tensor want = encoder->encode(rows_of({whole})).last_hidden;
    const auto length = static_cast<int64_t>(rest.size());
    const at::Tensor got = at::cat({prefix.last_hidden, rows.narrow(0, row, length)});
    EXPECT_LT((got - want).abs().max().item<double>(), 1e-5 * want.abs().max().item<double>());
    row += length;
  }
  for (const TokenPrefix::Keys& keys : prefix.segments)
    if (keys.keys.defined()) kept += static_cast<int64_t>(keys.keys.nbytes() + keys.values.nbytes());
  EXPECT_EQ(encoder->prefix_bytes(9), kept + static_cast<int64_t>(prefix.last_hidden.nbytes()));
  EXPECT_EQ(build_text_encoder("t5_encoder", nlohmann::json::parse(R"({"d_model": 48, "d_kv": 12, "d_ff": 80,
      "num_layers": 1, "num_heads": 4, "vocab_size": 90})"))
                ->prefix_bytes(9),
            0);
}

}  // namespace
}  // namespace kiln
