// A U-Net of a program's own, with convolutions and a skip: one file and one row of the registry.
#include "core/aten.h"
#include "models/parts/layers.h"
#include "plan/toy_trial.h"
#include "sample/sample_options.h"

namespace kiln {
namespace {

constexpr int64_t kWidth = 8;

// (B, W, 1, 1) of the timesteps.
at::Tensor time_features(const at::Tensor& timesteps) {
  const at::Tensor places = at::arange(1, kWidth + 1, timesteps.options().dtype(at::kFloat));
  return (timesteps.to(at::kFloat).unsqueeze(1) * 0.01 * places).sin().unsqueeze(-1).unsqueeze(-1);
}

class ConvSegment : public Segment {
 protected:
  ConvSegment(const std::string& name, const BuildOptions& options) : options_(options) { name_ = name; }
  Conv2d conv(const std::string& name, int64_t in, int64_t out, int64_t stride) {
    return ParameterScope(parameters_, options_, name_ + ".").conv2d(name, in, out, 3, stride, 1);
  }
  at::Tensor run(const Conv2d& conv, const at::Tensor& x) const {
    return conv.forward(x, options_.compute_dtype).to(at::kFloat);
  }

 private:
  BuildOptions options_;
};

class Down : public ConvSegment {
 public:
  Down(int64_t channels, const BuildOptions& options)
      : ConvSegment("down", options),
        in_(conv("in", channels, kWidth, 1)),
        half_(conv("half", kWidth, kWidth, 2)) {}
  SkipUse skips() const override { return {.pushes = 1}; }
  State forward(const State&, const ModelInput& input) const override {
    const at::Tensor x = run(in_, input.x_t) + time_features(input.timesteps);
    return {.hidden = run(half_, at::silu(x)), .skips = {x}};
  }

 private:
  Conv2d in_, half_;
};

class Middle : public ConvSegment {
 public:
  explicit Middle(const BuildOptions& options)
      : ConvSegment("middle", options), conv_(conv("conv", kWidth, kWidth, 1)) {}
  State forward(const State& state, const ModelInput&) const override {
    return {.hidden = state.hidden + run(conv_, at::silu(state.hidden))};
  }

 private:
  Conv2d conv_;
};

class Up : public ConvSegment {
 public:
  Up(int64_t channels, const BuildOptions& options)
      : ConvSegment("up", options), out_(conv("out", 2 * kWidth, channels, 1)) {}
  SkipUse skips() const override { return {.pops = 1}; }
  State forward(const State& state, const ModelInput&) const override {
    const at::Tensor& skip = state.skips.back();
    const at::Tensor grown = at::upsample_nearest2d(state.hidden, {skip.size(2), skip.size(3)});
    return {.hidden = run(out_, at::silu(at::cat({grown, skip}, 1)))};
  }

 private:
  Conv2d out_;
};

class ToyUnet : public Denoiser {
 public:
  ToyUnet(const nlohmann::json& config, const BuildOptions& options) {
    const int64_t channels = config.at("channels");
    segments_.push_back(std::make_unique<Down>(channels, options));
    segments_.push_back(std::make_unique<Middle>(options));
    segments_.push_back(std::make_unique<Up>(channels, options));
    shape_ = {.in_channels = channels,
              .out_channels = channels,
              .input_size = config.at("side"),
              .size_multiple = 1,
              .guided_channels = channels};
  }
};

const std::map<std::string, nlohmann::json>& unet_presets() {
  static const std::map<std::string, nlohmann::json> table = {{"toy-unet", {{"channels", 3}, {"side", 16}}}};
  return table;
}

TEST(ToyUnet, IsAFileAndARow) {
  add_denoiser_family(test::toy_family<ToyUnet>("toy-unet", unet_presets));
  const test::TempFolder folder;
  TrainOptions options;
  options.model.name = "toy-unet";
  options.data.path = "synthetic";
  options.data.autoencoder = "pixels";
  options.data.image_size = 16;
  options.objective.name = "v_prediction";
  options.out = folder / "runs";
  test::try_family(options);

  SampleCommand sample;
  sample.run = folder / "runs/whole";
  sample.out = folder / "samples";
  sample.num_images = 2;
  sample.num_sampling_steps = 2;
  sample.cfg_scale = 1;
  ProcessGroup alone;
  run_sample_command(sample, alone);
  EXPECT_FALSE(read_bytes(folder / "samples/000001.png").empty());
}

}  // namespace
}  // namespace kiln
