// The requested pictures: prompts as a text encoder's rows, and the conditioning of each picture.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "models/model_record.h"
#include "models/text/caption_encoder.h"
#include "sample/sampler_loop.h"

namespace kiln {

struct Prompts {
  std::vector<std::string> texts{};
  std::string encoder_fingerprint{};
  TextRows rows{};  // one text for each prompt, on the CPU; undefined: the model takes no captions
  TextRows null{};  // of the negative or empty prompt, which guidance moves away from; undefined: the model's
                    // learned null rows
};

// Reads the prompts of a file, one per line, without empty lines. Throws Error naming the line that is not
// UTF-8, or for a file without prompts.
std::vector<std::string> read_prompts(const std::string& path);

// Encodes prompts as the captions of a run's training were encoded. `folder` is that of the encoder; empty:
// where it was then. An empty `negative` means what the model was trained with for dropped captions.
// `num_processes` is the number of processes on this machine, which share its memory. Throws Error: no
// encoder there, or another one than the captions' (a warning with `anyway`).
Prompts encode_prompts(const ModelRecord::TextInfo& trained, const std::string& folder,
                       std::vector<std::string> texts, const std::string& negative,
                       const ConditioningShape& shape, at::Device device, at::ScalarType compute_dtype,
                       int64_t num_processes, bool anyway = false);

// The same with the encoder of the captions already in memory.
Prompts encode_prompts(const CaptionEncoder& encoder, const ModelRecord::TextInfo& trained,
                       std::vector<std::string> texts, const std::string& negative,
                       const ConditioningShape& shape);

// Adds a prompt to each picture: picture i of the list is drawn with text prompt_of_image[i].
ConditioningFn with_prompts(ConditioningFn others, const Prompts& prompts,
                            std::vector<int64_t> prompt_of_image);
// Adds the pictures' size in pixels, if the model takes it.
ConditioningFn with_image_size(const ConditioningShape& shape, ConditioningFn others, int64_t height,
                               int64_t width);

}  // namespace kiln
