// Text encoders whose weights are read segment by segment give the same bits as those that hold them all.

#include "models/text/streamed_weights.h"
#include "checkpoint/tensor_files.h"
#include "core/files/mapped_file.h"
#include "models/denoiser_checks.h"
#include "models/text/text_registry.h"
#include "models/weights.h"

namespace kiln {
namespace {

using nlohmann::json;

struct EncoderFamily {
  const char* name;
  const char* config;
};
const EncoderFamily kFamilies[] = {
    {"t5_encoder",
     R"({"model_type": "t5", "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 3, "num_heads": 5,
         "vocab_size": 900, "feed_forward_proj": "gated-gelu"})"},
    {"gemma2",
     R"({"model_type": "gemma2", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6,
         "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 72, "vocab_size": 900, "sliding_window": 5})"},
    {"clip_text", R"({"model_type": "clip_text_model", "hidden_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "intermediate_size": 72, "vocab_size": 900})"},
    {"bert", R"({"model_type": "bert", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 72, "vocab_size": 900})"},
};

class StreamedEncoders : public testing::TestWithParam<EncoderFamily> {
 protected:
  // A folder with random weights, stored in `dtype`.
  std::string folder_of(at::ScalarType dtype) {
    const at::NoGradGuard no_grad;
    const std::string folder = temporary_ / c10::toString(dtype);
    std::filesystem::create_directories(folder);
    const json config = json::parse(GetParam().config);
    std::ofstream(folder + "/config.json") << config.dump();
    const auto encoder = build_text_encoder(GetParam().name, config);
    initialize_weights(encoder->parameters(), 0);
    std::map<std::string, at::Tensor> weights;
    for (const auto& parameter : encoder->parameters()) weights[parameter->key] = parameter->value.to(dtype);
    save_tensors(folder + "/model.safetensors", weights);
    return folder;
  }

  // Texts of these lengths.
  static TextBatch texts(const std::vector<int64_t>& lengths, int64_t seed) {
    TokenRows tokens{.host_offsets = {0}};
    for (const int64_t length : lengths) tokens.host_offsets.push_back(tokens.host_offsets.back() + length);
    at::manual_seed(seed);
    tokens.ids = at::randint(0, 900, {tokens.host_offsets.back()}, at::kLong);
    return {.tokens = tokens};
  }

  test::TempFolder temporary_;
};

TEST_P(StreamedEncoders, GiveTheBitsOfResidentOnes) {
  const at::NoGradGuard no_grad;
  const std::vector<TextBatch> batches = {texts({7, 7, 3}, 0), texts({20, 1}, 1), texts({5}, 2)};
  for (const at::ScalarType stored : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const std::string folder = folder_of(stored);
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(std::string(c10::toString(stored)) + " in " + c10::toString(compute));
      OpenedTextEncoder resident = open_text_encoder(folder, compute);
      resident.load(at::kCPU);
      const OpenedTextEncoder opened = open_text_encoder(folder, compute);
      EXPECT_EQ(opened.fingerprint, resident.fingerprint);
      StreamedWeights streamed(*opened.encoder, opened.stored, at::kCPU);
      EXPECT_LT(streamed.resident_bytes(), weight_bytes(*opened.encoder));
      for (int pass = 0; pass < 2; ++pass) {
        size_t taken = 0;
        streamed.encode(batches, [&](size_t b, const at::Tensor& hidden) {
          EXPECT_EQ(b, taken++);
          EXPECT_TRUE(at::equal(hidden, resident.encoder->encode_batch(batches[b])));
        });
        EXPECT_EQ(taken, batches.size());
      }
      for (const auto& parameter : opened.encoder->parameters())
        EXPECT_TRUE(parameter->value.is_meta()) << parameter->key;
    }
  }
}

