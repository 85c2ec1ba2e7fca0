// Captions that a run encodes while it trains, beside its pictures.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "data/images/image_dataset.h"
#include "extract/encoded_text.h"
#include "models/conditioning.h"
#include "run/train_options.h"

namespace kiln {

// The options of captions as kiln extract has them.
TextExtractOptions text_options_of(const DataOptions& options);
// Captions encoded at once: --text-batch, else as many as images.
int64_t captions_at_once(const TrainOptions& options);

// The captions of --data's pictures, with their encoder on the device. Throws Error saying what to do: no
// --text-encoder, no captions, or an encoder that does not pad where the model needs it. Without `encodes`
// the encoder's weights are not loaded.
std::shared_ptr<const EncodedText> open_captions(const TrainOptions& options, const ImageDataset& images,
                                                 const ConditioningShape& model, at::Device device,
                                                 at::ScalarType compute_dtype, bool encodes = true);
// The captions of other pictures, at `path`, by the same encoder.
std::shared_ptr<const EncodedText> captions_like(const EncodedText& text, const ImageDataset& images,
                                                 const std::string& path);

// What whoever trains on them should know, one line each: captions that are cut, weights that are streamed.
std::vector<std::string> caption_notes(const EncodedText& text, double cut_share);

}  // namespace kiln
