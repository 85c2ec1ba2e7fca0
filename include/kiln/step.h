// Trains a model on batches of your own, on one rank. Needs no torch.
#pragma once
#include <functional>
#include <memory>

#include "kiln/options.h"

namespace kiln::v0 {

// A global batch in host memory, row-major.
struct Batch {
  std::vector<float> x_0;  // (B, channels, height, width) as the model sees them: scaled and shifted
  std::vector<int64_t> class_labels;  // (B); empty for a model without labels
  // Drawn by the seed and the position in the stream of samples where they are empty.
  std::vector<float> noise;   // (B, channels, height, width)
  std::vector<double> times;  // (B) in [0, 1): the objective maps them to timesteps
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual Batch next() = 0;
};

struct StepResult {
  int64_t step = 0;  // from 1 on
  double loss = 0;   // mean over the batch
  double grad_norm = 0;
  double lr = 0;
  bool applied = false;  // false: loss or gradient was not finite, nothing moved
};

// A model with its objective, optimizer and averages. The options are those of `kiln train`, "data" and "out"
// left out: the batches come from you and nothing is written. Models that take captions are refused.
class Trainer {
 public:
  explicit Trainer(const Options& options);
  ~Trainer();

  // Of the batches that it takes.
  struct Shape {
    int64_t rows = 0;  // "global-batch"
    int64_t channels = 0, height = 0, width = 0;
    int64_t num_classes = 0;
  };
  Shape shape() const;

  // One step on one batch: labels are dropped with the model's probability, and the learning rate is that of
  // the schedule. The same batches give the same bits.
  StepResult step(const Batch& batch);
  void train(BatchSource& source, int64_t steps, const std::function<void(const StepResult&)>& report = {});

  // Writes a safetensors file with the record that `kiln sample`, `convert` and kiln::v0::Model read.
  // `average`: the first EMA, if there is one.
  void save_weights(const std::string& path, bool average = true) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kiln::v0
