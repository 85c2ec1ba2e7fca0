// The pieces that a model was trained with: whether given ones are those, and what its record tells of them.
// Also tells pieces from models.
#pragma once
#include <string>

#include "models/autoencoders/autoencoder.h"
#include "models/family.h"
#include "models/model_record.h"

namespace kiln {

// Both name what differs, with both fingerprints; "" if nothing does, or nothing is recorded. `named`: what
// the text calls the given piece.
std::string autoencoder_mismatch(const ModelRecord::AutoencoderInfo& trained, const Autoencoder& given,
                                 const std::string& named);
// `given`: its encoder and the two fingerprints.
std::string text_encoder_mismatch(const ModelRecord::TextInfo& trained, const ModelRecord::TextInfo& given,
                                  const std::string& named);

// Throws Error naming the piece and the option that takes it if these weights, which no family of denoisers
// knows, are those of an autoencoder or a text encoder. `source`: their file.
void refuse_other_piece(const std::string& source, const TensorMap& weights);

// Returns the pixels of a latent's side: as recorded, else as usual for the autoencoder, else as usual for
// the model's family. Records of earlier versions do not say it.
int64_t pixels_of_latent(const ModelRecord::AutoencoderInfo& trained, const Family& family);

}  // namespace kiln
