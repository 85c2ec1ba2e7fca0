// The loss on samples that training does not see: --validation-data, --validation-share.
#pragma once
#include <functional>
#include <optional>
#include <string>

#include "train/dataset/training_data.h"
#include "train/setup.h"
#include "watch/monitor.h"

namespace kiln {

// Takes the first --validation-images of the samples, in an order that the seed decides. With pictures of
// several shapes it takes each shape's share. Each sample has its label and caption, and the same noise,
// timestep, flip and posterior sample every time. Neither the number of ranks nor the batch size changes any
// of this.
class Validation {
 public:
  // Opens options.validation.data: a feature store, or images that are encoded during training. `data` is
  // what is trained on; its autoencoder encodes the images. Throws Error saying what to do: another image
  // size, autoencoder or other classes than those, fewer samples than asked for, images and no autoencoder.
  Validation(const TrainOptions& options, const TrainingData& data, at::Device device);

  // Computes with the first EMA, as sampling does (without one: with the weights that compute), in the
  // compute dtype, with as many images at once as a step. All ranks get the same result, or nothing if `stop`
  // became true on one. A collective.
  std::optional<ValidationLoss> run(const Training& training, at::Device device,
                                    const std::function<bool()>& stop) const;

  const std::string& identity() const { return data_.identity; }  // names the samples' content
  const Pictures& pictures() const { return data_.pictures; }     // see ValidationData
  std::string weights() const;  // the weights that run() uses: "ema-0.9999", "model"

 private:
  // Losses of images and their places in the schedule.
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

// Returns the seed of a validation's draws. None equals the draw of the same position in training.
uint64_t validation_seed(uint64_t seed);

// Returns the loss of each of `batch`'s samples with the current weights, (B) on the model's device, as the
// step computes it, without gradients. A collective where weights are divided.
at::Tensor forward_losses(const Training& training, const StepBatch& batch);

}  // namespace kiln
