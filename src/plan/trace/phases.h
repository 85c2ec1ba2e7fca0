// Traces what happens on the device outside the step: building model and state, validation, drawing sample
// grids, encoding images. As for the step, this runs on meta tensors, on one of the ranks of `group`
// (dry_group).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/dry_run.h"
#include "step/span.h"
#include "train/setup.h"

namespace kiln {

// Returns what `work` allocates and frees on meta.
MemoryEvents logged_on_meta(const std::function<void()>& work);

// Traces build_training(). What it leaves alive is the persistent state.
MemoryEvents trace_load(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                        const std::shared_ptr<ProcessGroup>& group);

// Traces a sample grid without its decoding: one batch through two steps of the sampler. Everything is freed
// at the end.
MemoryEvents trace_sample_grid(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                               const std::shared_ptr<ProcessGroup>& group);
// Traces one batch of a validation, of so many rows on the rank. Everything is freed at the end.
MemoryEvents trace_validation(const TrainOptions& options, const DataShape& data, int64_t rows,
                              DryRunDevice device, const std::shared_ptr<ProcessGroup>& group);

struct AutoencoderEvents {
  MemoryEvents load;       // leaves its weights alive
  MemoryEvents decode;     // decodes one batch of a sample grid
  MemoryEvents encode;     // encodes the images of a pass in the largest lane
  MemoryEvents validate;   // does so for a batch of a validation
  int64_t downsample = 1;  // pixels of a latent along a side
};
// Traces the autoencoder of the data on one of `world_size` ranks. `validation_rows`: the rank's images in a
// batch of a validation; 0: none are encoded. REQUIRES: the data have one.
AutoencoderEvents trace_autoencoder(const TrainOptions& options, const DataDescription& data,
                                    DryRunDevice device, int64_t world_size, int64_t validation_rows = 0);

// Returns the operations of encoding the images of a pass in the largest lane of `data`.
std::vector<OpRecord> trace_encoding(const AutoencoderOutline& outline, const TrainOptions& options,
                                     const DataShape& data, DryRunDevice device, int64_t world_size);

struct TextEncoderEvents {
  MemoryEvents load;      // leaves its weights alive; empty if they are streamed
  MemoryEvents encode;    // encodes the longest captions, as many as are encoded at once
  MemoryEvents validate;  // does so for a batch of a validation
  bool is_streamed = false;
};
// Traces the encoding of the captions of `data` on one of `world_size` ranks. `validation_rows`: as above.
TextEncoderEvents trace_text_encoder(const TextEncoderOutline& outline, const TrainOptions& options,
                                     const DataShape& data, DryRunDevice device, int64_t world_size,
                                     int64_t validation_rows = 0);
// The operations of encoding as many captions as are encoded at once, each of data.text.max_rows.
struct CaptionEncodingTrace {
  std::vector<OpRecord> ops{};
  int64_t captions = 0;
};
CaptionEncodingTrace trace_caption_encoding(const TextEncoder& encoder, const TrainOptions& options,
                                            const DataShape& data, DryRunDevice device, int64_t world_size);
// Returns the bytes of the weights of the text encoder that a run keeps on the device; 0 if there is none.
int64_t text_encoder_bytes(const TrainOptions& options, const DataDescription& data, DryRunDevice device);

// Returns the bytes of the weights of the autoencoder that a run loads; 0 if it loads none.
int64_t autoencoder_bytes(const TrainOptions& options, const DataDescription& data, DryRunDevice device);

// The memory of evaluations in training (--evaluate-every): the feature net and the statistics of the
// reference all along, and what one evaluation takes besides drawing its pictures.
struct EvaluationTrace {
  int64_t net_bytes = 0;        // the net on the device, from before the state is built
  int64_t reference_bytes = 0;  // on the host, likewise: the reference's statistics and features
  MemoryEvents judge{};    // on the device: pictures through the net; on a CPU statistics and metrics, too
  int64_t host_bytes = 0;  // most of statistics and metrics; on a CPU they are in `judge`
  std::string note{};      // what is not known of it; "" if all is known
};
// Traces evaluations on one of `world_size` ranks. REQUIRES: the run evaluates. Throws Error for an unknown
// net.
EvaluationTrace trace_evaluation(const TrainOptions& options, DryRunDevice device, int64_t world_size);

// Returns the bytes of the feature net's weights; 0 if the run does not evaluate.
int64_t feature_net_bytes(const TrainOptions& options);

}  // namespace kiln
