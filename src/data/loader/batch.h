// One global batch (or a rank's slice of one), drawn ahead of time by the loader. No torch here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/store/data_shape.h"
#include "data/store/sample_order.h"

namespace kiln {

// The arrays of a batch.
enum class BatchArray {
  kX0,
  kNoise,
  kInputNoise,
  kTimeUniform,
  kClassLabels,
  kTextRows,
  kTextOffsets,
  kTextDropped,
  kImageHw,
  kAspectRatio,
};

struct HostArray {
  BatchArray array;
  const char* name;  // for messages
  Dtype dtype;
  std::vector<int64_t> sizes;

  int64_t num_elements() const;
};

// The shape of a batch of one lane, from which follow its arrays.
struct BatchShape {
  int64_t rows = 0, channels = 0;
  Lane lane{};
  bool has_labels = false, has_image_size = false, has_input_noise = false;
  bool has_halo = false;  // x_0, noise and times have a row more, that of the sample before the first one
  int64_t text_rows = 0;  // of all captions together
  int64_t text_width = 0;
  Dtype text_dtype = Dtype::kF32;

  int64_t sample_elements() const { return channels * lane.area(); }
  int64_t rows_with_halo() const { return rows + (has_halo ? 1 : 0); }

  // Calls visitor(HostArray, member of Batch) for each array in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) const;

  int64_t bytes() const;
};

// Row-major f32 and integer arrays for `size` images. Everything random in a training step is in here:
// the step is a pure function of (weights, batch).
//
// With a halo (shape.has_halo), x_0, noise, time_uniform and sample_ids have a row B more. It belongs to the
// sample before row 0 in the global batch, whose first sample follows on its last.
struct Batch {
  int64_t first_position = 0;  // position of row 0 in the global stream of samples (= images seen before it)
  int64_t global_size = 0;     // rows of the global batch that this is a slice of
  int64_t first_row = 0;       // index of row 0 in the global batch
  BatchShape shape{};          // of the arrays below, shape.rows = B; arrays it lacks are empty
  std::vector<float> x_0;      // (B, C, H, W) scaled latents or pixels in [-1, 1], posterior drawn, flipped
  std::vector<float> noise;    // (B, C, H, W) N(0, 1)
  std::vector<float> input_noise;     // (B, C, H, W) the noise in x_t, if input perturbation changes it
  std::vector<double> time_uniform;   // (B) in [0, 1); the objective maps it to a timestep
  std::vector<int64_t> class_labels;  // (B) after label dropout (dropped = the null class)
  std::vector<std::byte> text_rows;   // (T, D) captions, one after another
  std::vector<int32_t> text_offsets;  // (B + 1) caption i has rows [offset i, offset i + 1)
  std::vector<uint8_t> text_dropped;  // (B) 1: dropped, the model's null rows replace it
  std::vector<float> image_hw;        // (B, 2) height and width of the original picture
  std::vector<float> aspect_ratio;    // (B, 1) of the bucket, height / width
  std::vector<int64_t> sample_ids;    // (B) index into the store, for messages

  int64_t size() const { return shape.rows; }
  int64_t size_with_halo() const { return shape.rows_with_halo(); }
  // Returns the position of a row, or of the halo's, in the global stream of samples.
  int64_t position(int64_t row) const;
  // Returns the memory of one of the arrays.
  const void* data(BatchArray array) const;
};

template <class Visitor>
void BatchShape::visit(Visitor&& visitor) const {
  using enum BatchArray;
  const auto row = [&](BatchArray array, const char* name, auto member, Dtype dtype,
                       std::vector<int64_t> sizes) {
    visitor(HostArray{array, name, dtype, std::move(sizes)}, member);
  };
  row(kX0, "x_0", &Batch::x_0, Dtype::kF32, {rows_with_halo(), channels, lane.height, lane.width});
  row(kNoise, "noise", &Batch::noise, Dtype::kF32, {rows_with_halo(), channels, lane.height, lane.width});
  if (has_input_noise)
    row(kInputNoise, "input noise", &Batch::input_noise, Dtype::kF32,
        {rows, channels, lane.height, lane.width});
  row(kTimeUniform, "uniform times", &Batch::time_uniform, Dtype::kF64, {rows_with_halo()});
  if (has_labels) row(kClassLabels, "class labels", &Batch::class_labels, Dtype::kI64, {rows});
  if (text_width > 0) {
    row(kTextRows, "captions", &Batch::text_rows, text_dtype, {text_rows, text_width});
    row(kTextOffsets, "offsets of captions", &Batch::text_offsets, Dtype::kI32, {rows + 1});
    row(kTextDropped, "dropped captions", &Batch::text_dropped, Dtype::kBool, {rows});
  }
  if (has_image_size) {
    row(kImageHw, "image sizes", &Batch::image_hw, Dtype::kF32, {rows, 2});
    row(kAspectRatio, "aspect ratios", &Batch::aspect_ratio, Dtype::kF32, {rows, 1});
  }
}

// How the loader makes batches.
struct BatchOptions {
  uint64_t seed = 0;
  int64_t global_batch = 0;
  int64_t begin = 0;                 // position in the stream at which these samples begin (SampleOrder)
  int64_t rank = 0, world_size = 1;  // this rank's rows, see rank_rows()
  double class_dropout_prob = 0;     // label -> null_class with this probability
  int64_t null_class = -1;
  // A caption is dropped with this probability. The rows of the empty caption replace it or, with
  // has_null_text, the model's learned null rows; then the row is marked in text_dropped.
  double text_dropout_prob = 0;
  bool has_null_text = false;
  // The samples to take, in as many lanes as the data have. Empty: all samples of the data.
  std::vector<SampleLane> lanes{};
  std::optional<int64_t> only_lane{};  // all batches come from this lane
  bool draw_posterior = true;          // false: take the mean itself
  bool flip = true;                    // with a store of two flips, or on pixels: mirror with probability 1/2
  double offset_noise = 0;        // standard deviation of the offset added to each whole channel of the noise
  double input_perturbation = 0;  // standard deviation of the fresh noise added to the noise of x_t alone
  bool has_halo = false;          // for losses that compare samples
  int num_threads = 1;
  int64_t prefetch = 4;  // batches ready ahead
};

// Returns the shape of a batch of `rows` samples of a lane, whose captions have `text_rows` rows together.
BatchShape batch_shape(const BatchOptions& options, const DataShape& data, const Lane& lane, int64_t rows,
                       int64_t text_rows = 0);

// Seconds that the device spent encoding the pictures and captions of batches.
struct EncodingSeconds {
  double pictures = 0, captions = 0;
};

// A source of batches. Batch g of the stream depends on (seed, g, global_batch) alone.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // Returns this rank's rows of the next global batch. Worker threads draw ahead.
  virtual std::shared_ptr<const Batch> next() = 0;
  // Continues from this position in the global stream of samples (a multiple of global_batch).
  virtual void seek(int64_t images_seen) = 0;
  // The order of the samples in the batches.
  virtual const SampleOrder& order() const = 0;
  // Returns the seconds that next() waited since the last call of this function (monitoring).
  virtual double take_stall_seconds() = 0;
  // Returns the seconds spent encoding since the last call of this function; 0 for stored features.
  virtual EncodingSeconds take_encoding_seconds() { return {}; }
  // Batches that are ready now (monitoring).
  virtual int64_t ready() const = 0;
};

}  // namespace kiln
