// What pictures are asked for: prompts as a text encoder's rows, and the conditioning of each picture.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "models/text/caption_encoder.h"
#include "sample/run_folder.h"
#include "sample/sampler_loop.h"

namespace kiln {

struct Prompts {
  std::vector<std::string> texts{};
  std::string encoder_fingerprint{};
  TextRows rows{};  // one text each, on the CPU; undefined: the model takes no captions
  TextRows null{};  // of the negative or empty prompt, which guidance moves away from; undefined: the model's
                    // learned null rows
};

// The prompts of a file, one a line; empty lines are left out. Throws Error naming the line that is no UTF-8,
// or a file without prompts.
std::vector<std::string> read_prompts(const std::string& path);

// Encodes prompts as the captions of a run's training were. `folder`: of the encoder; empty: where it lay
// then. `negative`: empty means what the model was trained with for dropped captions. `num_processes`: of
// this machine, which share its memory. Throws Error: no encoder there, or another one than the run's.
Prompts encode_prompts(const RunInfo::TextInfo& trained, const std::string& folder,
                       std::vector<std::string> texts, const std::string& negative,
                       const ConditioningShape& shape, at::Device device, at::ScalarType compute_dtype,
                       int64_t num_processes);

// The same by an encoder that is in memory, which encoded the captions.
Prompts encode_prompts(const CaptionEncoder& encoder, const RunInfo::TextInfo& trained,
                       std::vector<std::string> texts, const std::string& negative,
                       const ConditioningShape& shape);

// Adds a prompt to each picture: picture i of the list is drawn by text prompt_of_image[i].
ConditioningFn with_prompts(ConditioningFn others, const Prompts& prompts,
                            std::vector<int64_t> prompt_of_image);
// Tells the model the pictures' size in pixels, where it asks.
ConditioningFn with_image_size(const ConditioningShape& shape, ConditioningFn others, int64_t height,
                               int64_t width);

}  // namespace kiln
