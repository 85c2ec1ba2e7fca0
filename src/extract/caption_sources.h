// Where the captions of a picture come from.
#pragma once
#include <string>
#include <vector>

#include "data/images/image_dataset.h"
#include "data/text_store/caption_table.h"

namespace kiln {

struct CaptionOptions {
  // Comma-separated: data | png-text | file-names. A picture has the captions of all of them.
  std::string sources = "data";
  std::string prefix, suffix;  // around every caption
  std::string instruction{};   // the encoder sees it before every caption; its rows are not kept
};

// Returns the captions of picture `index` with prefix and suffix, without empty ones and repetitions. Throws
// Error naming the picture if one is no UTF-8.
std::vector<Caption> captions_of(const ImageDataset& dataset, int64_t index, const CaptionOptions& options);
// Throws Error for an unknown source.
void check_caption_options(const CaptionOptions& options);

// Returns "red apple" for "animals/red_apple-2.png": the base name without its extension and a number at its
// end, with spaces for separators.
std::string caption_of_file_name(const std::string& name);

}  // namespace kiln
