// Where the captions of a picture come from.
#pragma once
#include <string>
#include <vector>

#include "data/images/image_dataset.h"
#include "data/text_store/caption_table.h"

namespace kiln {

struct CaptionOptions {
  std::string sources =
      "data";  // comma-separated: data | png-text | file-names; a picture has the captions of all
  std::string prefix, suffix;  // around every caption
};

// Captions of picture `index` with prefix and suffix, without empty ones and repetitions. Throws Error naming
// the picture where one is no UTF-8.
std::vector<Caption> captions_of(const ImageDataset& dataset, int64_t index, const CaptionOptions& options);
// Throws Error for an unknown source.
void check_caption_options(const CaptionOptions& options);

// "animals/red_apple-2.png" is "red apple": the base name without its end, separators as spaces, without a
// number at its end.
std::string caption_of_file_name(const std::string& name);

}  // namespace kiln
