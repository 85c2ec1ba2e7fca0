// Statistics, scores and features of a set of pictures, computed by all ranks together.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "evaluate/metrics.h"
#include "models/features/feature_nets.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Reads the samples or the reference pictures from a folder or an .npz, in a fixed order.
class PictureSource {
 public:
  // Opens a data set of any layout (docs/datasets.md), a folder of pictures (without the grid.png of kiln
  // sample) or an .npz whose arr_0 is u8 (N, H, W, 3). `crop`: side of DiT's centre crop in pixels, 0 for
  // none. `skips_broken`: pictures that are not there or cannot be decoded are named on stderr and left out.
  // Throws Error.
  static std::unique_ptr<PictureSource> open(const std::string& path, int64_t crop,
                                             bool skips_broken = false);
  virtual ~PictureSource() = default;

  virtual int64_t size() const = 0;  // with those that are skipped
  // Passes pictures [first, last) to `sink` in batches (B, 3, H, W) u8 of at most `batch`, each of one size.
  // Throws Error naming a picture that cannot be read, unless such pictures are skipped.
  using Sink = std::function<void(int64_t first, const at::Tensor& pictures)>;
  virtual void for_each_batch(int64_t first, int64_t last, int64_t batch, const Sink& sink) = 0;
};

struct PictureSet {
  int64_t count = 0;          // those that were measured; 0 if not known
  std::string fingerprint{};  // "pixels:..." of pictures, "statistics:..." of a file of statistics
  std::optional<GaussianStatistics> gaussian{}, spatial{};
  std::optional<InceptionScore> score{};
  at::Tensor features{};  // (N, D) f32 on the CPU; undefined unless asked for
};

// The parts of a PictureSet to compute.
struct PictureSetNeeds {
  bool gaussian = false, spatial = false, features = false;
  int64_t score_splits = 0;  // 0: no score
};

// Sums over the pictures of one rank.
class PictureSetSums {
 public:
  // `num_pictures`: size of the whole set.
  PictureSetSums(const PictureSetNeeds& needs, int64_t num_pictures);
  // Adds pictures (B, 3, H, W) u8 and their features. `indices`: their places in the set.
  void add(const std::vector<int64_t>& indices, const at::Tensor& pictures, const PictureFeatures& made);
  // Joins the sums of all ranks. The result is the same on each. A collective. Throws Error for fewer than
  // two pictures.
  PictureSet finish(ProcessGroup& group);

 private:
  PictureSetNeeds needs_;
  FeatureStatistics gaussian_, spatial_;
  std::optional<InceptionScoreSums> score_;
  std::vector<at::Tensor> features_;
  int64_t num_added_ = 0;
  uint64_t checksum_ = 0;
};

struct ExtractionOptions {
  int64_t num_pictures = 0;  // only the first ones; 0: all
  int64_t batch = 32;
  std::function<void(int64_t done, int64_t total)> progress{};  // counts this rank's share; optional
};

// Measures pictures. Every rank takes a share; the result is the same on all. A collective. Throws Error:
// fewer pictures than asked for, one that cannot be read.
PictureSet measure_pictures(const FeatureNet& net, PictureSource& source, const PictureSetNeeds& needs,
                            const ExtractionOptions& options, ProcessGroup& group);

// Reads mu and sigma (pytorch-fid's files), and mu_s and sigma_s (ADM's files), if present. Throws Error:
// neither pair is there, or shapes do not fit each other.
PictureSet read_statistics(const std::string& path);
// Writes the statistics of a set to such a file. Throws Error.
void write_statistics(const std::string& path, const PictureSet& set);

}  // namespace kiln
