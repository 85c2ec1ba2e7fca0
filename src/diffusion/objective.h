// Training objectives: what x_t is, what the model is told, what its output should be, and the loss.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kiln {

struct NoisedBatch {
  at::Tensor x_t;        // (B, C, H, W) f32
  at::Tensor model_t;    // (B) f32, what the model is given
  at::Tensor target;     // (B, C, H, W) f32; what the objective's loss compares with
  at::Tensor timesteps;  // (B) i64 index, or f32 sigma (flow): kept for the loss and for loss-by-quartile
};

struct LossTerms {
  at::Tensor loss;  // (B) f32, differentiable; the step's loss is the mean over the global batch
  at::Tensor mse;   // (B), undefined where the objective has none
  at::Tensor vb;    // (B), iddpm
};

class Objective {
 public:
  virtual ~Objective() = default;
  // u (B) f64 uniforms in [0,1) from the loader -> what the objective calls t: i64 indices, or f32 sigma
  // (flow).
  virtual at::Tensor timesteps(const at::Tensor& u) const = 0;
  virtual NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor& noise,
                                const at::Tensor& timesteps) const = 0;
  // prediction (B, C or 2C, H, W) f32.
  virtual LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                         const NoisedBatch& noised) const = 0;
  // Fraction of the schedule in [0, 1] of each t, for loss per quartile.
  virtual at::Tensor position(const at::Tensor& timesteps) const = 0;
  virtual bool learns_sigma() const = 0;
};

// config: {"type": "iddpm" | "ddpm" | "flow", ...}: docs/objectives.md lists the keys of each type. Throws
// Error.
std::unique_ptr<Objective> make_objective(const nlohmann::json& config);
// The config behind a --objective name: iddpm | epsilon | v_prediction | x_0 | flow.
nlohmann::json objective_config(const std::string& name);
std::vector<std::string> objective_names();

}  // namespace kiln
