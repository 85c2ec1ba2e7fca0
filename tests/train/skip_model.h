// A small denoiser with skip connections, as a U-Net has them: what one segment puts aside, a later one takes
// up.
#pragma once

#include <memory>
#include <string>

#include "core/aten.h"
#include "models/model.h"

namespace kiln::test {

// in -> down -> middle -> up -> out on tokens (B, 64, D); "down" and "in" leave a skip each, "up" and "out"
// use one.
class SkipModel : public Denoiser {
 public:
  static constexpr int64_t kChannels = 4, kSide = 8, kHidden = 24, kNumSegments = 5;

  explicit SkipModel(const BuildOptions& options) {
    shape_ = {.in_channels = kChannels, .out_channels = kChannels, .input_size = kSide};
    segments_.push_back(std::make_unique<In>(options));
    segments_.push_back(std::make_unique<Down>(options));
    segments_.push_back(std::make_unique<Middle>(options));
    segments_.push_back(std::make_unique<Up>(options));
    segments_.push_back(std::make_unique<Out>(options));
  }

 private:
  class Part : public Segment {
   protected:
    Part(const std::string& name, const BuildOptions& options) : device_(options.device) { name_ = name; }

    std::shared_ptr<Parameter> add(const std::string& key, at::IntArrayRef sizes) {
      parameters_.push_back(std::make_shared<Parameter>(Parameter{
          .key = name_ + "." + key, .value = at::empty(sizes, device_), .init = Init::normal(0.05)}));
      return parameters_.back();
    }
    // In the weights' dtype; the stream stays f32.
    static at::Tensor linear(const at::Tensor& x, const std::shared_ptr<Parameter>& weight) {
      return at::linear(x.to(weight->value.scalar_type()), weight->value).to(at::kFloat);
    }

   private:
    at::Device device_;
  };

  class In : public Part {
   public:
    explicit In(const BuildOptions& options)
        : Part("in", options),
          pixels_(add("pixels", {kHidden, kChannels})),
          time_(add("time", {kHidden, 2})) {}
    SkipUse skips() const override { return {.pushes = 1}; }
    State forward(const State&, const ModelInput& input) const override {
      const at::Tensor t = input.timesteps.to(at::kFloat) * 0.01;
      const at::Tensor time = linear(at::stack({t.sin(), t.cos()}, 1), time_);
      State state;
      state.hidden = linear(input.x_t.flatten(2).transpose(1, 2), pixels_) + time.unsqueeze(1);
      state.skips = {state.hidden};
      return state;
    }

   private:
    std::shared_ptr<Parameter> pixels_, time_;
  };

  class Down : public Part {
   public:
    explicit Down(const BuildOptions& options)
        : Part("down", options), weight_(add("weight", {kHidden, kHidden})) {}
    SkipUse skips() const override { return {.pushes = 1}; }
    State forward(const State& before, const ModelInput&) const override {
      State state = before;
      state.hidden = before.hidden + at::gelu(linear(before.hidden, weight_));
      state.skips.push_back(state.hidden);
      return state;
    }

   private:
    std::shared_ptr<Parameter> weight_;
  };

  class Middle : public Part {
   public:
    explicit Middle(const BuildOptions& options)
        : Part("middle", options),
          widen_(add("widen", {2 * kHidden, kHidden})),
          narrow_(add("narrow", {kHidden, 2 * kHidden})) {}
    State forward(const State& before, const ModelInput&) const override {
      State state = before;
      state.hidden = before.hidden + linear(at::gelu(linear(before.hidden, widen_)), narrow_);
      return state;
    }

   private:
    std::shared_ptr<Parameter> widen_, narrow_;
  };

  class Up : public Part {
   public:
    explicit Up(const BuildOptions& options)
        : Part("up", options), weight_(add("weight", {kHidden, 2 * kHidden})) {}
    SkipUse skips() const override { return {.pops = 1}; }
    State forward(const State& before, const ModelInput&) const override {
      State state = before;
      state.hidden = before.hidden + linear(at::cat({before.hidden, before.skips.back()}, -1), weight_);
      state.skips.pop_back();
      return state;
    }

   private:
    std::shared_ptr<Parameter> weight_;
  };

  class Out : public Part {
   public:
    explicit Out(const BuildOptions& options)
        : Part("out", options), weight_(add("weight", {kChannels, 2 * kHidden})) {}
    SkipUse skips() const override { return {.pops = 1}; }
    State forward(const State& before, const ModelInput&) const override {
      const at::Tensor tokens = linear(at::cat({before.hidden, before.skips.back()}, -1), weight_);
      State state;
      state.hidden = tokens.transpose(1, 2).reshape({tokens.size(0), kChannels, kSide, kSide});
      return state;
    }

   private:
    std::shared_ptr<Parameter> weight_;
  };
};

}  // namespace kiln::test
