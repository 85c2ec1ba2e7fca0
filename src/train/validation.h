// The loss on samples that training does not see: --validation-data.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "train/training_data.h"
#include "watch/monitor.h"

namespace kiln {

// The samples behind --validation-data.
struct ValidationData {
  std::vector<int64_t> samples_of_lane{};  // one lane each shape
  std::string identity{};                  // names the samples' content
  BatchMaker batches{};
  std::vector<std::string> notes{};  // that the user of the run should read
};

// Takes the first --validation-images of the samples, in an order that the seed decides; of pictures in
// several shapes each shape's share of them. Each has its label and caption, and noise, timestep, flip and
// posterior sample that are the same every time. Neither the number of ranks nor the batch size changes any
// of it.
class Validation {
 public:
  // Opens options.validation.data: a feature store, or images that are encoded on the way. `data`: what is
  // trained on, whose autoencoder encodes the images. Throws Error saying what to do: another image size,
  // autoencoder or other classes than those, fewer samples than asked for, images and no autoencoder.
  Validation(const TrainOptions& options, const TrainingData& data, at::Device device);

  // Computes with the first EMA, which samples are drawn from (without one: with the weights that compute),
  // in the compute dtype, and with as many images at once as a step. All ranks get the same result, or
  // nothing when `stop` became true on one. A collective.
  std::optional<ValidationLoss> run(const Training& training, at::Device device,
                                    const std::function<bool()>& stop) const;

  const std::string& identity() const { return data_.identity; }  // names the samples' content
  const std::vector<std::string>& notes() const { return data_.notes; }
  std::string weights() const;  // what run() computes with: "ema-0.9999", "model"

 private:
  // Losses and places in the schedule, image by image.
  struct Losses {
    std::vector<double> losses{}, positions{};
  };
  std::optional<Losses> losses_of(int64_t lane, const Training& training, at::Device device,
                                  const std::function<bool()>& stop) const;

  TrainOptions options_;
  ValidationData data_;
  std::vector<int64_t> images_of_lane_;
  uint64_t seed_ = 0;
};

// The seed of a validation's draws: none equals the draw of the same position in training.
uint64_t validation_seed(uint64_t seed);

// Returns the loss of each of `batch`'s samples with the weights as they are, (B) on the device of the model:
// what the step computes, without gradients. A collective where weights are divided.
at::Tensor forward_losses(const Training& training, const StepBatch& batch);

}  // namespace kiln
