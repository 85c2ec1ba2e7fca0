#include "optim/came.h"

#include <cmath>

#include "core/error.h"
#include "core/json_config.h"
#include "optim/came_update.h"

namespace kiln {

std::vector<StateBuffer> Came::state(const FlatLayout& layout) const {
  std::vector<StateBuffer> buffers(6);
  constexpr const char* kNames[] = {"exp_avg",        "exp_avg_sq",      "exp_avg_sq_row",
                                    "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"};
  for (size_t i = 0; i < buffers.size(); ++i) buffers[i].name = kNames[i];
  for (const FlatSlot& slot : layout.slots) {
    const CameShape seen = came_shape(options_.variant, slot.shape);
    const int64_t elements = seen.rows * seen.columns;
    const StateSlot nothing{.shape = {}, .elements = elements},
        rows{.shape = seen.row_shape, .elements = elements, .values = seen.has_rows() ? seen.rows : 0},
        columns{.shape = seen.column_shape, .elements = elements, .values = seen.columns};
    buffers[kCameSquare].packed.push_back(seen.is_factored ? nothing : columns);
    buffers[kCameSquareRow].packed.push_back(rows);
    buffers[kCameSquareColumn].packed.push_back(seen.is_factored ? columns : nothing);
    buffers[kCameDistanceRow].packed.push_back(rows);
    buffers[kCameDistanceColumn].packed.push_back(seen.is_factored ? columns : nothing);
  }
  return buffers;
}

void Came::step(OptimizerSlice& slice, const OptimizerStep& step) const {
  CameUpdate(options_, slice, state(*slice.layout), step).run();
}

CameOptions parse_came(const nlohmann::json& config, CameVariant variant) {
  const JsonConfig reader("came", config);
  CameOptions options{.variant = variant};
  if (reader.has("variant"))
    options.variant = parse_choice<CameVariant>("came", "variant", reader.get<std::string>("variant", ""));
  const auto betas = reader.get("betas", std::vector<double>{options.beta1, options.beta2, options.beta3});
  if (betas.size() != 3) fail("came", "betas expects 3 numbers, got {}", betas.size());
  for (const double beta : betas)
    if (!(beta >= 0 && beta < 1)) fail("came", "betas must be in [0, 1), got {}", beta);
  const auto eps = reader.get("eps", std::vector<double>{options.eps_square, options.eps_distance});
  if (eps.size() != 2) fail("came", "eps expects 2 numbers, got {}", eps.size());
  for (const double value : eps)  // with 0, a gradient of zeros would be divided by zero in f32
    if (!(static_cast<float>(value) > 0) || !std::isfinite(value))
      fail("came", "eps must be positive in f32, got {}", value);
  options.beta1 = betas[0];
  options.beta2 = betas[1];
  options.beta3 = betas[2];
  options.eps_square = eps[0];
  options.eps_distance = eps[1];
  options.clip_threshold = reader.get("clip_threshold", options.clip_threshold);
  if (!(options.clip_threshold > 0))
    fail("came", "clip_threshold must be positive, got {}", options.clip_threshold);
  options.weight_decay = reader.get("weight_decay", options.weight_decay);
  if (!(options.weight_decay >= 0))
    fail("came", "weight_decay must not be negative, got {}", options.weight_decay);
  return options;
}

}  // namespace kiln
