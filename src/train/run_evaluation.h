// Metrics of pictures that are drawn during training: --evaluate-every.
#pragma once
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "evaluate/evaluation.h"
#include "run/train_options.h"
#include "train/sample_grid.h"

namespace kiln {

inline constexpr int64_t kPicturesAtOnce = 32;  // through the feature net

class RunEvaluation {
 public:
  // Loads the feature net and measures the reference. Its pictures are cropped to the run's size unless they
  // come from an .npz. A collective. Throws Error: what load_feature_net() and PictureSource refuse.
  RunEvaluation(const TrainOptions& options, ProcessGroup& group, at::Device device);

  // Returns the net's weights, and the statistics and features of the reference, which are on the CPU.
  std::vector<at::Tensor> tensors() const;

  // Draws --evaluate-images pictures and measures them. They are drawn as the grids are, with the first EMA
  // and the same noise every time, and each rank draws its share. Returns what kiln evaluate would, the same
  // on every rank, or nothing if `stop` became true on one. A collective.
  std::optional<nlohmann::json> run(const TrainOptions& options, const GridSource& source,
                                    const std::function<bool()>& stop) const;

 private:
  std::shared_ptr<const FeatureNet> net_;
  MetricChoice choice_;
  PictureSet reference_;
};

}  // namespace kiln
