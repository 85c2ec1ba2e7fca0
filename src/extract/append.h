// kiln extract --append: the pictures of a store that has got more of them.
#pragma once
#include <functional>
#include <memory>

#include "data/images/image_dataset.h"
#include "extract/extract_options.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Adds the pictures of --data that the store at options.out lacks, by name, as its next part, and captions to
// the part that was added last. `extract_features`: of a new store at its options' out. Throws Error: no
// complete store there, a picture with the name of a sample from another folder, captions of another encoder
// than the store's. A collective.
using FeatureExtractor =
    std::function<void(const ExtractOptions& of_part, std::unique_ptr<ImageDataset> pictures)>;
void append_pictures(const ExtractOptions& options, ProcessGroup& group,
                     const FeatureExtractor& extract_features);

}  // namespace kiln
