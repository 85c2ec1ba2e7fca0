// The captions of several text stores as one. Torch-free.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "data/text_store/text_store.h"

namespace kiln {

// Opens text stores as one. Their samples follow each other store by store, in the order of `folders`. A
// single store is opened as it is. info() of the joined store is that of the first one, with the samples and
// entries of all. Throws Error naming the folder that does not fit the first one: another encoder, tokenizer,
// length or precision.
std::shared_ptr<const TextStore> open_texts(const std::vector<std::string>& folders);

// Throws Error unless the captions of both stores can be trained on together.
void require_same_encoder(const TextStoreInfo& first, const std::string& first_folder,
                          const TextStoreInfo& other, const std::string& other_folder);

}  // namespace kiln