// A batch that fills a prefix and those that go on after it, in one pass.
TEST_P(StreamedEncoders, KeepPrefixesAsResidentOnesDo) {
  const at::NoGradGuard no_grad;
  const std::string folder = folder_of(at::kBFloat16);
  OpenedTextEncoder resident = open_text_encoder(folder, at::kFloat);
  if (resident.encoder->prefix_bytes(1) == 0) return;  // its tokens see those that come later
  resident.load(at::kCPU);
  const auto run = [](const auto& encode) {
    TokenPrefix prefix;
    std::vector<TextBatch> batches = {texts({9}, 0), texts({4, 4, 2}, 1), texts({3}, 2)};
    batches[0].fills = &prefix;
    batches[1].after = &prefix;
    std::vector<at::Tensor> hidden;
    encode(batches, hidden);
    return hidden;
  };
  const auto want = run([&](const std::vector<TextBatch>& batches, std::vector<at::Tensor>& hidden) {
    for (const TextBatch& batch : batches) hidden.push_back(resident.encoder->encode_batch(batch));
  });
  const OpenedTextEncoder opened = open_text_encoder(folder, at::kFloat);
  StreamedWeights streamed(*opened.encoder, opened.stored, at::kCPU);
  const auto got = run([&](const std::vector<TextBatch>& batches, std::vector<at::Tensor>& hidden) {
    streamed.encode(batches, [&](size_t, at::Tensor rows) { hidden.push_back(std::move(rows)); });
  });
  for (size_t b = 0; b < want.size(); ++b) EXPECT_TRUE(at::equal(got[b], want[b])) << "batch " << b;
}

TEST_P(StreamedEncoders, RefuseIdsOfAnotherTokenizerAndGoOn) {
  const OpenedTextEncoder opened = open_text_encoder(folder_of(at::kFloat), at::kFloat);
  StreamedWeights streamed(*opened.encoder, opened.stored, at::kCPU);
  const TextBatch wrong = texts({3}, 0);
  wrong.tokens.ids.fill_(900);
  const auto ignore = [](size_t, const at::Tensor&) {};
  EXPECT_ERROR(streamed.encode(std::vector{wrong}, ignore), "another tokenizer");
  streamed.encode(std::vector{texts({3}, 0)}, ignore);
}

TEST_P(StreamedEncoders, PlannedBatchesGrowWithTheirTexts) {
  const OpenedTextEncoder opened = open_text_encoder(folder_of(at::kFloat), at::kBFloat16);
  const BatchMemory one = planned_batch(*opened.encoder, 1, 20, at::kCPU),
                    four = planned_batch(*opened.encoder, 4, 20, at::kCPU);
  EXPECT_GE(one.state_bytes, 20 * 48 * 4);
  EXPECT_GT(one.peak_bytes, one.state_bytes);
  EXPECT_GE(four.state_bytes - one.state_bytes, 3 * 20 * 48 * 4);
  EXPECT_GE(four.peak_bytes - one.peak_bytes, 3 * 20 * 48 * 4);
}

INSTANTIATE_TEST_SUITE_P(All, StreamedEncoders, testing::ValuesIn(kFamilies),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(MappedPages, AreReadAgainAfterTheirRelease) {
  const test::TempFolder folder;
  const std::string path = folder / "tensors.safetensors";
  const at::Tensor values = at::arange(100000, at::kFloat);
  save_tensors(path, {{"values", values}});
  const at::Tensor mapped = load_tensors(path).at("values");
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(mapped.const_data_ptr()),
                                         mapped.nbytes());
  for (int round = 0; round < 2; ++round) {
    MappedFile::fetch(bytes);
    EXPECT_TRUE(at::equal(mapped, values));
    MappedFile::release(bytes);
    EXPECT_TRUE(at::equal(mapped, values));
  }
  // Memory of other kinds stays as it is.
  const at::Tensor own = values.clone();
  MappedFile::release({static_cast<const std::byte*>(own.const_data_ptr()), own.nbytes()});
  EXPECT_TRUE(at::equal(own, values));
}

}  // namespace
}  // namespace kiln
