// One global batch (or a rank's slice of one), drawn ahead of time by the loader. No torch here.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kiln {

// Row-major f32 and integer arrays for `size` images. Everything random in a training step is in here:
// the step is a pure function of (weights, batch).
struct Batch {
  int64_t first_position = 0;  // position of row 0 in the global stream of samples (= images seen before it)
  int64_t size = 0;            // B
  int64_t global_size = 0;     // of the global batch that these are rows of
  int64_t first_row = 0;       // of row 0 in it
  int64_t channels = 0, height = 0, width = 0;
  std::vector<float> x_0;    // (B, C, H, W) scaled latents or pixels in [-1, 1], posterior drawn, flipped
  std::vector<float> noise;  // (B, C, H, W) N(0, 1)
  std::vector<double> time_uniform;  // (B) in [0, 1): the objective maps it to a timestep
  std::vector<int64_t>
      class_labels;  // (B) after label dropout (dropped = the null class); empty if unconditional
  std::vector<int64_t> sample_ids;  // (B) index into the store, for messages
};

// Where batches come from. Batch g of the stream depends on (seed, g, global_batch) alone.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // The next global batch's rows for this rank; draws run ahead in worker threads.
  virtual std::shared_ptr<const Batch> next() = 0;
  // Continue from this position in the global stream of samples (a multiple of global_batch).
  virtual void seek(int64_t images_seen) = 0;
  virtual int64_t num_samples() const = 0;  // images per epoch (0: endless synthetic data)
  // Seconds next() spent waiting since the last call of this, and batches ready now (monitoring).
  virtual double take_stall_seconds() = 0;
  virtual int64_t ready() const = 0;
};

}  // namespace kiln
