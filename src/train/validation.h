// The loss on samples that training does not see: --validation-data.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "train/validation_data.h"

namespace kiln {

struct ValidationLoss {
  int64_t num_images = 0;
  double loss = 0;                    // of the objective, mean over the images
  std::array<double, 4> quartiles{};  // the same by quarter of the schedule, cleanest first; NaN: no image
};

// The first --validation-images of the samples in an order of the seed's, each with noise, timestep, flip and
// posterior sample of its own that are the same every time, and with its label. Neither the number of ranks
// nor the batch size changes any of it.
class Validation {
 public:
  // Opens options.validation_data. `data`: what is trained on. Throws Error: what open_validation_data()
  // refuses, fewer images than asked for.
  Validation(const TrainOptions& options, const TrainingData& data, at::Device device);

  // With the first EMA, from which samples are drawn and which is what a run is for (without one: the weights
  // that compute), in the compute dtype. As many images at once as in the step. The same result on every
  // rank; nothing when `stop` became true on one. A collective.
  std::optional<ValidationLoss> run(const Training& training, at::Device device,
                                    const std::function<bool()>& stop) const;

  const std::string& identity() const { return data_.identity; }  // names the samples' content
  std::string weights() const;  // what run() computes with: "ema-0.9999", "model"

 private:
  std::optional<std::vector<double>> losses(const Training& training, at::Device device,
                                            const std::function<bool()>& stop) const;

  TrainOptions options_;
  ValidationData data_;
  int64_t num_images_ = 0;
  uint64_t seed_ = 0;
};

// The seed of its draws: none of them is that of the same position in training.
uint64_t validation_seed(uint64_t seed);

// The loss of each of `batch`'s samples with the weights as they are, (B) on the device of the model. What
// the step computes, without gradients. Where weights are divided, a collective.
at::Tensor forward_losses(const Training& training, const StepBatch& batch);

}  // namespace kiln
