// The captions of several text stores as one. Torch-free.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "data/text_store/text_store.h"

namespace kiln {

// Captions of samples that follow each other store by store, in the order of `folders`. A single one is
// opened as it is. The joined store says of itself what the first one does. Throws Error naming the folder
// that does not fit the first one: another encoder, tokenizer, length or precision.
std::shared_ptr<const TextStore> open_texts(const std::vector<std::string>& folders);

// Throws Error unless captions of both can be trained on together.
void require_same_encoder(const TextStoreInfo& first, const std::string& first_folder,
                          const TextStoreInfo& other, const std::string& other_folder);

}  // namespace kiln
