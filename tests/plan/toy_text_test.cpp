// A text model of a program's own, with ragged captions and pictures of two shapes: one file and one row of
// the registry.
#include "core/aten.h"
#include "data/test_store.h"
#include "data/text_store/text_store_writer.h"
#include "plan/toy_trial.h"
#include "train/settings.h"

namespace kiln {
namespace {

constexpr int64_t kHidden = 12, kTextWidth = 5, kMostTokens = 4, kSamples = 15;

class Part : public Segment {
 protected:
  Part(const std::string& name, const BuildOptions& options) : options_(options) { name_ = name; }
  std::shared_ptr<Parameter> weight(const std::string& key, int64_t out, int64_t in) {
    return test::toy_weight(parameters_, options_, name_ + "." + key, {out, in});
  }
  static at::Tensor linear(const at::Tensor& x, const std::shared_ptr<Parameter>& weight) {
    return at::linear(x.to(weight->value.scalar_type()), weight->value).to(at::kFloat);
  }

 private:
  BuildOptions options_;
};

class Embed : public Part {
 public:
  Embed(int64_t channels, const BuildOptions& options)
      : Part("embed", options),
        pixels_(weight("pixels", kHidden, channels)),
        text_(weight("text", kHidden, kTextWidth)),
        time_(weight("time", kHidden, 2)) {}
  State forward(const State&, const ModelInput& input) const override {
    const at::Tensor t = input.timesteps.to(at::kFloat) * 0.01;
    const at::Tensor time = linear(at::stack({t.sin(), t.cos()}, 1), time_);
    return {.hidden = linear(input.x_t.flatten(2).transpose(1, 2), pixels_) + time.unsqueeze(1),
            .text = linear(input.conditioning.text.rows, text_)};
  }

 private:
  std::shared_ptr<Parameter> pixels_, text_, time_;
};

class Mix : public Part {
 public:
  explicit Mix(const BuildOptions& options)
      : Part("mix", options), weight_(weight("weight", kHidden, kHidden)) {}
  State forward(const State& state, const ModelInput& input) const override {
    const std::vector<int64_t>& offsets = input.conditioning.text.host_offsets;
    std::vector<at::Tensor> means;
    for (size_t b = 1; b < offsets.size(); ++b)
      means.push_back(
          state.text.narrow(0, offsets[b - 1], offsets[b] - offsets[b - 1]).mean(0, /*keepdim=*/true));
    return {.hidden = state.hidden + linear((state.hidden + at::stack(means)).tanh(), weight_),
            .text = state.text};
  }

 private:
  std::shared_ptr<Parameter> weight_;
};

class Final : public Part {
 public:
  Final(int64_t channels, const BuildOptions& options)
      : Part("final", options), weight_(weight("weight", channels, kHidden)) {}
  State forward(const State& state, const ModelInput& input) const override {
    return {.hidden = linear(state.hidden, weight_).transpose(1, 2).reshape(input.x_t.sizes())};
  }

 private:
  std::shared_ptr<Parameter> weight_;
};

class ToyText : public Denoiser {
 public:
  ToyText(const nlohmann::json& config, const BuildOptions& options) {
    const int64_t channels = config.at("channels");
    segments_.push_back(std::make_unique<Embed>(channels, options));
    segments_.push_back(std::make_unique<Mix>(options));
    segments_.push_back(std::make_unique<Final>(channels, options));
    shape_ = {.in_channels = channels,
              .out_channels = channels,
              .input_size = config.at("side"),
              .size_multiple = 1,
              .conditioning = {.text_width = kTextWidth, .max_text_tokens = kMostTokens},
              .guided_channels = channels};
  }
};

const std::map<std::string, nlohmann::json>& presets() {
  static const std::map<std::string, nlohmann::json> table = {{"toy-text", {{"channels", 3}, {"side", 4}}}};
  return table;
}

// Pixels in two shapes, and captions of one to four rows, one of them missing.
void write_data(const std::string& folder) {
  StoreInfo info;
  info.autoencoder = "pixels";
  info.channels = 3;
  info.lanes = {{.height = 4, .width = 4}, {.height = 2, .width = 8}};
  info.image_size = 4;
  info.has_logvar = false;
  const auto writer = FeatureStoreWriter::open(folder, info);
  CaptionTable table;
  for (int64_t i = 0; i < kSamples; ++i) {
    const std::string name = fmt::format("{}.png", i);
    writer->add({.name = name,
                 .caption = {},
                 .mean = std::vector<float>(48, static_cast<float>(i) / kSamples - 0.5f),
                 .logvar = {},
                 .lane = i < 9 ? 0 : 1});
    table.add_sample(
        name, i == 3 ? std::vector<Caption>() : std::vector<Caption>{{.text = fmt::format("number {}", i)}});
  }
  writer->finish();
  TextStoreWriter captions(text_store_folder(folder, "bert"),
                           test::small_text_info(kTextWidth, kMostTokens, 64), table);
  std::vector<int64_t> rows;
  std::vector<float> features;
  for (int64_t entry = 0; entry < table.num_entries(); ++entry) {
    rows.push_back(1 + entry % kMostTokens);
    features.insert(features.end(), static_cast<size_t>(rows.back() * kTextWidth),
                    static_cast<float>(entry) / kSamples);
  }
  captions.write_shard(0, rows, std::as_bytes(std::span(features)), 0);
  captions.finish(table);
}

TEST(ToyText, IsAFileAndARow) {
  add_denoiser_family(test::toy_family<ToyText>("toy-text", presets));
  const test::TempFolder folder;
  write_data(folder / "store");
  TrainOptions options = changed({},
                                 "model=toy-text image-size=4 text-dropout-prob=0.3 objective=flow "
                                 "sample-every=6 num-samples=3 num-sampling-steps=2");
  options.data.path = folder / "store";
  options.out = folder / "runs";
  test::try_family(options);
  EXPECT_FALSE(read_bytes(folder / "runs/whole/samples/step-00000006.png").empty());
}

}  // namespace
}  // namespace kiln
