// One global batch (or a rank's slice of one), drawn ahead of time by the loader. No torch here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/store/data_shape.h"
#include "data/store/sample_order.h"

namespace kiln {

// Row-major f32 and integer arrays for `size` images. Everything random in a training step is in here:
// the step is a pure function of (weights, batch).
struct Batch {
  int64_t first_position = 0;  // position of row 0 in the global stream of samples (= images seen before it)
  int64_t global_size = 0;     // of the global batch that these are rows of
  int64_t first_row = 0;       // of row 0 in it
  BatchShape shape{};          // of the arrays below, shape.rows = B; those that it lacks are empty
  std::vector<float> x_0;      // (B, C, H, W) scaled latents or pixels in [-1, 1], posterior drawn, flipped
  std::vector<float> noise;    // (B, C, H, W) N(0, 1)
  std::vector<float> input_noise;  // (B, C, H, W) the noise that x_t has, where input perturbation changes it
  std::vector<double> time_uniform;   // (B) in [0, 1): the objective maps it to a timestep
  std::vector<int64_t> class_labels;  // (B) after label dropout (dropped = the null class)
  std::vector<std::byte> text_rows;   // (T, D) captions, one after another
  std::vector<int32_t> text_offsets;  // (B + 1) where each begins and ends
  std::vector<uint8_t> text_dropped;  // (B) 1: after caption dropout, the model's null rows stand for it
  std::vector<float> image_hw;        // (B, 2) height and width of the original picture
  std::vector<float> aspect_ratio;    // (B, 1) of the bucket, height / width
  std::vector<int64_t> sample_ids;    // (B) index into the store, for messages

  int64_t size() const { return shape.rows; }
  // The memory of one of its arrays.
  const void* data(BatchArray array) const;
};

// How the loader makes batches.
struct BatchOptions {
  uint64_t seed = 0;
  int64_t global_batch = 0;
  int64_t begin = 0;                 // position in the stream at which these samples begin (SampleOrder)
  int64_t rank = 0, world_size = 1;  // this rank's rows, see rank_rows()
  double class_dropout_prob = 0;     // label -> null_class with this probability
  int64_t null_class = -1;
  double text_dropout_prob =
      0;  // A caption is dropped with this probability; the rows of the empty caption then stand for it.
  bool has_null_text = false;  // True: the model's learned null rows stand for it, and the row is marked.
  std::vector<SampleLane>
      lanes{};  // the samples that come, where not all of the data do; a lane for each of theirs
  std::optional<int64_t> only_lane{};  // batches of this one of a store's lanes alone
  bool draw_posterior = true;          // false: the mean itself
  bool flip = true;                    // with a store of two flips, or on pixels: mirror with probability 1/2
  double offset_noise = 0;  // so many standard deviations are added to each channel of the noise as a whole
  double input_perturbation = 0;  // and of fresh noise to that of x_t alone
  int num_threads = 1;
  int64_t prefetch = 4;  // batches ready ahead
};

// Seconds spent encoding what a batch is made of, on the device.
struct EncodingSeconds {
  double pictures = 0, captions = 0;
};

// Where batches come from. Batch g of the stream depends on (seed, g, global_batch) alone.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // The next global batch's rows for this rank; draws run ahead in worker threads.
  virtual std::shared_ptr<const Batch> next() = 0;
  // Continue from this position in the global stream of samples (a multiple of global_batch).
  virtual void seek(int64_t images_seen) = 0;
  // Which samples the batches hold.
  virtual const SampleOrder& order() const = 0;
  // Seconds next() spent waiting since the last call of this, and batches ready now (monitoring).
  virtual double take_stall_seconds() = 0;
  // The same of encoding on the way what the model takes.
  virtual EncodingSeconds take_encoding_seconds() { return {}; }
  virtual int64_t ready() const = 0;
};

}  // namespace kiln
