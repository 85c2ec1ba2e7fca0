#include "data/loader/caption_choice.h"

#include "core/philox.h"
#include "data/loader/batch_draws.h"

namespace kiln {

CaptionChoice choose_captions(const TextStore& text, const BatchOptions& options, const Batch& batch) {
  CaptionChoice choice;
  for (int64_t row = 0; row < batch.size(); ++row) {
    const int64_t position = batch.first_position + row;
    const double u = philox_uniform(options.seed, Draw::kCaption, static_cast<uint64_t>(position));
    int64_t entry = text.entry(batch.sample_ids[row], u);
    const bool is_dropped = draws_text_drop(options, position) || entry == TextStore::kNullEntry;
    if (is_dropped && !options.has_null_text) entry = TextStore::kNullEntry;
    choice.entries.push_back(entry);
    choice.dropped.push_back(is_dropped && options.has_null_text);
  }
  return choice;
}

}  // namespace kiln
