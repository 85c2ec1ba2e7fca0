// Writes the folder of a diffusers pipeline.
#pragma once
#include <string>

#include "models/family.h"
#include "models/model_record.h"

namespace kiln {

struct DiffusersFolderOptions {
  std::string autoencoder{};   // folder or file of what makes the pictures; "": the pipeline has none
  std::string text_encoder{};  // folder of the text encoder and its tokenizer; "": it has none
  bool links = false;          // links the weights of those two, instead of copying them
  bool anyway = false;         // they may be others than those that the model was trained with
};

// What was written, for the user.
struct DiffusersFolder {
  std::string pipeline;  // the class of model_index.json
  std::string limit{};   // why it draws other pictures than Kiln; "": the same
  bool has_null_rows = false;
  std::string missing{};  // what the pipeline needs and the folder lacks, in words; "": nothing
};

// Writes model_index.json, the model's own folder with its record, scheduler/, the components, the null rows
// that the class has no place for and a card (model_card.h) to a partial folder, then renames it. `folder`
// must not exist. `weights` have the published keys. The model's file gets what is `known`; scheduler and
// card follow `settled`, in which the objective, how to draw and the whole config are guessed where they are
// not known. Throws Error, also for pieces that are not those of training.
DiffusersFolder write_diffusers_pipeline(const std::string& folder, const ForeignFormat& format,
                                         const ModelRecord& known, const ModelRecord& settled,
                                         const TensorMap& weights, const DiffusersFolderOptions& options);

}  // namespace kiln
