#include "diffusion/samplers/conversion.h"

#include <cmath>

#include "core/aten.h"
#include "core/error.h"

namespace kiln {

PredictionType parse_prediction_type(const std::string& who, const std::string& name) {
  if (name == "epsilon") return PredictionType::kEpsilon;
  if (name == "v_prediction") return PredictionType::kVPrediction;
  if (name == "sample") return PredictionType::kSample;
  if (name == "flow_prediction") return PredictionType::kVelocity;
  fail(who,
       "expected prediction_type to be one of epsilon, v_prediction, sample, flow_prediction, got \"{}\"",
       name);
}

at::Tensor to_x_0(PredictionType type, const at::Tensor& output, const at::Tensor& x_t, double alpha_t,
                  double sigma_t) {
  switch (type) {
    case PredictionType::kEpsilon:
      return (x_t - sigma_t * output) / alpha_t;
    case PredictionType::kVPrediction:
      return alpha_t * x_t - sigma_t * output;
    case PredictionType::kSample:
      return output;
    case PredictionType::kVelocity:
      return x_t - sigma_t * output;
  }
  return output;
}

at::Tensor to_epsilon(PredictionType type, const at::Tensor& output, const at::Tensor& x_t, double alpha_t,
                      double sigma_t) {
  switch (type) {
    case PredictionType::kEpsilon:
      return output;
    case PredictionType::kVPrediction:
      return alpha_t * output + sigma_t * x_t;
    case PredictionType::kSample:
      return (x_t - alpha_t * output) / sigma_t;
    case PredictionType::kVelocity:
      return x_t + (1 - sigma_t) * output;
  }
  return output;
}

at::Tensor noised_at(double alpha_bar, const at::Tensor& x_0, const at::Tensor& noise) {
  return std::sqrt(alpha_bar) * x_0 + std::sqrt(1 - alpha_bar) * noise;
}

}  // namespace kiln
