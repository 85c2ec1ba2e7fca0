// Metrics of pictures that are drawn during training: --evaluate-every.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
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

// Captions of a run's own data, for pictures that are to be judged beside that data.
struct RunCaptions {
  std::vector<std::string> texts{};  // without the prefix and suffix that the run puts around captions
  std::string origin{};              // "captions that --validation-share 0.1 holds out of store"
};

// Returns up to `count` captions spread over the samples that the run in `run` validates on, else over those
// that it trains on. No texts if the run takes no captions or its data are synthetic. Throws Error saying to
// give --prompts: the data are not there any more, or have no captions.
RunCaptions captions_of_run(const std::string& run, int64_t count);

}  // namespace kiln
