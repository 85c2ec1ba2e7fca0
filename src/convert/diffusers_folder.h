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
// must not exist. `weights` have the published keys; `record` knows the objective and how to draw. Throws
// Error.
DiffusersFolder write_diffusers_pipeline(const std::string& folder, const ForeignFormat& format,
                                         const ModelRecord& record, const TensorMap& weights,
                                         const DiffusersFolderOptions& options);

}  // namespace kiln
