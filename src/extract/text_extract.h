// kiln extract --text-encoder: captions of a feature store's samples -> text store.
#pragma once
#include <string>

#include "data/images/image_dataset.h"
#include "extract/settings.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Throws Error if the encoder's folder, its tokenizer or the options of captions are wrong. Called before
// pictures are encoded, which may take hours.
void check_text_encoder(const TextExtractOptions& options);

// Encodes the captions of the samples of the complete feature store in `store`, equal captions once.
// `pictures`, those of options.data, have the captions. Continues what an interrupted run left. Several ranks
// take shards in turn. The store's bytes do not depend on either. `grown` is the store that this one is a
// part of, whose captions must be of the same encoder; "": it is a store of its own. Throws Error: a sample
// that the pictures lack, no captions at all, a store of another encoder.
void extract_text(const ExtractOptions& options, const ImageDataset& pictures, const std::string& store,
                  ProcessGroup& group, const std::string& grown = "");

}  // namespace kiln
