// kiln extract: pictures -> feature store, and their captions -> text store.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "data/images/image_dataset.h"
#include "extract/settings.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Without an autoencoder the store must be complete, and only text is added to it.
//
// Continues what an earlier run of the same settings left in `out`: the store's bytes are those of an
// uninterrupted run. SIGINT and SIGTERM end it after the current batch. Each of several ranks takes whole
// batches, which follow each other: the samples are those that a single rank makes, in other shards. Throws
// Error: nothing to read, impossible options, a store of other settings, a broken picture when strict.
void extract(const ExtractOptions& options, ProcessGroup& group);

// Throws Error if the encoder's folder, its tokenizer or the options of captions are wrong. Called before
// pictures are encoded, which may take hours.
void check_text_encoder(const CaptionEncodingOptions& options);

// Encodes the captions of the samples of the complete feature store in `store`, equal captions once.
// `pictures`, those of options.data, have the captions. Continues what an interrupted run left. Several ranks
// take shards in turn. The store's bytes do not depend on either. `grown` is the store that this one is a
// part of, whose captions must be of the same encoder; "": it is a store of its own. Throws Error: a sample
// that the pictures lack, no captions at all, a store of another encoder.
void extract_text(const ExtractOptions& options, const ImageDataset& pictures, const std::string& store,
                  ProcessGroup& group, const std::string& grown = "");

// kiln extract --append: the pictures of a store that has got more of them.
//
// Extracts pictures to a new store at of_part.out.
using FeatureExtractor =
    std::function<void(const ExtractOptions& of_part, std::shared_ptr<const ImageDataset> pictures)>;
// Adds those of `pictures`, which lie at --data, whose names the store at options.out lacks as its next part,
// and captions to the last part. Throws Error: no complete store there, a picture with the name of a sample
// from another folder, captions of another encoder than the store's. A collective.
void append_pictures(const ExtractOptions& options, const std::shared_ptr<const ImageDataset>& pictures,
                     ProcessGroup& group, const FeatureExtractor& extract_features);

// Imports the caption features that PixArt's tools/extract_features.py has cached, as the text store of an
// imported feature store.
struct PixartCaptionOptions {
  std::string features;      // folder of .npz files: caption_feature (1, L, D), attention_mask (1, L)
  std::string data_info;     // data_info.json: the prompts
  std::string text_encoder;  // folder of the encoder that they were made with; "": not at hand
  std::string name = "t5";   // of the text store
};

// REQUIRES: `store` is what import_store() made with the same data_info. Keeps the rows that the mask marks.
// Without the encoder the store has no features of the empty caption, and prompts are not checked against its
// fingerprint. Throws Error naming a sample without features, or what is wrong with a file.
void import_pixart_captions(const std::string& store, const PixartCaptionOptions& options);

}  // namespace kiln
