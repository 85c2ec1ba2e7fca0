#include <cmath>
#include <deque>

#include "core/aten.h"
#include "core/error.h"
#include "diffusion/losses.h"
#include "diffusion/samplers/conversion.h"
#include "diffusion/samplers/sampler_types.h"
#include "diffusion/samplers/spacing.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

constexpr int64_t kPndmOrder = 4;
constexpr int64_t kRungeKuttaCalls = 12;  // three steps

// A model call and the step after it, which takes x from one timestep to another (negative: clean).
struct Call {
  int64_t timestep, from, to;
};

// Returns the calls of multistep steps, from spaced[first] on.
std::vector<Call> multistep_calls(const std::vector<int64_t>& spaced, size_t first, int64_t stride,
                                  bool consecutive) {
  std::vector<Call> calls;
  for (size_t i = first; i < spaced.size(); ++i) {
    const int64_t next = i + 1 < spaced.size() ? spaced[i + 1] : -1;
    calls.push_back({spaced[i], spaced[i], consecutive ? next : spaced[i] - stride});
  }
  return calls;
}

// Calls the model twice at the end of the first step, to repeat that step with the mean of the slopes at its
// ends.
std::vector<Call> plms_calls(const std::vector<int64_t>& spaced, int64_t stride, bool consecutive) {
  std::vector<Call> calls = multistep_calls(spaced, 0, stride, consecutive);
  if (spaced.size() > 1) {
    const int64_t end = spaced[1];
    calls.insert(calls.begin() + 1, Call{end, consecutive ? spaced[0] : end + stride, end});
  }
  return calls;
}

// Runge-Kutta calls its model at the ends and twice in the middle of an interval.
std::vector<Call> runge_kutta_calls(const std::vector<int64_t>& spaced, int64_t stride, bool consecutive) {
  std::vector<Call> calls;
  const int64_t half = stride / 2;
  for (int64_t i = 0; i + 1 < kPndmOrder; ++i) {
    const int64_t start = spaced[i], middle = spaced[i + 1] + half, end = spaced[i + 1];
    calls.insert(calls.end(), {{start, start, start - half},
                               {middle, start, middle},
                               {middle, start, middle - half},
                               {end, start, end}});
  }
  const std::vector<Call> rest = multistep_calls(spaced, kPndmOrder - 1, stride, consecutive);
  calls.insert(calls.end(), rest.begin(), rest.end());
  return calls;
}

class PndmSampler : public Sampler {
 public:
  PndmSampler(const JsonConfig& config, const JsonConfig& scheduler)
      : alpha_bars_(diffusers_alpha_bars(scheduler)),
        type_(parse_prediction_type("pndm", scheduler.get<std::string>("prediction_type", "epsilon"))),
        final_alpha_bar_(scheduler.get("set_alpha_to_one", false) ? 1.0 : alpha_bars_.front()),
        skips_runge_kutta_(scheduler.get("skip_prk_steps", false)) {
    if (type_ == PredictionType::kVelocity) fail("pndm", "flow_prediction needs flow_euler, unipc or dpmpp");
    const int64_t num_train_timesteps = static_cast<int64_t>(alpha_bars_.size());
    const int64_t steps = num_steps(config, num_train_timesteps);
    stride_ = num_train_timesteps / steps;
    spaced_ = spaced_timesteps(scheduler, steps, "leading");
    consecutive_ = config.get("consecutive", false);
    make_calls();
  }

  const std::vector<double>& timesteps() const override { return timesteps_; }
  bool stochastic() const override { return false; }
  int64_t step_count() const override { return static_cast<int64_t>(spaced_.size()); }
  // The first step left becomes a first step, since there is no history of skipped steps.
  void skip(int64_t count) override {
    drop_first(spaced_, count);
    make_calls();
  }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    return noised_at(alpha_bars_[static_cast<size_t>(spaced_[0])], x_0, noise);
  }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                  const StepNoiseFn&) override {
    if (i == 0) history_.clear();
    const at::Tensor output = predicted_channels("pndm", model_output, x.size(1));
    return i < kRungeKuttaCalls && !skips_runge_kutta_ ? runge_kutta(i, x, output) : multistep(i, x, output);
  }

 private:
  void make_calls() {
    if (!skips_runge_kutta_ && step_count() < kPndmOrder)
      fail("pndm", "expected at least {} sampling steps without skip_prk_steps, got {}", kPndmOrder,
           step_count());
    calls_ = skips_runge_kutta_ ? plms_calls(spaced_, stride_, consecutive_)
                                : runge_kutta_calls(spaced_, stride_, consecutive_);
    timesteps_.clear();
    for (const Call& call : calls_) timesteps_.push_back(static_cast<double>(call.timestep));
  }

  at::Tensor runge_kutta(int64_t i, const at::Tensor& x, const at::Tensor& output) {
    at::Tensor slope = output;
    if (i % 4 == 0) {
      sum_ = output / 6;
      start_ = x;
      remember(output);
    } else if (i % 4 < 3) {
      sum_ = sum_ + output / 3;
    } else {
      slope = sum_ + output / 6;
    }
    return transferred(start_, calls_[i], slope);
  }

  at::Tensor multistep(int64_t i, const at::Tensor& x, const at::Tensor& output) {
    const Call& call = calls_[i];
    if (skips_runge_kutta_ && i == 1) return transferred(start_, call, (output + history_[0]) / 2);
    remember(output);
    if (history_.size() == 1) start_ = x;
    return transferred(x, call, extrapolated());
  }

  void remember(const at::Tensor& output) {
    history_.push_front(output);
    if (history_.size() > kPndmOrder) history_.pop_back();
  }

  // Extrapolates by Adams-Bashforth, of the order that the history allows.
  at::Tensor extrapolated() const {
    const auto& h = history_;
    switch (h.size()) {
      case 1:
        return h[0];
      case 2:
        return (3 * h[0] - h[1]) / 2;
      case 3:
        return (23 * h[0] - 16 * h[1] + 5 * h[2]) / 12;
      default:
        return (55 * h[0] - 59 * h[1] + 37 * h[2] - 9 * h[3]) / 24;
    }
  }

  // Moves x along `slope` by eq. 9 of the paper.
  at::Tensor transferred(const at::Tensor& x, const Call& call, const at::Tensor& slope) const {
    const double bar = alpha_bars_.at(static_cast<size_t>(call.from));
    const double next = call.to >= 0 ? alpha_bars_[static_cast<size_t>(call.to)] : final_alpha_bar_;
    const at::Tensor epsilon = to_epsilon(type_, slope, x, std::sqrt(bar), std::sqrt(1 - bar));
    const double divisor = bar * std::sqrt(1 - next) + std::sqrt(bar * (1 - bar) * next);
    return std::sqrt(next / bar) * x - (next - bar) / divisor * epsilon;
  }

  std::vector<double> alpha_bars_;
  PredictionType type_;
  double final_alpha_bar_;
  bool skips_runge_kutta_, consecutive_ = false;
  int64_t stride_ = 0;           // of a diffusers step, in timesteps
  std::vector<int64_t> spaced_;  // where steps begin
  std::vector<Call> calls_;
  std::vector<double> timesteps_;
  std::deque<at::Tensor> history_;  // model outputs, newest first
  at::Tensor sum_, start_;          // of the current interval
};

}  // namespace

std::unique_ptr<Sampler> make_pndm_sampler(const nlohmann::json& config) {
  const JsonConfig options("pndm", config);
  const nlohmann::json scheduler = options.object("scheduler");
  return std::make_unique<PndmSampler>(options, JsonConfig("pndm", scheduler));
}

}  // namespace kiln
