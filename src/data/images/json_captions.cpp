// Captions in the JSON of metadata.jsonl and WebDataset.
#include <algorithm>

#include "core/error.h"
#include "data/images/dataset_layouts.h"

namespace kiln::layouts {
namespace {

Caption caption_of(const nlohmann::json& value, const std::string& where) {
  if (value.is_string()) return {.text = value.get<std::string>()};
  const auto text = value.is_object() ? value.find("text") : value.end();
  if (!value.is_object() || text == value.end() || !text->is_string())
    fail("dataset", "expected a caption or an object with its text, got {} ({})",
         value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 80), where);
  Caption caption{.text = text->get<std::string>()};
  if (const auto weight = value.find("weight"); weight != value.end()) {
    if (!weight->is_number() || weight->get<double>() < 0)
      fail("dataset", "expected a weight of at least 0, got {} ({})", weight->dump(), where);
    caption.weight = weight->get<float>();
  }
  if (const auto kind = value.find("kind"); kind != value.end()) {
    if (!kind->is_string()) fail("dataset", "expected a kind, got {} ({})", kind->dump(), where);
    caption.kind = kind->get<std::string>();
  }
  return caption;
}

}  // namespace

std::vector<Caption> captions_of(const nlohmann::json& fields, const std::string& where) {
  std::vector<Caption> captions;
  for (const char* key : {"text", "caption", "captions"}) {
    const auto field = fields.find(key);
    if (field == fields.end() || field->is_null()) continue;
    if (field->is_array()) {
      for (const auto& value : *field) captions.push_back(caption_of(value, where));
    } else if (field->is_string()) {
      captions.push_back(caption_of(*field, where));
    }
    if (!captions.empty()) break;
  }
  std::erase_if(captions, [](const Caption& caption) { return caption.text.empty(); });
  return captions;
}

}  // namespace kiln::layouts
