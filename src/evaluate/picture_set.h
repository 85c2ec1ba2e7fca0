// A set of pictures as metrics see it: statistics, scores and features, computed by all ranks together.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "evaluate/metrics.h"
#include "evaluate/pictures.h"
#include "models/features/feature_net.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

struct PictureSet {
  int64_t count = 0;          // 0: not known
  std::string fingerprint{};  // "pixels:..." of pictures, "statistics:..." of a file of statistics
  std::optional<GaussianStatistics> gaussian{}, spatial{};
  std::optional<InceptionScore> score{};
  at::Tensor features{};  // (N, D) f32 on the CPU; undefined unless asked for
};

// What a set is wanted for.
struct PictureSetNeeds {
  bool gaussian = false, spatial = false, features = false;
  int64_t score_splits = 0;  // 0: no score
};

// What one rank has seen of a set.
class PictureSetSums {
 public:
  // `num_pictures`: of the whole set.
  PictureSetSums(const PictureSetNeeds& needs, int64_t num_pictures);
  // pictures (B, 3, H, W) u8 and what the net made of them; `indices`: their places in the set.
  void add(const std::vector<int64_t>& indices, const at::Tensor& pictures, const PictureFeatures& made);
  // Joins the sets of all ranks; the result is the same on each. A collective. Throws Error for fewer than
  // two pictures.
  PictureSet finish(ProcessGroup& group);

 private:
  PictureSetNeeds needs_;
  int64_t num_pictures_;
  FeatureStatistics gaussian_, spatial_;
  std::optional<InceptionScoreSums> score_;
  std::vector<at::Tensor> features_;
  uint64_t checksum_ = 0;
};

struct ExtractionOptions {
  int64_t num_pictures = 0;  // the first so many; 0: all
  int64_t batch = 32;
  std::function<void(int64_t done, int64_t total)> progress{};  // of this rank's share; optional
};

// Every rank takes its share; the result is the same on all. A collective. Throws Error: fewer pictures than
// asked for, one that cannot be read.
PictureSet measure_pictures(const FeatureNet& net, PictureSource& source, const PictureSetNeeds& needs,
                            const ExtractionOptions& options, ProcessGroup& group);

// mu and sigma of a file of pytorch-fid's, with mu_s and sigma_s of ADM's. Absent ones are left out. Throws
// Error: neither, shapes that do not fit each other.
PictureSet read_statistics(const std::string& path);
// The same file, for PictureSets with statistics. Throws Error.
void write_statistics(const std::string& path, const PictureSet& set);

}  // namespace kiln
