// Whether pieces of a model are those that it was trained with.
#pragma once
#include <string>

#include "models/autoencoders/autoencoder.h"
#include "models/model_record.h"

namespace kiln {

// Both name what differs, with both fingerprints; "" if nothing does, or nothing is recorded. `named`: what
// the text calls the given piece.
std::string autoencoder_mismatch(const ModelRecord::AutoencoderInfo& trained, const Autoencoder& given,
                                 const std::string& named);
// `given`: its encoder and the two fingerprints.
std::string text_encoder_mismatch(const ModelRecord::TextInfo& trained, const ModelRecord::TextInfo& given,
                                  const std::string& named);

}  // namespace kiln
