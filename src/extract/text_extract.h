// kiln extract --text-encoder: captions of a feature store's samples -> text store.
#pragma once
#include <cstdint>
#include <string>

#include "extract/text_settings.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Encodes the captions that the pictures of `data` have for the samples of the complete feature store in
// `store`, equal ones once. Continues what an interrupted run left; several ranks take shards in turn, and
// the store's bytes do not depend on either. Throws Error: a sample that `data` lacks, no captions at all, a
// store of another encoder. `grown`: the store that this one is a part of, whose captions must have been
// encoded likewise; "": it is one of its own.
void extract_text(const TextExtractOptions& options, const std::string& data, const std::string& store,
                  const std::string& compute_dtype, const std::string& device, ProcessGroup& group,
                  const std::string& grown = "");

}  // namespace kiln
