// Metrics of pictures that a run in training draws: --evaluate-every.
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
  // Loads the feature net and measures the reference, whose pictures are cropped to the run's size unless
  // they are an .npz's. A collective. Throws Error: what load_feature_net() and PictureSource refuse.
  RunEvaluation(const TrainOptions& options, ProcessGroup& group, at::Device device);

  // The net's weights, and on the CPU the statistics and features of the reference.
  std::vector<at::Tensor> tensors() const;

  // Draws --evaluate-images pictures as the grids are drawn, with the first EMA and the same noise every
  // time, each rank its share, and measures them. The same result on every rank, as of kiln evaluate; nothing
  // when `stop` became true on one. A collective.
  std::optional<nlohmann::json> run(const TrainOptions& options, const GridSource& source,
                                    const std::function<bool()>& stop) const;

 private:
  std::shared_ptr<const FeatureNet> net_;
  MetricChoice choice_;
  PictureSet reference_;
};

}  // namespace kiln
