// Training objectives: x_t, the inputs and the target of the model, and the loss.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/json.h"

namespace kiln {

class Segment;

struct NoisedBatch {
  at::Tensor x_t;        // (B, C, H, W) f32
  at::Tensor model_t;    // (B) f32, the timestep given to the model
  at::Tensor target;     // (B, C, H, W) f32; the loss compares with this
  at::Tensor timesteps;  // (B) i64 index, or f32 sigma (flow); for the loss and for loss by quartile
  // (B, C, H, W) f32: another sample's target, for losses that compare samples. Undefined: such a loss leaves
  // out what it compares with others, as for held-out samples.
  at::Tensor other_target{};
  // For losses with taps: the hidden tensors that Objective::taps() names, in that order, differentiable.
  // Empty: such a loss leaves out what it makes of them, as for held-out samples.
  std::vector<at::Tensor> taps{};
};

// Losses of samples.
struct LossTerms {
  at::Tensor loss;  // (B) f32, differentiable; the step's loss is the mean over the global batch
  std::vector<at::Tensor> terms{};  // (B) each: what the loss is made of, in the order of term_names()
};

class Objective {
 public:
  virtual ~Objective() = default;
  // Turns the loader's uniforms u (B), f64 in [0,1), into timesteps: i64 indices, or f32 sigma (flow).
  virtual at::Tensor timesteps(const at::Tensor& u) const = 0;
  virtual NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor& noise,
                                const at::Tensor& timesteps) const = 0;
  // Returns the names of the loss's terms, such as "mse". Runs log each by its name if there are several.
  virtual std::vector<std::string> term_names() const = 0;
  // prediction (B, C or 2C, H, W) f32.
  virtual LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                         const NoisedBatch& noised) const = 0;
  // Returns each timestep's fraction of the schedule in [0, 1], for loss per quartile.
  virtual at::Tensor position(const at::Tensor& timesteps) const = 0;
  virtual bool learns_sigma() const = 0;
  // Returns true if the loss of a sample takes another sample's target too. A batch then needs a halo.
  virtual bool compares_samples() const { return false; }
  // Returns the segments whose hidden output the loss takes besides the prediction, as indices into
  // Denoiser::segments().
  virtual std::vector<size_t> taps() const { return {}; }
  // Returns the network with weights of its own that the loss runs where it has its taps, or null. The
  // weights train and resume with the model's. They have no average and are in no weights file of the model.
  virtual const Segment* head() const { return nullptr; }
};

// config: {"type": "iddpm" | "ddpm" | "flow", ...}. docs/objectives.md lists the keys of each type. Throws
// Error.
std::unique_ptr<Objective> make_objective(const nlohmann::json& config);
// Returns the config of a --objective name: iddpm | epsilon | v_prediction | x_0 | flow.
nlohmann::json objective_config(const std::string& name);
std::vector<std::string> objective_names();

}  // namespace kiln
