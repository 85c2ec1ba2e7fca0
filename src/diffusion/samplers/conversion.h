// Converts a model's prediction to x_0 and epsilon.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace kiln {

enum class PredictionType { kEpsilon, kVPrediction, kSample, kVelocity };

// "epsilon" | "v_prediction" | "sample" | "flow_prediction". Throws Error.
PredictionType parse_prediction_type(const std::string& who, const std::string& name);

// Convert for x_t = alpha_t x_0 + sigma_t epsilon. `output` and `x_t` (B, C, H, W).
at::Tensor to_x_0(PredictionType type, const at::Tensor& output, const at::Tensor& x_t, double alpha_t,
                  double sigma_t);
at::Tensor to_epsilon(PredictionType type, const at::Tensor& output, const at::Tensor& x_t, double alpha_t,
                      double sigma_t);

// Returns x_t from x_0 and N(0, 1) noise at a cumulative alpha.
at::Tensor noised_at(double alpha_bar, const at::Tensor& x_0, const at::Tensor& noise);

}  // namespace kiln
