// Captions that a run encodes while it trains, for the pictures that it encodes.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "data/images/image_dataset.h"
#include "extract/encoded_text.h"
#include "models/conditioning.h"
#include "models/text/caption_encoder.h"
#include "run/train_options.h"

namespace kiln {

// Returns the options of captions with their encoder, --text-encoder.
CaptionEncodingOptions text_options_of(const DataOptions& options);
// Returns how many captions are encoded at once: --text-batch, else as many as images.
int64_t captions_at_once(const TrainOptions& options);

// Opens the captions of `images`, --data's pictures, for a model of this name that is told `told`. Their
// encoder is an outline, which makes ids alone. Throws Error saying what to do: no --text-encoder, no
// captions, or an encoder that does not pad although the model needs it.
std::shared_ptr<const EncodedText> open_captions(const DataOptions& options, const ImageDataset& images,
                                                 const std::string& model, const ConditioningShape& told,
                                                 at::ScalarType compute_dtype);
// Loads the encoder of opened captions to the device; with EncoderUse::kIds only its fingerprint. It encodes
// `at_once` captions together unless the options name a number. Throws Error.
std::shared_ptr<const EncodedText> load_captions(const EncodedText& captions, int64_t at_once,
                                                 at::Device device, at::ScalarType compute_dtype,
                                                 EncoderUse use = EncoderUse::kEncode);
// Opens the captions of other pictures, at `path`, with the same encoder.
std::shared_ptr<const EncodedText> captions_like(const EncodedText& text, const ImageDataset& images,
                                                 const std::string& path);

// Returns notes for the user, one line each: captions that are cut, pictures without one.
std::vector<std::string> caption_notes(const EncodedText& text, double cut_share);

}  // namespace kiln
