// kiln extract --append: the pictures of a store that has got more of them.
#pragma once
#include <functional>
#include <memory>

#include "data/images/image_dataset.h"
#include "extract/settings.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Extracts pictures to a new store at of_part.out.
using FeatureExtractor =
    std::function<void(const ExtractOptions& of_part, std::shared_ptr<const ImageDataset> pictures)>;
// Adds those of `pictures`, which lie at --data, whose names the store at options.out lacks as its next part,
// and captions to the last part. Throws Error: no complete store there, a picture with the name of a sample
// from another folder, captions of another encoder than the store's. A collective.
void append_pictures(const ExtractOptions& options, const std::shared_ptr<const ImageDataset>& pictures,
                     ProcessGroup& group, const FeatureExtractor& extract_features);

}  // namespace kiln
